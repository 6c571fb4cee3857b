// Package kvroom accounts for an engine's KV memory (docs/adr/0052): what it holds of prompts that it computes for
// other engines, until they have fetched them, and what its own answers need.
package kvroom

import (
	"cmp"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// Room is the account of one engine. The zero value is an engine without requests. It is safe for concurrent use.
type Room struct {
	held atomic.Int64
	need atomic.Int64 // of all claims
	sent atomic.Int64 // of requests that were sent here already

	mu     sync.Mutex
	claims []claim // by slot
	free   []int32 // free slots
	order  []int32 // scratch
	strays strays
}

// strays are prompts whose KV will not be fetched. All go with the process that holds them.
type strays struct {
	n, tokens int64
	process   int
}

// claim is one request that the engine answers, or will.
type claim struct {
	need  int64
	held  int64 // in the memory of from
	from  *Room // which computes or keeps the prompt's KV; nil: none, or it was fetched
	since int64 // when the request was sent here, Unix ns; coming: it was not yet
}

const coming = math.MaxInt64

// grain is what tokens are rounded up to: engines give memory in blocks of 16 to 64 tokens.
const grain = 64

func grains(tokens int64) int64 { return (max(tokens, 0) + grain - 1) &^ (grain - 1) }

// Held returns the tokens of KV that hand-overs hold here. Each counts from the choice of this engine until its KV was
// fetched or, if it will not be, until its lease ends.
func (r *Room) Held() int64 { return r.held.Load() }

// Need returns the tokens of the largest request that the engine answers, or will; sent: of those that were sent here
// already.
func (r *Room) Need(sent bool) int64 {
	if sent {
		return r.sent.Load()
	}
	return r.need.Load()
}

// Claim records a request that the engine answers, with the tokens that it needs at most at a time, and that the KV of
// its prompt, of so many tokens, is kept by from until the engine has fetched it; nil: by nobody. since is when the
// request was sent here, Unix ns; 0: it will be sent later. [Room.Release] must follow, with the slot.
func (r *Room) Claim(need int64, from *Room, held, since int64) (slot int32) {
	c := claim{need: grains(need), from: from, since: cmp.Or(since, coming)}
	if from != nil {
		c.held = grains(held)
		from.held.Add(c.held)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if n := len(r.free); n > 0 {
		slot, r.free = r.free[n-1], r.free[:n-1]
		r.claims[slot] = c
	} else {
		slot = int32(len(r.claims))
		r.claims = append(r.claims, c)
	}
	r.need.Store(max(r.need.Load(), c.need))
	if c.since != coming {
		r.sent.Store(max(r.sent.Load(), c.need))
	}
	return slot
}

// Release ends a claim.
func (r *Room) Release(slot int32) {
	r.mu.Lock()
	defer r.mu.Unlock()
	c := &r.claims[slot]
	c.fetched()
	gone := c.need
	*c = claim{}
	r.free = append(r.free, slot)
	if gone > 0 && (gone == r.need.Load() || gone == r.sent.Load()) {
		need, sent := int64(0), int64(0)
		for i := range r.claims {
			if c := &r.claims[i]; c.since != coming {
				sent = max(sent, c.need)
			} else {
				need = max(need, c.need)
			}
		}
		r.need.Store(max(need, sent))
		r.sent.Store(sent)
	}
}

// maxStrays bounds the prompts that nobody will fetch and that are counted. That many fill the memory of any engine.
const maxStrays = 4096

// Strand counts the KV of a prompt that nobody will fetch, until its lease ends. Then it calls freed.
func (r *Room) Strand(tokens int64, lease time.Duration, freed func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.strays.n >= maxStrays {
		return
	}
	n, process := grains(tokens), r.strays.process
	r.stray(1, n)
	time.AfterFunc(lease, func() {
		r.mu.Lock()
		if r.strays.process == process {
			r.stray(-1, -n)
		}
		r.mu.Unlock()
		freed()
	})
}

// stray counts prompts that nobody will fetch. The caller holds the lock.
func (r *Room) stray(n, tokens int64) {
	r.strays.n, r.strays.tokens = r.strays.n+n, r.strays.tokens+tokens
	r.held.Add(tokens)
}

// Restarted forgets the strays: the engine is another process, with an empty memory.
func (r *Room) Restarted() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.stray(-r.strays.n, -r.strays.tokens)
	r.strays.process++
}

// Unfetched reports whether the KV of a claim's prompt is at another engine as far as is known.
func (r *Room) Unfetched(slot int32) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.claims[slot].from != nil
}

// fetched ends what the claim holds at another endpoint.
func (c *claim) fetched() bool {
	if c.from == nil {
		return false
	}
	c.from.held.Add(-c.held)
	c.from, c.held = nil, 0
	return true
}

// Waiting learns from the engine's report how many of its requests wait outside its batch. Engines fetch KV first come,
// first served, so of the requests that were sent before a time, Unix ns, all but the latest ones have fetched theirs.
// A request that was sent later may not have been there yet. It reports whether anything changed.
func (r *Room) Waiting(n, before int64) (changed bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.order = r.order[:0]
	for i := range r.claims {
		if c := &r.claims[i]; c.from != nil && c.since != coming {
			r.order = append(r.order, int32(i))
		}
	}
	if int64(len(r.order)) <= n {
		return false
	}
	slices.SortFunc(r.order, func(a, b int32) int { return cmp.Compare(r.claims[a].since, r.claims[b].since) })
	for _, i := range r.order[:int64(len(r.order))-n] {
		if c := &r.claims[i]; c.since < before {
			changed = c.fetched() || changed
		}
	}
	return changed
}
