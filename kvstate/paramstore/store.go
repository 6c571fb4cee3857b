// Package paramstore stores KV transfer parameters that are too large for a header between the two hops of a request,
// within a bound of bytes.
package paramstore

import (
	"crypto/rand"
	"errors"
	"sync"
	"time"
)

// ErrFull is returned when the stored parameters take all the memory allowed.
var ErrFull = errors.New("kvstate: no memory left for another hand-over")

// maxEntries bounds their number, since small ones cost more than their bytes.
const maxEntries = 1 << 16

// Store stores parameters. It is safe for concurrent use.
type Store struct {
	mu    sync.Mutex
	max   int
	ttl   time.Duration
	bytes int
	held  map[[16]byte]entry
}

type entry struct {
	params  []byte
	expires time.Time
}

// New returns a store of at most limit bytes, each kept for ttl.
func New(limit int, ttl time.Duration) *Store {
	return &Store{max: limit, ttl: ttl, held: map[[16]byte]entry{}}
}

// Put stores a copy of params and returns a reference to it, or [ErrFull].
func (h *Store) Put(params []byte) (ref [16]byte, err error) {
	_, _ = rand.Read(ref[:]) // never fails (crypto/rand)
	return ref, h.PutAs(ref, params)
}

// PutAs is Put with a reference that the reader already knows.
func (h *Store) PutAs(ref [16]byte, params []byte) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(params) > h.max-h.bytes || len(h.held) >= maxEntries {
		return ErrFull
	}
	if before, ok := h.held[ref]; ok {
		h.bytes -= len(before.params)
	}
	h.held[ref] = entry{append([]byte(nil), params...), time.Now().Add(h.ttl)}
	h.bytes += len(params)
	return nil
}

// Take returns and removes the entry with a reference.
func (h *Store) Take(ref [16]byte) ([]byte, bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	kept, ok := h.held[ref]
	if !ok {
		return nil, false
	}
	delete(h.held, ref)
	h.bytes -= len(kept.params)
	return kept.params, time.Now().Before(kept.expires)
}

// Sweep removes what has expired.
func (h *Store) Sweep(now time.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for ref, kept := range h.held {
		if now.After(kept.expires) {
			delete(h.held, ref)
			h.bytes -= len(kept.params)
		}
	}
}

// Held returns the number of entries and their bytes.
func (h *Store) Held() (entries, bytes int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return len(h.held), h.bytes
}
