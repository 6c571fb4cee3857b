package openai

import (
	"bytes"
	"fmt"
	"strconv"
	"strings"
	"unicode/utf8"
)

// Request is a scanned body. The zero value is ready; Scan may be called again and reuses all memory. It refers to the
// scanned body and is valid as long as that is. It is for one goroutine at a time.
type Request struct {
	document
	api     API
	index   [numFields]int16 // 1-based position among the top members; 0: absent
	control bool
	model   string
}

// Scan validates the body and finds its members. An error is an [*Error] with status 400 (413 beyond 2 GiB), and
// leaves a request without members.
func (r *Request) Scan(api API, body []byte, lim Limits) error {
	r.api, r.control = api, false
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
	return nil
}

// Reset drops the body, so that a pooled Request does not keep its memory, and leaves a request without members.
func (r *Request) Reset() {
	r.body = nil
	r.forget()
}

func (r *Request) forget() {
	r.index, r.control, r.model = [numFields]int16{}, false, ""
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

// API returns the API that the body was scanned for.
func (r *Request) API() API { return r.api }

// Body returns the scanned body.
func (r *Request) Body() []byte { return r.body }

// Model returns the requested model, valid UTF-8; "" if the body names none.
func (r *Request) Model() string { return r.model }

// Has reports whether the body has the member, null or not.
func (r *Request) Has(f Field) bool { return r.index[f] > 0 }

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
