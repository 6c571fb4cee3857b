package extproc

import (
	"bytes"
	"slices"
	"strconv"

	"tandem/extproc/openai"
)

// replacer restores the model name that the client asked for in answers: `"model":"x"` and `"model": "x"`, as
// engines write it, in whole answers and in each event of a stream. Pieces of the answer may end anywhere, so a
// possible beginning of a match is held back until the next piece.
type replacer struct {
	old, new [2][]byte
	kept     []byte
}

// newReplacer returns a replacer of the model name served by the name asked.
func newReplacer(served, asked string) *replacer {
	r := &replacer{}
	for i, before := range []string{`"model":`, `"model": `} {
		r.old[i] = strconv.AppendQuote([]byte(before), served)
		r.new[i] = strconv.AppendQuote([]byte(before), asked)
	}
	return r
}

// append appends the rewritten piece to dst. end marks the last piece.
func (r *replacer) append(dst, piece []byte, end bool) []byte {
	text := piece
	if len(r.kept) > 0 {
		text = append(r.kept, piece...)
	}
	for len(text) > 0 {
		at, which := r.find(text)
		if at < 0 {
			break
		}
		dst = append(append(dst, text[:at]...), r.new[which]...)
		text = text[at+len(r.old[which]):]
	}
	keep := 0
	if !end {
		keep = r.beginning(text)
	}
	dst = append(dst, text[:len(text)-keep]...)
	r.kept = bytes.Clone(text[len(text)-keep:])
	return dst
}

// find returns the first match of either spelling.
func (r *replacer) find(text []byte) (at, which int) {
	at = bytes.Index(text, r.old[0])
	if other := bytes.Index(text, r.old[1]); other >= 0 && (at < 0 || other < at) {
		return other, 1
	}
	return at, 0
}

// beginning returns the number of bytes at the end of text that may begin a match.
func (r *replacer) beginning(text []byte) int {
	for n := min(len(text), len(r.old[1])-1); n > 0; n-- {
		tail := text[len(text)-n:]
		if bytes.HasPrefix(r.old[0], tail) || bytes.HasPrefix(r.old[1], tail) {
			return n
		}
	}
	return 0
}

// rewriteModel replaces the request's model according to the cluster's rewrites.
func (x endpointPicker) rewriteModel(p *picked) {
	asked := x.req.Model()
	if asked == "" || x.body.Len() == 0 {
		return
	}
	p.rewritten = x.s.State.Rewritten(p.pool.Spec.Name, asked, random())
	if p.rewritten == "" || p.rewritten == asked {
		p.rewritten = ""
		return
	}
	p.asked = asked
	x.req.Patch.Reset(&x.req.Request)
	x.req.Patch.Set("model", openai.FieldModel, strconv.AppendQuote(nil, p.rewritten))
	p.edits = slices.Clone(x.req.Patch.Edits())
}

// merge joins two lists of edits of one body in their order. They do not overlap; insertions of a come first.
func merge(a, b openai.Edits) openai.Edits {
	if len(a) == 0 {
		return b
	}
	out := append(slices.Clone(a), b...)
	slices.SortStableFunc(out, func(a, b openai.Edit) int { return a.Start - b.Start })
	return out
}
