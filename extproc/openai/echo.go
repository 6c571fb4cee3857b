package openai

import (
	"bytes"
	"encoding/json"
	"slices"
	"strings"
)

// CutEcho appends an engine's refusal to dst without the members that a client must not send. Engines show in an
// error what they were sent, and those members are Tandem's: they name internal hosts and rooms. They show it as a
// JSON object (FastAPI: detail[].input) or, within a string, as Python's repr of one (SGLang 0.5.23; vLLM before it
// summed the input up). Every other byte stays; a string that loses something is written anew.
//
// Values that Tandem changed (max_tokens, stream) stay as the engine was sent them: nothing in the text tells them
// from a client's.
func CutEcho(dst, body []byte) []byte {
	at := 0 // of what is not copied yet
	for i := 0; i < len(body); i++ {
		if body[i] != '"' {
			continue
		}
		end, ok := stringEnd(body, i)
		if !ok {
			break // no JSON from here on
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

// foreign reports whether a member of that name is Tandem's, as a client's was cut.
func foreign(name []byte) bool { return fieldOf(name).control() }

// mayEcho is a quick look for a name that is followed by a colon, in single quotes or, escaped, in double ones.
func mayEcho(text []byte) bool {
	return bytes.Contains(text, []byte(`': `)) || bytes.Contains(text, []byte(`\":`))
}

// stringEnd is behind the string that starts at i.
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

// valueStart is where the value of a key that ends before i begins; false if no colon follows.
func valueStart(b []byte, i int) (start int, ok bool) {
	if i = skipSpace(b, i); i >= len(b) || b[i] != ':' {
		return 0, false
	}
	start = skipSpace(b, i+1)
	return start, start < len(b)
}

// closeGap takes the comma that is too much, behind the member that ended at i or before it, at the end of dst.
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

// maxNameBytes is longer than every name that is looked for, quotes included.
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
			continue // an apostrophe, or no name
		}
		start, is := valueStart(python, end)
		if !is || !foreign(python[i+1:end-1]) {
			continue // whether it opens a string or closes one is not known: the next quote is looked at again
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

// pythonString is behind the string that starts at i, in whichever quotes.
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

// pythonValue is behind the value that starts at i, as repr writes it: a string, a list, tuple or dict of values,
// or a word or number, which ends where the next thing begins.
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
