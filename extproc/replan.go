package extproc

import (
	"cmp"
	"io"
	"net/http"
	"time"

	"tandem/extproc/kvtransfer"
	"tandem/extproc/openai"
	"tandem/kvstate"
)

// Replan answers the second try of a hop that failed outright (two composite clusters send it here): 307, with a ticket
// that says what failed, so that pass 2 plans anew. It cannot see why the first try failed, so KV parameters that were
// with it count as spent.
func (s *Server) Replan() http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		defer discard(r.Body, int64(s.MaxBodyBytes+maxDecodeMember))
		id := r.Header.Get(headerRequestID)
		t, err := s.keys().Open(r.Header.Get(headerTicket), id, time.Now())
		if t == nil || t.Redirects+1 >= s.MaxRedirects {
			s.Log.Warn("replan refused", "request_id", id, "err", err)
			if t != nil {
				w.Header().Set(headerFinal, "true") // another replica would say the same: Envoy is not to ask it
			}
			s.refuseReplan(w, openai.Unavailable("endpoint_failed", "the endpoint failed and there is no other way to answer", time.Second))
			return
		}
		next := *t
		if next.Stage, next.Params, next.Path = kvtransfer.Failed, nil, ""; t.Stage != kvtransfer.PairLegs {
			next.ID = newTicketID() // that of an attempt with both legs at once goes on: it names the leg that may still run
		}
		next.Redirects++
		hop, failed := "decode", t.Decode
		next.Cause = kvtransfer.CauseDecode
		switch t.Stage {
		case kvtransfer.PrefillLeg:
			hop, failed, next.Cause = "prefill", t.Prefill, kvtransfer.CausePrefill
		case kvtransfer.EncodeLeg:
			hop, next.Cause = "encode", kvtransfer.CauseEncode
		}
		if t.Stage == kvtransfer.PrefillLeg { // P has answered after all, and its answer came too late to be followed
			s.strandedUnfollowed(t, id, strandedReplanned)
		}
		took := time.Since(s.sealedAt(t))
		s.metrics.hop(t.Pool, hop, failed, "failed", took, nil)
		if hop == "decode" && t.Split {
			s.metrics.stranded.WithLabelValues(t.Pool, t.Prefill, strandedDecodeFailed).Inc() // or fetched: who failed does not say
		}
		if t.Stage == kvtransfer.PrefillLeg && t.Turn.Told {
			s.turnFailed(&next, id, 0)
		}
		next.Excluded = append(next.Excluded, failed)
		if pool := s.State.Pool(t.Pool); pool != nil {
			if e := pool.Endpoint(failed); e != nil {
				s.markFailed(e, t, took)
			}
		}
		sealed, err := s.keys().Seal(nil, &next, id)
		if err != nil {
			s.Log.Error("sealing a replan ticket", "request_id", id, "err", err)
			s.refuseReplan(w, openai.Internal())
			return
		}
		w.Header().Set("location", string(location([]byte(r.Host), []byte(cmp.Or(t.Path, r.URL.RequestURI())))))
		w.Header().Set(headerTicket, string(sealed))
		w.WriteHeader(http.StatusTemporaryRedirect)
	})
}

// markFailed leaves out an endpoint that failed a hop. One that was cut off by the hop's time limit hangs; but a P that was to fetch
// a turn may have waited for the endpoint that kept it.
func (s *Server) markFailed(e *kvstate.Endpoint, t *kvtransfer.Ticket, took time.Duration) {
	policy, _ := s.policy(t.Pool)
	limit := policy.PrefillTimeout
	switch t.Stage {
	case kvtransfer.DecodeLeg:
		limit = policy.StreamStart
		if policy.WholeAnswer > 0 {
			limit = min(limit, policy.WholeAnswer)
		}
	case kvtransfer.EncodeLeg:
		limit = policy.EncodeTimeout
	}
	switch {
	case took < limit:
		s.State.MarkFailed(e)
	case t.Stage != kvtransfer.PrefillLeg || !t.Turn.Told:
		s.State.MarkHung(e)
	}
}

// discard reads what is left of a body: Envoy follows a redirect only once the request was sent in full.
func discard(body io.Reader, limit int64) { _, _ = io.CopyN(io.Discard, body, limit) }

func (s *Server) refuseReplan(w http.ResponseWriter, e *openai.Error) {
	s.metrics.refused(e)
	w.Header().Set("content-type", contentTypeJSON)
	if e.RetryAfter > 0 {
		w.Header().Set(headerRetryAfter, string(itoa(int(e.RetryAfter.Seconds()))))
	}
	w.WriteHeader(e.Status)
	_, _ = w.Write(e.JSON())
}
