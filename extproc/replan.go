package extproc

import (
	"cmp"
	"context"
	"errors"
	"net/http"
	"time"

	"tandem/extproc/envoywire"
	"tandem/extproc/faults"
	"tandem/extproc/kvtransfer"
	"tandem/extproc/openai"
	"tandem/extproc/plan"
	"tandem/extproc/reclaim"
	"tandem/extproc/replan"
)

// Replan handles the second try of a hop that failed outright (composite clusters send it here). It answers 307 with
// a ticket that says what failed, and pass 2 plans again. How it failed is what Envoy logs of the first try. Whatever
// that is, the KV parameters of the first try count as consumed.
func (s *Server) Replan() http.Handler {
	p := replanPort{s}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		limit := s.MaxBodyBytes + plan.MaxDecodeMember
		defer replan.Discard(r.Body, limit)
		id := r.Header.Get(envoywire.HeaderRequestID)
		t, err := s.passes.Keys().Open(r.Header.Get(envoywire.HeaderTicket), id, s.passes.Now())
		if r.Header.Get(envoywire.HeaderRestart) != "" {
			p.restart(w, r, t)
			return
		}
		if t != nil && r.URL.Path == "/late" && r.Header.Get(envoywire.HeaderRule) == "late" { // no hop has both
			checkLate(s, w, t, id)
			return
		}
		if t == nil || !replan.Takes(t) || t.Redirects+1 >= s.MaxRedirects {
			p.refuse(w, t, id, err)
			return
		}
		if hedged(t, s.passes.Since(t)) {
			// otherwise the server would not notice that Envoy ends this try
			replan.Discard(r.Body, limit)
			isLost := func() bool { return lost(s, t) }
			if !s.hedges.AwaitLoss(r.Context(), t.ID, s.draining, isLost) || !s.State.Consume(replan.ID(t)) {
				panic(http.ErrAbortHandler) // Envoy awaits the other try
			}
		} else if !s.State.Consume(replan.ID(t)) {
			p.refuse(w, t, id, errTicketConsumed)
			return
		}
		next := p.hopFailed(r.Context(), t, id)
		p.redirect(w, &next, id, cmp.Or(t.Path, r.URL.RequestURI()))
	})
}

// checkLate answers a question of Envoy's about a decode leg that begins its answer late: 204 if it may go on, 409 if
// the KV that it is made from may have been another prompt's.
func checkLate(s *Server, w http.ResponseWriter, t *kvtransfer.Ticket, id string) {
	why := outdated(s, t)
	if why == "" {
		w.WriteHeader(http.StatusNoContent)
		return
	}
	s.observer.Outdated(t.Pool, t.Decode, string(why))
	s.Log.Warn("an answer is refused: its KV may have been another prompt's (docs/security.md#wrong-text)", "request_id", id,
		"reason", why, "prefill", t.Prefill, "decode", t.Decode)
	w.WriteHeader(http.StatusConflict)
}

// replanPort is the replan port of a server.
type replanPort struct{ *Server }

// errTicketConsumed: a ticket was at the replan port before.
var errTicketConsumed = errors.New("the ticket was consumed here before")

// hopFailed records that the hop of a ticket failed, and returns the next pass's ticket. An endpoint that exceeded
// the hop's time limit counts as hanging; but a P that had to fetch a stored turn may have waited for the endpoint
// that holds it.
func (s replanPort) hopFailed(ctx context.Context, t *kvtransfer.Ticket, id string) kvtransfer.Ticket {
	took, prefill := s.passes.Since(t), false
	if t.Stage == kvtransfer.PairLegs {
		p := s.pairs.Enter(t.ID)
		e := plan.EndpointOf(s.State, t.Pool, t.Decode)
		prefill = (e == nil || !e.Failed()) && p.PrefillFailed(ctx)
		s.pairs.Leave(t.ID)
	}
	next, hop, failed := replan.Failed(t, prefill)
	if t.Stage == kvtransfer.PrefillLeg { // P has answered after all, but too late to be followed
		s.reclaim.NotFollowed(t, id, reclaim.Replanned)
	}
	s.observer.HopEnded(t.Pool, hop, failed, "failed", took, nil)
	if hop == "decode" && t.Split {
		s.observer.Orphaned(t.Pool, t.Prefill, reclaim.DecodeFailed) // or fetched: the failure does not show it
	}
	turn := t.Stage == kvtransfer.PrefillLeg && t.Turn.Named
	if turn {
		s.passes.TurnFailed(&next, id, 0)
	}
	late := overdue(took, s.limit(t))
	switch f := (faults.Failure{Overdue: late, Unreached: !late}); {
	case hop == "decode" && !late:
		f = s.faults.Failed(ctx, t)
		s.faults.Decode(&next, id, &f)
	case late && turn:
		next.Loads, next.Excluded = false, append(next.Excluded, failed)
	default:
		next.Loads = false
		s.faults.Endpoint(&next, id, failed, &f)
	}
	return next
}

// restart answers a request that no replica decided, because the one that had its body died or hung: with a 307, so
// that another replica repeats the pass. t is the ticket that the pass began with, or that the replica gave it before
// it got the body. A pass is restarted once only, so a request that crashes replicas reaches two of them at most.
func (s replanPort) restart(w http.ResponseWriter, r *http.Request, t *kvtransfer.Ticket) {
	h, id := r.Header, r.Header.Get(envoywire.HeaderRequestID)
	size := replan.Discard(r.Body, s.MaxBodyBytes+plan.MaxDecodeMember)
	if t == nil || t.Cause == kvtransfer.CauseRouter || !replan.TakesPass(t, h.Get(envoywire.HeaderPrefilled) != "") ||
		t.Redirects+1 >= s.MaxRedirects || !s.State.Consume(replan.ID(t)) {
		w.Header().Set(envoywire.HeaderFinal, "true")
		giveUp(s.Server, w, openai.Unavailable("router_failed", "the router failed twice to decide this request", time.Second))
		return
	}
	s.Log.Warn("a replica failed while it decided a request; another one is asked", "request_id", id)
	// a redirect removes the headers that its answer lacks
	for _, name := range []string{envoywire.HeaderPrefilled, envoywire.HeaderLoad} {
		if v := h.Get(name); v != "" {
			w.Header().Set(name, v)
		}
	}
	next := replan.Pass(t, size)
	s.redirect(w, &next, id, r.URL.RequestURI())
}

// redirect answers with the next pass's ticket. The path is for Envoy's URL parser; the ticket has the client's.
func (s replanPort) redirect(w http.ResponseWriter, next *kvtransfer.Ticket, id, path string) {
	sealed, err := s.passes.Keys().Seal(nil, next, id)
	if err != nil {
		s.Log.Error("sealing a replan ticket", "request_id", id, "err", err)
		giveUp(s.Server, w, openai.Internal())
		return
	}
	w.Header().Set("location", string(replan.Location([]byte(path))))
	w.Header().Set(envoywire.HeaderTicket, string(sealed))
	w.WriteHeader(http.StatusTemporaryRedirect)
}

// overdue reports whether a hop took as long as its time limit; 0: none.
func overdue(took, limit time.Duration) bool { return limit > 0 && took >= limit }

// limit returns the shortest time limit of a ticket's leg; 0: none.
func (s *Server) limit(t *kvtransfer.Ticket) time.Duration {
	policy, _ := s.passes.Policy(t.Pool)
	return policy.LegLimit(t)
}

// refuse refuses a hop without a ticket that can be planned again.
func (s replanPort) refuse(w http.ResponseWriter, t *kvtransfer.Ticket, id string, err error) {
	s.Log.Warn("replan refused", "request_id", id, "err", err)
	if t == nil {
		s.observer.TicketRefused()
	} else { // another replica would answer the same: Envoy must not ask it
		w.Header().Set(envoywire.HeaderFinal, "true")
	}
	const message = "the endpoint failed and there is no other way to answer"
	giveUp(s.Server, w, openai.Unavailable("endpoint_failed", message, time.Second))
}

// giveUp answers with an error, and counts it.
func giveUp(s *Server, w http.ResponseWriter, e *openai.Error) {
	s.observer.GivenUp(e)
	replan.Refuse(w, e)
}
