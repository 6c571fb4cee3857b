package openai

// Patch plans changes of a scanned body. The zero value is ready; Reset reuses all memory.
//
// Members that are there keep their place and get a new value; members that are not are put in front, directly after the
// opening brace, all of them in one edit, which is the first of [Patch.Edits]. Nothing else moves.
type Patch struct {
	r       *Request
	edits   Edits
	deleted []bool // by member
	front   []byte // members to put in, each followed by a comma

	samplingEdits   Edits
	samplingDeleted []bool
	samplingFront   []byte
	samplingTouched bool
}

// Reset makes the patch ready for changes of r, which must stay as it is until the edits were applied.
func (p *Patch) Reset(r *Request) {
	p.r = r
	p.edits, p.front = p.edits[:0], p.front[:0]
	p.samplingEdits, p.samplingFront, p.samplingTouched = p.samplingEdits[:0], p.samplingFront[:0], false
	p.deleted = zeroed(p.deleted, len(r.members))
	p.samplingDeleted = zeroed(p.samplingDeleted, len(r.sampling))
}

func zeroed(b []bool, n int) []bool {
	if cap(b) < n {
		return make([]bool, n)
	}
	b = b[:n]
	clear(b)
	return b
}

// Set gives a top-level member a value, which is JSON text. key is its name and f its field; f may be unknown for a
// member that the body cannot have.
func (p *Patch) Set(key string, f Field, value []byte) {
	if i := p.r.index[f]; i > 0 && f != fieldUnknown {
		m := p.r.members[i-1]
		p.edits = append(p.edits, Edit{Start: int(m.value), End: int(m.valueEnd), New: value})
		return
	}
	p.front = appendMember(p.front, key, value)
}

// Delete removes a top-level member, if it is there.
func (p *Patch) Delete(f Field) {
	if i := p.r.index[f]; i > 0 {
		p.deleted[i-1] = true
	}
}

// SetSampling is Set for a member of sampling_params.
func (p *Patch) SetSampling(key string, f Field, value []byte) {
	p.samplingTouched = true
	for _, m := range p.r.sampling {
		if m.field == f {
			p.samplingEdits = append(p.samplingEdits, Edit{Start: int(m.value), End: int(m.valueEnd), New: value})
			return
		}
	}
	p.samplingFront = appendMember(p.samplingFront, key, value)
}

// DeleteSampling is Delete for a member of sampling_params.
func (p *Patch) DeleteSampling(f Field) {
	for i, m := range p.r.sampling {
		if m.field == f {
			p.samplingDeleted[i] = true
		}
	}
}

func appendMember(b []byte, key string, value []byte) []byte {
	b = append(append(append(b, '"'), key...), '"', ':')
	return append(append(b, value...), ',')
}

// Edits are the planned changes, valid until the next Reset. Unless nothing was put in, the first of them is an
// insertion right after the opening brace.
func (p *Patch) Edits() Edits {
	r := p.r
	p.addSampling()
	brace := openingBrace(r.body)
	p.edits = insertion(p.edits, brace+1, p.front, survivors(p.deleted))
	p.edits = r.removals(p.edits, func(i int) bool { return p.deleted[i] })
	p.edits.sort()
	return p.edits
}

// addSampling puts the changes of sampling_params among the others, or the whole of it where the body has none.
func (p *Patch) addSampling() {
	r := p.r
	raw := r.Raw(FieldSamplingParams)
	switch {
	case !p.samplingTouched:
	case raw == nil || string(raw) == "null":
		object := append([]byte{'{'}, p.samplingFront...)
		object[len(object)-1] = '}' // in place of the last comma
		p.Set("sampling_params", FieldSamplingParams, object)
	case raw[0] == '{':
		p.samplingEdits = insertion(p.samplingEdits, int(r.members[r.index[FieldSamplingParams]-1].value)+1, p.samplingFront, survivors(p.samplingDeleted))
		p.samplingEdits = removals(p.samplingEdits, r.body, r.sampling, func(i int) bool { return p.samplingDeleted[i] })
		p.edits = append(p.edits, p.samplingEdits...)
	}
}

// insertion adds the edit that puts members in at a place. Without survivors behind it the last comma is too many.
func insertion(e Edits, at int, members []byte, survivors bool) Edits {
	if len(members) == 0 {
		return e
	}
	if !survivors {
		members = members[:len(members)-1]
	}
	return append(e, Edit{Start: at, End: at, New: members})
}

func survivors(deleted []bool) bool {
	for _, d := range deleted {
		if !d {
			return true
		}
	}
	return false
}

// openingBrace is where the body's opening brace lies.
func openingBrace(body []byte) int {
	i := 0
	for body[i] != '{' {
		i++
	}
	return i
}
