package prefixindex

import (
	"math"
	"math/bits"
	"sync/atomic"
	"time"
)

// Uses counts how many recent prompts have a block. A count fades: after [UsesWindow] a prompt counts 1/e.
//
// Only some blocks of a prompt are counted, at distances that grow with the depth (sampled): 160 of 8,192. A block is
// at least as popular as the blocks behind it, so a block between two counted ones is assumed to be as popular as the
// second.
//
// The memory is fixed: a table of sets of four counts. A new block replaces the least used block of its set, if that
// one is hardly used. Readers and writers take no lock; a race may lose a count.
type Uses struct {
	began  time.Time
	fading [8 * ticks / fadeStep]float32 // the factor after this many times fadeStep ...
	finer  [fadeStep]float32             // ... and this many ticks
	sets   [1 << useSetBits]useSet
}

// UsesWindow is the period over which uses are counted.
const UsesWindow = time.Minute

const (
	useSetBits = 14 // sets of 64 bytes: 1 MiB
	useWays    = 4
	rareUses   = 1.5     // fewer uses do not count as shared: a block's first prompt, or one that has nearly faded
	ticks      = 1 << 12 // in a window
	useTick    = UsesWindow / ticks

	leastSeen = ticks / 40
	fadeStep  = 16   // ticks
	forgotten = 0.05 // a count that has faded to this is reset
)

type useSet [useWays]struct {
	block atomic.Uint64 // 32 bits of its hash <<32 | when it was first counted, in ticks
	count atomic.Uint64 // a float32 <<32 | when it was last counted
}

// UseStep is the number of recent prompts that have the blocks of a prompt between the previous step's Blocks and its
// own.
type UseStep struct {
	Blocks int32
	Uses   float32
}

// MaxUseSteps bounds the steps of a prompt.
const MaxUseSteps = 8

// NewUses returns empty counts.
func NewUses(now time.Time) *Uses {
	u := &Uses{began: now}
	for i := range u.fading {
		u.fading[i] = float32(math.Exp(-float64(i) * fadeStep / ticks))
	}
	for i := range u.finer {
		u.finer[i] = float32(math.Exp(-float64(i) / ticks))
	}
	return u
}

func (u *Uses) tick(now time.Time) uint32 { return uint32(max(now.Sub(u.began), 0) / useTick) }

// sampled returns the first depth from depth on at which blocks are counted.
func sampled(depth int) int {
	step := 1 << max(bits.Len(uint(depth))-5, 0) // a sixteenth of the octave
	return (depth + step - 1) &^ (step - 1)
}

// fade returns the value of a count at a tick.
func (u *Uses) fade(count uint64, tick uint32) float32 {
	passed := uint32(max(int32(tick-uint32(count)), 0))
	if passed/fadeStep >= uint32(len(u.fading)) {
		return 0
	}
	return math.Float32frombits(uint32(count>>32)) * u.fading[passed/fadeStep] * u.finer[passed%fadeStep]
}

func (u *Uses) set(block uint64) (set *useSet, tag uint32) {
	mixed := block * 0x9e3779b97f4a7c15
	return &u.sets[mixed>>(64-useSetBits)], uint32(mixed)
}

// Note counts a prompt.
func (u *Uses) Note(hashes []uint64, now time.Time) {
	tick := u.tick(now)
	for depth := 0; depth < len(hashes); depth = sampled(depth + 1) {
		u.note(hashes[depth], tick)
	}
}

func (u *Uses) note(block uint64, tick uint32) {
	set, tag := u.set(block)
	for i := range set {
		if uint32(set[i].block.Load()>>32) != tag {
			continue
		}
		if count := u.fade(set[i].count.Load(), tick); count > forgotten {
			set[i].count.Store(pack(count+1, tick))
			return
		}
	}
	at, least := -1, float32(rareUses)
	for i := range set {
		if count := u.fade(set[i].count.Load(), tick); count < least {
			at, least = i, count
		}
	}
	if at >= 0 {
		set[at].count.Store(pack(1, tick))
		set[at].block.Store(uint64(tag)<<32 | uint64(tick))
	}
}

func pack(count float32, tick uint32) uint64 {
	return uint64(math.Float32bits(count))<<32 | uint64(tick)
}

// Steps appends the popularity of the blocks of a prompt, as far as several prompts had them.
func (u *Uses) Steps(dst []UseStep, hashes []uint64, now time.Time) []UseStep {
	tick, n := u.tick(now), len(dst)
	for depth := 0; depth < len(hashes); depth = sampled(depth + 1) {
		uses := u.of(hashes[depth], tick)
		if uses < rareUses {
			break
		}
		last := len(dst) - 1
		switch {
		case last >= n && uses > dst[last].Uses*0.8:
			dst[last].Blocks = int32(depth + 1)
		case last+1-n == MaxUseSteps:
			dst[last] = UseStep{int32(depth + 1), uses}
		default:
			dst = append(dst, UseStep{int32(depth + 1), uses})
		}
	}
	return dst
}

// of returns how many prompts of a window have a block. A block that was first seen less than a window ago counts
// at its rate so far, over at least leastSeen.
func (u *Uses) of(block uint64, tick uint32) float32 {
	set, tag := u.set(block)
	for i := range set {
		name := set[i].block.Load()
		if uint32(name>>32) != tag {
			continue
		}
		count := u.fade(set[i].count.Load(), tick)
		if count <= 1 {
			return count
		}
		seen := max(int32(tick-uint32(name)), leastSeen)
		return 1 + (count-1)/(1-u.fade(pack(1, 0), uint32(seen)))
	}
	return 0
}
