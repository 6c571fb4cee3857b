package envoywire

import (
	"math/bits"
	"sync"

	"google.golang.org/grpc/mem"

	"tandem/extproc/openai"
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

// MaxPiece is the largest body part of one answer in FULL_DUPLEX_STREAMED mode (Envoy's documented limit is 64 KiB for
// the message).
const MaxPiece = 62000

// Pieces lists the parts of an edited body as ranges of one buffer: unchanged bytes stay where they were received, new
// bytes are appended behind.
type Pieces struct {
	ranges []struct{ start, end int }
	Total  int
}

// Cut plans the parts of the body in b after the edits, and appends the new bytes to b.
func (p *Pieces) Cut(b *Body, edits openai.Edits) {
	p.ranges, p.Total = p.ranges[:0], 0
	n := b.Len()
	b.Grow(edits.Size())
	from := 0
	for _, e := range edits {
		p.add(from, e.Start)
		tail := b.Len()
		b.Data = append(b.Data, e.New...)
		p.add(tail, b.Len())
		from = e.End
	}
	p.add(from, n)
}

func (p *Pieces) add(start, end int) {
	if start == end {
		return
	}
	p.Total += end - start
	if k := len(p.ranges); k > 0 && p.ranges[k-1].end == start {
		p.ranges[k-1].end = end
		return
	}
	p.ranges = append(p.ranges, struct{ start, end int }{start, end})
}

// Whole returns all parts as references into buf.
func (p *Pieces) Whole(buf mem.Buffer) mem.BufferSlice {
	out := make(mem.BufferSlice, 0, len(p.ranges))
	for _, r := range p.ranges {
		out = append(out, buf.Slice(r.start, r.end))
	}
	return out
}

// Each calls send with parts of at most maxPiece bytes, in order, the last one marked. There is at least one call.
func (p *Pieces) Each(buf mem.Buffer, send func(parts mem.BufferSlice, last bool) error) error {
	var parts mem.BufferSlice
	room, left := MaxPiece, p.Total
	if left == 0 {
		return send(nil, true)
	}
	for _, r := range p.ranges {
		for r.start < r.end {
			n := min(r.end-r.start, room)
			parts = append(parts, buf.Slice(r.start, r.start+n))
			r.start += n
			room -= n
			left -= n
			if room == 0 || left == 0 {
				if err := send(parts, left == 0); err != nil {
					return err
				}
				parts, room = nil, MaxPiece
			}
		}
	}
	return nil
}
