package openai

import (
	"bytes"
	"encoding/json"
	"slices"
	"strings"
)

// CutEcho appends an engine's refusal to dst without the members that a client must not send. Engines quote the
// request in an error, and Tandem put those members there: they name internal hosts and rooms. Engines quote them as a
// JSON object (FastAPI: detail[].input) or, within a string, as Python's repr of one (SGLang 0.5.23; vLLM before it
// shortened the input). Every other byte stays, but a string that loses a member is encoded again.
//
// Values that Tandem changed (max_tokens, stream) stay as the engine received them: nothing in the text distinguishes
// them from a client's.
func CutEcho(dst, body []byte) []byte {
	at := 0 // start of the part that is not copied yet
	for i := 0; i < len(body); i++ {
		if body[i] != '"' {
			continue
		}
		end, ok := stringEnd(body, i)
		if !ok {
			break // not JSON from here on
		}
		name := unescapedKey(body[i+1 : end-1])
		if start, is := valueStart(body, end); is && foreign(name) {
			if stop, ok := skipValue(body, start, maxNesting); ok == noFault {
				dst = append(dst, body[at:i]...)
				dst, at = closeGap(dst, body, stop)
				i = at - 1
				continue
			}
		}
		if text := body[i+1 : end-1]; mayEcho(text) {
			if cut, ok := cutText(body[i:end]); ok {
				dst = append(append(dst, body[at:i]...), cut...)
				at = end
			}
		}
		i = end - 1
	}
	return append(dst, body[at:]...)
}

// foreign reports whether a member is Tandem's: a client's member of that name was cut.
func foreign(name []byte) bool { return fieldOf(name).control() }

// mayEcho is a quick search for a name that is followed by a colon, in single quotes or, escaped, in double ones.
func mayEcho(text []byte) bool {
	return bytes.Contains(text, []byte(`': `)) || bytes.Contains(text, []byte(`\":`))
}

// stringEnd returns the index behind the string that starts at i.
func stringEnd(b []byte, i int) (end int, ok bool) {
	for i++; i < len(b); i++ {
		switch b[i] {
		case '\\':
			i++
		case '"':
			return i + 1, true
		}
	}
	return 0, false
}

// valueStart returns the index of the value of a key that ends before i; false if no colon follows.
func valueStart(b []byte, i int) (start int, ok bool) {
	if i = skipSpace(b, i); i >= len(b) || b[i] != ':' {
		return 0, false
	}
	start = skipSpace(b, i+1)
	return start, start < len(b)
}

// closeGap removes the superfluous comma after a cut: the one behind the member, which ended at i, or the one at the
// end of dst.
func closeGap(dst, b []byte, i int) ([]byte, int) {
	next := i
	for next < len(b) && b[next] == ' ' {
		next++
	}
	if next < len(b) && b[next] == ',' {
		next++
		for next < len(b) && b[next] == ' ' {
			next++
		}
		return dst, next
	}
	trimmed := bytes.TrimRight(dst, " ")
	return bytes.TrimSuffix(trimmed, []byte(",")), i
}

// maxNameBytes is more than the length of every name that is searched for, quotes included.
const maxNameBytes = 64

// cutText is CutEcho within a JSON string, which is given with its quotes; false if nothing was cut.
func cutText(quoted []byte) (cut []byte, ok bool) {
	var text string
	if json.Unmarshal(quoted, &text) != nil {
		return nil, false
	}
	python := []byte(text)
	out := make([]byte, 0, len(python))
	at := 0
	for i := 0; i < len(python); i++ {
		c := python[i]
		if c != '\'' && c != '"' {
			continue
		}
		end, whole := pythonString(python[:min(len(python), i+maxNameBytes)], i)
		if !whole {
			continue // an apostrophe, or not a control member
		}
		start, is := valueStart(python, end)
		if !is || !foreign(python[i+1:end-1]) {
			continue // it may open a string or close one: look at the next quote again
		}
		stop, whole := pythonValue(python, start, 0)
		if !whole {
			stop = len(python) // the engine has shortened the text there
		}
		out = append(out, python[at:i]...)
		out, at = closeGap(out, python, stop)
		i = at - 1
	}
	if at == 0 {
		return nil, false
	}
	out = append(out, python[at:]...)
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	if e.Encode(string(out)) != nil {
		return nil, false
	}
	return slices.Clip(bytes.TrimSuffix(b.Bytes(), []byte("\n"))), true
}

// pythonString returns the index behind the string that starts at i, in either kind of quotes.
func pythonString(b []byte, i int) (end int, ok bool) {
	quote := b[i]
	for i++; i < len(b); i++ {
		switch b[i] {
		case '\\':
			i++
		case quote:
			return i + 1, true
		}
	}
	return 0, false
}

// pythonValue returns the index behind the value that starts at i, in repr's form: a string, a list, tuple or dict of
// values, or a word or number, which ends at the next delimiter.
func pythonValue(b []byte, i, depth int) (end int, ok bool) {
	if i >= len(b) || depth > maxNesting {
		return 0, false
	}
	switch b[i] {
	case '\'', '"':
		return pythonString(b, i)
	case '{', '[', '(':
		for i++; i < len(b); {
			switch b[i] {
			case '}', ']', ')':
				return i + 1, true
			case ' ', ',', ':':
				i++
				continue
			}
			next, ok := pythonValue(b, i, depth+1)
			if !ok || next == i {
				return 0, false
			}
			i = next
		}
		return 0, false
	}
	for i < len(b) && strings.IndexByte(" ,:}])'\"\n", b[i]) < 0 {
		i++
	}
	return i, true
}
