package api

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"time"

	"tandem/e2e/enginesim/connector"
	"tandem/e2e/enginesim/engine"
	"tandem/e2e/enginesim/fault"
	"tandem/e2e/enginesim/web"
)

// serveFail is /sim/fail: POST adds a rule (or a list), GET lists, DELETE clears.
func (s *Server) serveFail(w http.ResponseWriter, r *http.Request) {
	var rules []fault.Rule
	switch r.Method {
	case http.MethodPost:
		body, err := io.ReadAll(io.LimitReader(r.Body, 1<<20))
		if err == nil {
			rules, err = fault.Parse(body)
		}
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		s.Faults.Add(rules)
	case http.MethodDelete:
		s.Faults.Clear()
		s.ranks.resume()
	case http.MethodGet:
	default:
		http.Error(w, "POST, GET or DELETE", http.StatusMethodNotAllowed)
		return
	}
	text, _ := json.Marshal(s.Faults.List())
	w.Header().Set("Content-Type", "application/json")
	writeWith(w, http.StatusOK, text)
	_ = http.NewResponseController(w).Flush() // the client has its answer before the port closes
	s.strike(rules)
}

// strike executes the rules that strike at once.
func (s *Server) strike(rules []fault.Rule) {
	for _, r := range rules {
		switch r.Mode {
		case fault.Refuse:
			s.Metrics.Injected.Add(r.Mode, 1)
			go func() {
				if !s.web.Refuse(r.Wait) {
					s.Logf("the HTTP port could not be opened again")
				}
			}()
		case fault.Die:
			s.Metrics.Injected.Add(r.Mode, 1)
			s.die("told to by POST /sim/fail")
		case fault.Restart:
			s.again.Store(&r)
			s.die("told to start again by POST /sim/fail")
		case fault.Stall:
			s.Metrics.Injected.Add(r.Mode, 1)
			s.ranks.stall(r.Wait)
		}
	}
}

// ranks are an engine's data-parallel ranks.
type ranks []*connector.Node

// stall makes every rank's core stand still, for d, or until resume if that is 0.
func (r ranks) stall(d time.Duration) {
	for _, n := range r {
		n.Core.Stop()
		if d > 0 {
			time.AfterFunc(d, n.Core.Resume)
		}
	}
}

func (r ranks) resume() {
	for _, n := range r {
		n.Core.Resume()
	}
}

// takeRule returns the failure that strikes a request.
func (c *call) takeRule(leg string, body []byte) *fault.Rule {
	m := c.n.Metrics
	return c.s.Faults.Take(&fault.Request{Leg: leg, Path: c.r.URL.Path, Body: body, Stream: c.req.Stream,
		Reused: web.Reused(c.r), Busy: m.Running.Load() + m.Waiting()})
}

// inject executes a failure that strikes before any work. done means that the request needs no answer.
func (c *call) inject(rule *fault.Rule) (done bool) {
	if rule == nil {
		return false
	}
	cleared := c.s.Faults.UntilCleared()
	c.s.Metrics.Injected.Add(rule.Mode, 1)
	c.rec.setInjected(rule.Mode)
	ctx := c.r.Context()
	switch rule.Mode {
	case fault.Status:
		if rule.Status == http.StatusSwitchingProtocols {
			c.switchProtocols()
			return true
		}
		if rule.Status < 400 { // as FastAPI does for a superfluous slash
			c.w.Header().Set("Location", "http://"+c.r.Host+c.r.URL.Path+"/")
		}
		if rule.RetryAfter > 0 {
			c.w.Header().Set("Retry-After", fmt.Sprint(rule.RetryAfter))
		}
		typ := "ServiceUnavailableError"
		if rule.Status < 500 {
			typ = "BadRequestError"
		}
		c.refuse(&engine.Error{Status: rule.Status, Typ: typ, Message: "enginesim: injected failure"})
		return true
	case fault.EarlyReset:
		c.reset()
		return true
	case fault.Race:
		c.hangUp(false)
		return true
	case fault.Hang:
		select {
		case <-ctx.Done():
			c.rec.setAborted()
		case <-cleared:
			c.reset()
		}
		return true
	case fault.Garbage:
		c.writeBody(http.StatusOK, []byte(`{"id":"garbage", <html>not JSON`))
		return true
	case fault.Abort:
		c.writeBody(http.StatusOK, []byte(`{"id":"aborted","object":"chat.completion","choices":[{"index":0,`+
			`"message":{"role":"assistant","content":""},"finish_reason":"abort"}],`+
			`"usage":{"prompt_tokens":1,"completion_tokens":0}}`))
		return true
	case fault.Slow:
		select {
		case <-ctx.Done():
			c.rec.setAborted()
			return true
		case <-time.After(rule.Wait):
		}
	}
	c.rule, c.leg.Rule = rule, rule
	return false
}

// switchProtocols answers 101 without a request for it, and ends the connection at the next byte.
func (c *call) switchProtocols() {
	conn, _, err := http.NewResponseController(c.w).Hijack()
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	defer conn.Close()
	_, _ = io.WriteString(conn, "HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n")
	_, _ = conn.Read(make([]byte, 1))
}

// serveLose is POST /sim/kv-events {"lose":n}: the next n batches are kept for replay but not published.
func (s *Server) serveLose(w http.ResponseWriter, r *http.Request) {
	var ask struct {
		Lose int `json:"lose"`
	}
	if err := json.NewDecoder(io.LimitReader(r.Body, 1024)).Decode(&ask); err != nil || s.Events == nil ||
		ask.Lose < 0 {
		http.Error(w, errors.Join(errors.New(`{"lose":n} is for an engine with -kv-events`), err).Error(),
			http.StatusBadRequest)
		return
	}
	s.Events.LoseNext(ask.Lose)
	w.WriteHeader(http.StatusNoContent)
}
