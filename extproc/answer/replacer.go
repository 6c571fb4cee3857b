package answer

import (
	"bytes"
	"strconv"
)

// Replacer restores the model name that the client asked for in answers: `"model":"x"` and `"model": "x"`, as
// engines write it, in whole answers and in each event of a stream. Pieces of the answer may end anywhere, so a
// possible beginning of a match is held back until the next piece.
type Replacer struct {
	old, new [2][]byte
	kept     []byte
}

// NewReplacer returns a Replacer of the model name served by the name asked.
func NewReplacer(served, asked string) *Replacer {
	r := &Replacer{}
	for i, before := range []string{`"model":`, `"model": `} {
		r.old[i] = strconv.AppendQuote([]byte(before), served)
		r.new[i] = strconv.AppendQuote([]byte(before), asked)
	}
	return r
}

// Append appends the rewritten piece to dst. end marks the last piece.
func (r *Replacer) Append(dst, piece []byte, end bool) []byte {
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
func (r *Replacer) find(text []byte) (at, which int) {
	at = bytes.Index(text, r.old[0])
	if other := bytes.Index(text, r.old[1]); other >= 0 && (at < 0 || other < at) {
		return other, 1
	}
	return at, 0
}

// beginning returns the number of bytes at the end of text that may begin a match.
func (r *Replacer) beginning(text []byte) int {
	for n := min(len(text), len(r.old[1])-1); n > 0; n-- {
		tail := text[len(text)-n:]
		if bytes.HasPrefix(r.old[0], tail) || bytes.HasPrefix(r.old[1], tail) {
			return n
		}
	}
	return 0
}
