package main

import (
	"bytes"
	"fmt"
	"strconv"
	"strings"
)

// shape is one kind of request.
type shape struct {
	name, title string
	model       string // the pair of engines: instant or paced
	size        int    // of the client's body, bytes
	tokens      int    // of the answer
	stream      bool
	requests    int // in a round: about a second's worth for 16 clients
}

// allShapes returns all shapes. The longer stream separates the cost of a token from that of a request. A stream whose
// tokens all come at once travels in a few large pieces, unlike any real engine's; it shows the difference.
func allShapes() []shape {
	return []shape{
		{"json1k", "1 KB JSON", instant, 1 << 10, 16, false, 500},
		{"json220k", "220 KB JSON", instant, 220 << 10, 16, false, 100},
		{"json400k", "400 KB JSON", instant, 400 << 10, 16, false, 60}, // 100k tokens
		{"json1m", "1 MB JSON", instant, 1 << 20, 16, false, 40},
		{"sse256", "256-token SSE", paced, 1 << 10, 256, true, 32},
		{"sse16", "16-token SSE at once", instant, 1 << 10, 16, true, 200},
		{"sse1024", "1,024-token SSE", paced, 1 << 10, 1024, true, 32},
		{"sse256burst", "256-token SSE at once", instant, 1 << 10, 256, true, 300},
	}
}

func findShape(name string) (shape, error) {
	var names []string
	for _, s := range allShapes() {
		if s.name == name {
			return s, nil
		}
		names = append(names, s.name)
	}
	return shape{}, fmt.Errorf("-shapes: %q is none of %s", name, strings.Join(names, ", "))
}

// body is a client's chat completion and the floor's two bodies for it.
type body struct {
	client    []byte    // for Tandem
	prefill   []byte    // for P
	documents uint64    // that prompts begin with, in turn; 0: a new one for each
	first     [2][]byte // of client and prefill: the document's number, in the first message
	last      [2][]byte // the request's number, in the last message
}

// The places of the two numbers in a new body.
const (
	firstMark = "0000000000000000"
	lastMark  = "1111111111111111"
)

// kvPrefill asks a vLLM prefill engine with the NIXL connector to keep its blocks for a decode engine.
const kvPrefill = `{"kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,` +
	`"remote_block_ids":null,"remote_host":null,"remote_port":null},`

// newBody returns a chat completion of exactly the shape's size: a long first message and a short last one. Prompts are
// of so many documents, or all new.
func newBody(s shape, documents int) *body {
	text := func(stream bool, tokens, padding int) []byte {
		b := fmt.Appendf(nil, `{"model":%q,"messages":[{"role":"system","content":"%s You answer in few words. %s"},`+
			`{"role":"user","content":"And now? %s"}],"temperature":0,"max_tokens":`,
			s.model, firstMark, filler(padding), lastMark)
		b = strconv.AppendInt(b, int64(tokens), 10)
		if stream {
			b = append(b, `,"stream":true`...)
		}
		return append(b, `,"ignore_eos":true}`...)
	}
	padding := s.size - len(text(s.stream, s.tokens, 0))
	b := &body{client: text(s.stream, s.tokens, padding), documents: uint64(documents)}
	b.prefill = append([]byte(kvPrefill), text(false, 1, padding)[1:]...)
	b.mark()
	return b
}

// mark finds the places of the numbers in a body that has none yet.
func (b *body) mark() {
	for i, sent := range [2][]byte{b.client, b.prefill} {
		place := func(mark string) []byte {
			at := bytes.Index(sent, []byte(mark))
			return sent[at : at+len(mark)]
		}
		b.first[i], b.last[i] = place(firstMark), place(lastMark)
	}
}

// number sets the numbers for request n.
func (b *body) number(n uint64) {
	document := n
	if b.documents > 0 {
		document %= b.documents
	}
	for i := range b.first {
		digits(b.first[i], document)
		digits(b.last[i], n)
	}
}

// digits writes a number, the lowest digit first.
func digits(to []byte, n uint64) {
	for i := range to {
		to[i] = '0' + byte(n%10)
		n /= 10
	}
}

// filler returns n bytes of JSON string content: English with the line breaks and quotes of a real prompt.
func filler(n int) string {
	const line = `Disaggregated serving runs \"prefill\" and \"decode\" on different machines, so that neither ` +
		`waits for the other.\n`
	text := strings.Repeat(line, n/len(line)+1)[:n]
	if strings.HasSuffix(text, `\`) && !strings.HasSuffix(text, `\\`) {
		text = text[:n-1] + "."
	}
	return text
}

// cutParams returns the value of kv_transfer_params in P's answer, an object, as it stands there.
func cutParams(answer []byte) ([]byte, bool) {
	_, rest, found := bytes.Cut(answer, []byte(`"kv_transfer_params":`))
	rest = bytes.TrimLeft(rest, " ")
	if !found || len(rest) == 0 || rest[0] != '{' {
		return nil, false
	}
	depth := 0
	for i, c := range rest { // engines' names and addresses contain neither braces nor quotes
		switch c {
		case '{':
			depth++
		case '}':
			if depth--; depth == 0 {
				return rest[:i+1], true
			}
		}
	}
	return nil, false
}

// clone returns a copy of a body that has no number yet, for one client.
func (b *body) clone() *body {
	c := &body{client: bytes.Clone(b.client), prefill: bytes.Clone(b.prefill), documents: b.documents}
	c.mark()
	return c
}
