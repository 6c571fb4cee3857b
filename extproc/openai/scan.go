package openai

import (
	"bytes"
	"fmt"
	"math"
	"strings"
	"unicode/utf8"

	"github.com/cespare/xxhash/v2"
)

// Limits bound a body. Zero values take the defaults.
type Limits struct {
	MaxDepth   int // nesting of arrays and objects; default 512, at most 1,024
	MaxMembers int // of one of the objects of a scope; default 512, at most 4,096
}

func (l Limits) withDefaults() Limits {
	if l.MaxDepth <= 0 {
		l.MaxDepth = 512
	}
	if l.MaxMembers <= 0 {
		l.MaxMembers = 512
	}
	l.MaxDepth, l.MaxMembers = min(l.MaxDepth, maxNesting), min(l.MaxMembers, 4096)
	return l
}

// scope is one of the objects whose members are read.
type scope uint8

const (
	scopeTop       scope = iota
	scopeSampling        // sampling_params
	scopeExtraArgs       // sampling_params.extra_args
	scopeXArgs           // vllm_xargs
	numScopes
)

// inner returns the scope that a member opens, if its value is an object.
func (s scope) inner(f Field) (scope, bool) {
	switch {
	case s == scopeTop && f == FieldSamplingParams:
		return scopeSampling, true
	case s == scopeTop && f == fieldVLLMXArgs:
		return scopeXArgs, true
	case s == scopeSampling && f == fieldExtraArgs:
		return scopeExtraArgs, true
	}
	return 0, false
}

// member is one member of a scope, as offsets into the body: from the key's opening quote to the value's end.
type member struct {
	key, keyEnd, value, valueEnd int32
	hash                         uint64 // of the unescaped key
	field                        Field
}

// document is a scanned body.
type document struct {
	body    []byte
	start   int // of the opening brace
	members [numScopes][]member
	scratch []byte // an unescaped key
}

// key returns a member's key as it stands in the body, without quotes.
func (d *document) key(m *member) []byte { return d.body[m.key+1 : m.keyEnd-1] }

// text returns a member's value as it stands in the body.
func (d *document) text(m *member) []byte { return d.body[m.value:m.valueEnd:m.valueEnd] }

// scan validates the body and finds the members of its scopes. It allocates only where slices must grow.
func (d *document) scan(body []byte, lim Limits) error {
	d.body = body
	for i := range d.members {
		d.members[i] = d.members[i][:0]
	}
	if cap(d.scratch) > 64<<10 {
		d.scratch = nil // with a key of unusual length
	}
	if len(body) > math.MaxInt32 {
		return TooLarge(math.MaxInt32)
	}
	lim = lim.withDefaults()
	d.start = skipSpace(body, 0)
	if d.start == len(body) {
		return BadRequest("empty_body", "", "the body is empty; a JSON object is expected")
	}
	if body[d.start] != '{' {
		return d.notObject(lim)
	}
	i, f := d.object(scopeTop, d.start, lim.MaxDepth-1, lim)
	if f == noFault {
		if i = skipSpace(body, i); i < len(body) {
			f = faultTrailing
		}
	}
	if f != noFault {
		return d.refuse(i, f, lim)
	}
	return nil
}

// object reads the object at i. room is the number of levels that may still be opened. It recurses only into objects
// that are scopes.
func (d *document) object(s scope, i, room int, lim Limits) (int, fault) {
	b := d.body
	if i = skipSpace(b, i+1); i < len(b) && b[i] == '}' {
		return i + 1, noFault
	}
	for {
		var m member
		var f fault
		if m, i, f = d.readKey(s, i, lim); f != noFault {
			return i, f
		}
		if within, ok := s.inner(m.field); ok && i < len(b) && b[i] == '{' && room > 0 {
			i, f = d.object(within, i, room-1, lim)
		} else {
			i, f = skipValue(b, i, room)
		}
		if f != noFault {
			return i, f
		}
		m.valueEnd = int32(i)
		d.members[s] = append(d.members[s], m)
		if i = skipSpace(b, i); i >= len(b) || b[i] != ',' && b[i] != '}' {
			return i, faultObjectEnd
		}
		if b[i] == '}' {
			return i + 1, noFault
		}
		i = skipSpace(b, i+1)
	}
}

// readKey reads a member up to its value.
func (d *document) readKey(s scope, i int, lim Limits) (m member, end int, f fault) {
	b := d.body
	if i >= len(b) || b[i] != '"' {
		return m, i, faultKey
	}
	m.key = int32(i)
	end, escaped, f := skipString(b, i)
	if f != noFault {
		return m, end, f
	}
	m.keyEnd = int32(end)
	name := b[i+1 : end-1]
	if !utf8.Valid(name) {
		return m, i, faultKeyUTF8
	}
	if escaped {
		d.scratch = appendUnescaped(d.scratch[:0], name)
		name = d.scratch
	}
	m.hash, m.field = xxhash.Sum64(name), fieldOf(name)
	if d.find(s, m.hash, name) != nil {
		return m, i, faultDuplicate
	}
	if len(d.members[s]) == lim.MaxMembers {
		return m, i, faultTooMany
	}
	end, f = skipColon(b, end)
	m.value = int32(end)
	return m, end, f
}

// find searches for a member by its unescaped name. It is linear: bodies have tens of members.
func (d *document) find(s scope, hash uint64, name []byte) *member {
	for i := range d.members[s] {
		m := &d.members[s][i]
		if m.hash == hash && bytes.Equal(unescapedKey(d.key(m)), name) {
			return m
		}
	}
	return nil
}

// unescapedKey allocates only for a key with escapes, which is rare: it is called only if hashes are equal.
func unescapedKey(key []byte) []byte {
	if bytes.IndexByte(key, '\\') < 0 {
		return key
	}
	return appendUnescaped(nil, key)
}

// notObject returns the error for a body that does not start with a brace: other JSON, or none.
func (d *document) notObject(lim Limits) error {
	if bytes.HasPrefix(d.body[d.start:], []byte("\xEF\xBB\xBF")) {
		return d.refuse(d.start, faultBOM, lim)
	}
	i, f := skipValue(d.body, d.start, lim.MaxDepth)
	if f == noFault {
		if i = skipSpace(d.body, i); i < len(d.body) {
			f = faultTrailing
		}
	}
	if f != noFault {
		return d.refuse(i, f, lim)
	}
	return BadRequest("invalid_body", "", "the body must be a JSON object")
}

// refuse returns the error for a fault at byte i. It quotes nothing of the body but a short plain key.
func (d *document) refuse(i int, f fault, lim Limits) *Error {
	switch f {
	case faultTooDeep:
		return BadRequest("too_deep", "",
			fmt.Sprintf("byte %d of the body: nested more than %d levels deep", i, lim.MaxDepth))
	case faultTooMany:
		return BadRequest("too_many_members", "",
			fmt.Sprintf("byte %d of the body: an object has more than %d members", i, lim.MaxMembers))
	case faultDuplicate:
		end, _, _ := skipString(d.body, i)
		key := printable(unescapedKey(d.body[i+1 : end-1]))
		what := "a member"
		if key != "" {
			what = "`" + key + "`"
		}
		return BadRequest("duplicate_key", key,
			fmt.Sprintf("byte %d of the body: %s is there twice in one object", i, what))
	}
	if i >= len(d.body) {
		return BadRequest("invalid_json", "", fmt.Sprintf("the body is not valid JSON: it ends at byte %d: %s", i, f))
	}
	return BadRequest("invalid_json", "", fmt.Sprintf("the body is not valid JSON: byte %d: %s", i, f))
}

// printable returns a name for a message or log if it is short and plain, else "".
func printable(name []byte) string {
	const plain = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.:/-"
	if len(name) > 64 || strings.Trim(string(name), plain) != "" {
		return ""
	}
	return string(name)
}
