package extproc

import (
	"math/bits"
	"sync"

	"google.golang.org/grpc/mem"
)

// bodyBuffer holds one body, or one edited body, as a growing piece of pooled memory. Parts of it are sent without
// copying: gRPC holds a reference on them until they are on the wire, so the memory goes back to the pool only when the
// stream and the last of its messages have let go.
type bodyBuffer struct {
	data []byte
	slot *[]byte // what the pool gave; data is a part of it
}

const minBody = 4 << 10

func (b *bodyBuffer) len() int      { return len(b.data) }
func (b *bodyBuffer) bytes() []byte { return b.data }

// grow makes room for n more bytes.
func (b *bodyBuffer) grow(n int) {
	if need := len(b.data) + n; need > cap(b.data) {
		slot := bodies.Get(max(need, 2*cap(b.data), minBody))
		data := append((*slot)[:0], b.data...)
		b.free()
		b.slot, b.data = slot, data
	}
}

// reset empties the buffer and keeps its memory.
func (b *bodyBuffer) reset() { b.data = b.data[:0] }

// read appends the cursor's bytes up to end.
func (b *bodyBuffer) read(c *cursor, end int) {
	b.grow(end - c.pos)
	b.data = c.appendTo(b.data, end)
}

// share turns the contents into a reference-counted buffer whose slices can be sent. The bodyBuffer is empty afterwards;
// the caller frees what it got.
func (b *bodyBuffer) share() mem.Buffer {
	if b.slot == nil {
		return mem.SliceBuffer(nil)
	}
	*b.slot = b.data
	buffer := mem.NewBuffer(b.slot, bodies)
	b.slot, b.data = nil, nil
	return buffer
}

// free gives the memory back.
func (b *bodyBuffer) free() {
	if b.slot != nil {
		bodies.Put(b.slot)
	}
	b.slot, b.data = nil, nil
}

// bodyPool is a mem.BufferPool with one sync.Pool for each power of two. gRPC's own pools stop at 1 MiB and clear
// buffers they hand out; prompts are larger than that and are overwritten anyway.
type bodyPool struct {
	sizes [maxBodyBits + 1]sync.Pool
}

// BufferPool is the pool that this package's gRPC server should read into: unlike gRPC's own it does not clear what it
// hands out, which at large bodies is a tenth of all the CPU.
func BufferPool() mem.BufferPool { return bodies }

const maxBodyBits = 26 // 64 MiB; larger ones are left to the garbage collector

var bodies = &bodyPool{}

func (p *bodyPool) Get(n int) *[]byte {
	class := bits.Len(uint(max(n, minBody) - 1))
	if class > maxBodyBits {
		b := make([]byte, n)
		return &b
	}
	if b, ok := p.sizes[class].Get().(*[]byte); ok {
		*b = (*b)[:n]
		return b
	}
	b := make([]byte, n, 1<<class)
	return &b
}

func (p *bodyPool) Put(b *[]byte) {
	class := bits.Len(uint(cap(*b)) - 1)
	if cap(*b) < minBody || class > maxBodyBits || cap(*b) != 1<<class {
		return
	}
	p.sizes[class].Put(b)
}
