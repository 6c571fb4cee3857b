package extproc

import (
	"cmp"
	"io"
	"net/http"
	"strconv"
	"time"

	"tandem/extproc/envoywire"
	"tandem/extproc/faults"
	"tandem/extproc/kvtransfer"
	"tandem/extproc/openai"
	"tandem/extproc/plan"
	"tandem/extproc/reclaim"
)

// Replan handles the second try of a hop that failed outright (composite clusters send it here). It answers 307
// with a ticket that says what failed, and pass 2 plans again. How it failed is what Envoy logs of the first try. Whatever
// that is, the KV parameters of the first try count as consumed.
func (s *Server) Replan() http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		defer discard(r.Body, int64(s.MaxBodyBytes+plan.MaxDecodeMember))
		id := r.Header.Get(envoywire.HeaderRequestID)
		t, err := s.keys().Open(r.Header.Get(envoywire.HeaderTicket), id, time.Now())
		if r.Header.Get(envoywire.HeaderRestart) != "" && (t != nil || r.Header.Get(envoywire.HeaderTicket) == "") {
			s.restart(w, r, t)
			return
		}
		if t != nil && r.Header.Get(envoywire.HeaderRule) == "late" {
			checkLate(s, w, t, id)
			return
		}
		if t == nil || t.Redirects+1 >= s.MaxRedirects {
			s.Log.Warn("replan refused", "request_id", id, "err", err)
			if t != nil {
				// another replica would answer the same: Envoy must not ask it
				w.Header().Set(envoywire.HeaderFinal, "true")
			}
			s.refuseReplan(w, openai.Unavailable("endpoint_failed", "the endpoint failed and there is no other way to answer", time.Second))
			return
		}
		took, limit := time.Since(s.sealedAt(t)), s.limit(t)
		if hedged(t, took) {
			// otherwise the server would not notice that Envoy ends this try
			discard(r.Body, int64(s.MaxBodyBytes+plan.MaxDecodeMember))
			if !s.hedges.AwaitLoss(r.Context(), t.ID, s.draining, func() bool { return lost(s, t) }) {
				panic(http.ErrAbortHandler) // Envoy awaits the other try
			}
			took = time.Since(s.sealedAt(t))
		}
		next := *t
		if next.Stage, next.Params = kvtransfer.Failed, nil; t.Stage != kvtransfer.PairLegs {
			// the id of an attempt with concurrent legs stays: it names the leg that may still be running
			next.ID = plan.NewID()
		}
		next.Redirects++
		hop, failed := "decode", t.Decode
		next.Cause = kvtransfer.CauseDecode
		switch t.Stage {
		case kvtransfer.PrefillLeg:
			hop, failed, next.Cause = "prefill", t.Prefill, kvtransfer.CausePrefill
		case kvtransfer.EncodeLeg:
			hop, next.Cause = "encode", kvtransfer.CauseEncode
		case kvtransfer.PairLegs:
			p := s.pairs.Enter(t.ID)
			if e := endpointOf(s.State, t.Pool, t.Decode); (e == nil || !e.Failed()) && p.PrefillFailed(r.Context()) {
				hop, failed, next.Cause = "prefill", t.Prefill, kvtransfer.CausePrefill
			}
			s.pairs.Leave(t.ID)
		}
		if t.Stage == kvtransfer.PrefillLeg { // P has answered after all, but too late to be followed
			s.reclaim.NotFollowed(t, id, reclaim.Replanned)
		}
		s.observer.HopEnded(t.Pool, hop, failed, "failed", took, nil)
		if hop == "decode" && t.Split {
			s.observer.Orphaned(t.Pool, t.Prefill, reclaim.DecodeFailed) // or fetched: the failure does not show it
		}
		if t.Stage == kvtransfer.PrefillLeg && t.Turn.Named {
			s.conversationFailed(&next, id, 0)
		}
		f := faults.Failure{Overdue: overdue(took, limit)}
		if hop == "decode" && !f.Overdue && t.Stage != kvtransfer.EncodeLeg {
			f = s.faults.Failed(r.Context(), t)
			s.faults.Decode(&next, id, &f)
		} else {
			next.Loads = false
			s.hopFailed(&next, t, id, failed, f)
		}
		sealed, err := s.keys().Seal(nil, &next, id)
		if err != nil {
			s.Log.Error("sealing a replan ticket", "request_id", id, "err", err)
			s.refuseReplan(w, openai.Internal())
			return
		}
		w.Header().Set("location", string(location([]byte(cmp.Or(t.Path, r.URL.RequestURI())))))
		w.Header().Set(envoywire.HeaderTicket, string(sealed))
		w.WriteHeader(http.StatusTemporaryRedirect)
	})
}

// checkLate answers a question of Envoy's about a decode leg that begins its answer late: 204 if it may go on, 409 if the
// KV that it is made from may have been another prompt's.
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

// restart answers a request that no replica decided, because the one that had its body died or hung: with a 307, so
// that another replica repeats the pass. t is the ticket that the pass began with; nil: it was pass 1. A pass is
// restarted once only, so a request that crashes replicas reaches two of them at most.
func (s *Server) restart(w http.ResponseWriter, r *http.Request, t *kvtransfer.Ticket) {
	id := r.Header.Get(envoywire.HeaderRequestID)
	size, _ := io.Copy(io.Discard, io.LimitReader(r.Body, int64(s.MaxBodyBytes+plan.MaxDecodeMember)))
	if t == nil {
		t = &kvtransfer.Ticket{
			ID: plan.NewID(), Stage: kvtransfer.Failed, Expires: time.Now().Add(s.TicketTTL), Started: time.Now(),
			BodyBytes: int(size), Authority: r.Host, Path: r.URL.RequestURI(),
		}
	}
	if t.Cause == kvtransfer.CauseRouter || t.Redirects+1 >= s.MaxRedirects {
		w.Header().Set(envoywire.HeaderFinal, "true")
		s.refuseReplan(w, openai.Unavailable("router_failed", "the router failed twice to decide this request", time.Second))
		return
	}
	s.Log.Warn("a replica failed while it decided a request; another one is asked", "request_id", id)
	next := *t
	next.Cause = kvtransfer.CauseRouter
	next.Redirects++
	sealed, err := s.keys().Seal(nil, &next, id)
	if err != nil {
		s.Log.Error("sealing the ticket of a restart", "request_id", id, "err", err)
		s.refuseReplan(w, openai.Internal())
		return
	}
	h := w.Header()
	h.Set("location", string(location([]byte(r.URL.RequestURI()))))
	h.Set(envoywire.HeaderTicket, string(sealed))
	// a redirect removes the headers that its answer lacks
	for _, name := range []string{envoywire.HeaderPrefilled, envoywire.HeaderLoad} {
		if v := r.Header.Get(name); v != "" {
			h.Set(name, v)
		}
	}
	w.WriteHeader(http.StatusTemporaryRedirect)
}

// hopFailed records that an endpoint failed a hop outright. One that exceeded the hop's time limit counts as hanging; but
// a P that had to fetch a stored turn may have waited for the endpoint that holds it.
func (s *Server) hopFailed(next, t *kvtransfer.Ticket, id, failed string, f faults.Failure) {
	if f.Overdue && t.Stage == kvtransfer.PrefillLeg && t.Turn.Named {
		next.Excluded = append(next.Excluded, failed)
		return
	}
	f.Unreached = !f.Overdue
	s.faults.Endpoint(next, id, failed, &f)
}

// overdue reports whether a hop took as long as its time limit; 0: none.
func overdue(took, limit time.Duration) bool { return limit > 0 && took >= limit }

// limit returns the shortest time limit of a ticket's leg; 0: none.
func (s *Server) limit(t *kvtransfer.Ticket) time.Duration {
	policy, _ := s.policy(t.Pool)
	return policy.LegLimit(t)
}

// discard reads the rest of a body: Envoy follows a redirect only once the request was sent completely.
func discard(body io.Reader, limit int64) { _, _ = io.CopyN(io.Discard, body, limit) }

func (s *Server) refuseReplan(w http.ResponseWriter, e *openai.Error) {
	s.observer.GivenUp(e)
	w.Header().Set("content-type", envoywire.ContentTypeJSON)
	if e.RetryAfter > 0 {
		w.Header().Set(envoywire.HeaderRetryAfter, strconv.Itoa(int(e.RetryAfter.Seconds())))
	}
	w.WriteHeader(e.Status)
	_, _ = w.Write(e.JSON())
}
