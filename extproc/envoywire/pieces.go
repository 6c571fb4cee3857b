package envoywire

import (
	"google.golang.org/grpc/mem"

	"tandem/extproc/openai"
)

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
