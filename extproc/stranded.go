package extproc

import (
	"bytes"
	"context"
	"crypto/rand"
	"io"
	"net/http"
	"time"

	"tandem/extproc/kvtransfer"
	"tandem/kvstate"
	"tandem/kvstate/enginehttp"
)

// A hand-over is stranded when its client left between the hops: the prefill endpoint keeps the blocks for a decode that
// will never come, until its lease ends (vLLM from 0.22: 30 s) or, in older releases, a timeout of minutes does (0.12 to 0.21:
// 480 s). Where the pool wants it (strandedBlocks: cleanupDecode), a decode endpoint is told to fetch them, which is all
// that makes such a release let go.

// cleanup is one hand-over to be fetched and thrown away.
type cleanup struct {
	pool, requestID string
	prefill         string
	params          []byte
	dialect         kvtransfer.Dialect
	decode          *kvstate.Endpoint
}

// Bounds: what does not fit is left to the engine's own time limit.
const (
	maxCleanups     = 256
	cleanupWorkers  = 4
	cleanupTimeout  = 10 * time.Second
	maxCleanupBytes = 1 << 20 // of an answer, which nobody reads
)

// stranded notes that nobody will fetch what a hand-over ticket names, why, and has it fetched where the pool wants that.
// The ticket is spent by it: the request cannot go on with these parameters any more.
func (s *Server) stranded(t *kvtransfer.Ticket, requestID, why string) {
	s.metrics.stranded.WithLabelValues(t.Pool, t.Prefill, why).Inc()
	policy, _ := s.policy(t.Pool)
	if !policy.CleanupDecode || policy.Dialect == nil || t.Stage != kvtransfer.HandOver || !s.State.Spend(t.ID) {
		return
	}
	params := t.Params
	if t.ParamsRef != ([16]byte{}) {
		params, _ = s.State.TakeHandOver(t.ParamsRef)
	}
	pool := s.State.Pool(t.Pool)
	if params == nil || pool == nil {
		return
	}
	d := pool.Endpoint(t.Decode)
	if d == nil || d.Failed() {
		s.metrics.cleanups.WithLabelValues(t.Pool, "no_endpoint").Inc()
		return
	}
	select {
	case s.cleanups <- cleanup{t.Pool, requestID, t.Prefill, bytes.Clone(params), policy.Dialect, d}:
	default:
		s.metrics.cleanups.WithLabelValues(t.Pool, "too_many").Inc()
	}
}

// cleanUp works off the stranded hand-overs until ctx ends.
func (s *Server) cleanUp(ctx context.Context) {
	client := enginehttp.New(cleanupTimeout, func(t *http.Transport) { t.MaxIdleConnsPerHost, t.IdleConnTimeout = 1, time.Second })
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
// decode endpoint's prefix cache.
func (s *Server) fetchStranded(ctx context.Context, client *enginehttp.Client, c cleanup) {
	salt := rand.Text()
	body := append([]byte(`{"prompt":"a","max_tokens":1,"cache_salt":"`+salt+`",`), c.dialect.DecodeMember(nil, c.params)...)
	body = append(body, '}')
	resp, err := client.Post(ctx, c.decode, "/v1/completions", body, http.Header{http.CanonicalHeaderKey(headerRequestID): {c.requestID}})
	result := "failed"
	if err == nil {
		_, _ = io.CopyN(io.Discard, resp.Body, maxCleanupBytes)
		_ = resp.Body.Close()
		if resp.StatusCode == http.StatusOK {
			result = "ok"
		}
	}
	s.metrics.cleanups.WithLabelValues(c.pool, result).Inc()
	s.Log.Info("cleanup decode for a stranded hand-over", "request_id", c.requestID, "prefill", c.prefill, "decode", c.decode.Addr, "result", result, "err", err)
}
