package openai

import (
	"bytes"

	"github.com/cespare/xxhash/v2"
)

// A conversation's next request repeats the earlier ones but for bytes that engines do not render. The hashes of a
// prompt leave those bytes out, or no turn of a coding agent would be found again:
//
//   - Clients of Anthropic's API mark the last two messages with cache_control, so the marks move with each turn
//     (Claude Code, Cline, Roo Code). A message that is a text becomes a list of one part for that, and later a text
//     again.
//   - Claude Code begins its system prompt with a line that differs in each request, for Anthropic's accounts. vLLM
//     leaves it out (0.32.0, entrypoints/anthropic/serving.py and renderers/chat_utils.py); SGLang renders it
//     (entrypoints/anthropic/request_conversion.py, 2026-11).

// unrendered is a part of the body that hashes leave out.
type unrendered struct {
	start, end int32
	line       bool // it is the line of Claude Code
}

// maxCuts bounds the cuts that are kept. Clients mark four places at most, but a long conversation may have thousands
// of messages with one part.
const maxCuts = 4096

var attribution = []byte("x-anthropic-billing-header")

// KeepAttribution makes hashes cover the line with which Claude Code begins its system prompt, for engines that render
// it.
func (r *Request) KeepAttribution() {
	kept := r.beside.cuts[:0]
	for _, c := range r.beside.cuts {
		if !c.line {
			kept = append(kept, c)
		}
	}
	r.beside.cuts = kept
}

// cut adds a part, behind those that there are.
func (m *beside) cut(start, end int, line bool) {
	if start >= end || len(m.cuts) == maxCuts || start < m.cutEnd() {
		return
	}
	m.cuts = append(m.cuts, unrendered{int32(start), int32(end), line})
	if m.chat && !line {
		m.cutBytes += end - start
	}
}

// cutEnd returns where the last cut ends.
func (m *beside) cutEnd() int {
	if len(m.cuts) == 0 {
		return 0
	}
	return int(m.cuts[len(m.cuts)-1].end)
}

// mark cuts the mark whose name begins at start, and whose value begins at value, with its comma.
func (m *beside) mark(b []byte, start, value int, stack *levels, open int) {
	if start < m.cutEnd() || len(m.cuts) == maxCuts || inCall(b, stack, open-1) {
		return
	}
	end, f := skipValue(b, value, maxNesting)
	if f != noFault { // the scan will find it
		return
	}
	if from := beforeSpace(b, start); b[from-1] == ',' {
		start = from - 1
	} else if next := skipSpace(b, end); next < len(b) && b[next] == ',' {
		end = skipSpace(b, next+1)
	}
	m.cut(start, end, false)
}

func isMark(b []byte) bool {
	const name = `"cache_control"`
	return len(b) > len(name) && b[1] == 'c' && b[2] == 'a' && string(b[:len(name)]) == name
}

// inCall reports whether the object at a level is within the input of a tool call, which engines render.
func inCall(b []byte, stack *levels, level int) bool {
	for level--; level >= 0; level-- {
		if level < keptNames && stack.object(level) && bytes.HasPrefix(b[stack.names[level]:], []byte(`"input"`)) {
			return true
		}
	}
	return false
}

// beforeSpace returns where the white space before i begins.
func beforeSpace(b []byte, i int) int {
	for i > 0 && (b[i-1] == ' ' || b[i-1] == '\n' || b[i-1] == '\t' || b[i-1] == '\r') {
		i--
	}
	return i
}

// line cuts the line of Claude Code from the string at b[start:end].
func (m *beside) line(b []byte, start, end int) {
	if !bytes.HasPrefix(b[start+1:], attribution) {
		return
	}
	if n := bytes.Index(b[start:end], []byte(`\n`)); n >= 0 {
		end = start + n + 3
	}
	m.cut(start+1, end-1, true)
}

// onlyText reads a content, the list at i, if it has nothing but one part that is a text, and leaves of it only the
// text itself to be hashed. It returns the index behind the list, or false if the list is another one, or not valid.
func (m *beside) onlyText(b []byte, i int, stack *levels, open int) (end int, ok bool) {
	const ofMessage = 2 // levels: the list of messages, and one of them
	if !m.chat || open != ofMessage || !stack.object(1) || !bytes.HasPrefix(b[stack.names[1]:], []byte(`"content"`)) {
		return i, false
	}
	list := i
	if i = skipSpace(b, i+1); i >= len(b) || b[i] != '{' {
		return i, false
	}
	text, textEnd, typed := 0, 0, false
	for i = skipSpace(b, i+1); ; {
		name := i
		value, f := skipKey(b, i)
		if f != noFault || value >= len(b) {
			return i, false
		}
		known := false
		switch key := b[name:]; {
		case bytes.HasPrefix(key, []byte(`"type"`)):
			typed = bytes.HasPrefix(b[value:], []byte(`"text"`))
			known = typed
		case bytes.HasPrefix(key, []byte(`"text"`)):
			text, known = value, b[value] == '"' && text == 0
		case isMark(key):
			known = true
		}
		if !known {
			return i, false
		}
		if i, f = skipValue(b, value, maxPartNesting); f != noFault {
			return i, false
		}
		if text == value {
			textEnd = i
		}
		if i = skipSpace(b, i); i >= len(b) {
			return i, false
		}
		if b[i] == '}' {
			break
		}
		if b[i] != ',' {
			return i, false
		}
		i = skipSpace(b, i+1)
	}
	if i = skipSpace(b, i+1); i >= len(b) || b[i] != ']' || !typed || text == 0 {
		return i, false
	}
	m.cut(list, text, false)
	m.line(b, text, textEnd)
	m.cut(textEnd, i+1, false)
	return i + 1, true
}

// maxPartNesting is the nesting of a part of a content that is a text: of its cache_control.
const maxPartNesting = 2

// blockHasher hashes a text in blocks as it is written.
type blockHasher struct {
	dst        []uint64
	h          uint64 // of all before
	blockBytes int
	most       int // of dst
	begun      xxhash.Digest
	n          int // bytes of the block that has begun
}

// write appends the hashes of the full blocks of a text, until dst has most of them.
func (w *blockHasher) write(text []byte) {
	if w.n > 0 {
		part := text[:min(len(text), w.blockBytes-w.n)]
		_, _ = w.begun.Write(part)
		w.n, text = w.n+len(part), text[len(part):]
		if w.n < w.blockBytes {
			return
		}
		w.add(w.begun.Sum64())
		w.n = 0
	}
	for ; len(text) >= w.blockBytes && len(w.dst) < w.most; text = text[w.blockBytes:] {
		w.add(xxhash.Sum64(text[:w.blockBytes]))
	}
	if len(w.dst) < w.most && len(text) > 0 {
		w.begun.Reset()
		_, _ = w.begun.Write(text)
		w.n = len(text)
	}
}

func (w *blockHasher) add(block uint64) {
	if len(w.dst) < w.most {
		w.h = chain(w.h, block)
		w.dst = append(w.dst, w.h)
	}
}

// medium appends the blocks of a medium. The bytes since the last block are a part of it.
func (w *blockHasher) medium(m *medium, body []byte) {
	before := xxhash.Sum64(nil)
	if w.n > 0 {
		before, w.n = w.begun.Sum64(), 0
	}
	w.dst, w.h = m.hash(w.dst, w.h, before, body, w.most-len(w.dst))
}

// rendered calls visit with the parts of the body between two places that are not cut.
func (r *Request) rendered(from, to int, visit func(text []byte)) {
	for i := range r.beside.cuts {
		c := &r.beside.cuts[i]
		if int(c.end) <= from {
			continue
		}
		if int(c.start) >= to {
			break
		}
		if int(c.start) > from {
			visit(r.body[from:c.start])
		}
		from = int(c.end)
	}
	if from < to {
		visit(r.body[from:to])
	}
}

// sum returns the hash of a member of the prompt, without what is cut.
func (r *Request) sum(f Field) uint64 {
	m := r.member(scopeTop, f)
	var d xxhash.Digest
	d.Reset()
	r.rendered(int(m.value), int(m.valueEnd), func(text []byte) { _, _ = d.Write(text) })
	return d.Sum64()
}
