package main

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"slices"
	"sync"
	"time"
)

// failRule is one injected failure, as POST /sim/fail takes it.
type failRule struct {
	Mode       string          `json:"mode"`
	Leg        string          `json:"leg,omitempty"`         // prefill, decode, plain, any (default)
	Path       string          `json:"path,omitempty"`        // only this path, e.g. /v1/chat/completions
	Count      int             `json:"count,omitempty"`       // how often; 0: until cleared
	Skip       int             `json:"skip,omitempty"`        // matching requests to let through first
	Status     int             `json:"status,omitempty"`      // of mode status; default 503
	RetryAfter int             `json:"retry_after,omitempty"` // seconds, of mode status
	Delay      string          `json:"delay,omitempty"`       // of mode slow (default 1s) and refuse (how long; default 1s)
	Events     int             `json:"events,omitempty"`      // of mode stream-reset-after
	Params     json.RawMessage `json:"params,omitempty"`      // of mode malformed-params: what to answer with
	Hits       int             `json:"hits"`                  // how often it has struck so far

	delay time.Duration
}

// The modes. All but refuse, die and unreachable wait for a request that matches.
const (
	failStatus      = "status"               // answer an error at once
	failEarlyReset  = "reset-before-headers" // reset the connection instead of answering
	failMidReset    = "reset-mid-body"       // headers and half the body, then reset
	failHang        = "hang"                 // never answer
	failSlow        = "slow"                 // wait, then go on as usual
	failGarbage     = "garbage-body"         // 200 that is not JSON
	failEmptyParams = "empty-params"         // prefill: kv_transfer_params {}
	failNullParams  = "null-params"          // prefill: kv_transfer_params null
	failBadParams   = "malformed-params"     // prefill: kv_transfer_params that would kill a decode engine
	failStreamReset = "stream-reset-after"   // reset a stream after so many events
	failRefuse      = "refuse"               // at once: close the HTTP port for a while
	failDie         = "die"                  // at once: exit as a crashed engine does
	failUnreachable = "unreachable"          // until cleared: other engines cannot connect to the KV side channel
)

var failModes = []string{
	failStatus, failEarlyReset, failMidReset, failHang, failSlow, failGarbage, failEmptyParams, failNullParams,
	failBadParams, failStreamReset, failRefuse, failDie, failUnreachable,
}

// legs are what a request can be to the protocol.
var legs = []string{"plain", "prefill", "decode"}

func (r *failRule) check() error {
	if !slices.Contains(failModes, r.Mode) {
		return fmt.Errorf("mode %q: not one of %v", r.Mode, failModes)
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
	r.delay = time.Second
	if r.Delay != "" {
		var err error
		if r.delay, err = time.ParseDuration(r.Delay); err != nil {
			return fmt.Errorf("delay: %w", err)
		}
	}
	if r.Mode == failBadParams && r.Params == nil {
		r.Params = json.RawMessage(`{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":["a"],"remote_engine_id":"x","remote_request_id":"x","remote_port":1}`)
	}
	return nil
}

// failures are the rules in force, in the order they came.
type failures struct {
	mu      sync.Mutex
	rules   []*failRule
	cleared chan struct{} // closed when the rules are cleared: ends hangs
}

func newFailures(rules []failRule) *failures {
	f := &failures{cleared: make(chan struct{})}
	for _, r := range rules {
		f.rules = append(f.rules, &r)
	}
	return f
}

// suits reports whether a rule is meant for such a request. Rules that spoil a hand-over want a prefill leg, one that
// cuts a stream wants a stream.
func (r *failRule) suits(leg, path string, stream bool) bool {
	switch r.Mode {
	case failUnreachable:
		return false
	case failEmptyParams, failNullParams, failBadParams:
		if leg != "prefill" {
			return false
		}
	case failStreamReset:
		if !stream {
			return false
		}
	}
	return (r.Leg == "" || r.Leg == "any" || r.Leg == leg) && (r.Path == "" || r.Path == path)
}

// take finds the failure that a request meets, nil for none, and uses it up by one.
func (f *failures) take(leg, path string, stream bool) *failRule {
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

func (f *failures) add(rules []failRule) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, r := range rules {
		f.rules = append(f.rules, &r)
	}
}

func (f *failures) clear() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.rules = nil
	close(f.cleared)
	f.cleared = make(chan struct{})
}

// unreachable reports whether other engines are kept from the side channel.
func (f *failures) unreachable() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.ContainsFunc(f.rules, func(r *failRule) bool { return r.Mode == failUnreachable })
}

func (f *failures) untilCleared() <-chan struct{} {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.cleared
}

func (f *failures) list() []failRule {
	f.mu.Lock()
	defer f.mu.Unlock()
	out := []failRule{}
	for _, r := range f.rules {
		out = append(out, *r)
	}
	return out
}

// serveFail is /sim/fail: POST adds a rule (or a list), GET lists, DELETE clears.
func (s *sim) serveFail(w http.ResponseWriter, r *http.Request) {
	var rules []failRule
	switch r.Method {
	case http.MethodPost:
		body, err := io.ReadAll(io.LimitReader(r.Body, 1<<20))
		if err == nil {
			rules, err = parseFailRules(body)
		}
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		s.fail.add(slices.DeleteFunc(slices.Clone(rules), failRule.atOnce))
	case http.MethodDelete:
		s.fail.clear()
	case http.MethodGet:
	default:
		http.Error(w, "POST, GET or DELETE", http.StatusMethodNotAllowed)
		return
	}
	text, _ := json.Marshal(s.fail.list())
	w.Header().Set("Content-Type", "application/json")
	writeWith(w, http.StatusOK, text)
	_ = http.NewResponseController(w).Flush() // who asks has its answer before the port closes
	s.strike(rules)
}

// addFailures puts rules in force.
func (s *sim) addFailures(rules []failRule) {
	s.fail.add(slices.DeleteFunc(slices.Clone(rules), failRule.atOnce))
	s.strike(rules)
}

// atOnce says of a rule that it waits for no request.
func (r failRule) atOnce() bool { return r.Mode == failRefuse || r.Mode == failDie }

// strike does what rules have done at once.
func (s *sim) strike(rules []failRule) {
	for _, r := range rules {
		switch r.Mode {
		case failRefuse:
			s.metrics.injected.add(r.Mode, 1)
			go s.refuse(r.delay)
		case failDie:
			s.metrics.injected.add(r.Mode, 1)
			s.die("told to by POST /sim/fail")
		}
	}
}

// inject carries out a failure that comes before any work. It reports whether the request is done with.
func (c *call) inject(rule *failRule) (done bool) {
	if rule == nil {
		return false
	}
	cleared := c.s.fail.untilCleared()
	c.s.metrics.injected.add(rule.Mode, 1)
	c.rec.setInjected(rule.Mode)
	ctx := c.r.Context()
	switch rule.Mode {
	case failStatus:
		if rule.Status == http.StatusSwitchingProtocols {
			c.switchProtocols()
			return true
		}
		if rule.Status < 400 { // as FastAPI does for a slash too many
			c.w.Header().Set("Location", "http://"+c.r.Host+c.r.URL.Path+"/")
		}
		if rule.RetryAfter > 0 {
			c.w.Header().Set("Retry-After", fmt.Sprint(rule.RetryAfter))
		}
		typ := "ServiceUnavailableError"
		if rule.Status < 500 {
			typ = "BadRequestError"
		}
		c.refuse(&apiError{status: rule.Status, typ: typ, message: "enginesim: injected failure"})
		return true
	case failEarlyReset:
		c.reset()
		return true
	case failHang:
		select {
		case <-ctx.Done():
			c.rec.setAborted()
		case <-cleared:
			c.reset()
		}
		return true
	case failGarbage:
		c.writeBody(http.StatusOK, "application/json", []byte(`{"id":"garbage", <html>not JSON`))
		return true
	case failSlow:
		select {
		case <-ctx.Done():
			c.rec.setAborted()
			return true
		case <-time.After(rule.delay):
		}
	}
	c.rule = rule
	return false
}

// spoilParams is what an injected failure makes of a hand-over. The blocks are then freed: nobody can fetch them.
func (r *failRule) spoilParams(good []byte) (params []byte, spoilt bool) {
	if r == nil {
		return good, false
	}
	switch r.Mode {
	case failEmptyParams:
		return []byte("{}"), true
	case failNullParams:
		return []byte("null"), true
	case failBadParams:
		return r.Params, true
	}
	return good, false
}

// switchProtocols answers 101, which nobody asked for, and ends the connection at the next byte, which is none of the new protocol.
func (c *call) switchProtocols() {
	conn, _, err := http.NewResponseController(c.w).Hijack()
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	defer conn.Close()
	_, _ = io.WriteString(conn, "HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n")
	_, _ = conn.Read(make([]byte, 1))
}
