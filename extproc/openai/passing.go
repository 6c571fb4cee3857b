package openai

import (
	"bytes"
)

// PassingCounts is [CachedTokens] for an answer that is one JSON object and passes in pieces that end anywhere. It
// keeps nothing but the value of the member usage, so the answer may have any size. What is no object, and a usage of
// more than 64 KiB, pass as they are. It is for one answer, and for one goroutine.
type PassingCounts struct {
	By CachedTokens

	state   passingState
	depth   int    // of objects and arrays that are open
	naming  bool   // the next string of the outermost object is a member's name
	matched int    // bytes of the last name that are those of "usage"; -1: it is another name
	holding bool   // the value of usage has begun ...
	held    []byte // ... and these are its bytes, up to the piece that is read
}

type passingState uint8

const (
	passingBefore passingState = iota // the object
	passingBetween
	passingString
	passingEscaped // in a string, behind a backslash
	passingOver    // the rest passes
)

const (
	usageName    = "usage"
	maxUsageHeld = 64 << 10
)

// Over reports whether the rest of the answer passes as it is.
func (p *PassingCounts) Over() bool { return p.state == passingOver }

// Append appends to dst what the client gets for the next piece of the answer. end: it is the last.
func (p *PassingCounts) Append(dst, piece []byte, end bool) []byte {
	from := 0 // what lies before is in dst
	for i := 0; i < len(piece) && p.state != passingOver; i++ {
		if p.state == passingString && !p.naming {
			for i < len(piece) && piece[i] != '"' && piece[i] != '\\' {
				i++
			}
			if i == len(piece) {
				break
			}
		}
		held := p.holding
		p.read(piece[i])
		switch {
		case p.holding && !held:
			dst, from = append(dst, piece[from:i]...), i
		case held && !p.holding:
			p.held = append(p.held, piece[from:i+1]...)
			from = i + 1
			if len(p.held) > maxUsageHeld {
				return append(p.release(dst), piece[from:]...)
			}
			dst, p.held = p.By.appendUsage(dst, p.held), p.held[:0]
		}
	}
	if p.holding {
		p.held = append(p.held, piece[from:]...)
		from = len(piece)
		if end || len(p.held) > maxUsageHeld {
			dst = p.release(dst)
		}
	}
	return append(dst, piece[from:]...)
}

// release appends what is held as it came, and has the rest pass.
func (p *PassingCounts) release(dst []byte) []byte {
	dst = append(dst, p.held...)
	p.state, p.holding, p.held = passingOver, false, nil
	return dst
}

// read reads a byte.
func (p *PassingCounts) read(c byte) {
	switch p.state {
	case passingBefore:
		p.before(c)
	case passingBetween:
		p.between(c)
	case passingString:
		p.inString(c)
	case passingEscaped:
		p.state = passingString
	case passingOver:
	}
}

func (p *PassingCounts) before(c byte) {
	switch c {
	case ' ', '\t', '\r', '\n':
	case '{':
		p.state, p.depth, p.naming, p.matched = passingBetween, 1, true, -1
	default:
		p.state = passingOver
	}
}

// between reads a byte outside of strings.
func (p *PassingCounts) between(c byte) {
	switch c {
	case '"':
		p.state = passingString
		if p.naming {
			p.matched = 0
		}
	case ':':
		p.naming = false
	case ',':
		if p.depth == 1 {
			p.naming, p.matched = true, -1
		}
	case '{', '[':
		p.depth++
		p.holding = p.holding || c == '{' && p.depth == 2 && p.matched == len(usageName)
	case '}', ']':
		p.depth--
		switch p.depth {
		case 1:
			p.holding = false
		case 0:
			p.state = passingOver
		}
	}
}

func (p *PassingCounts) inString(c byte) {
	switch {
	case c == '\\':
		p.state = passingEscaped
		if p.naming {
			p.matched = -1
		}
	case c == '"':
		p.state = passingBetween
	case !p.naming:
	case p.matched >= 0 && p.matched < len(usageName) && c == usageName[p.matched]:
		p.matched++
	default:
		p.matched = -1
	}
}

// appendUsage appends the value of usage with the counts.
func (c CachedTokens) appendUsage(dst, usage []byte) []byte {
	if !countsCached(usage) || !valid(usage) {
		return append(dst, usage...)
	}
	if out, ok := c.messagesUsage(usage); ok {
		return append(dst, out...)
	}
	return c.appendObject(dst, usage)
}

// countsCached reports whether a text may have counts of cached tokens.
func countsCached(text []byte) bool {
	return bytes.Contains(text, []byte(`cached_tokens"`)) || bytes.Contains(text, []byte(`cache_read_input_tokens"`))
}
