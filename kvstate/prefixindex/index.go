package prefixindex

import (
	"math/bits"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// Index records which members hold which prefixes of prompts. A block is identified by its chained hash: of its
// content and of everything before it, model, adapter and salt included.
//
// An [Owner] (one engine) has several members: one for the prompts that were routed to it (text blocks, a guess), one
// for each publisher of KV events ([Feed]: token blocks, exact). Each can be forgotten without the others.
//
// One invariant makes a look-up fast: a member that holds a block holds every block before it too. So the holders of
// block i of a prompt are a subset of those of block i-1; if two blocks have equally many, the sets are equal, and so
// are all between them. Lookup leaps over equal sets instead of visiting them. Routed prompts are written from their
// first block on and forgotten from their last. Engines' events can leave gaps; a Feed keeps the blocks behind a gap
// as orphans until the gap is closed.
//
// Readers take no lock and never wait (blockStore). Only one goroutine writes at a time. A request that finds another
// writer active queues its blocks for that one to write.
//
// Each member forgets by generations of its own: a block that is stored or looked up again belongs to the current
// generation. When that is half of the member's capacity, or older than half of the time to live, the rest of the
// previous one is forgotten, last blocks first. So a block is forgotten once between one half and all of the capacity
// has been used since its last use, which comes close to an engine's LRU at one bit a block. A feed forgets nothing as
// long as all that its engine holds has room: the engine reports what it evicts.
type Index struct {
	store   *blockStore
	writing sync.Mutex
	members []*member // by slot; nil: free
	limits  Limits
	slots   atomic.Int32 // ever used
	queue   routedQueue
	sizes   atomic.Pointer[[]int]             // tokens in a block, of the current feeds
	loras   atomic.Pointer[map[string]string] // adapters that feeds have named
	share   int                               // blocks of MaxBytes for each member
}

// Limits bound an index.
type Limits struct {
	MaxBytes     int           // of all members together
	RoutedBlocks int           // of the prompts routed to one owner whose capacity is unknown ([Owner.Keeps])
	FeedBlocks   int           // of one feed
	TTL          time.Duration // of routed prompts that are not looked up again
}

// BytesPerEntry is the largest size of a block and one member that holds it, all tables included
// (BenchmarkIndexMemory).
const BytesPerEntry = 40

// member holds blocks.
type member struct {
	slot    int
	gone    bool
	parity  uint32 // of the current generation: 0 or stateParity
	current int    // blocks in it
	held    int
	limit   int
	ttl     time.Duration // 0: for ever
	fresh   bool
	keeps   atomic.Int64 // maximum of routed blocks to remember
	fits    atomic.Int64 // blocks that the engine appears to keep, learned from its reports; 0: nothing learned
	began   time.Time    // beginning of the current generation
	list    []uint32     // held blocks, earlier ones of a prompt before later ones; a feed's are in feed.keys
	feed    *Feed        // nil: routed prompts
}

// New returns an empty index.
func New(limits Limits) *Index {
	return &Index{store: newBlockStore(), limits: limits, share: limits.MaxBytes / BytesPerEntry}
}

// join creates a member for routed prompts (feed is nil) or for a feed. Without a free slot in the index the member
// is gone at once.
func (x *Index) join(feed *Feed) *member {
	return x.admit(&member{feed: feed, began: time.Now()})
}

func (x *Index) joinFresh() *freshMember {
	m := x.admit(&member{fresh: true, began: time.Now()})
	return &freshMember{m, []int32{int32(m.slot)}}
}

func (x *Index) admit(m *member) *member {
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
		// doubling: otherwise every set would be moved for every 32 members
		x.store.sets.groups = 1 << bits.Len(uint(m.slot/32))
	}
	x.members[m.slot] = m
	x.limit(m)
	return m
}

// limit sets how many blocks a member may hold: at most its share of the memory. Feeds get more by [Index.resize].
func (x *Index) limit(m *member) {
	m.keeps.CompareAndSwap(0, int64(x.limits.RoutedBlocks))
	m.limit, m.ttl = int(m.keeps.Load()), x.limits.TTL
	if m.feed != nil {
		m.limit, m.ttl = x.limits.FeedBlocks, 0
	} else if m.fresh {
		m.ttl = freshTTL
	}
	m.limit = max(min(m.limit, x.share), 2)
}

// learn corrects the estimate of an engine's capacity, by its cached tokens of a prompt: a little more if the index
// was right, an eighth less if the index expected blocks that were gone.
func (m *member) learn(promised, found, slack int64) {
	fits, most := m.fits.Load(), m.keeps.Load()
	if fits == 0 {
		fits = most
	}
	if promised-found > slack {
		fits -= fits / 8
	} else if promised > 0 {
		fits += fits/64 + 1
	}
	m.fits.Store(min(max(fits, minFits), most)) // concurrent callers lose a step
}

// minFits is the least estimate of an engine's capacity, in blocks: roughly the longest prompt.
const minFits = 512

// capacity returns the current maximum of the member's blocks.
func (m *member) capacity() int {
	if fits := m.fits.Load(); fits > 0 {
		return min(m.limit, int(fits))
	}
	return m.limit
}

// freshMember holds the prompts that were routed to an owner moments ago, in addition to the member that remembers
// them for longer: the engine will report these blocks, but has not had the time yet.
type freshMember struct {
	m    *member
	slot []int32
}

// freshTTL is the maximum time from an engine's receiving a prompt to its report of the blocks.
const freshTTL = 20 * time.Second

// leave removes a member. Its cost grows with the number of its blocks.
func (x *Index) leave(m *member) {
	x.writing.Lock()
	defer x.unlock()
	if m.gone {
		return
	}
	x.clear(m)
	m.gone = true
	x.members[m.slot] = nil
}

// Resize shares the memory among the current members. Call it after owners joined or left.
func (x *Index) Resize() {
	x.writing.Lock()
	defer x.unlock()
	x.resize()
}

// resize gives each member an equal share of the memory. What the members for routed prompts do not need of theirs, the
// feeds share: an engine's cache usually has more blocks than the prompts that are remembered as routed to it.
func (x *Index) resize() {
	members, feeds := 0, 0
	for _, m := range x.members {
		if m != nil {
			members++
			if m.feed != nil {
				feeds++
			}
		}
	}
	left := x.limits.MaxBytes / BytesPerEntry
	x.share = left / max(members, 1)
	for _, m := range x.members {
		if m != nil && m.feed == nil {
			x.limit(m)
			left -= m.limit
		}
	}
	for _, m := range x.members {
		if m != nil && m.feed != nil {
			m.limit = max(min(x.limits.FeedBlocks, left/feeds), 2)
		}
	}
}

// Sweep ends generations that are old enough.
func (x *Index) Sweep(now time.Time) {
	x.writing.Lock()
	members := append([]*member(nil), x.members...)
	x.unlock()
	for _, m := range members {
		if m == nil {
			continue
		}
		x.writing.Lock() // for one member at a time: a request may be waiting with its blocks
		if m.ttl > 0 && now.Sub(m.began) >= m.ttl/2 && !m.gone {
			x.nextGeneration(m)
			m.began = now
		}
		x.unlock()
	}
}

// add records that a member holds the blocks of a prompt. It never waits for another writer.
func (x *Index) add(m *member, hashes []uint64) {
	if !x.writing.TryLock() {
		x.queue.put(m, hashes)
		if !x.writing.TryLock() {
			return // the writer looks into the queue after releasing the lock
		}
	} else {
		x.write(m, hashes)
	}
	x.unlock()
}

// unlock writes what was queued meanwhile and releases the lock.
func (x *Index) unlock() {
	for {
		x.queue.drain(x.write)
		x.writing.Unlock()
		if x.queue.waiting.Load() == 0 || !x.writing.TryLock() {
			return
		}
	}
}

// Settle returns when everything queued before is written.
func (x *Index) Settle() {
	x.writing.Lock()
	x.unlock()
}

// Stats are the statistics of an index.
type Stats struct {
	Blocks  int // different ones
	Entries int // pairs of a block and a member that holds it
	Members int
}

// Stats returns the current statistics of the index.
func (x *Index) Stats() Stats {
	x.writing.Lock()
	defer x.unlock()
	s := Stats{Blocks: x.store.blocks}
	for _, m := range x.members {
		if m != nil {
			s.Members++
			s.Entries += m.held
		}
	}
	return s
}

// Blocks returns the number of different blocks in the index.
func (x *Index) Blocks() int {
	x.writing.Lock()
	defer x.unlock()
	return x.store.blocks
}

// Reserve allocates space for blocks that are about to be loaded.
func (x *Index) Reserve(blocks int) {
	x.writing.Lock()
	defer x.unlock()
	x.store.reserve(min(x.store.blocks+blocks, x.limits.MaxBytes/BytesPerEntry))
}

// routedQueue holds prompts that were routed while another goroutine was writing.
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

// maxQueued bounds the queue; a prompt beyond it is not recorded, which costs a prefix hit.
const maxQueued = 256

func (q *routedQueue) put(m *member, hashes []uint64) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.prompts) == maxQueued {
		return
	}
	var buf []uint64
	if n := len(q.spare); n > 0 {
		buf, q.spare = q.spare[n-1], q.spare[:n-1]
	}
	q.prompts = append(q.prompts, routedPrompt{m, append(buf[:0], hashes...)})
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

// TokenBlockSizes returns the block sizes of the engines with feeds.
func (x *Index) TokenBlockSizes() []int {
	if sizes := x.sizes.Load(); sizes != nil {
		return *sizes
	}
	return nil
}

// noteSizes records the block sizes of the feeds.
func (x *Index) noteSizes() {
	x.writing.Lock()
	defer x.unlock()
	x.noteSizesLocked()
}

func (x *Index) noteSizesLocked() {
	var sizes []int
	for _, m := range x.members {
		if m != nil && m.feed != nil && m.feed.size > 0 && !slices.Contains(sizes, m.feed.size) {
			sizes = append(sizes, m.feed.size)
		}
	}
	x.sizes.Store(&sizes)
}
