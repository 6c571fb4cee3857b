package picker

import (
	"errors"

	"tandem/kvstate"
)

// Faults is what a request's failures mean for its next choice. It is part of the request, because a request that
// waits is placed anew on each view of the fleet.
type Faults struct {
	Excluded []string // addresses that failed this request
	// Final are those of Excluded that stay excluded even if no other is left.
	Final []string
	// FailedPair are the addresses of the pair (P, D) that failed this request last, if it is not known which of the
	// two failed.
	FailedPair [2]string
	// Trial says that the request may try an avoided pair again, once the first pause of the pair is over.
	Trial bool
	// LacksModel says that those of Excluded have answered that they do not serve the request's model, whatever they
	// have reported before: it may have moved to others that have not reported it yet.
	LacksModel bool
	// MustPair excludes decode alone for a request that may be split.
	MustPair bool
}

// ErrFull means that the endpoints which could serve the request have refused others because they are full
// ([kvstate.Candidate.Full]). They get requests again soon: the request may wait.
var ErrFull = errors.New("picker: the endpoints for this request are full")

// avoid says which failed KV loads exclude a pair.
type avoid uint8

const (
	avoidFailed avoid = iota // all that are avoided
	avoidTrials              // also pairs whose first pause is not over
	avoidNone
)

// attempt is one way to choose for a request: which endpoints it excludes, and which choices are good enough.
type attempt struct {
	excluded []string
	avoid    avoid
	pair     bool // decode alone is not good enough
}

// attempts returns the ways to choose for a request, in order; the first choice that is good enough is taken. After a
// pair has failed, the first way leaves out both endpoints; after the first failure, the next two leave out only P, and
// only D. If decode alone is not possible, avoided pairs follow, and then endpoints that failed the request once: they
// may fail again, but the alternative is a certain error.
func (k *Picker) attempts(r *Request) []attempt {
	a := attempt{excluded: r.Excluded}
	if r.Trial {
		a.avoid = avoidTrials
	}
	must := r.MustPair && r.Split
	out := k.ladder[:0]
	if r.FailedPair[0] != "" && r.Split {
		k.without = append(append(k.without[:0], r.FailedPair[:]...), r.Excluded...)
		out = append(out, attempt{k.without, a.avoid, true})
		if len(r.Excluded) == 1 {
			out = append(out, attempt{k.without[:1:1], a.avoid, true}, attempt{k.without[1:2:2], a.avoid, true})
		}
	}
	a.pair = must
	out = append(out, a)
	if must {
		out = append(out, attempt{r.Excluded, avoidNone, true}, attempt{r.Final, a.avoid, true},
			attempt{r.Final, avoidNone, true})
		a.pair = false // the caller says why there is none
		out = append(out, a)
	}
	k.ladder = out
	return out
}

// Pick chooses the endpoints of a request. Without a suitable prefill endpoint, decode works alone; without a decode
// endpoint it returns [ErrNoEndpoint], or [ErrFull] if one may be had soon. Endpoints that failed this request are
// chosen to decode only if there is no other. If no choice meets the request's targets, it may return [ErrMissed].
func (k *Picker) Pick(r *Request, v *kvstate.View) (c Choice, err error) {
	for _, a := range k.attempts(r) {
		k.excluded, k.avoid = a.excluded, a.avoid
		if c, err = k.pickWith(r, v); err == nil && (c.Prefill >= 0 || !a.pair) || errors.Is(err, ErrMissed) {
			break
		}
	}
	must := r.MustPair && r.Split
	if (errors.Is(err, ErrNoEndpoint) || err == nil && must && c.Prefill < 0) && k.soon(r, v, must) {
		c, err = none(), ErrFull
		c.Wait = true
	}
	c.Selective, c.Named = k.learned && k.partly || k.placed, k.learned || k.placed
	return c, err
}

// PickDecode chooses a decode endpoint for a prompt whose KV is on prefill, a position in the view, or -1 if that
// endpoint is gone. If decode alone is not possible, it takes an avoided pair rather than none. If the prefill endpoint
// must answer, for want of room, the error is [ErrNoRoom].
func (k *Picker) PickDecode(r *Request, v *kvstate.View, prefill int) (int, error) {
	k.excluded, k.avoid = r.Excluded, avoidFailed
	if r.Trial {
		k.avoid = avoidTrials
	}
	t := k.weighAll(r, v)
	d := k.partner(r, v, &t, prefill)
	if d < 0 && prefill >= 0 && r.MustPair {
		k.avoid = avoidNone
		t = k.weighAll(r, v)
		d = k.partner(r, v, &t, prefill)
	}
	if k.answersItself(r, v, prefill, d >= 0) {
		return -1, ErrNoRoom
	}
	if d < 0 {
		k.weighDesperate(r, v, &t)
		d = k.partner(r, v, &t, prefill)
	}
	switch {
	case d >= 0:
		return d, nil
	case k.soon(r, v, false):
		return -1, ErrFull
	}
	return -1, ErrNoEndpoint
}

// soon reports whether the request could be served if no endpoint were full: by a pair, or by a decode endpoint.
func (k *Picker) soon(r *Request, v *kvstate.View, pair bool) bool {
	var roles kvstate.Role
	able, full := 0, false
	for i := range v.Endpoints {
		c := &v.Endpoints[i]
		role := c.Endpoint.Role & kvstate.RoleBoth
		if !pair {
			role &= kvstate.RoleDecode
		}
		if role != 0 && (c.Usable || c.Full) && k.unmet(r, c) == "" {
			able, roles, full = able+1, roles|role, full || c.Full
		}
	}
	return full && (!pair || able > 1 && roles == kvstate.RoleBoth)
}

// faults returns the failed KV loads of an endpoint that count for the attempt; nil: none.
func (k *Picker) faults(c *kvstate.Candidate) *kvstate.LoadFaults {
	switch {
	case c.Faults == nil || k.avoid == avoidNone:
		return nil
	case k.avoid == avoidTrials:
		return c.Faults.Trial
	}
	return c.Faults
}

// loads reports whether, as far as is known, d can load KV from prefill; both are positions in the view, -1 is no
// endpoint.
func (k *Picker) loads(v *kvstate.View, prefill, d int) bool {
	c := &v.Endpoints[d]
	return prefill < 0 || !k.faults(c).Excludes(kvstate.RoleDecode) &&
		!k.faults(&v.Endpoints[prefill]).Avoids(c.Endpoint.Addr)
}
