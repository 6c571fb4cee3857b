package fault

import (
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
	Mode       string `json:"mode"`
	Leg        string `json:"leg,omitempty"`         // prefill, decode, plain, any (default)
	Path       string `json:"path,omitempty"`        // only this path, e.g. /v1/chat/completions
	Count      int    `json:"count,omitempty"`       // how often; 0: until cleared
	Skip       int    `json:"skip,omitempty"`        // matching requests to let through first
	Status     int    `json:"status,omitempty"`      // of mode status; default 503
	RetryAfter int    `json:"retry_after,omitempty"` // seconds, of mode status
	// of mode slow (default 1s) and refuse (how long; default 1s)
	Delay  string          `json:"delay,omitempty"`
	Events int             `json:"events,omitempty"` // of mode stream-reset-after
	Params json.RawMessage `json:"params,omitempty"` // of mode malformed-params: what to answer with
	Hits   int             `json:"hits"`             // how often it has struck so far

	Wait time.Duration
}

// The modes. All but refuse, die and unreachable wait for a request that matches.
const (
	Status      = "status"               // answer an error at once
	EarlyReset  = "reset-before-headers" // reset the connection instead of answering
	MidReset    = "reset-mid-body"       // headers and half the body, then reset
	Hang        = "hang"                 // never answer
	Slow        = "slow"                 // wait, then continue as usual
	Garbage     = "garbage-body"         // 200 that is not JSON
	EmptyParams = "empty-params"         // prefill: kv_transfer_params {}
	NullParams  = "null-params"          // prefill: kv_transfer_params null
	BadParams   = "malformed-params"     // prefill: kv_transfer_params that would kill a decode engine
	StreamReset = "stream-reset-after"   // reset a stream after so many events
	Refuse      = "refuse"               // at once: close the HTTP port for a while
	Die         = "die"                  // at once: exit as a crashed engine does
	Unreachable = "unreachable"          // until cleared: other engines cannot connect to the KV side channel
)

var modes = []string{
	Status, EarlyReset, MidReset, Hang, Slow, Garbage, EmptyParams, NullParams,
	BadParams, StreamReset, Refuse, Die, Unreachable,
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
	r.Wait = time.Second
	if r.Delay != "" {
		var err error
		if r.Wait, err = time.ParseDuration(r.Delay); err != nil {
			return fmt.Errorf("delay: %w", err)
		}
	}
	if r.Mode == BadParams && r.Params == nil {
		r.Params = json.RawMessage(`{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":["a"],` +
			`"remote_engine_id":"x","remote_request_id":"x","remote_port":1}`)
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
func (r *Rule) suits(leg, path string, stream bool) bool {
	switch r.Mode {
	case Unreachable:
		return false
	case EmptyParams, NullParams, BadParams:
		if leg != "prefill" {
			return false
		}
	case StreamReset:
		if !stream {
			return false
		}
	}
	return (r.Leg == "" || r.Leg == "any" || r.Leg == leg) && (r.Path == "" || r.Path == path)
}

// Take returns the failure that hits a request, nil for none, and counts it.
func (f *Rules) Take(leg, path string, stream bool) *Rule {
	f.mu.Lock()
	defer f.mu.Unlock()
	for i, r := range f.rules {
		if !r.suits(leg, path, stream) {
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

// Add adds more rules.
func (f *Rules) Add(rules []Rule) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, r := range rules {
		f.rules = append(f.rules, &r)
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
	out := []Rule{}
	for _, r := range f.rules {
		out = append(out, *r)
	}
	return out
}

// AtOnce reports whether a rule strikes without waiting for a request.
func (r Rule) AtOnce() bool { return r.Mode == Refuse || r.Mode == Die }

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
