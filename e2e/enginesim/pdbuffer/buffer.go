// Package pdbuffer is the receive buffer of a decode engine with LMCache's PD backend.
//
// The buffer is finite, and nothing but a retrieval removes a chunk. A chunk that is pushed while it is there needs no
// memory, but then one more retrieval (pd_backend.py:925, 1066 of LMCache 0.5.6). So chunks of prompts that D's own
// cache has stay. (In an endless buffer they are dropped after the lease.) They are counted in enginesim_blocks_held.
// An allocation that waits for longer than -pd-allocation-timeout is a violation: prompts that each got a part of the
// buffer waited for each other, which the router should prevent by pushing one prompt after the other, or prompts that
// nobody takes have filled it.
package pdbuffer

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"tandem/e2e/enginesim/engine"
)

// DefaultChunk is LMCache's chunk_size.
const DefaultChunk = 256

// Options are a buffer's.
type Options struct {
	Ranks     int // of the engine's tensor parallelism, each of which gets every push
	Tokens    int // capacity; 0: endless
	BlockSize int
	Timeout   time.Duration // the maximum wait of an allocation
	Chunk     int           // tokens of a chunk
	Lease     time.Duration
	Faithful  bool // other prompts are no violation, as in a real engine
	Violate   func(v *engine.Violation, xid string)
}

// Buffer is a decode engine's PD buffer.
type Buffer struct {
	Options

	mu      sync.Mutex
	used    int
	chunks  map[uint64]*chunk
	arrived map[string]*arrival
	wake    chan struct{} // closed and replaced when space becomes free
}

// chunk is a part of a prompt, found by the hash of the prompt up to its end.
type chunk struct {
	blocks int  // allocated, of one rank
	refs   int  // pushes less retrievals
	ready  bool // its content has arrived
}

// arrival is one push: complete when every rank has pushed.
type arrival struct {
	xid    string
	blocks []uint64
	prompt Pushed
	ranks  int
	keys   []uint64 // of its chunks
	timer  *time.Timer
}

// Pushed is what a receiver knows of a prompt besides its blocks, to diagnose a wrong request for them: its
// length, and P's token that D must append.
type Pushed struct {
	N     int
	First uint32
	Has   bool // there is such a token
}

// Chunks calls f with the key and number of blocks of each chunk, of chunkTokens, of a prompt of n tokens, until it
// returns false. The last one may have fewer tokens than others, and is found by prompts of the same length only.
func Chunks(blocks []uint64, blockSize, chunkTokens, n int, f func(key uint64, blocks int) bool) {
	size := max(chunkTokens/blockSize, 1)
	for from := 0; from < len(blocks); from += size {
		end := min(from+size, len(blocks))
		key := blocks[end-1]
		if end-from < size {
			key += uint64(n)
		}
		if !f(key, end-from) {
			return
		}
	}
}

// New returns an empty buffer.
func New(o Options) *Buffer {
	return &Buffer{Options: o, chunks: map[uint64]*chunk{}, arrived: map[string]*arrival{}, wake: make(chan struct{})}
}

// Held returns the number of blocks in the buffer.
func (b *Buffer) Held() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.used
}

// arrival returns the entry of a request, new if there is none. The lease starts with its first chunk.
func (b *Buffer) arrival(reqID, xid string) *arrival {
	a := b.arrived[reqID]
	if a == nil {
		a = &arrival{xid: xid}
		a.timer = time.AfterFunc(b.Lease, func() { b.expire(reqID, a) })
		b.arrived[reqID] = a
	}
	return a
}

// expire forgets a push that no request came for.
func (b *Buffer) expire(reqID string, a *arrival) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.arrived[reqID] != a {
		return
	}
	delete(b.arrived, reqID)
	for _, key := range a.keys {
		if b.Tokens == 0 {
			b.free(key)
		}
	}
}

// free takes back one push of a chunk, and its memory with the last.
func (b *Buffer) free(key uint64) {
	c := b.chunks[key]
	if c == nil {
		return
	}
	if c.refs--; c.refs > 0 {
		return
	}
	delete(b.chunks, key)
	b.used -= c.blocks
	close(b.wake)
	b.wake = make(chan struct{})
}

// Alloc reserves space for a chunk of n blocks, unless it is there, and waits for it. Only rank 0's space is counted:
// the others' buffers fill alike.
func (b *Buffer) Alloc(reqID, xid string, key uint64, n int) error {
	deadline := time.NewTimer(b.Timeout)
	defer deadline.Stop()
	for {
		b.mu.Lock()
		c := b.chunks[key]
		if c == nil && (b.Tokens == 0 || b.used+n <= b.Tokens/b.BlockSize) {
			c = &chunk{blocks: n}
			b.chunks[key] = c
			b.used += n
		}
		if c != nil {
			c.refs++
			a := b.arrival(reqID, xid)
			a.keys = append(a.keys, key)
			b.mu.Unlock()
			return nil
		}
		wake := b.wake
		b.mu.Unlock()
		select {
		case <-wake:
		case <-deadline.C:
			b.Violate(&engine.Violation{Kind: "buffer_exhausted",
				Message: fmt.Sprintf("no room for %d more blocks in %s", n, b.Timeout)}, xid)
			return errors.New("no room")
		}
	}
}

// Push takes the content of a prompt's blocks from one rank.
func (b *Buffer) Push(reqID, xid string, blocks []uint64, p Pushed) {
	b.mu.Lock()
	defer b.mu.Unlock()
	a := b.arrival(reqID, xid)
	a.blocks, a.prompt = blocks, p
	if a.ranks++; a.ranks < b.Ranks {
		return
	}
	for _, key := range a.keys {
		if c := b.chunks[key]; c != nil {
			c.ready = true
		}
	}
}

// Take retrieves the blocks of a prompt that the buffer has and the engine's own cache, with local blocks of it, lacks.
// It returns the number of leading blocks that the buffer has. If what was pushed under the request's own id belongs to
// another prompt, that is a violation: P and D tokenised differently.
//
// A prompt with one more token must be that prompt with P's token appended. (LMCache's proxy sends D so, and its D
// looks up all but the last token: skip_last_n_tokens.)
func (b *Buffer) Take(xid string, p *engine.Prompt, local int) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	want, n := p.Full, p.N
	for reqID, a := range b.arrived {
		if a.ranks != b.Ranks || a.xid != xid {
			continue
		}
		a.timer.Stop()
		delete(b.arrived, reqID)
		if a.prompt.Has && p.N == a.prompt.N+1 {
			if p.Ids[len(p.Ids)-1] != a.prompt.First {
				return 0, &engine.Violation{Kind: "other_first_token",
					Message: "the token behind the prompt is not the one that P answered"}
			}
			want, n = want[:min(len(want), len(a.blocks))], a.prompt.N
		}
		if !slices.Equal(a.blocks, want) && !b.Faithful {
			return 0, &engine.Violation{Kind: "other_prompt",
				Message: "what P pushed for this request is the KV of another prompt"}
		}
		break
	}
	size, found := b.BlockSize, 0
	var lacks []uint64
	Chunks(want, size, b.Chunk, n, func(key uint64, blocks int) bool {
		c := b.chunks[key]
		if c == nil || !c.ready {
			return false
		}
		if found += blocks; found*size > local*size/b.Chunk*b.Chunk {
			lacks = append(lacks, key)
		}
		return true
	})
	tokens := found * size
	if found == len(want) {
		tokens = n - 1 // with all of a prompt's KV its last token is computed again, for the answer
	}
	if tokens > local*size {
		for _, key := range lacks {
			b.free(key)
		}
	}
	return found, nil
}

// Reset empties the buffer.
func (b *Buffer) Reset() {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, a := range b.arrived {
		a.timer.Stop()
	}
	clear(b.arrived)
	clear(b.chunks)
	b.used = 0
	close(b.wake)
	b.wake = make(chan struct{})
}
