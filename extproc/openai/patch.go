package openai

import (
	"bytes"
	"fmt"
	"slices"
)

// Patch plans changes of a scanned body. The zero value is ready; Reset reuses all memory.
//
// Existing members keep their place and get a new value. New members are inserted directly after the opening brace, all
// in one edit, which comes first in [Patch.Edits] except for the edit of [Patch.Own]. Nothing else moves. If a member
// is changed twice, the last change counts.
//
// The body must not have a changed member twice, and control members must be cut before ([Request.Clean]).
type Patch struct {
	r        *Request
	top      changes
	sampling changes
	text     []byte // new values
	front    []byte // members to insert
	edits    Edits
}

// changes are those of one object.
type changes struct {
	of  []change // by member
	new []insert
}

// change is a change of a member. Offsets are into Patch.text.
type change struct {
	what       action
	start, end int
	own        bool
}

type action uint8

const (
	keep action = iota
	replace
	cut
	rename
)

// insert is a member to insert.
type insert struct {
	key        string
	start, end int
	own        bool
}

// Reset prepares the patch for changes of r, which must not change until the edits were applied.
func (p *Patch) Reset(r *Request) {
	p.r = r
	p.top.reset(len(r.members[scopeTop]))
	p.sampling.reset(len(r.members[scopeSampling]))
	p.text = p.text[:0]
}

func (c *changes) reset(members int) {
	c.of = slices.Grow(c.of[:0], members)[:members]
	clear(c.of)
	c.new = c.new[:0]
}

// Set gives a top-level member a value: JSON text, which is copied. key is the member's name, which must not need
// escapes, and f its field.
func (p *Patch) Set(key string, f Field, value []byte) {
	p.set(&p.top, scopeTop, key, f, value, false)
}

// Own is Set for a member that is the operator's and not the client's: [Edits.Inverse] does not undo it, so every later
// leg of the request has the same value.
func (p *Patch) Own(key string, f Field, value []byte) {
	p.set(&p.top, scopeTop, key, f, value, true)
}

// Insert inserts a top-level member even if the body has one of that name, which then has to be renamed.
func (p *Patch) Insert(key string, value []byte) {
	p.set(&p.top, scopeTop, key, fieldUnknown, value, false)
}

// Rename renames a top-level member, if it exists; its value stays. key must not need escapes.
func (p *Patch) Rename(f Field, key string) {
	if i := p.position(scopeTop, f); i >= 0 {
		start := len(p.text)
		p.text = append(p.text, key...)
		p.top.of[i] = change{what: rename, start: start, end: len(p.text)}
	}
}

// Delete removes a top-level member, if it exists.
func (p *Patch) Delete(f Field) { p.delete(&p.top, scopeTop, f) }

// SetSampling is Set for a member of sampling_params, which is created if the body has none. If sampling_params is not
// an object, nothing happens: no engine accepts such a request.
func (p *Patch) SetSampling(key string, f Field, value []byte) {
	p.set(&p.sampling, scopeSampling, key, f, value, false)
}

// DeleteSampling is Delete for a member of sampling_params.
func (p *Patch) DeleteSampling(f Field) { p.delete(&p.sampling, scopeSampling, f) }

func (p *Patch) set(c *changes, s scope, key string, f Field, value []byte, own bool) {
	start := len(p.text)
	p.text = append(p.text, value...)
	if i := p.position(s, f); i >= 0 {
		c.of[i] = change{replace, start, len(p.text), own}
		return
	}
	n := insert{key, start, len(p.text), own}
	for i := range c.new {
		if c.new[i].key == key {
			c.new[i] = n
			return
		}
	}
	c.new = append(c.new, n)
}

func (p *Patch) delete(c *changes, s scope, f Field) {
	if i := p.position(s, f); i >= 0 {
		c.of[i] = change{what: cut}
	}
}

// position returns the index of the field among the scope's members, -1 if it is absent.
func (p *Patch) position(s scope, f Field) int {
	if f == fieldUnknown {
		return -1
	}
	return slices.IndexFunc(p.r.members[s], func(m member) bool { return m.field == f })
}

// Edits returns the planned changes, valid until the next change or Reset.
func (p *Patch) Edits() Edits {
	r := p.r
	p.front = p.front[:0]
	if raw := r.Raw(FieldSamplingParams); !present(raw) && len(p.sampling.new) > 0 {
		start := len(p.front)
		p.front = p.appendMembers(append(p.front, '{'), p.sampling.new, false)
		p.front[len(p.front)-1] = '}' // in place of the last comma
		p.Set("sampling_params", FieldSamplingParams, p.front[start:])
	}
	p.edits = p.appendEdits(p.edits[:0], &p.top, scopeTop, r.start)
	return p.edits
}

// appendEdits appends the edits of one object, whose opening brace is at open, in the order of the body.
func (p *Patch) appendEdits(edits Edits, c *changes, s scope, open int) Edits {
	followed := slices.ContainsFunc(c.of, func(x change) bool { return x.what != cut })
	for _, own := range [...]bool{true, false} {
		from := len(p.front)
		p.front = p.appendMembers(p.front, c.new, own)
		to := len(p.front)
		if to == from {
			continue
		}
		if !followed && (!own || !slices.ContainsFunc(c.new, func(n insert) bool { return !n.own })) {
			to-- // remove the last comma too
		}
		// in an object with no other members, what stays would leave a comma behind when the rest is undone
		edits = append(edits, Edit{Start: open + 1, End: open + 1, New: p.front[from:to:to], Keep: own && followed})
	}
	members := p.r.members[s]
	cuts := cutter{body: p.r.body, members: members}
	for i, x := range c.of {
		m := &members[i]
		if x.what == cut {
			edits = cuts.cut(edits, i)
			continue
		}
		cuts.keep()
		switch value := p.text[x.start:x.end:x.end]; {
		case x.what == replace && !bytes.Equal(value, p.r.text(m)):
			edits = append(edits, Edit{Start: int(m.value), End: int(m.valueEnd), New: value, Keep: x.own})
		case x.what == rename:
			edits = append(edits, Edit{Start: int(m.key) + 1, End: int(m.keyEnd) - 1, New: value})
		case x.what == keep && s == scopeTop && m.field == FieldSamplingParams && p.r.body[m.value] == '{':
			edits = p.appendEdits(edits, &p.sampling, scopeSampling, int(m.value))
		}
	}
	return edits
}

// appendMembers appends members as text, each with a comma behind: the operator's own or the others.
func (p *Patch) appendMembers(b []byte, members []insert, own bool) []byte {
	for _, m := range members {
		if m.own != own {
			continue
		}
		b = append(append(append(b, '"'), m.key...), '"', ':')
		b = append(append(b, p.text[m.start:m.end]...), ',')
	}
	return b
}

// Edit replaces body[Start:End] by New.
type Edit struct {
	Start, End int
	New        []byte
	Keep       bool // it is not undone
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

// Inverse appends to dst the edits that turn the edited body back into body, but for what is to be kept: byte offsets
// of the edited body, New referring to body.
func (e Edits) Inverse(dst Edits, body []byte) Edits {
	shift := 0
	for _, x := range e {
		if start := x.Start + shift; !x.Keep {
			dst = append(dst, Edit{Start: start, End: start + len(x.New), New: body[x.Start:x.End:x.End]})
		}
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
