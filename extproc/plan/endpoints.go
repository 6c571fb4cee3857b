package plan

import (
	"cmp"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	"tandem/extproc/openai"
	"tandem/kvstate"
	"tandem/picker"
)

// missing names the role, and the list or selector, that has no endpoint for a request.
func missing(pool *kvstate.Pool, role kvstate.Role, source string) string {
	name := nameOf(role)
	source = cmp.Or(source, "endpoints")
	all := slices.DeleteFunc(slices.Clone(pool.Endpoints()), func(e *kvstate.Endpoint) bool { return e.Role&role == 0 })
	switch {
	case len(all) == 0:
		return fmt.Sprintf("pool %s has no %s endpoint: there is none in its %s", pool.Spec.Name, name, source)
	case !slices.ContainsFunc(all, func(e *kvstate.Endpoint) bool { return !e.Failed() }):
		return fmt.Sprintf("no %s endpoint of pool %s works: all %d of its %s have failed",
			name, pool.Spec.Name, len(all), source)
	case !slices.ContainsFunc(all, (*kvstate.Endpoint).TakesWork):
		return fmt.Sprintf("no %s endpoint of pool %s takes requests: %s",
			name, pool.Spec.Name, outOfWork(all, source))
	}
	return fmt.Sprintf("no %s endpoint of pool %s can take this request now, of %d in its %s",
		name, pool.Spec.Name, len(all), source)
}

// outOfWork says why endpoints take no new requests: all of them, or so many each.
func outOfWork(all []*kvstate.Endpoint, source string) string {
	failed, ending, paused := 0, 0, 0
	for _, e := range all {
		switch {
		case e.Failed():
			failed++
		case e.Draining:
			ending++
		default:
			paused++
		}
	}
	var out []string
	for _, c := range []struct {
		n        int
		one, are string
	}{
		{paused, "is paused or drained by the operator", "are paused or drained by the operator"},
		{failed, "has failed", "have failed"},
		{ending, "is terminating", "are terminating"},
	} {
		switch {
		case c.n == len(all) && c.n == 1:
			return fmt.Sprintf("the only one of its %s %s", source, c.one)
		case c.n == len(all):
			return fmt.Sprintf("all %d of its %s %s", c.n, source, c.are)
		case c.n == 1:
			out = append(out, "1 "+c.one)
		case c.n > 1:
			out = append(out, fmt.Sprintf("%d %s", c.n, c.are))
		}
	}
	return fmt.Sprintf("of the %d of its %s, %s", len(all), source, strings.Join(out, ", "))
}

// noPair describes the side of a pool that has no endpoint for a pair.
func (p *Policy) noPair(pool *kvstate.Pool) string {
	if works(pool, kvstate.RoleDecode) {
		return missing(pool, kvstate.RolePrefill, p.Source)
	}
	return missing(pool, kvstate.RoleDecode, p.Source)
}

// EndpointOf returns the endpoint of a pool at an address; nil: it is gone.
func EndpointOf(state *kvstate.State, pool, addr string) *kvstate.Endpoint {
	if p := state.Pool(pool); p != nil {
		return p.Endpoint(addr)
	}
	return nil
}

// works reports whether an endpoint of the pool with a role takes requests.
func works(pool *kvstate.Pool, role kvstate.Role) bool {
	return slices.ContainsFunc(pool.Endpoints(), func(e *kvstate.Endpoint) bool {
		return e.Role&role != 0 && e.TakesWork()
	})
}

// full returns the client's answer if an endpoint of a role is full: that of the first one which gets requests
// again, with its status. nil: none is full.
func full(pool *kvstate.Pool, role kvstate.Role) error {
	if pool == nil {
		return nil
	}
	var first *kvstate.Endpoint
	var least time.Duration
	status, now := 0, time.Now()
	for _, e := range pool.Endpoints() {
		if e.Role&role == 0 || !e.TakesWork() {
			continue
		}
		if left, code := e.FullFor(now); left > 0 && (first == nil || left < least) {
			first, least, status = e, left, code
		}
	}
	if first == nil {
		return nil
	}
	return fullError(role, first.Refusing(now), status, least)
}

// justFull is full for a request whose attempts are spent: the endpoint may get requests again by now.
func justFull(pool *kvstate.Pool) error {
	if err := fullFirst(pool); err != nil {
		return err
	}
	for _, e := range pool.Endpoints() {
		if status := e.JustFull(time.Now()); status > 0 {
			return fullError(e.Role, fmt.Sprintf("%s answered %d each time", e.DisplayName(), status), status, 0)
		}
	}
	return nil
}

func fullError(role kvstate.Role, says string, status int, least time.Duration) error {
	err := openai.Unavailable("endpoint_full", nameOf(role)+" "+says, least.Truncate(time.Second)+time.Second)
	if err.Status = status; status == http.StatusTooManyRequests {
		err.Type = "rate_limit_error"
	}
	return err
}

// fullFirst is full of decode endpoints if none of them takes requests now, else of prefill endpoints.
func fullFirst(pool *kvstate.Pool) error {
	takes := func(e *kvstate.Endpoint) bool {
		left, _ := e.FullFor(time.Now())
		return e.Role&kvstate.RoleDecode != 0 && e.TakesWork() && left == 0
	}
	decode, prefill := full(pool, kvstate.RoleDecode), full(pool, kvstate.RolePrefill)
	if decode == nil || prefill != nil && slices.ContainsFunc(pool.Endpoints(), takes) {
		return prefill
	}
	return decode
}

func nameOf(role kvstate.Role) string {
	if role == kvstate.RolePrefill {
		return "prefill"
	}
	return "decode"
}

// NoEndpoint turns the picker's refusal into the client's 503, or into the answer of the endpoint that is full.
func (p *Policy) NoEndpoint(pool *kvstate.Pool, err error) error {
	if errors.Is(err, picker.ErrFull) {
		if err := fullFirst(pool); err != nil {
			return err
		}
		err = picker.ErrNoEndpoint // it gets requests again, but the request does not wait
	}
	if errors.Is(err, picker.ErrNoEndpoint) {
		return openai.Unavailable("no_endpoint", missing(pool, kvstate.RoleDecode, p.Source), time.Second)
	}
	return fmt.Errorf("picking endpoints in pool %q: %w", pool.Spec.Name, err)
}

// Overloaded returns the client's error for a request that a full pool refuses.
func Overloaded() error {
	return openai.Overloaded("the pool is full, and this request gives way to others", time.Second)
}

// Missed turns a choice that misses the request's targets, and that the pool therefore refuses, into the client's
// error. The client may retry when the excess work before it will be done.
func Missed(r *picker.Request, c *picker.Choice, err error) error {
	if !errors.Is(err, picker.ErrMissed) {
		return err
	}
	after := time.Second
	if r.TTFT > 0 {
		after = max(after, kvstate.Seconds(r.Waited+c.FirstToken-r.TTFT))
	}
	return openai.TargetMissed(min(after, time.Minute))
}

// ClientsFault reports whether an engine's status is about the request itself, so that the client gets the engine's
// answer.
func ClientsFault(code int) bool {
	switch code {
	case 408, 425, 429: // of the moment, or of the engine's load
		return false
	}
	return code >= 400 && code < 500
}
