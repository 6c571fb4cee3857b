package fault

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"
)

// Rule is one injected failure, in the form of POST /sim/fail.
type Rule struct {
	Mode string `json:"mode"`
	Which
	Status     int `json:"status,omitempty"`      // of mode status; default 503
	RetryAfter int `json:"retry_after,omitempty"` // seconds, of mode status
	// of modes slow, refuse and restart (default 1s), and stall (default: until cleared)
	Delay  string          `json:"delay,omitempty"`
	Warmup string          `json:"warmup,omitempty"` // of mode restart: how long the new engine then answers 503
	Events int             `json:"events,omitempty"` // of modes stream-reset-after and die-in-stream
	Params json.RawMessage `json:"params,omitempty"` // of mode malformed-params: what to answer with
	Hits   int             `json:"hits"`             // how often it has struck so far

	Wait, Warm time.Duration
}

// Which is the choice of the requests that a rule strikes.
type Which struct {
	Leg      string `json:"leg,omitempty"`      // prefill, decode, plain, any (default)
	Path     string `json:"path,omitempty"`     // only this path, e.g. /v1/chat/completions
	Contains string `json:"contains,omitempty"` // only bodies with this text
	Busy     int    `json:"busy,omitempty"`     // only while that many requests run or wait
	Count    int    `json:"count,omitempty"`    // how often; 0: until cleared
	Skip     int    `json:"skip,omitempty"`     // matching requests to let through first
	For      string `json:"for,omitempty"`      // how long the rule holds, from its arrival on; "": until cleared

	until time.Time
}

// Request is what rules choose by.
type Request struct {
	Leg    string
	Path   string
	Body   []byte
	Stream bool
	Reused bool  // over a connection that had carried another request
	Busy   int64 // requests that run or wait
}

// The modes. All but refuse, die, restart, stall and unreachable wait for a request that matches.
const (
	Status      = "status"               // answer an error at once
	EarlyReset  = "reset-before-headers" // reset the connection instead of answering
	MidReset    = "reset-mid-body"       // headers and half the body, then reset
	Hang        = "hang"                 // never answer
	Slow        = "slow"                 // wait, then continue as usual
	Garbage     = "garbage-body"         // 200 that is not JSON
	Abort       = "abort"                // 200 that says the engine has given the request up, as SGLang's does
	EmptyParams = "empty-params"         // prefill: kv_transfer_params {}
	NullParams  = "null-params"          // prefill: kv_transfer_params null
	BadParams   = "malformed-params"     // prefill: kv_transfer_params that would kill a decode engine
	StreamReset = "stream-reset-after"   // reset a stream after so many events
	StreamDeath = "die-in-stream"        // die after so many events of a stream
	Comment     = "comment"              // begin a stream with a comment, as a server that keeps the connection alive
	Race        = "keep-alive-race"      // close a connection that was idle, as a request arrives on it
	Refuse      = "refuse"               // at once: close the HTTP port for a while
	Die         = "die"                  // at once: exit as a crashed engine does
	Restart     = "restart"              // at once: die, and start a new engine with the same ports and no KV
	Stall       = "stall"                // at once: the core stands still, /health and /metrics answer
	Unreachable = "unreachable"          // until cleared: other engines cannot connect to the KV side channel
)

var modes = []string{
	Status, EarlyReset, MidReset, Hang, Slow, Garbage, Abort, EmptyParams, NullParams,
	BadParams, StreamReset, StreamDeath, Comment, Race, Refuse, Die, Restart, Stall, Unreachable,
}

// legs are a request's possible parts in the protocol.
var legs = []string{"plain", "prefill", "decode"}

func (r *Rule) check() error {
	if !slices.Contains(modes, r.Mode) {
		return fmt.Errorf("mode %q: not one of %v", r.Mode, modes)
	}
	if r.Leg != "" && r.Leg != "any" && !slices.Contains(legs, r.Leg) {
		return fmt.Errorf("leg %q: not one of any, %v", r.Leg, legs)
	}
	if r.Status == 0 {
		r.Status = http.StatusServiceUnavailable
	}
	if (r.Status < 200 || r.Status > 599) && r.Status != http.StatusSwitchingProtocols {
		return fmt.Errorf("status %d", r.Status)
	}
	if err := r.checkTimes(); err != nil {
		return err
	}
	if r.Mode == BadParams && r.Params == nil {
		r.Params = json.RawMessage(`{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":["a"],` +
			`"remote_engine_id":"x","remote_request_id":"x","remote_port":1}`)
	}
	return nil
}

// checkTimes reads the durations.
func (r *Rule) checkTimes() error {
	var hold time.Duration
	for _, of := range []struct {
		name, text string
		into       *time.Duration
	}{{"delay", r.Delay, &r.Wait}, {"warmup", r.Warmup, &r.Warm}, {"for", r.For, &hold}} {
		if of.text == "" {
			continue
		}
		var err error
		if *of.into, err = time.ParseDuration(of.text); err != nil || *of.into <= 0 {
			return fmt.Errorf("%s: not a duration above 0: %q", of.name, of.text)
		}
	}
	if r.Delay == "" && r.Mode != Stall {
		r.Wait = time.Second
	}
	if hold > 0 {
		r.until = time.Now().Add(hold)
	}
	return nil
}

// Rules are the active rules, in the order of their arrival.
type Rules struct {
	mu      sync.Mutex
	rules   []*Rule
	cleared chan struct{} // closed when the rules are cleared, which ends hangs
}

// New returns active rules.
func New(rules []Rule) *Rules {
	f := &Rules{cleared: make(chan struct{})}
	for _, r := range rules {
		f.rules = append(f.rules, &r)
	}
	return f
}

// suits reports whether a rule applies to such a request. Rules that spoil a hand-over need a prefill leg, one that
// cuts a stream needs a stream.
func (r *Rule) suits(q *Request) bool {
	switch r.Mode {
	case Unreachable:
		return false
	case EmptyParams, NullParams, BadParams:
		if q.Leg != "prefill" {
			return false
		}
	case StreamReset, StreamDeath, Comment:
		if !q.Stream {
			return false
		}
	case Race:
		if !q.Reused {
			return false
		}
	}
	return r.chosen(q)
}

// chosen reports whether the request is one of those.
func (w *Which) chosen(q *Request) bool {
	return (w.Leg == "" || w.Leg == "any" || w.Leg == q.Leg) && (w.Path == "" || w.Path == q.Path) &&
		(w.Contains == "" || bytes.Contains(q.Body, []byte(w.Contains))) && q.Busy >= int64(w.Busy)
}

// Take returns the failure that hits a request, nil for none, and counts it.
func (f *Rules) Take(q *Request) *Rule {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.drop()
	for i, r := range f.rules {
		if !r.suits(q) {
			continue
		}
		if r.Skip > 0 {
			r.Skip--
			continue
		}
		r.Hits++
		hit := *r
		if r.Count > 0 && r.Hits >= r.Count {
			f.rules = append(f.rules[:i:i], f.rules[i+1:]...)
		}
		return &hit
	}
	return nil
}

// drop removes rules whose time is over. The lock is held.
func (f *Rules) drop() {
	f.rules = slices.DeleteFunc(f.rules, func(r *Rule) bool { return !r.until.IsZero() && time.Now().After(r.until) })
}

// Add adds more rules; those that strike at once are the caller's.
func (f *Rules) Add(rules []Rule) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, r := range rules {
		if !r.AtOnce() {
			f.rules = append(f.rules, &r)
		}
	}
}

// Clear removes all rules and ends hangs.
func (f *Rules) Clear() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.rules = nil
	close(f.cleared)
	f.cleared = make(chan struct{})
}

// Unreachable reports whether the side channel refuses other engines.
func (f *Rules) Unreachable() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.drop()
	return slices.ContainsFunc(f.rules, func(r *Rule) bool { return r.Mode == Unreachable })
}

// UntilCleared returns a channel that the next Clear closes.
func (f *Rules) UntilCleared() <-chan struct{} {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.cleared
}

// List copies the active rules.
func (f *Rules) List() []Rule {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.drop()
	out := []Rule{}
	for _, r := range f.rules {
		out = append(out, *r)
	}
	return out
}

// AtOnce reports whether a rule strikes without waiting for a request.
func (r Rule) AtOnce() bool {
	return r.Mode == Refuse || r.Mode == Die || r.Mode == Restart || r.Mode == Stall
}

// SpoilParams returns a hand-over's parameters as an injected failure changes them. The blocks are then freed: nothing
// can fetch them.
func (r *Rule) SpoilParams(good []byte) (params []byte, spoilt bool) {
	if r == nil {
		return good, false
	}
	switch r.Mode {
	case EmptyParams:
		return []byte("{}"), true
	case NullParams:
		return []byte("null"), true
	case BadParams:
		return r.Params, true
	}
	return good, false
}

// Parse reads one rule or a list of them, and checks them.
func Parse(b []byte) ([]Rule, error) {
	if strings.HasPrefix(strings.TrimSpace(string(b)), "[") {
		var rules []Rule
		if err := json.Unmarshal(b, &rules); err != nil {
			return nil, err
		}
		for i := range rules {
			if err := rules[i].check(); err != nil {
				return nil, err
			}
		}
		return rules, nil
	}
	var r Rule
	if err := json.Unmarshal(b, &r); err != nil {
		return nil, err
	}
	return []Rule{r}, r.check()
}
