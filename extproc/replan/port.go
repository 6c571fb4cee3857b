// Package replan is the replan port: Envoy sends a hop there that failed outright, hedges (hedges.go), and a pass
// that no replica decided (docs/adr/0028, 0053).
//
// Nothing comes of a request without a genuine ticket, and each ticket is taken once: engines see the tickets of their
// own legs, and may reach the port.
package replan

import (
	"cmp"
	"context"
	"errors"
	"io"
	"net/http"
	"strconv"
	"time"

	"tandem/extproc/concurrent"
	"tandem/extproc/faults"
	"tandem/extproc/journey"
	"tandem/extproc/kvtransfer"
	"tandem/extproc/names"
	"tandem/extproc/openai"
	"tandem/extproc/pass"
	"tandem/extproc/plan"
)

// Port handles the second try of a hop that failed outright (composite clusters send it here). It answers 307 with a
// ticket that says what failed, and pass 2 plans again. It learns from Envoy's log how the first try failed. In any
// case the KV parameters of the first try count as consumed. It is safe for concurrent use.
type Port struct {
	journeys *journey.Shared
	passes   *pass.Shared
	pairs    *concurrent.Pairs
	tries    tries
	draining <-chan struct{}
	maxBody  int
}

// NewPort returns a port. Its tries end when draining is closed; bodies have maxBody bytes at most.
func NewPort(journeys *journey.Shared, pairs *concurrent.Pairs, draining <-chan struct{}, maxBody int) *Port {
	return &Port{journeys, journeys.Passes, pairs, tries{}, draining, maxBody}
}

// TryFailed ends the wait of a hop's hedge, because Envoy reports that its try at the endpoint has failed.
func (p *Port) TryFailed(id kvtransfer.ID) { p.tries.fail(id) }

// ServeHTTP implements [http.Handler].
func (p *Port) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s, limit := p.passes, p.maxBody+plan.MaxDecodeMember
	defer discard(r.Body, limit)
	id := r.Header.Get(names.HeaderRequestID)
	t, err := s.Keys().Open(r.Header.Get(names.HeaderTicket), id, s.Now())
	switch {
	case r.Header.Get(names.HeaderRestart) != "":
		p.restart(w, r, t)
		return
	// a failed hop never comes with both
	case t != nil && r.URL.Path == "/late" && r.Header.Get(names.HeaderRule) == "late":
		p.checkLate(w, t, id)
		return
	case t == nil || journey.StateOf(t) == journey.Waiting || !p.journeys.Another(t):
		p.refuse(w, r, t, id, err)
		return
	case hedged(t, s.Since(t)):
		discard(r.Body, limit) // otherwise the server would not notice that Envoy ends this try
		isLost := func() bool { return p.journeys.Lost(t) }
		if !p.tries.awaitLoss(r.Context(), t.ID, p.draining, isLost) ||
			!s.State.HandOvers.Consume(t.ID.Replanned(t.Stage)) {
			panic(http.ErrAbortHandler) // Envoy awaits the other try
		}
	case !s.State.HandOvers.Consume(t.ID.Replanned(t.Stage)):
		p.refuse(w, r, t, id, errTicketConsumed)
		return
	}
	next, refusal := p.hopFailed(r.Context(), t, id)
	if refusal != nil {
		w.Header().Set("content-type", names.ContentTypeJSON)
		w.Header().Set(names.HeaderFinal, "true")
		w.WriteHeader(refusal.Status)
		_, _ = w.Write(journey.Refusal(refusal, []byte(r.URL.Path))) //nolint:gosec // JSON, said to be JSON
		return
	}
	p.redirect(w, r, &next, id, cmp.Or(t.Path, r.URL.RequestURI()))
}

// checkLate answers a question of Envoy's about a decode leg that begins its answer late: 204 if it may go on, 409 if
// the KV that it is made from may have been another prompt's.
func (p *Port) checkLate(w http.ResponseWriter, t *kvtransfer.Ticket, id string) {
	if p.journeys.IsOutdated(t, id) {
		w.WriteHeader(http.StatusConflict)
	} else {
		w.WriteHeader(http.StatusNoContent)
	}
}

// errTicketConsumed: a ticket was at the replan port before.
var errTicketConsumed = errors.New("the ticket was consumed here before")

// hopFailed records that the hop of a ticket failed, and returns the next pass's ticket. An endpoint that exceeded
// the hop's time limit counts as hanging. refusal is P's refusal of the request, for the client in place of another
// pass; nil: none.
func (p *Port) hopFailed(
	ctx context.Context, t *kvtransfer.Ticket, id string,
) (next kvtransfer.Ticket, refusal *concurrent.Outcome) {
	s := p.passes
	took := s.Since(t)
	late := overdue(took, p.limit(t))
	switch t.Stage {
	case kvtransfer.DecodeLeg:
		f := p.decodeFailure(ctx, t, late)
		return p.journeys.DecodeFailed(t, id, &f), nil
	case kvtransfer.PairLegs:
		return p.pairFailed(ctx, t, id, late)
	}
	return p.journeys.HopLost(t, id, late), nil
}

// restart answers a request that no replica decided, because the one that had its body died or hung: with a 307, so
// that another replica repeats the pass. t is the ticket that the pass began with, or that the replica gave it before
// it got the body. A pass is restarted once only, so a request that crashes replicas reaches two of them at most.
func (p *Port) restart(w http.ResponseWriter, r *http.Request, t *kvtransfer.Ticket) {
	s, h, id := p.passes, r.Header, r.Header.Get(names.HeaderRequestID)
	size := discard(r.Body, p.maxBody+plan.MaxDecodeMember)
	if t == nil || t.Cause == kvtransfer.CauseRouter || !takesPass(t, h.Get(names.HeaderPrefilled) != "") ||
		!p.journeys.Another(t) || !s.State.HandOvers.Consume(t.ID.Replanned(t.Stage)) {
		w.Header().Set(names.HeaderFinal, "true")
		p.giveUp(w, r, openai.Unavailable("router_failed", "the router failed twice to decide this request",
			time.Second))
		return
	}
	s.Log.Warn("a replica failed while it decided a request; another one is asked", "request_id", id)
	// a redirect removes the headers that its answer lacks
	for _, name := range []string{names.HeaderPrefilled, names.HeaderLoad} {
		if v := h.Get(name); v != "" {
			w.Header().Set(name, v)
		}
	}
	next := passTicket(t, size)
	p.redirect(w, r, &next, id, r.URL.RequestURI())
}

// redirect answers with the next pass's ticket. The path is for Envoy's URL parser; the ticket has the client's.
func (p *Port) redirect(w http.ResponseWriter, r *http.Request, next *kvtransfer.Ticket, id, path string) {
	sealed, err := p.passes.Keys().Seal(nil, next, id)
	if err != nil {
		p.passes.Log.Error("sealing a replan ticket", "request_id", id, "err", err)
		p.giveUp(w, r, openai.Internal())
		return
	}
	w.Header().Set("location", string(Location([]byte(path))))
	w.Header().Set(names.HeaderTicket, string(sealed))
	w.WriteHeader(http.StatusTemporaryRedirect)
}

// overdue reports whether a hop took as long as its time limit; 0: none.
func overdue(took, limit time.Duration) bool { return limit > 0 && took >= limit }

// limit returns the shortest time limit of a ticket's leg; 0: none.
func (p *Port) limit(t *kvtransfer.Ticket) time.Duration {
	policy, _ := p.passes.Policy(t.Pool)
	return policy.LegLimit(t)
}

// refuse refuses a hop that has no ticket by which it could be planned again.
func (p *Port) refuse(w http.ResponseWriter, r *http.Request, t *kvtransfer.Ticket, id string, err error) {
	p.passes.Log.Warn("replan refused", "request_id", id, "err", err)
	if t == nil {
		p.passes.Observer.TicketRefused()
	} else { // another replica would answer the same: Envoy must not ask it
		w.Header().Set(names.HeaderFinal, "true")
	}
	const message = "the endpoint failed and there is no other way to answer"
	p.giveUp(w, r, openai.Unavailable("endpoint_failed", message, time.Second))
}

// giveUp answers with an error, and counts it.
func (p *Port) giveUp(w http.ResponseWriter, r *http.Request, e *openai.Error) {
	p.passes.Observer.GivenUp(e)
	refuse(w, e.For([]byte(r.URL.Path)))
}

// hedged reports whether a try at the replan port is a hedge: the previous try may still get its answer. Envoy sends
// the retry of a failed try sooner.
func hedged(t *kvtransfer.Ticket, took time.Duration) bool {
	return took >= HedgeAfter-early && journey.StateOf(t).IsSent()
}

// takesPass reports whether a pass may have begun with a ticket; inline: together with P's answer.
func takesPass(t *kvtransfer.Ticket, inline bool) bool {
	return t.Stage == kvtransfer.Undecided || t.Stage.Redirects() || inline && t.Stage == kvtransfer.PrefillLeg
}

// pairFailed is hopFailed for D of a pair: P may have failed first. refusal is P's of the request, for the client.
func (p *Port) pairFailed(
	ctx context.Context, t *kvtransfer.Ticket, id string, late bool,
) (next kvtransfer.Ticket, refusal *concurrent.Outcome) {
	pair := p.pairs.Enter(t.ID)
	defer p.pairs.Leave(t.ID)
	f := p.decodeFailure(ctx, t, late)
	j := p.journeys.NewPair(t, journey.PairRules{})
	a := j.DecodeFails(&f)
	if a.After > 0 {
		wait := time.NewTimer(a.After)
		defer wait.Stop()
		select {
		case <-pair.Verdict.Done():
			verdict := pair.Verdict.Value()
			a = j.PrefillEnded(&verdict)
		case <-wait.C:
			a = j.Elapsed()
		case <-ctx.Done():
			a = j.Elapsed()
		}
	}
	if a.Do == journey.Refuse {
		return next, a.Refusal
	}
	return p.journeys.PairFailed(t, id, a.Leg, a.Failure), nil
}

// decodeFailure returns how D of a ticket failed. late: it exceeded its time limit.
func (p *Port) decodeFailure(ctx context.Context, t *kvtransfer.Ticket, late bool) faults.Failure {
	if late {
		return faults.Failure{Overdue: true}
	}
	return p.passes.Faults.Failed(ctx, t)
}

// passTicket returns the ticket with which another replica repeats a pass. body is the length of the request's body.
func passTicket(t *kvtransfer.Ticket, body int) kvtransfer.Ticket {
	next := *t
	next.Cause = kvtransfer.CauseRouter
	next.Redirects++
	if t.Stage == kvtransfer.Undecided { // pass 1
		next.Stage, next.BodyBytes = kvtransfer.Failed, body
	}
	return next
}

// discard reads the rest of a body, at most limit bytes, and returns its length: Envoy follows a redirect only once the
// request was sent completely.
func discard(body io.Reader, limit int) int {
	n, _ := io.CopyN(io.Discard, body, int64(limit))
	return int(n)
}

// refuse answers with an error.
func refuse(w http.ResponseWriter, e *openai.Error) {
	w.Header().Set("content-type", names.ContentTypeJSON)
	if e.RetryAfter > 0 {
		w.Header().Set(names.HeaderRetryAfter, strconv.Itoa(int(e.RetryAfter.Seconds())))
	}
	w.WriteHeader(e.Status)
	_, _ = w.Write(e.JSON()) //nolint:gosec // JSON, said to be JSON
}
