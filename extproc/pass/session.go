package pass

import (
	"bytes"
	"strings"

	"github.com/cespare/xxhash/v2"

	"tandem/extproc/plan"
)

// SessionKey is where a request's session name comes from: the first of these that it has. Zero: none.
type SessionKey struct {
	Header string // lower case
	Cookie string
	Body   string // a top-level member with a string
}

// sessionHeaders returns the headers with the session names or labels of any pool. The pool of a request is known
// only after its body has arrived, so all of them are kept until then.
func sessionHeaders(pools map[string]Policy) (names []string) {
	for _, p := range pools {
		if p.Session.Header != "" {
			names = append(names, p.Session.Header)
		}
		if p.Session.Cookie != "" {
			names = append(names, "cookie")
		}
		if p.LabelHeader != "" {
			names = append(names, p.LabelHeader)
		}
	}
	return names
}

// of returns the hash of the name of a request's session; 0: none. The kind of source is part of it, so a header's
// value never equals a cookie's.
func (k SessionKey) of(h *Head, r *plan.Request) uint64 {
	if k == (SessionKey{}) {
		return 0
	}
	if v := h.extra(k.Header); k.Header != "" && len(v) > 0 {
		return sessionHash('h', v)
	}
	if v := cookie(h.extra("cookie"), k.Cookie); k.Cookie != "" && len(v) > 0 {
		return sessionHash('c', v)
	}
	if v := r.Client.Text(k.Body); k.Body != "" && len(v) > 0 {
		return sessionHash('b', v)
	}
	return 0
}

func sessionHash(kind byte, name []byte) uint64 {
	var d xxhash.Digest
	d.ResetWithSeed(uint64(kind))
	_, _ = d.Write(name)
	return d.Sum64() | 1
}

// cookie returns the value of a cookie in a Cookie header (RFC 6265, 4.2.1).
func cookie(header []byte, name string) []byte {
	for len(header) > 0 {
		var pair []byte
		pair, header, _ = bytes.Cut(header, []byte(";"))
		key, value, _ := bytes.Cut(bytes.TrimSpace(pair), []byte("="))
		if string(key) == name {
			return bytes.Trim(value, `"`)
		}
	}
	return nil
}

// lower converts a configured header name to its form on the wire.
func (k SessionKey) lower() SessionKey {
	k.Header = strings.ToLower(k.Header)
	return k
}
