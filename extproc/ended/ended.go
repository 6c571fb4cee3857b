// Package ended describes how a request ended, for both transports: beside Envoy the access log reports it, inside
// Envoy the filter sees it. Metrics, usage, faults and what decisions learn are made from it alone.
package ended

import (
	"bytes"
	"time"

	"tandem/extproc/names"
)

// Pass is how one pass of a request ended; the end of the last one is the request's. Its slices live as long as the
// message or the hook that it came with.
type Pass struct {
	RequestID   []byte
	Reservation []byte // the name of the request's reservations, which no other request has
	Traceparent []byte // if the configuration enables tracing
	Details     []byte // Envoy's response code details
	Status      int    // 0: no answer was sent
	Start       time.Time
	Duration    time.Duration // from start, the beginning of the request's first pass
	ClientGone  bool
	Outdated    bool   // Tandem refused the answer: its KV may have been another prompt's
	Unfollowed  []byte // the answer was a redirect that Envoy did not follow: the tag that its script set
	Try
	Answered
}

// Try is the last try at an endpoint.
type Try struct {
	Tries             uint64
	Sent, SentHeaders uint64 // bytes to the endpoint
	Began             bool   // it had a connection, and sent something
	Pod               bool   // it went to an endpoint, not to the replan port or an internal listener
	Replan            bool   // it went to the replan port
	RetryAfter        []byte // of the answer
	// the details of an answer that Envoy gave by itself on a leg's listener; empty: the engine answered
	Own []byte
}

// Asked reports whether an endpoint may have received anything of the pass. A try that waits for a connection has sent
// nothing (Envoy 1.40). Only the last try is described, so a second try counts as received.
func (t *Try) Asked() bool { return t.Tries > 1 || t.Began || t.Sent > 0 }

// Refusal returns the code of the error with which Tandem itself ended the request, or with which Envoy did because it
// had no route for Tandem's decision; "" if neither did.
func (p *Pass) Refusal() string {
	if p.Status == 503 && string(p.Details) == "direct_response" { // of a route that nothing decided should take
		return names.CodeNoRoute
	}
	code, ours := bytes.CutPrefix(p.Details, []byte(names.DetailsPrefix+"_"))
	if !ours || p.Status < 400 {
		return ""
	}
	return string(code)
}

// BrokeOff reports whether an answer ended before it was complete. Its status was sent long before; Envoy (1.40)
// writes the cause into the details: the endpoint's connection broke, or a time limit expired.
func (p *Pass) BrokeOff() bool {
	for _, why := range [...]string{
		"upstream_reset_after_response_started", "stream_idle_timeout",
		"upstream_per_try_idle_timeout", "response_timeout",
		"max_duration_timeout", "upstream_max_stream_duration_reached",
	} {
		if len(p.Details) >= len(why) && string(p.Details[:len(why)]) == why { // Envoy may add more in braces
			return true
		}
	}
	return false
}

// TooShort reports whether an answer is a stream that its engine ended before it was complete: it has fewer bytes than
// any complete one. Failures after the status was sent end like this, above all failed KV loads.
func (p *Pass) TooShort(leastBytes int) bool {
	return p.Status == 200 && p.Body < uint64(leastBytes) && !p.ClientGone && !p.BrokeOff()
}

// maxDelay is how late an entry of the access log may come; Envoy sends them every 0.2 s.
const maxDelay = 2 * time.Second

// SetTime replaces the start of an end that is read now, if Envoy's clock cannot be right.
func (p *Pass) SetTime(now time.Time) {
	if late := now.Sub(p.Start.Add(p.Duration)); late < 0 || late > maxDelay {
		p.Start = now.Add(-p.Duration)
	}
}
