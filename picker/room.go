package picker

import (
	"errors"
	"math"

	"tandem/kvstate"
)

// Room for KV (docs/adr/0052). A prompt that an engine computed for another holds memory there until the other has
// fetched it, and the other needs memory to fetch it. Engines of both roles could hold so much for each other that none
// can fetch. Therefore such an engine
//
//   - gives at most half of its memory to what it holds for others, or holds one prompt alone, and
//   - holds only as much as leaves room for the largest request that it answers, and answers none for which what it
//     holds leaves no room.
//
// Then whatever waits at an engine fits as soon as the answers there have ended: no engine waits for another one. An
// engine that only prefills and is full only costs time: its price is higher, and late binding waits.

// ErrNoRoom means that no other endpoint has room for a prompt whose KV is computed. The endpoint that computed it
// answers.
var ErrNoRoom = errors.New("picker: no other endpoint has room for the prompt's KV")

// isBoth reports whether an endpoint has both roles.
func isBoth(c *kvstate.Candidate) bool { return c.Endpoint.Role&kvstate.RoleBoth == kvstate.RoleBoth }

// onlyPrefills reports whether an endpoint only prefills: by its role, or by its word once all its answers have ended.
func onlyPrefills(c *kvstate.Candidate) bool {
	return !isBoth(c) || c.Word == kvstate.RolePrefill && c.Room.Need == 0
}

// leaveOut removes the prices of the legs for which an endpoint of both roles has no room, and reports whether it did
// so.
func (t *terms) leaveOut(c *kvstate.Candidate, p *prices) bool {
	inf := math.Inf(1)
	before := *p
	if !t.keeps(c) {
		p.prefill = inf
		p.later = c.KVTokens == 0 || t.tokens <= float64(c.KVTokens)
	}
	if !t.takes(c) {
		p.decode, p.near, p.alone, p.crowded = inf, inf, inf, before.decode < inf
	}
	return p.prefill > before.prefill || p.decode > before.decode
}

// roomWait is the price of a full endpoint that only prefills, in seconds: what was fetched counts for two more
// scrapes. The endpoint is not left out, because a long prompt's cached prefix is worth more.
const roomWait = 4.0

// isFull reports whether a prompt would wait for memory at an endpoint that only prefills. What is held counts from the
// choice of the endpoint until two scrapes after the fetch, and what the engine reports lacks the latest prompts. If
// both are known, there must be room by both.
func (t *terms) isFull(c *kvstate.Candidate) bool {
	room := float64(c.KVTokens) - t.most
	if c.KVTokens == 0 || float64(c.Room.Held) <= room {
		return false
	}
	return c.Trust == 0 || c.Signals.KVUsage < 0 || c.Signals.KVUsage*float64(c.KVTokens) > room
}

// keeps reports whether an endpoint of both roles may compute the prompt for another. If its capacity is not known, it
// does so only while it answers nobody. An engine that does nothing else computes a prompt if its estimate alone fits.
func (t *terms) keeps(c *kvstate.Candidate) bool {
	if onlyPrefills(c) {
		return true
	}
	if c.KVTokens == 0 {
		return c.Room.Need == 0
	}
	if c.Room == (kvstate.Room{}) {
		return t.tokens <= float64(c.KVTokens)
	}
	held, all := float64(c.Room.Held)+t.most, float64(c.KVTokens)
	return (held <= all/2 || c.Room.Held == 0) && held+float64(c.Room.Need) <= all
}

// takes reports whether an endpoint of both roles may answer the request. If its capacity is not known, it does so only
// while it holds nothing for others.
func (t *terms) takes(c *kvstate.Candidate) bool {
	return c.Room.Held == 0 || float64(c.Room.Held)+t.most+t.out <= float64(c.KVTokens)
}

// later reports whether some endpoint of both roles may compute the prompt for another when it has room again.
func (k *Picker) later() bool {
	for i := range k.prices {
		if k.prices[i].later {
			return true
		}
	}
	return false
}

// crowd chooses an endpoint for a request that none has room for: always the same one, whose memory becomes free
// because the others keep room for what it holds, and because it gets nothing more to hold.
func (k *Picker) crowd(v *kvstate.View, t *terms) Choice {
	at, most := -1, false
	for i := range v.Endpoints {
		c := &v.Endpoints[i]
		if !k.prices[i].crowded {
			continue
		}
		over := IsOver(c)
		if at < 0 || over && !most || over == most && before(c, &v.Endpoints[at]) {
			at, most = i, over
		}
	}
	if at < 0 {
		return none()
	}
	k.weighEach(t, &v.Endpoints[at], &k.prices[at], v.Endpoints[at].Used())
	c := k.choice(t, v, -1, at, k.prices[at].alone)
	c.NoRoom = true
	return c
}

// IsOver reports whether an endpoint holds so much for others that the largest request there does not fit.
func IsOver(c *kvstate.Candidate) bool {
	return c.Room.Held > 0 && c.Room.Need > 0 && c.Room.Held+c.Room.Need > c.KVTokens
}

// before orders endpoints by what they hold, and equals by their addresses, as every replica does.
func before(a, b *kvstate.Candidate) bool {
	return a.Room.Held < b.Room.Held || a.Room.Held == b.Room.Held && a.Endpoint.Addr < b.Endpoint.Addr
}

// answersItself reports whether the endpoint that computed a prompt answers it: no decode endpoint was found and some
// have no room, or the endpoint holds too much itself. The latter happens if replicas did not know of each other's
// requests yet. Then its memory gets free when leases end, whatever the others do.
func (k *Picker) answersItself(r *Request, v *kvstate.View, prefill int, found bool) bool {
	if prefill < 0 {
		return false
	}
	c := &v.Endpoints[prefill]
	return isBoth(c) && (k.full && !found || IsOver(c)) && k.why(r, c) == ""
}
