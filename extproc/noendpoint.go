package extproc

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"time"

	"tandem/extproc/openai"
	"tandem/kvstate"
	"tandem/picker"
)

// Alone says when a request that can be split may be decoded alone. Requests that cannot be split always are.
type Alone uint8

// The policies of a pool's decodeAlone.
const (
	AloneByCost   Alone = iota // where it costs less, as far as the pool's placement compares costs, and as a fallback
	AloneFallback              // where no prefill endpoint can take the request
	AloneNever                 // never: 503
)

// refusesAlone returns the 503 for a request that is not to be decoded alone; why is the reason that it was not split.
func (p *Policy) refusesAlone(pool *kvstate.Pool, why string) error {
	if p.Alone != AloneNever && p.OnFailure != Fail {
		return nil
	}
	place := p.place()
	switch why {
	case "cheaper":
		if place.Split != picker.SplitAlways {
			return nil
		}
	case "no_prefill":
	case "prefill_failed", "attempts_spent", "redirects_spent", "time_spent":
		return openai.Unavailable("prefill_failed", "the prefill of this request failed", time.Second)
	default: // the request cannot be split
		return nil
	}
	return openai.Unavailable("no_prefill", missing(pool, kvstate.RolePrefill, p.Source), time.Second)
}

// missing names the role and the list or selector that has no endpoint for a request.
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
		return fmt.Sprintf("no %s endpoint of pool %s works: all %d of its %s have failed", name, pool.Spec.Name, len(all), source)
	}
	return fmt.Sprintf("no %s endpoint of pool %s can take this request now, of %d in its %s", name, pool.Spec.Name, len(all), source)
}

// noEndpoint turns the picker's refusal into the client's 503.
func noEndpoint(pool *kvstate.Pool, source string, err error) error {
	if errors.Is(err, picker.ErrNoEndpoint) {
		return openai.Unavailable("no_endpoint", missing(pool, kvstate.RoleDecode, source), time.Second)
	}
	return fmt.Errorf("picking endpoints in pool %q: %w", pool.Spec.Name, err)
}
