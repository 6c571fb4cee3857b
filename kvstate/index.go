package kvstate

import (
	"math/bits"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// prefixIndex says which endpoints hold which prefixes of prompts. A block is known by its chained hash: of its content
// and of everything before it, which model, adapter and salt included.
//
// Who holds blocks is a member. Every endpoint is one, with the blocks of the prompts that were routed to it ([prefixIndex.add]:
// text blocks, a guess); each publisher of KV events is another ([Feed]: token blocks, the truth), so that either can be
// forgotten without the other.
//
// What makes a look-up fast is one invariant: who holds a block in the index holds every block before it too. So the
// holders of block i of a prompt are a subset of those of block i-1; where two blocks have equally many, they are the same,
// and so are all between them. hits leaps over what is the same instead of visiting it. Routed prompts are written from
// their first block on and forgotten from their last. Engines' events can tear holes; a Feed keeps what is behind a hole
// aside until the hole is closed.
//
// Readers take no lock and wait for nobody (blockStore). Writers take turns. A request that finds another writer at work
// leaves its blocks for that one to write.
//
// Each member forgets by generations of its own: what it stores, or is asked for again, belongs to the running one; when
// that is half of what the member may hold, or older than half of the time to live, what is left of the one before is
// forgotten, last blocks first. So a block is forgotten after between one half and the whole of what fits beside it, which
// comes close to an engine's LRU, for one bit a block.
type prefixIndex struct {
	store   *blockStore
	writing sync.Mutex
	members []*member // by slot; nil: free
	limits  indexLimits
	slots   atomic.Int32 // ever given out
	queue   routedQueue
	sizes   atomic.Pointer[[]int]             // tokens in a block, of the feeds there are
	loras   atomic.Pointer[map[string]string] // adapters that feeds have named
	parts   int                               // members that share maxBytes
}

type indexLimits struct {
	maxBytes       int           // of all members together
	endpointBlocks int           // of what was routed to one endpoint
	feedBlocks     int           // of one feed
	ttl            time.Duration // of what was routed
}

// bytesPerEntry is what a block and one endpoint that holds it take at most, all tables included (BenchmarkIndexMemory).
const bytesPerEntry = 40

// member is somebody who holds blocks.
type member struct {
	slot    int
	gone    bool
	parity  uint32 // of the running generation: 0 or stateParity
	current int    // blocks in it
	held    int
	limit   int
	ttl     time.Duration // 0: for ever
	fresh   bool
	fits    atomic.Int64 // blocks that the engine seems to keep, as learned from what it reports; 0: nothing learned
	began   time.Time    // the running generation
	list    []uint32     // what it holds, earlier blocks of a prompt before later ones; of a feed it is in feed.keys
	feed    *Feed        // nil: an endpoint with what was routed to it
}

func newPrefixIndex(limits indexLimits) *prefixIndex {
	return &prefixIndex{store: newBlockStore(), limits: limits, parts: 1}
}

// join makes a new member; nil where there are more than the index has numbers for.
func (x *prefixIndex) join(feed *Feed) *member {
	return x.admit(&member{feed: feed, began: time.Now()})
}

func (x *prefixIndex) joinFresh() *fresh {
	m := x.admit(&member{fresh: true, began: time.Now()})
	return &fresh{m, []int32{int32(m.slot)}}
}

func (x *prefixIndex) admit(m *member) *member {
	x.writing.Lock()
	defer x.unlock()
	for m.slot < len(x.members) && x.members[m.slot] != nil {
		m.slot++
	}
	if m.slot > maxSlots {
		m.gone = true
		return m
	}
	if m.slot == len(x.members) {
		x.members = append(x.members, nil)
		x.slots.Store(int32(len(x.members)))
		x.store.sets.groups = 1 << bits.Len(uint(m.slot/32)) // doubling, or every set would be moved for every 32 endpoints
	}
	x.members[m.slot] = m
	x.limit(m)
	return m
}

func (x *prefixIndex) limit(m *member) {
	m.limit, m.ttl = x.limits.endpointBlocks, x.limits.ttl
	if m.feed != nil {
		m.limit, m.ttl = x.limits.feedBlocks, 0
	} else if m.fresh {
		m.ttl = freshTTL
	}
	m.limit = max(min(m.limit, x.limits.maxBytes/bytesPerEntry/x.parts), 2)
}

// learn corrects how much an endpoint is thought to keep, by what it found of a prompt in its cache: a little more when the
// index was right, an eighth less when it promised what was gone.
func (m *member) learn(promised, found, slack int64, most int) {
	fits := m.fits.Load()
	if fits == 0 {
		fits = int64(most)
	}
	if promised-found > slack {
		fits -= fits / 8
	} else if promised > 0 {
		fits += fits/64 + 1
	}
	m.fits.Store(min(max(fits, minFits), int64(most))) // two who race here lose a step
}

// minFits is how many blocks an endpoint is always thought to keep: the longest prompt, roughly.
const minFits = 512

// room is how many blocks the member may hold now.
func (m *member) room() int {
	if fits := m.fits.Load(); fits > 0 {
		return min(m.limit, int(fits))
	}
	return m.limit
}

// fresh is what was routed to an endpoint in the last moments, beside the member that remembers it for longer: its engine
// will tell of these blocks, but has not had the time yet.
type fresh struct {
	m    *member
	slot []int32
}

// freshTTL is how long an engine may take from being sent a prompt to telling of its blocks, and until it is noticed that it
// does not.
const freshTTL = 20 * time.Second

// leave forgets a member. It costs what the member holds.
func (x *prefixIndex) leave(m *member) {
	x.writing.Lock()
	defer x.unlock()
	if m.gone {
		return
	}
	x.clear(m)
	m.gone = true
	x.members[m.slot] = nil
}

// resize shares the memory among those who are there.
func (x *prefixIndex) resize() {
	x.writing.Lock()
	defer x.unlock()
	x.parts = 0
	for _, m := range x.members {
		if m != nil {
			x.parts++
		}
	}
	x.parts = max(x.parts, 1)
	for _, m := range x.members {
		if m != nil {
			x.limit(m)
		}
	}
}

// sweep ends generations that are old enough.
func (x *prefixIndex) sweep(now time.Time) {
	x.writing.Lock()
	members := append([]*member(nil), x.members...)
	x.unlock()
	for _, m := range members {
		if m == nil {
			continue
		}
		x.writing.Lock() // not for all of them: a request may be waiting with its blocks
		if m.ttl > 0 && now.Sub(m.began) >= m.ttl/2 && !m.gone {
			x.turn(m)
			m.began = now
		}
		x.unlock()
	}
}

// add notes that an endpoint holds the blocks of a prompt. It never waits for another writer.
func (x *prefixIndex) add(m *member, hashes []uint64) {
	if !x.writing.TryLock() {
		x.queue.put(m, hashes)
		if !x.writing.TryLock() {
			return // who holds the lock looks into the queue after giving it back
		}
	} else {
		x.write(m, hashes)
	}
	x.unlock()
}

// unlock writes what was queued meanwhile and gives the lock back.
func (x *prefixIndex) unlock() {
	for {
		x.queue.drain(x.write)
		x.writing.Unlock()
		if x.queue.waiting.Load() == 0 || !x.writing.TryLock() {
			return
		}
	}
}

// settle returns when all is written that was queued before.
func (x *prefixIndex) settle() {
	x.writing.Lock()
	x.unlock()
}

// routedQueue holds prompts that were routed while somebody else was writing.
type routedQueue struct {
	mu      sync.Mutex
	waiting atomic.Int32
	prompts []routedPrompt
	spare   [][]uint64
}

type routedPrompt struct {
	m      *member
	hashes []uint64
}

// maxQueued bounds the queue; what comes on top is not noted, which costs a prefix hit.
const maxQueued = 256

func (q *routedQueue) put(m *member, hashes []uint64) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.prompts) == maxQueued {
		return
	}
	var room []uint64
	if n := len(q.spare); n > 0 {
		room, q.spare = q.spare[n-1], q.spare[:n-1]
	}
	q.prompts = append(q.prompts, routedPrompt{m, append(room[:0], hashes...)})
	q.waiting.Add(1)
}

func (q *routedQueue) drain(write func(*member, []uint64)) {
	for q.waiting.Load() > 0 {
		q.mu.Lock()
		next := q.prompts[0]
		q.prompts = q.prompts[:copy(q.prompts, q.prompts[1:])]
		q.waiting.Add(-1)
		q.mu.Unlock()
		write(next.m, next.hashes)
		q.mu.Lock()
		if len(q.spare) < 16 {
			q.spare = append(q.spare, next.hashes)
		}
		q.mu.Unlock()
	}
}

// noteSizes notes which block sizes the feeds have.
func (x *prefixIndex) noteSizes() {
	x.writing.Lock()
	defer x.unlock()
	x.noteSizesLocked()
}

func (x *prefixIndex) noteSizesLocked() {
	var sizes []int
	for _, m := range x.members {
		if m != nil && m.feed != nil && m.feed.size > 0 && !slices.Contains(sizes, m.feed.size) {
			sizes = append(sizes, m.feed.size)
		}
	}
	x.sizes.Store(&sizes)
}
