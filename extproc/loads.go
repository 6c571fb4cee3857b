package extproc

import (
	"context"
	"log/slog"

	"tandem/extproc/envoywire"
	"tandem/extproc/kvtransfer"
	"tandem/extproc/telemetry"
	"tandem/kvstate"
)

// How a failed KV load was seen: label values of a metric.
const (
	loadStream = "stream" // a stream that is shorter than any complete one
	loadAnswer = "answer" // decode answered 5xx, or not at all
	loadCount  = "count"  // decode's own count of failed transfers rose
)

// decodeEnded records, at the end of a decode leg, whether its KV load worked. If its answer broke off, the endpoint
// may have died: it is checked.
func (s *Server) decodeEnded(t *kvtransfer.Ticket, e *envoywire.LogEntry) {
	pool := s.State.Pool(t.Pool)
	if t.Stage != kvtransfer.DecodeLeg && t.Stage != kvtransfer.PairLegs {
		return
	}
	if e.BrokeOff() {
		checkEndpoint(s.Check, pool, t.Decode)
	}
	switch {
	case !t.Loads || pool == nil:
	case e.TooShort(t.LeastBytes):
		s.loadFailed(pool, t.Prefill, t.Decode, loadStream)
	case telemetry.EndedAs(t, e) == "ok":
		s.State.LoadSucceeded(pool, t.Prefill, t.Decode)
	}
}

// loadFailed records that a pair's KV load failed, and how that was seen.
func (s *Server) loadFailed(pool *kvstate.Pool, prefill, decode, seen string) {
	news := s.State.LoadFailed(pool, prefill, decode)
	if news || seen != loadCount { // a count also rises for failures that were seen as they happened
		s.observer.LoadFailed(pool.Spec.Name, prefill, seen)
	}
	if !news {
		return
	}
	checkEndpoint(s.Check, pool, prefill) // if it died and came back, its failed loads are forgotten then
	s.Log.LogAttrs(context.Background(), slog.LevelWarn, "decode could not load the KV of prefill: the pair is avoided for a while",
		slog.String("prefill", prefill), slog.String("decode", decode), slog.String("seen", seen))
}

// loadLegFailed records that a decode leg failed before it answered. If it had KV to load, either endpoint or the
// network between them may be at fault, so the decode endpoint is checked before it is marked as failed. It reports
// whether the leg had KV to load.
func (s *Server) loadLegFailed(t *kvtransfer.Ticket) bool {
	pool := s.State.Pool(t.Pool)
	if !t.Loads || pool == nil || s.Check == nil {
		return false
	}
	s.loadFailed(pool, t.Prefill, t.Decode, loadAnswer)
	checkEndpoint(s.Check, pool, t.Decode)
	return true
}

// checkEndpoint starts a health check of an endpoint. pool may be nil, and the endpoint may have been removed.
func checkEndpoint(check func(*kvstate.Endpoint), pool *kvstate.Pool, name string) {
	if pool == nil || check == nil {
		return
	}
	if e := pool.Endpoint(name); e != nil {
		check(e)
	}
}
