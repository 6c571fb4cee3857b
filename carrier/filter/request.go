package filter

import (
	"bytes"
	"math/rand/v2"
	"net/http"
	"slices"
	"strconv"
	"strings"

	"tandem/extproc/names"
	"tandem/extproc/openai"
	"tandem/extproc/pass"
	"tandem/extproc/paths"
)

// headerAttempt names the attempt of a request that begins again. Only a filter sets it, and takes it away.
const headerAttempt = "x-tandem-attempt"

// head has the headers of a request.
type head struct {
	memory []byte
	list   []headerAt
}

// headerAt is where a header lies in head.memory.
type headerAt struct{ name, value, end int }

// read copies the headers of a request: a goroutine reads them, while Envoy's may change.
func (h *head) read(e Envoy) {
	h.memory, h.list = make([]byte, 0, 1024), make([]headerAt, 0, 24)
	e.EachHeader(func(name, value []byte) {
		at := headerAt{name: len(h.memory)}
		h.memory = append(h.memory, name...)
		at.value = len(h.memory)
		h.memory = append(h.memory, value...)
		at.end = len(h.memory)
		h.list = append(h.list, at)
	})
}

// Extra returns a header; nil: the request has none, or an empty one.
func (h *head) Extra(name string) []byte {
	for _, at := range h.list {
		if at.end > at.value && string(h.memory[at.name:at.value]) == name {
			return h.memory[at.value:at.end:at.end]
		}
	}
	return nil
}

// twice returns the first header that has several values and may have only one; "": there is none. more are such
// headers that the settings name.
func (h *head) twice(more []string) string {
	for i, at := range h.list {
		name := h.memory[at.name:at.value]
		if at.end == at.value || !names.OneValue(name, more) {
			continue
		}
		for _, before := range h.list[:i] {
			if before.end > before.value && sameHeader(h.memory[before.name:before.value], name) &&
				!bytes.Equal(h.memory[before.value:before.end], h.memory[at.value:at.end]) {
				return string(name)
			}
		}
	}
	return ""
}

// sameHeader reports whether two names are of one header.
func sameHeader(a, b []byte) bool { return bytes.Equal(a, b) || bytes.Equal(primary(a), primary(b)) }

// primary returns the first of the two names that some headers have, and any other name as it is.
func primary(name []byte) []byte {
	switch string(name) {
	case names.HeaderGatewayObjective:
		return []byte(names.HeaderObjective)
	case names.HeaderGatewayFairness:
		return []byte(names.HeaderFairness)
	}
	return name
}

// either returns a header that has two names.
func (h *head) either(name, other string) []byte {
	if v := h.Extra(name); v != nil {
		return v
	}
	return h.Extra(other)
}

func (h *head) get(name string) string { return string(h.Extra(name)) }

// pass returns the headers that a pass reads. path is without a gateway's prefix; more are headers that settings name.
func (h *head) pass(path []byte, more []string) pass.Head {
	return pass.Head{
		Method: h.Extra(":method"), Path: path, Authority: h.Extra(":authority"),
		ContentType: h.Extra("content-type"), ContentEncoding: h.Extra("content-encoding"),
		Authorization: h.Extra("authorization"),
		Objective:     h.either(names.HeaderObjective, names.HeaderGatewayObjective),
		Fairness:      h.either(names.HeaderFairness, names.HeaderGatewayFairness),
		TTFT:          pass.Target{Name: names.HeaderTTFT, Value: h.Extra(names.HeaderTTFT)},
		TPOT:          pass.Target{Name: names.HeaderTPOT, Value: h.Extra(names.HeaderTPOT)},
		Explain:       h.Extra(names.HeaderExplain), More: h, Twice: h.twice(more),
	}
}

// identify names the request: by the client's own id if it is valid, else by a new one.
func (f *Filter) identify() {
	p := &f.m.pass
	sent := f.head.get(names.HeaderRequestID)
	path, _ := paths.WithoutPrefix(f.s.PathPrefixes, f.head.Extra(":path"))
	if f.resumed != nil { // the leg may have had others
		p.ID, p.ReservedAs = f.resumed.id, f.resumed.reservedAs
		if t := &f.resumed.ticket; t.Path != "" {
			path = []byte(t.Path)
		}
	} else { // clients may send an id many times
		p.ReservedAs = strconv.FormatUint(rand.Uint64(), 36) + strconv.FormatUint(rand.Uint64(), 36)
		p.ID, _ = pass.Name(sent)
	}
	if p.ID != sent {
		f.envoy.SetHeader(names.HeaderRequestID, p.ID)
	}
	f.id, p.Prefilled.ID = p.ID, p.ID
	f.reservedAs = p.ReservedAs
	p.Head = f.head.pass(path, f.s.Passes.Headers())
	if f.resumed != nil && f.resumed.ticket.Authority != "" {
		p.Head.Authority = []byte(f.resumed.ticket.Authority)
	}
}

// admit refuses requests that can be refused without their body, and reports whether the body has to be read.
func (f *Filter) admit(bodyless bool) (reads bool, err error) {
	h, passes := &f.m.pass.Head, f.s.Passes
	if f.resumed != nil {
		return true, nil
	}
	a := pass.Arrival{
		Upgrade: f.head.Extra("upgrade") != nil, Ended: bodyless, Length: f.head.Extra("content-length"),
		Reads: readsOther(string(h.ContentType), len(passes.State.Pools())),
	}
	if len(h.Path) > maxPath {
		a.Unfit = openai.HeadersTooLarge(http.StatusRequestURITooLong, "uri_too_long",
			"the path and query of the request are too long")
	}
	switch api, err := passes.Admit(h, a); {
	case err != nil:
		return false, err
	case api == openai.Models, api == openai.PassThrough && (bodyless || !a.Reads):
		return false, nil
	}
	if length, _ := strconv.Atoi(string(a.Length)); length > f.limit() {
		return false, openai.TooLarge(f.limit())
	}
	return true, nil
}

// maxPath bounds the path and query of a request, in bytes.
const maxPath = 8 << 10

// readsOther reports whether the body of a request that is never split is read: JSON, for members that a client must
// not send, and forms where their model decides about the pool.
func readsOther(contentType string, pools int) bool {
	kind := strings.ToLower(contentType)
	return strings.Contains(kind, "json") ||
		strings.Contains(kind, "multipart/form-data") && pools > 1
}

// limit returns the largest body that is read, in bytes.
func (f *Filter) limit() int {
	if f.resumed != nil { // the leg's
		return f.s.MaxBodyBytes + maxLegMore
	}
	return f.s.MaxBodyBytes
}

// dropped reports whether P's leg goes without a header of the client's: those of the connection, those that steer the
// request in Envoy, and those that change the form of an answer, which Tandem reads.
func dropped(name []byte) bool {
	switch string(name) {
	case "connection", "keep-alive", "proxy-connection", "transfer-encoding", "upgrade", "content-length", "host",
		":authority", ":path", "accept-encoding", names.HeaderEndpoint, names.HeaderRank,
		names.HeaderExplain:
		return true
	}
	return slices.Contains(names.FormHeaders, string(name)) ||
		bytes.HasPrefix(name, []byte("x-tandem-")) || bytes.HasPrefix(name, []byte("x-envoy-"))
}
