package openai

import (
	"fmt"
	"slices"
)

// Edit replaces body[Start:End] by New.
type Edit struct {
	Start, End int
	New        []byte
}

// Edits are changes of one body, sorted by Start and not overlapping. If several have the same Start, all but the last
// only insert.
type Edits []Edit

// Len returns the length of a body of n bytes after the edits.
func (e Edits) Len(n int) int {
	for _, x := range e {
		n += len(x.New) - (x.End - x.Start)
	}
	return n
}

// Size returns the number of bytes that the edits insert.
func (e Edits) Size() int {
	n := 0
	for _, x := range e {
		n += len(x.New)
	}
	return n
}

// Apply appends the edited body to dst, growing it at most once. The edits must fit body ([Edits.Check]).
func (e Edits) Apply(dst, body []byte) []byte {
	dst = slices.Grow(dst, e.Len(len(body)))
	from := 0
	for _, x := range e {
		dst = append(dst, body[from:x.Start]...)
		dst = append(dst, x.New...)
		from = x.End
	}
	return append(dst, body[from:]...)
}

// Inverse appends to dst the edits that turn the edited body back into body: byte offsets of the edited body, New
// referring to body.
func (e Edits) Inverse(dst Edits, body []byte) Edits {
	shift := 0
	for _, x := range e {
		start := x.Start + shift
		dst = append(dst, Edit{Start: start, End: start + len(x.New), New: body[x.Start:x.End:x.End]})
		shift += len(x.New) - (x.End - x.Start)
	}
	return dst
}

// Check reports whether the edits can be applied to a body of n bytes.
func (e Edits) Check(n int) error {
	from := 0
	for i, x := range e {
		if x.Start < from || x.End < x.Start || x.End > n {
			return fmt.Errorf("edit %d covers bytes %d to %d of %d, after one that ends at %d", i, x.Start, x.End, n,
				from)
		}
		from = x.End
	}
	return nil
}

// cutter cuts members out of one object, each together with a comma so that the rest stays valid: the comma before it,
// or the one behind it if no kept member precedes it. It is called for every member in order. Adjacent cuts become one
// edit.
type cutter struct {
	body    []byte
	members []member
	kept    bool // a member before this one was kept
	running bool // the member before this one was cut
}

func (c *cutter) keep() { c.kept, c.running = true, false }

func (c *cutter) cut(edits Edits, i int) Edits {
	m := &c.members[i]
	start, end := int(m.key), int(m.valueEnd)
	if !c.kept && i+1 < len(c.members) {
		end = int(c.members[i+1].key)
	}
	if c.running {
		edits[len(edits)-1].End = end
		return edits
	}
	if c.kept {
		start = skipSpace(c.body, int(c.members[i-1].valueEnd)) // the comma
	}
	c.running = true
	return append(edits, Edit{Start: start, End: end})
}
