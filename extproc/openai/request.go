package openai

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/cespare/xxhash/v2"
)

// Request is a scanned body. The zero value is ready; Scan may be called again and reuses all memory. It refers to the
// scanned body and is valid as long as that is. It is for one goroutine at a time.
type Request struct {
	document
	api     API
	index   [numFields]int16 // 1-based position among the top members; 0: absent
	control bool
	model   string
	size    Size
}

// Scan validates the body and finds its members. An error is an [*Error] with status 400 (413 beyond 2 GiB), and
// leaves a request without members.
func (r *Request) Scan(api API, body []byte, lim Limits) error {
	r.api, r.beside.api, r.control = api, api, false
	r.index = [numFields]int16{}
	if err := r.scan(body, lim); err != nil {
		r.forget()
		return err
	}
	for i, m := range r.members[scopeTop] {
		if m.field != fieldUnknown && m.field != fieldControl {
			r.index[m.field] = int16(i + 1)
		}
	}
	for s := range r.members {
		for _, m := range r.members[s] {
			r.control = r.control || m.field.control()
		}
	}
	if err := r.readModel(); err != nil {
		r.forget()
		return err
	}
	r.size = r.measure()
	return nil
}

// Reset drops the body, so that a pooled Request does not keep its memory, and leaves a request without members.
func (r *Request) Reset() {
	r.body = nil
	r.forget()
}

func (r *Request) forget() {
	r.index, r.control, r.model, r.size = [numFields]int16{}, false, "", Size{}
	r.beside.reset()
	for s := range r.members {
		r.members[s] = r.members[s][:0]
	}
}

// maxModelBytes bounds the name of a model, which goes into maps, logs and errors. Real ones are a path or a
// repository.
const maxModelBytes = 1024

// readModel stores the model's name, and allocates only if it differs from the last scan's.
func (r *Request) readModel() error {
	raw := r.Raw(FieldModel)
	if !present(raw) {
		r.model = ""
		return nil
	}
	if raw[0] != '"' {
		return BadRequest("invalid_model", "model", "model must be a string")
	}
	name := raw[1 : len(raw)-1]
	if len(name) > maxModelBytes {
		return BadRequest("invalid_model", "model", fmt.Sprintf("model is longer than %d bytes", maxModelBytes))
	}
	if bytes.IndexByte(name, '\\') >= 0 {
		name = appendUnescaped(r.scratch[:0], name)
		r.scratch = name
	}
	if !utf8.Valid(name) {
		return BadRequest("invalid_model", "model", "model must be valid Unicode")
	}
	if string(name) != r.model {
		r.model = string(name)
	}
	return nil
}

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
	beside  beside
}

// key returns a member's key as it stands in the body, without quotes.
func (d *document) key(m *member) []byte { return d.body[m.key+1 : m.keyEnd-1] }

// text returns a member's value as it stands in the body.
func (d *document) text(m *member) []byte { return d.body[m.value:m.valueEnd:m.valueEnd] }

// scan validates the body and finds the members of its scopes. It allocates only where slices must grow.
func (d *document) scan(body []byte, lim Limits) error {
	d.body = body
	d.beside.reset()
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
			i, f = skipFinding(b, i, room, d.beside.in(s, d.key(&m)))
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

// HasControl reports whether the body has members that a client must not send: they steer engines, name internal hosts
// and KV blocks, and some kill an engine ({"do_remote_prefill":true} alone does, run against vLLM 0.32.0).
//
// They are looked for in the body itself and in the two other objects from which engines read such members:
// vllm_xargs, which vLLM merges into extra_args together with kv_transfer_params (vLLM 0.10 and later,
// entrypoints/openai/*/protocol.py: to_sampling_params), and extra_args within the sampling_params of
// /inference/v1/generate, which the engine reads directly (vllm/v1/request.py).
func (r *Request) HasControl() bool { return r.control }

// Clean appends the body without those members to dst. Every other byte stays.
func (r *Request) Clean(dst []byte) []byte {
	var edits Edits
	for s := range r.members {
		edits = r.removals(edits, r.members[s])
	}
	slices.SortFunc(edits, func(a, b Edit) int { return a.Start - b.Start })
	return edits.Apply(dst, r.body)
}

func (r *Request) removals(edits Edits, members []member) Edits {
	cuts := cutter{members: members, body: r.body}
	for i := range members {
		if members[i].field.control() {
			edits = cuts.cut(edits, i)
		} else {
			cuts.keep()
		}
	}
	return edits
}

// API returns the API that the body was scanned for.
func (r *Request) API() API { return r.api }

// Body returns the scanned body.
func (r *Request) Body() []byte { return r.body }

// Model returns the requested model, valid UTF-8; "" if the body names none.
func (r *Request) Model() string { return r.model }

// Has reports whether the body has the member, null or not.
func (r *Request) Has(f Field) bool { return r.index[f] > 0 }

// Empty reports whether there are no members, because the body is an empty object or none.
func (r *Request) Empty() bool { return len(r.members[scopeTop]) == 0 }

// Raw returns the member's value as it stands in the body, without space around it; nil if it is absent.
func (r *Request) Raw(f Field) []byte {
	if m := r.member(scopeTop, f); m != nil {
		return r.text(m)
	}
	return nil
}

// Sampling is Raw for a member of sampling_params.
func (r *Request) Sampling(f Field) []byte {
	if m := r.member(scopeSampling, f); m != nil {
		return r.text(m)
	}
	return nil
}

func (r *Request) member(s scope, f Field) *member {
	if s == scopeTop {
		if i := r.index[f]; i > 0 {
			return &r.members[s][i-1]
		}
		return nil
	}
	for i := range r.members[s] {
		if m := &r.members[s][i]; m.field == f {
			return m
		}
	}
	return nil
}

// String returns the member's value if it is a string, with escapes undone and invalid Unicode replaced by U+FFFD.
func (r *Request) String(f Field) (string, bool) {
	raw := r.Raw(f)
	if len(raw) < 2 || raw[0] != '"' {
		return "", false
	}
	return strings.ToValidUTF8(string(unescapedKey(raw[1:len(raw)-1])), "\uFFFD"), true
}

// Text returns the value of the top member of that name if it is a string, as it stands between its quotes; nil if
// there is none. A name that is written with escapes is not found.
func (r *Request) Text(name string) []byte {
	for i := range r.members[scopeTop] {
		m := &r.members[scopeTop][i]
		if string(r.key(m)) != name {
			continue
		}
		if v := r.text(m); len(v) >= 2 && v[0] == '"' {
			return v[1 : len(v)-1]
		}
		return nil
	}
	return nil
}

// Value is [Request.Raw] for a member that has no field. A name that is written with escapes is not found.
func Value(r *Request, name string) []byte { return r.topValue(name) }

// Int returns the number that engines read from the member; see [Count].
func (r *Request) Int(f Field) (int64, bool) { return Count(r.Raw(f)) }

// integer reads a number that is written as an integer and fits int64: 5, but neither 5.0 nor 5e0.
func integer(raw []byte) (int64, bool) {
	if len(raw) == 0 || len(raw) > len("-9223372036854775808") {
		return 0, false
	}
	n, err := strconv.ParseInt(string(raw), 10, 64)
	return n, err == nil
}

// True reports whether engines read true from the member: true, 1, "on".
func (r *Request) True(f Field) bool { return isTrue(r.Raw(f)) }

// Wants reports whether the member is there and engines do not read null or false from it.
func (r *Request) Wants(f Field) bool { return wanted(r.Raw(f)) }

// present reports whether there is a value other than null, which engines treat as absent.
func present(raw []byte) bool { return raw != nil && string(raw) != "null" }

// wanted reports whether a value is neither absent nor null nor read as false. What engines refuse is wanted: one of
// them shall refuse it.
func wanted(raw []byte) bool {
	v, ok := boolean(raw)
	return present(raw) && (v || !ok)
}

// Engines that validate bodies with pydantic read more than a member's own type: the text "512", 512.0 and true are
// numbers, 1 and "on" are true. So does everything here that reads or replaces such a member; else P's body would keep
// what Tandem did not understand. testdata/coerced.json has what pydantic 2.14 makes of each (vLLM 0.32.0, whose
// request models are in lax mode; SGLang's and TensorRT-LLM's are, too).

// Count returns the number that engines read from a member's value, of any size up to the limits of int64. ok is false
// if they refuse the value, or if it is null or absent.
func Count(raw []byte) (n int64, ok bool) {
	if len(raw) == 0 {
		return 0, false
	}
	switch c := raw[0]; {
	case c == 't':
		return 1, true
	case c == 'f':
		return 0, true
	case c == '"':
		return countOf(bytes.TrimSpace(unescapedKey(raw[1 : len(raw)-1])))
	case c == '-' || c-'0' <= 9:
		if n, ok = integer(raw); ok {
			return n, true
		}
		f, err := strconv.ParseFloat(string(raw), 64)
		if err != nil || f != math.Trunc(f) {
			return 0, false
		}
		return int64(max(math.MinInt64, min(f, math.MaxInt64-1023))), true // the greatest float64 of an int64
	}
	return 0, false
}

// countOf reads a number from text: digits with single underscores between them, a sign before, zeros after a point.
func countOf(text []byte) (int64, bool) {
	if whole, zeros, point := bytes.Cut(text, []byte(".")); point {
		if len(zeros) == 0 || len(bytes.Trim(zeros, "0")) > 0 {
			return 0, false
		}
		text = whole
	}
	if len(text) == 0 || bytes.Contains(text, []byte("__")) || text[len(text)-1] == '_' {
		return 0, false
	}
	digits := bytes.TrimLeft(text, "+-")
	if len(text)-len(digits) > 1 || len(digits) == 0 || digits[0] == '_' {
		return 0, false
	}
	if bytes.IndexByte(text, '_') >= 0 {
		text = bytes.ReplaceAll(text, []byte("_"), nil)
	}
	n, err := strconv.ParseInt(string(text), 10, 64)
	return n, err == nil || errors.Is(err, strconv.ErrRange)
}

// boolean returns the truth value that engines read from a value. ok is false if they refuse it, and for
// null and nothing.
func boolean(raw []byte) (v, ok bool) {
	if len(raw) == 0 {
		return false, false
	}
	if raw[0] == '"' {
		switch text := unescapedKey(raw[1 : len(raw)-1]); {
		case isAny(text, "true", "t", "yes", "y", "on", "1"):
			return true, true
		case isAny(text, "false", "f", "no", "n", "off", "0"):
			return false, true
		}
		return false, false
	}
	n, ok := Count(raw)
	return n == 1, ok && (n == 0 || n == 1)
}

// isAny reports whether text is one of the words, in letters of any case.
func isAny(text []byte, words ...string) bool {
	for _, w := range words {
		if len(text) == len(w) && bytes.EqualFold(text, []byte(w)) {
			return true
		}
	}
	return false
}

// isTrue reports whether engines read true from a value.
func isTrue(raw []byte) bool {
	v, _ := boolean(raw)
	return v
}

// StreamOptionsAllowed reports whether an engine takes stream_options with the body's stream. vLLM looks whether that
// is empty before it is read as true or false, so the text "false" counts as a stream (0.32.0,
// chat_completion/protocol.py:825).
func (r *Request) StreamOptionsAllowed() bool {
	raw := r.Raw(FieldStream)
	return isTrue(raw) || len(raw) > 2 && raw[0] == '"'
}
