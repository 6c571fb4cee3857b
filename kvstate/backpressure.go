package kvstate

import (
	"fmt"
	"net/http"
	"time"
)

// An endpoint that answers 429 or 503 is full, not broken: it gets no request for as long as it asks, others get them,
// and nothing is recorded against it. Each replica learns this from the answers that its Envoys see.

// Refusal is the answer of an endpoint that was full. It is never modified.
type Refusal struct {
	Status int       // 429 or 503
	Until  time.Time // when it gets requests again
	pause  time.Duration
	absent bool // it gave none: Envoy's cluster lacks it
}

// How long an endpoint gets no request after it refused one: as long as it asks (Retry-After), at most
// longestRetryAfter; else firstPause, twice as long after each refusal that follows soon, at most longestPause.
const (
	firstPause        = 250 * time.Millisecond
	longestPause      = time.Second
	longestRetryAfter = 30 * time.Second
	longestAbsence    = 10 * time.Second // the pause of an endpoint that Envoy's cluster lacks
)

// Refuses reports whether an engine's status says that it is full.
func Refuses(status int) bool {
	return status == http.StatusTooManyRequests || status == http.StatusServiceUnavailable
}

// MarkFull records that an endpoint refused a request because it is full. after is its Retry-After; 0: none. It returns
// true if the endpoint was not full already.
func (s *Health) MarkFull(e *Endpoint, status int, after time.Duration) (isNew bool) {
	return s.refuse(e, Refusal{Status: status, pause: firstPause}, after, longestPause)
}

// MarkAbsent records that the cluster in which Envoy looks for an endpoint lacks it, as it may for a while: Envoy and
// Tandem learn of endpoints in different ways. Nothing was sent to it. It returns true if that was not known already.
func (s *Health) MarkAbsent(e *Endpoint) (isNew bool) {
	absent := Refusal{Status: http.StatusServiceUnavailable, pause: firstPause, absent: true}
	return s.refuse(e, absent, 0, longestAbsence)
}

// refuse records that an endpoint gets no request for a while. longest bounds a pause that nobody has asked for.
func (s *Health) refuse(e *Endpoint, next Refusal, after, longest time.Duration) (isNew bool) {
	now := s.now()
	old := e.state.condition.refused.Load()
	isNew = old == nil || !now.Before(old.Until)
	switch {
	case !isNew: // it was under way when the endpoint refused another one
		next.pause = old.pause
	case old != nil && now.Sub(old.Until) < longest:
		next.pause = min(2*old.pause, longest)
	}
	if next.Until = now.Add(next.pause); after > 0 {
		next.Until = now.Add(min(after, longestRetryAfter))
	}
	if !isNew && next.Until.Before(old.Until) {
		return false
	}
	e.state.condition.refused.Store(&next)
	e.state.condition.fullUntil.Store(next.Until.UnixNano())
	return isNew
}

// FullFor returns how long an endpoint still gets no request because it refused one, and with which status; 0: it gets
// requests.
func (e *Endpoint) FullFor(now time.Time) (left time.Duration, status int) {
	if e.state == nil {
		return 0, 0
	}
	r := e.state.condition.refused.Load()
	if r == nil || !now.Before(r.Until) || e.Failed() {
		return 0, 0
	}
	return r.Until.Sub(now), r.Status
}

// JustFull returns the status of a refusal that an endpoint gave a moment ago, though it gets requests again; 0: none.
func (e *Endpoint) JustFull(now time.Time) (status int) {
	if r := e.state.condition.refused.Load(); r != nil && now.Sub(r.Until) < 2*longestPause {
		return r.Status
	}
	return 0
}

// Refusing describes for operators that an endpoint is full; "" if it is not.
func (e *Endpoint) Refusing(now time.Time) string {
	left, status := e.FullFor(now)
	if left == 0 {
		return ""
	}
	in := left.Round(10 * time.Millisecond).Seconds()
	if e.state.condition.refused.Load().absent {
		return fmt.Sprintf("the cluster of the gateway's route lacks %s, tried again in %.3g s", e.DisplayName(), in)
	}
	return fmt.Sprintf("%s answers %d, tried again in %.3g s", e.DisplayName(), status, in)
}
