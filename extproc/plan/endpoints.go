package plan

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"tandem/extproc/openai"
	"tandem/kvstate"
	"tandem/picker"
)

// missing names the role, and the list or selector, that has no endpoint for a request.
func missing(pool *kvstate.Pool, role kvstate.Role, source string) string {
	name := "decode"
	if role == kvstate.RolePrefill {
		name = "prefill"
	}
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
	decodes := func(e *kvstate.Endpoint) bool { return e.Role&kvstate.RoleDecode != 0 && e.TakesWork() }
	if slices.ContainsFunc(pool.Endpoints(), decodes) {
		return missing(pool, kvstate.RolePrefill, p.Source)
	}
	return missing(pool, kvstate.RoleDecode, p.Source)
}

// NoEndpoint turns the picker's refusal into the client's 503.
func (p *Policy) NoEndpoint(pool *kvstate.Pool, err error) error {
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
