// Package faults records what a failed hop says of its endpoint, and what it means for the request (docs/adr/0047):
//
//   - 429 and 503 of an engine are load: the endpoint is full, and gets no request for as long as it asks for.
//   - Any other status is about the request: another endpoint is tried. If another request gets the same status from
//     the same pair, the pair is avoided; if several requests get it from one endpoint, that endpoint has failed. A
//     success in between clears both counts.
//   - A connection that broke: the request is planned again, and the endpoint is checked.
//   - An endpoint that cannot be reached, or exceeded its time, has failed.
//
// [Means] is where that is decided, as values, for every leg and both transports; [Faults.Blame] records it.
//
// A KV load counts as failed only if the engine says so: by a stream that ends before it is complete, or by its own
// count.
package faults

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cespare/xxhash/v2"

	"tandem/extproc/ended"
	"tandem/extproc/kvtransfer"
	"tandem/extproc/plan"
	"tandem/extproc/telemetry"
	"tandem/kvstate"
)

// How a failed KV load was seen: label values of a metric.
const (
	SeenStream = "stream" // a stream that is shorter than any complete one
	SeenAnswer = "answer" // decode answered several requests with an error
	SeenCount  = "count"  // decode's own count of failed transfers rose
)

// Faults records the faults of endpoints.
type Faults struct {
	State    *kvstate.State
	Observer *telemetry.Observer
	Log      *slog.Logger
	// Check checks an endpoint's health soon; nil: one whose connection broke is marked as failed at once.
	Check func(*kvstate.Endpoint)

	tries  tries
	errors repeated
	logs   atomic.Int64
}

// Failure is how a hop failed.
type Failure struct {
	Status     int           // of the engine's answer; 0: it sent none
	RetryAfter time.Duration // of that answer; 0: none
	Unreached  bool          // there was no connection
	Overdue    bool          // it exceeded its time limit
	Absent     bool          // Envoy's cluster has no such endpoint: nothing was sent to it
	Unknown    bool          // unknown: the first entry of a connection in Envoy's log may come too late
}

// words say for people how a request failed.
func (f *Failure) words(requestID string) string {
	what := "it ended the connection, or broke off its answer"
	switch {
	case f.Overdue:
		what = "it did not answer in time"
	case f.Unreached:
		what = "no connection"
	case f.Status > 0:
		what = fmt.Sprintf("it answered %d", f.Status)
	}
	return fmt.Sprintf("%s (request %.64q)", what, requestID)
}

// answered begins Envoy's details of an answer that the endpoint gave by itself (Envoy 1.40, StreamInfo).
const answered = "via_upstream"

// Answered reports, by Envoy's details, whether an endpoint gave the answer.
func Answered(details string) bool { return strings.HasPrefix(details, answered) }

// Of returns the failure of an answer, by its status, Envoy's details of it and its Retry-After. Without details,
// as from an Envoy with an earlier configuration, the answer counts as the engine's.
func Of(status int, details, retryAfter string) Failure {
	if details != "" && !Answered(details) {
		return Failure{Unreached: strings.Contains(details, "connection_failure")}
	}
	f := Failure{Status: status}
	// Tandem's and Envoy's own answers have no Retry-After in the form of a date
	if s, err := strconv.Atoi(retryAfter); err == nil && s > 0 {
		f.RetryAfter = time.Duration(min(s, 3600)) * time.Second
	}
	return f
}

// routed lists how the details of answers from Envoy's router begin: an endpoint's, or Envoy's own in its place (1.40,
// envoy/stream_info/stream_info.h). Time limits of the whole stream count as the endpoint's.
var routed = []string{answered, "upstream_", "no_healthy_upstream", "cluster_not_found", "no_cluster",
	"route_not_found", "maintenance_mode", "unconditional_drop_overload", "stream_idle_timeout", "response_timeout",
	"max_duration_timeout"}

// Filtered reports, by Envoy's details, whether a filter before the router has answered, as a rate limit does: no
// endpoint was asked.
func Filtered(details string) bool {
	by := func(begin string) bool { return strings.HasPrefix(details, begin) }
	return details != "" && !slices.ContainsFunc(routed, by)
}

// Failed reports whether a status of a decode endpoint says that it did not serve the request, so that it is planned
// again. Any other one is an answer, or the engine's refusal of the request itself.
func Failed(status int) bool {
	return status >= 500 || status < 200 || status == http.StatusRequestTimeout || kvstate.Refuses(status) ||
		status == http.StatusTooEarly || status == http.StatusNotFound || // another endpoint may serve the model
		Redirects(status)
}

// Redirects reports whether a status redirects the client. Engines hardly do, but a proxy in front of one may (for a
// login), or an engine that serves the path under another spelling. The address is internal to the fleet, so no client
// gets it, and neither Tandem nor Envoy follows it.
func Redirects(status int) bool {
	switch status {
	case http.StatusMovedPermanently, http.StatusFound, http.StatusSeeOther, http.StatusTemporaryRedirect,
		http.StatusPermanentRedirect:
		return true
	}
	return false
}

// Full reports whether the endpoint was full.
func (f *Failure) Full() bool { return kvstate.Refuses(f.Status) }

// NotFound reports whether the endpoint answered 404: it does not serve the model, or the path.
func (f *Failure) NotFound() bool { return f.Status == http.StatusNotFound }

// Opened records that Envoy logs to this replica. The returned function records the end.
func (s *Faults) Opened() (closed func()) {
	s.logs.Add(1)
	return func() { s.logs.Add(-1) }
}

// Report records Envoy's log entry of a failed try at an endpoint. All replicas get it.
func (s *Faults) Report(t *kvtransfer.Ticket, e *ended.Pass) {
	details := e.Own
	if len(details) == 0 {
		details = e.Details
	}
	f := Of(e.Status, string(details), string(e.RetryAfter))
	if f.Status != 0 && e.Replan {
		return
	}
	f.Unreached = f.Unreached || f.Status == 0 && e.Pod && !e.Began && e.Sent == 0
	if f.Full() && (t.Stage == kvtransfer.DecodeLeg || t.Stage == kvtransfer.PairLegs) {
		s.full(t.Pool, t.Decode, &f)
	}
	s.tries.report(t.ID, f)
}

// await is how long the replan port waits for the log entry of the previous try. Envoy sends it at once.
const await = 500 * time.Millisecond

// Failed returns how the try of a ticket failed. What is unknown counts as a broken connection, whichever endpoint of
// the pair broke it.
func (s *Faults) Failed(ctx context.Context, t *kvtransfer.Ticket) Failure {
	if s.logs.Load() > 0 {
		if f, known := s.tries.await(ctx, t.ID, await); known {
			return f
		}
	}
	return Failure{Unknown: true}
}

// full records that an endpoint was full.
func (s *Faults) full(pool, addr string, f *Failure) {
	if e := plan.EndpointOf(s.State, pool, addr); e != nil && s.State.Health.MarkFull(e, f.Status, f.RetryAfter) {
		s.Observer.EndpointFull(pool, addr, f.Status)
		s.Log.LogAttrs(context.Background(), slog.LevelInfo, "an endpoint is full and gets no request for a while",
			slog.String("endpoint", addr), slog.Int("status", f.Status), slog.Duration("retry_after", f.RetryAfter))
	}
}

// absent records that Envoy's cluster lacks an endpoint.
func (s *Faults) absent(pool string, e *kvstate.Endpoint) {
	s.Observer.EndpointAbsent(pool, e.Addr)
	if s.State.Health.MarkAbsent(e) {
		s.Log.LogAttrs(context.Background(), slog.LevelWarn, "the cluster of the gateway's route lacks an endpoint, "+
			"which gets no request for a while: name the same engines to Tandem and to the route",
			slog.String("endpoint", e.Addr))
	}
}

// Blame records what a failed leg of a request means, for the endpoint at an address and for the ticket of the next
// pass.
func (s *Faults) Blame(next *kvtransfer.Ticket, requestID, addr string, f *Failure, m *Meaning) {
	next.Cause = m.Cause
	if m.Excludes {
		next.Excluded = append(slices.Clip(next.Excluded), addr)
	}
	if m.Blames {
		if f.Full() && next.Prefill != "" && next.Prefills > 0 {
			next.Prefills-- // a refusal does not count as an attempt: only the limit of redirects bounds them
		}
		s.Hop(next.Pool, requestID, addr, f)
	}
	pool := s.State.Pool(next.Pool)
	next.Loads = next.Loads && m.Loads && pool != nil
	if next.Loads && m.Suspects &&
		s.State.KVLoads.LoadSuspected(pool, next.Prefill, next.Decode, xxhash.Sum64String(requestID)) {
		s.loadFailed(pool, next.Prefill, next.Decode, SeenAnswer)
	}
}

// Hop records how an endpoint failed a hop of a request.
func (s *Faults) Hop(pool, requestID, addr string, f *Failure) {
	e := plan.EndpointOf(s.State, pool, addr)
	switch {
	case e == nil:
	case f.Absent:
		s.absent(pool, e)
	case f.Full():
		s.full(pool, addr, f)
	case f.Overdue:
		s.State.Health.Mark(e, true, kvstate.CauseTimeLimit, f.words(requestID))
	case e.Failed(): // else it would not count as hanging any more
	case f.Unreached || s.Check == nil && f.Status == 0,
		(f.Status >= 500 || Redirects(f.Status)) && s.errors.again(addr, requestID):
		s.State.Health.Mark(e, false, kvstate.CauseRequest, f.words(requestID))
	case s.Check != nil:
		s.Check(e)
	}
}

// DecodeEnded records, at the end of a decode leg, whether its KV load worked. If its answer broke off, the
// endpoint may have died: it is checked.
func (s *Faults) DecodeEnded(t *kvtransfer.Ticket, e *ended.Pass) {
	pool := s.State.Pool(t.Pool)
	if t.Stage != kvtransfer.DecodeLeg && t.Stage != kvtransfer.PairLegs {
		return
	}
	if e.BrokeOff() {
		s.CheckEndpoint(pool, t.Decode)
	}
	ok := telemetry.EndedAs(t, e) == "ok"
	switch {
	case !t.Loads || pool == nil || e.Outdated:
	case e.TooShort(t.LeastBytes):
		s.LoadFailed(pool, t.Prefill, t.Decode, SeenStream)
	case ok:
		s.State.KVLoads.LoadSucceeded(pool, t.Prefill, t.Decode)
	}
	if ok {
		s.errors.clear(t.Prefill, t.Decode)
	}
}

// LoadFailed records that a pair's KV load failed, and how that was seen.
func (s *Faults) LoadFailed(pool *kvstate.Pool, prefill, decode, seen string) {
	if s.State.KVLoads.LoadFailed(pool, prefill, decode) {
		s.loadFailed(pool, prefill, decode, seen)
	} else if seen != SeenCount { // a count also rises for failures that were seen as they happened
		s.Observer.LoadFailed(pool.Spec.Name, prefill, seen)
	}
}

// loadFailed reports a failed load that is new.
func (s *Faults) loadFailed(pool *kvstate.Pool, prefill, decode, seen string) {
	s.Observer.LoadFailed(pool.Spec.Name, prefill, seen)
	s.CheckEndpoint(pool, prefill) // if it died and came back, its failed loads are forgotten then
	const message = "decode could not load the KV of prefill: the pair is avoided for a while"
	s.Log.LogAttrs(context.Background(), slog.LevelWarn, message,
		slog.String("prefill", prefill), slog.String("decode", decode), slog.String("seen", seen))
}

// CheckEndpoint starts a health check of an endpoint. pool may be nil, and the endpoint may have been removed.
func (s *Faults) CheckEndpoint(pool *kvstate.Pool, addr string) {
	if pool == nil || s.Check == nil {
		return
	}
	if e := pool.Endpoint(addr); e != nil {
		s.Check(e)
	}
}

// repeated counts the errors of endpoints in a row, each of another request. The zero value is ready to use.
type repeated struct {
	mu     sync.Mutex
	counts map[string]*count // by address
}

type count struct {
	requests int
	last     string // id of the last request
	at       time.Time
}

const (
	inARow     = 3                // an endpoint that answers so many requests in a row with an error has failed
	rowTime    = 10 * time.Second // after which an error is forgotten
	maxCounted = 4096             // endpoints
)

// again counts an error. It reports whether the endpoint has failed.
func (r *repeated) again(addr, requestID string) bool {
	now := time.Now()
	r.mu.Lock()
	defer r.mu.Unlock()
	c := r.counts[addr]
	if c == nil || now.Sub(c.at) > rowTime {
		if r.counts == nil || len(r.counts) >= maxCounted {
			r.counts = map[string]*count{}
		}
		c = &count{}
		r.counts[addr] = c
	}
	if c.last != requestID {
		c.requests++
	}
	if c.last, c.at = requestID, now; c.requests < inARow {
		return false
	}
	delete(r.counts, addr)
	return true
}

// clear forgets the errors of endpoints that have served a request.
func (r *repeated) clear(addrs ...string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, addr := range addrs {
		delete(r.counts, addr)
	}
}
