package engine

import (
	"fmt"
	"math/rand/v2"
	"sync"
)

// lockedRand is for ids, not for answers.
type lockedRand struct {
	mu sync.Mutex
	r  *rand.Rand
}

func newLockedRand() lockedRand {
	return lockedRand{r: rand.New(rand.NewPCG(rand.Uint64(), rand.Uint64()))}
}

func (l *lockedRand) Uint32() uint32 { return uint32(l.Uint64()) }
func (l *lockedRand) Uint64() uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.r.Uint64()
}

func (l *lockedRand) Hex16() string { return fmt.Sprintf("%016x", l.Uint64()) }

func (l *lockedRand) UUID() string {
	a, b := l.Uint64(), l.Uint64()
	a = a&^0xF000 | 0x4000
	b = b&^(3<<62) | 2<<62
	return fmt.Sprintf("%08x-%04x-%04x-%04x-%012x", a>>32, a>>16&0xFFFF, a&0xFFFF, b>>48, b&(1<<48-1))
}

// NewUUID returns a random engine id.
func NewUUID() string { r := newLockedRand(); return r.UUID() }
