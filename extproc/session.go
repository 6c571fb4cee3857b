package extproc

import (
	"bytes"
	"strings"

	"github.com/cespare/xxhash/v2"

	"tandem/kvstate"
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

// sessionOf returns the hash of the name of the request's session; 0: none. The kind of source is part of it, so a
// header's value never equals a cookie's.
func (x *planning) sessionOf(k SessionKey) uint64 {
	if k == (SessionKey{}) {
		return 0
	}
	h := &x.msg.Headers
	if v := h.Extra(k.Header); k.Header != "" && len(v) > 0 {
		return sessionHash('h', v)
	}
	if v := cookie(h.Extra("cookie"), k.Cookie); k.Cookie != "" && len(v) > 0 {
		return sessionHash('c', v)
	}
	if v := x.req.Text(k.Body); k.Body != "" && len(v) > 0 {
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

// setAffinity records the endpoints that serve the request's session.
func (x *planning) setAffinity(pool *kvstate.Pool, session uint64, prefill, decode *kvstate.Endpoint) {
	if session != 0 {
		x.s.State.SetAffinity(pool, session, prefill, decode)
	}
}

// lower converts a configured header name to its form on the wire.
func (k SessionKey) lower() SessionKey {
	k.Header = strings.ToLower(k.Header)
	return k
}
