package main

import (
	"bytes"
	"fmt"
	"time"

	"tandem/e2e/bench/http1"
)

// client asks stacks over one connection, or one to each engine.
type client struct{ *http1.Conn }

// ask sends request id of a shape to a stack: one request through a router, two where the client is the router.
func (c *client) ask(s *stack, sh shape, b *body, id uint64) (firstByte time.Time, err error) {
	b.number(id)
	switch pairs := s.pairs[sh.model]; s.name {
	case floorName:
		firstByte, err = c.askTwice(c.Conn, c.Conn, pairs[id%uint64(len(pairs))], b, id)
	case directName:
		firstByte, err = c.askDirectly(pairs[id%uint64(len(pairs))], b, id)
	case dynamoName:
		firstByte, err = c.askDynamo(s, sh.model, b, id)
	default:
		firstByte, err = c.Post(id, "", b.client)
	}
	if err == nil {
		err = c.check(sh)
	}
	return firstByte, err
}

// askTwice makes the two requests of a disaggregated answer over the given connections.
func (c *client) askTwice(prefill, decode *http1.Conn, p pair, b *body, id uint64) (firstByte time.Time, err error) {
	if _, err := prefill.Post(id, p.prefill, b.prefill); err != nil {
		return firstByte, fmt.Errorf("prefill: %w", err)
	}
	params, ok := cutParams(prefill.Answer)
	if !ok {
		return firstByte, fmt.Errorf("prefill: no KV parameters in %.300s", prefill.Answer)
	}
	firstByte, err = decode.Post(id, p.decode, []byte(`{"kv_transfer_params":`), params, []byte(","), b.client[1:])
	c.Answer = decode.Answer
	return firstByte, err
}

// askDirectly makes them without an Envoy.
func (c *client) askDirectly(p pair, b *body, id uint64) (firstByte time.Time, err error) {
	prefill, err := c.At(p.prefill)
	if err != nil {
		return firstByte, err
	}
	decode, err := c.At(p.decode)
	if err != nil {
		return firstByte, err
	}
	return c.askTwice(prefill, decode, p, b, id)
}

// check checks that the measured answer is one.
func (c *client) check(sh shape) error {
	if !sh.stream {
		if !bytes.Contains(c.Answer, []byte(`"choices"`)) {
			return fmt.Errorf("not an answer: %.300s", c.Answer)
		}
		return nil
	}
	if n := bytes.Count(c.Answer, []byte("data: ")); n < sh.tokens ||
		!bytes.HasSuffix(c.Answer, []byte("data: [DONE]\n\n")) {
		return fmt.Errorf("a stream of %d events for %d tokens: %.300s", n, sh.tokens, c.Answer)
	}
	return nil
}
