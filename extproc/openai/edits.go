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

// Edits are changes of one body, sorted by Start and not overlapping.
type Edits []Edit

// Len is the length of a body of n bytes after the edits.
func (e Edits) Len(n int) int {
	for _, x := range e {
		n += len(x.New) - (x.End - x.Start)
	}
	return n
}

// Size is how many bytes the edits bring in.
func (e Edits) Size() int {
	n := 0
	for _, x := range e {
		n += len(x.New)
	}
	return n
}

// Apply appends the edited body to dst.
func (e Edits) Apply(dst, body []byte) []byte {
	from := 0
	for _, x := range e {
		dst = append(dst, body[from:x.Start]...)
		dst = append(dst, x.New...)
		from = x.End
	}
	return append(dst, body[from:]...)
}

// Inverse appends to dst the edits that turn the edited body back into body. Their New refers to body.
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
			return fmt.Errorf("edit %d covers bytes %d to %d of %d, after one that ends at %d", i, x.Start, x.End, n, from)
		}
		from = x.End
	}
	return nil
}

// removals appends the edits that cut whole members, each with the one comma that keeps the rest valid: the one before
// it, or behind it where nothing that stays is before it.
func (r *Request) removals(dst Edits, cut func(i int) bool) Edits {
	return removals(dst, r.body, r.members, cut)
}

func removals(dst Edits, body []byte, members []member, cut func(i int) bool) Edits {
	kept := false
	for i, m := range members {
		if !cut(i) {
			kept = true
			continue
		}
		e := Edit{Start: int(m.key), End: int(m.valueEnd)}
		switch {
		case kept:
			e.Start = commaAfter(body, int(members[i-1].valueEnd))
		case i+1 < len(members):
			e.End = int(members[i+1].key)
		}
		dst = append(dst, e)
	}
	return dst
}

// commaAfter is where the comma behind a member lies.
func commaAfter(body []byte, i int) int {
	for body[i] != ',' {
		i++
	}
	return i
}

func (e Edits) sort() { slices.SortStableFunc(e, func(a, b Edit) int { return a.Start - b.Start }) }
