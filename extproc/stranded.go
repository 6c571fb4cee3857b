package extproc

import (
	"context"
	"crypto/rand"
	"errors"
	"io"
	"net"
	"net/http"
	"slices"
	"time"

	"tandem/extproc/envoywire"
	"tandem/extproc/kvtransfer"
	"tandem/kvstate"
	"tandem/kvstate/enginehttp"
	"tandem/picker"
)

// A hand-over is stranded when the decode it was for never comes: the client left between the hops, or the request went on without
// it. The prefill endpoint keeps the blocks until its lease ends (vLLM from 0.22: 30 s) or, in older releases, a timeout of minutes
// does (0.12 to 0.21: 480 s). Where the pool wants it (strandedBlocks: cleanupDecode), a decode endpoint is told to fetch them,
// which is all that makes such a release let go. Never where a decode endpoint may have got the parameters: then it tells P itself, and the
// same parameters a second time can return another request's text.

// Why a hand-over was stranded: label values of a metric. Beside these there are the causes of a replan that is no fault of an endpoint's.
const (
	strandedClientGone   = "client_gone"   // between the hops
	strandedNoDecode     = "no_decode"     // the request ended with an error before a decode endpoint was asked
	strandedReplanned    = "replanned"     // P answered so late that another endpoint had been asked
	strandedDecodeFailed = "decode_failed" // perhaps after it fetched
	strandedAnswerCut    = "answer_cut"    // P's answer did not come whole: nobody knows its parameters
)

// cleanup is one hand-over to be fetched and thrown away.
type cleanup struct {
	id        [16]byte // of the hand-over's ticket
	requestID string
	handed    *handed
}

// cleanupUnsure is a result: another replica may have done it, and cannot be asked.
const cleanupUnsure = "unsure"

// Bounds: what does not fit is left to the engine's own time limit.
const (
	maxCleanups     = 256
	cleanupWorkers  = 4
	cleanupTimeout  = 10 * time.Second
	cleanupDial     = 2 * time.Second
	maxCleanupBytes = 1 << 20 // of an answer, which nobody reads
	maxCleanupTries = 3       // endpoints, of which all but the last refused the connection
)

// stranded notes that nobody will fetch what a hand-over ticket names, and why, unless pass 2 has opened the ticket. It is spent by
// this: the request cannot go on with these parameters any more.
func (s *Server) stranded(t *kvtransfer.Ticket, requestID, why string) {
	if !s.State.Spend(t.ID) {
		return
	}
	s.metrics.Orphaned(t.Pool, t.Prefill, why)
	if h := s.handed.take(t.ID); h != nil {
		s.cleanUpLater(t.ID, requestID, h)
	}
}

// strandedUnfollowed is stranded, of a prefill leg whose answer came too late to be followed, if it came. t is the leg's ticket.
func (s *Server) strandedUnfollowed(t *kvtransfer.Ticket, requestID, why string) {
	if h := s.takeUnfollowed(t, why); h != nil && h.read && s.State.Spend(t.ID) {
		s.strandedHanded(t.ID, requestID, h, why)
	}
}

// strandedHanded is stranded, of what was kept and is not any more.
func (s *Server) strandedHanded(id [16]byte, requestID string, h *handed, why string) {
	s.metrics.Orphaned(h.pool, h.prefill, why)
	s.cleanUpLater(id, requestID, h)
}

// cleanUpLater has a hand-over fetched and thrown away. Its ticket may be spent, but no decode endpoint was asked and none will be.
func (s *Server) cleanUpLater(id [16]byte, requestID string, h *handed) {
	s.State.Spend(id)
	result := "no_room"
	if h.params != nil {
		result = "too_many"
		if s.cleaning.Add(int64(len(h.params))) <= maxHandedBytes {
			select {
			case s.cleanups <- cleanup{id, requestID, h}:
				return
			default:
			}
		}
		s.cleaning.Add(-int64(len(h.params)))
	}
	s.metrics.Reclaimed(h.pool, result)
}

// ours reports whether this server is the one to clean up. What a cleanup spends is a name of its own, and where there are others to
// ask, they must have answered: a ticket that is spent twice may cost one request its KV, a cleanup that is done twice may cost another its text.
func (s *Server) ours(c cleanup) bool {
	c.id[0] ^= 0x80
	first, known := s.State.SpendSurely(c.id)
	if !known {
		s.metrics.Reclaimed(c.handed.pool, cleanupUnsure)
	}
	return first && known
}

// cleanUp works off the stranded hand-overs until ctx ends.
func (s *Server) cleanUp(ctx context.Context) {
	client := enginehttp.New(cleanupTimeout, func(t *http.Transport) {
		t.MaxIdleConnsPerHost, t.IdleConnTimeout, t.DialContext = 1, time.Second, (&net.Dialer{Timeout: cleanupDial}).DialContext
	})
	defer client.CloseIdle()
	for {
		select {
		case <-ctx.Done():
			return
		case c := <-s.cleanups:
			s.fetchStranded(ctx, client, c)
		}
	}
}

// fetchStranded sends the cleanup decode. Its prompt is one token, so the decode endpoint reads one block (the last: vLLM
// takes what it lacks from the end) and tells the prefill endpoint that it has what it wanted, which frees them all. The
// block is not that prompt's KV: so one token is made of it, which nobody is shown, and a salt of its own keeps it out of the
// decode endpoint's prefix cache. An endpoint that could not be connected to has got nothing, so another is asked.
func (s *Server) fetchStranded(ctx context.Context, client *enginehttp.Client, c cleanup) {
	h := c.handed
	defer s.cleaning.Add(-int64(len(h.params)))
	if !s.ours(c) {
		return
	}
	policy, _ := s.policy(h.pool)
	pool := s.State.Pool(h.pool)
	result, decode := "no_endpoint", ""
	var err error
	var tried []string
	for range maxCleanupTries {
		if time.Now().After(h.expires) {
			result = "too_late"
			break
		}
		d := s.cleaner(&policy, pool, h, tried)
		if d == nil {
			break
		}
		decode, tried = d.Addr, append(tried, d.Addr)
		if result, err = s.askCleaner(ctx, client, &policy, d, c); !refused(err) {
			break
		}
	}
	s.metrics.Reclaimed(h.pool, result)
	s.Log.Info("cleanup decode for a stranded hand-over", "request_id", c.requestID, "prefill", h.prefill, "decode", decode, "result", result, "err", err)
}

func (s *Server) askCleaner(ctx context.Context, client *enginehttp.Client, policy *Policy, d *kvstate.Endpoint, c cleanup) (result string, err error) {
	body := append([]byte(`{"prompt":"a","max_tokens":1,"cache_salt":"`+rand.Text()+`",`), policy.Dialect.DecodeMember(nil, c.handed.params)...)
	body = append(body, '}')
	resp, err := client.Post(ctx, d, "/v1/completions", body, http.Header{http.CanonicalHeaderKey(envoywire.HeaderRequestID): {c.requestID}})
	if err != nil {
		return "failed", err
	}
	_, _ = io.CopyN(io.Discard, resp.Body, maxCleanupBytes)
	_ = resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return "failed", nil
	}
	return "ok", nil
}

// cleaner chooses the endpoint of a cleanup: any that the prefill endpoint may pair with, the one that the request did not reach only
// where there is no other, or, where the blocks were pushed, the one that has them. nil: there is none.
func (s *Server) cleaner(policy *Policy, pool *kvstate.Pool, h *handed, tried []string) *kvstate.Endpoint {
	if pool == nil || policy.Dialect.DecodeMember == nil {
		return nil
	}
	if policy.Dialect.Push != nil {
		if d := pool.Endpoint(h.decode); d != nil && !d.Failed() && len(tried) == 0 {
			return d
		}
		return nil
	}
	var v kvstate.View
	s.State.View(pool, nil, &v)
	prefill := slices.IndexFunc(v.Endpoints, func(c kvstate.Candidate) bool { return c.Endpoint.Addr == h.prefill })
	if prefill < 0 {
		return nil // it has left, and its blocks with it
	}
	choose := picker.Picker{Policy: policy.place()}
	if h.unreached {
		tried = append(slices.Clip(tried), h.decode)
	}
	i, err := choose.PickDecode(&picker.Request{PromptTokens: 1, Model: h.model, Excluded: tried, Rand: random()}, &v, prefill)
	if err != nil {
		return nil
	}
	return v.Endpoints[i].Endpoint
}

// refused reports whether a call failed before there was a connection.
func refused(err error) bool {
	var op *net.OpError
	return errors.As(err, &op) && op.Op == "dial"
}
