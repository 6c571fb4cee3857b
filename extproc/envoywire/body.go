package envoywire

import (
	"math/bits"
	"sync"

	"google.golang.org/grpc/mem"
)

// Body holds one body, or one edited body, in growing pooled memory. Parts of it are sent without copying: gRPC holds
// a reference on them until they are on the wire, so the memory returns to the pool only when the stream and the last
// of its messages have released it.
type Body struct {
	Data []byte
	slot *[]byte // as the pool gave it; data is a part of it
}

const minBody = 4 << 10

// Len returns the length of the body.
func (b *Body) Len() int { return len(b.Data) }

// Bytes returns the body. It is valid until the next call of a method that changes it.
func (b *Body) Bytes() []byte { return b.Data }

// Grow makes room for n more bytes.
func (b *Body) Grow(n int) {
	if need := len(b.Data) + n; need > cap(b.Data) {
		slot := bodies.Get(max(need, 2*cap(b.Data), minBody))
		data := append((*slot)[:0], b.Data...)
		b.Free()
		b.slot, b.Data = slot, data
	}
}

// Reset empties the buffer and keeps its memory.
func (b *Body) Reset() { b.Data = b.Data[:0] }

// read appends the cursor's bytes up to end.
func (b *Body) read(c *cursor, end int) {
	b.Grow(end - c.pos)
	b.Data = c.appendTo(b.Data, end)
}

// Share turns the contents into a reference-counted buffer whose slices can be sent. The body is empty afterwards; the
// caller frees the buffer.
func (b *Body) Share() mem.Buffer {
	if b.slot == nil {
		return mem.SliceBuffer(nil)
	}
	*b.slot = b.Data
	buffer := mem.NewBuffer(b.slot, bodies)
	b.slot, b.Data = nil, nil
	return buffer
}

// Free gives the memory back.
func (b *Body) Free() {
	if b.slot != nil {
		bodies.Put(b.slot)
	}
	b.slot, b.Data = nil, nil
}

// bodyPool is a mem.BufferPool with one sync.Pool for each power of two. gRPC's own pools stop at 1 MiB and clear
// buffers they hand out; prompts are larger than that and are overwritten anyway.
type bodyPool struct {
	sizes [maxBodyBits + 1]sync.Pool
}

// BufferPool returns the pool for the gRPC server's receive buffers. Unlike gRPC's own pool it does not clear the
// buffers, which would take a tenth of all CPU with large bodies.
func BufferPool() mem.BufferPool { return bodies }

const maxBodyBits = 26 // 64 MiB; larger ones are left to the garbage collector

var bodies = &bodyPool{}

// Get implements mem.BufferPool.
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

// Put implements mem.BufferPool.
func (p *bodyPool) Put(b *[]byte) {
	class := bits.Len(uint(cap(*b)) - 1)
	if cap(*b) < minBody || class > maxBodyBits || cap(*b) != 1<<class {
		return
	}
	p.sizes[class].Put(b)
}
