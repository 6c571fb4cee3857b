package main

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"time"
)

// client is one HTTP/1.1 connection with one request after the other. net/http writes a request in pieces and costs
// more CPU than the measured Envoy; this writes head and body in one call.
type client struct {
	conn   net.Conn
	in     *bufio.Reader
	head   []byte
	answer []byte             // of the last request
	others map[string]*client // by address, for requests that do not go to the stack's own
}

func dial(addr string) (*client, error) {
	conn, err := net.Dial("tcp", addr)
	if err != nil {
		return nil, err
	}
	return &client{conn: conn, in: bufio.NewReaderSize(conn, 64<<10), answer: make([]byte, 0, 64<<10)}, nil
}

func (c *client) close() {
	_ = c.conn.Close()
	for _, o := range c.others {
		o.close()
	}
}

// at returns the client's connection to another address.
func (c *client) at(addr string) (*client, error) {
	if o := c.others[addr]; o != nil {
		return o, nil
	}
	o, err := dial(addr)
	if err != nil {
		return nil, err
	}
	if c.others == nil {
		c.others = map[string]*client{}
	}
	c.others[addr] = o
	return o, nil
}

// post sends a chat completion. The destination header is for the floor's Envoy.
func (c *client) post(id uint64, destination string, parts ...[]byte) (firstByte time.Time, err error) {
	return c.send("POST /v1/chat/completions", id, destination, parts...)
}

// send sends one request, whose body is given in parts, and reads the answer into c.answer. line is its method and
// path. firstByte is the time of the answer body's first byte.
func (c *client) send(line string, id uint64, destination string, parts ...[]byte) (firstByte time.Time, err error) {
	length := 0
	for _, p := range parts {
		length += len(p)
	}
	h := append(append(c.head[:0], line...), " HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"+
		"accept: */*\r\nx-request-id: bench-"...)
	h = strconv.AppendUint(h, id, 10)
	if destination != "" {
		h = append(append(h, "\r\nx-gateway-destination-endpoint: "...), destination...)
	}
	h = strconv.AppendInt(append(h, "\r\ncontent-length: "...), int64(length), 10)
	c.head = append(h, "\r\n\r\n"...)
	out := append(net.Buffers{c.head}, parts...)
	_ = c.conn.SetDeadline(time.Now().Add(time.Minute))
	if _, err := out.WriteTo(c.conn); err != nil { // one writev
		return firstByte, fmt.Errorf("sending: %w", err)
	}
	status, length, chunked, err := c.readHead()
	if err != nil {
		return firstByte, fmt.Errorf("reading the answer's head: %w", err)
	}
	c.answer = c.answer[:0]
	if chunked {
		firstByte, err = c.readChunks()
	} else {
		firstByte, err = time.Now(), c.readBytes(length)
	}
	if err != nil {
		return firstByte, fmt.Errorf("reading the answer: %w", err)
	}
	if status/100 != 2 {
		return firstByte, fmt.Errorf("status %d: %.300s", status, c.answer)
	}
	return firstByte, nil
}

func (c *client) readHead() (status, length int, chunked bool, err error) {
	line, err := c.line()
	if err != nil {
		return 0, 0, false, err
	}
	if _, err := fmt.Sscanf(string(line), "HTTP/1.1 %d", &status); err != nil {
		return 0, 0, false, fmt.Errorf("%q: %w", line, err)
	}
	for {
		line, err := c.line()
		if err != nil || len(line) == 0 {
			return status, length, chunked, err
		}
		name, value, _ := bytes.Cut(line, []byte(": "))
		switch {
		case bytes.EqualFold(name, []byte("content-length")):
			length, err = strconv.Atoi(string(value))
			if err != nil {
				return 0, 0, false, err
			}
		case bytes.EqualFold(name, []byte("transfer-encoding")):
			chunked = string(value) == "chunked"
		}
	}
}

// line reads a line without its end.
func (c *client) line() ([]byte, error) {
	line, err := c.in.ReadSlice('\n')
	return bytes.TrimRight(line, "\r\n"), err
}

func (c *client) readBytes(n int) error {
	at := len(c.answer)
	if cap(c.answer) < at+n {
		c.answer = append(make([]byte, 0, 2*(at+n)), c.answer...)
	}
	c.answer = c.answer[:at+n]
	_, err := io.ReadFull(c.in, c.answer[at:])
	return err
}

func (c *client) readChunks() (firstByte time.Time, err error) {
	for {
		line, err := c.line()
		if err != nil {
			return firstByte, err
		}
		n, err := strconv.ParseUint(string(line), 16, 32)
		if err != nil {
			return firstByte, err
		}
		if firstByte.IsZero() {
			firstByte = time.Now()
		}
		if err := c.readBytes(int(n)); err != nil {
			return firstByte, err
		}
		if line, err = c.line(); err != nil || len(line) != 0 {
			return firstByte, errors.Join(err, io.ErrUnexpectedEOF)
		}
		if n == 0 {
			return firstByte, nil
		}
	}
}

// ask sends request id of a shape to a stack: one request through a router, two where the client is the router.
func (c *client) ask(s *stack, sh shape, b *body, id uint64) (firstByte time.Time, err error) {
	b.number(id)
	switch pairs := s.pairs[sh.model]; s.name {
	case floorName:
		firstByte, err = c.askTwice(c, c, pairs[id%uint64(len(pairs))], b, id)
	case directName:
		firstByte, err = c.askDirectly(pairs[id%uint64(len(pairs))], b, id)
	case dynamoName:
		firstByte, err = c.askDynamo(s, sh.model, b, id)
	default:
		firstByte, err = c.post(id, "", b.client)
	}
	if err == nil {
		err = c.check(sh)
	}
	return firstByte, err
}

// askTwice makes the two requests of a disaggregated answer over the given connections.
func (c *client) askTwice(prefill, decode *client, p pair, b *body, id uint64) (firstByte time.Time, err error) {
	if _, err := prefill.post(id, p.prefill, b.prefill); err != nil {
		return firstByte, fmt.Errorf("prefill: %w", err)
	}
	params, ok := cutParams(prefill.answer)
	if !ok {
		return firstByte, fmt.Errorf("prefill: no KV parameters in %.300s", prefill.answer)
	}
	firstByte, err = decode.post(id, p.decode, []byte(`{"kv_transfer_params":`), params, []byte(","), b.client[1:])
	c.answer = decode.answer
	return firstByte, err
}

// askDirectly makes them without an Envoy.
func (c *client) askDirectly(p pair, b *body, id uint64) (firstByte time.Time, err error) {
	prefill, err := c.at(p.prefill)
	if err != nil {
		return firstByte, err
	}
	decode, err := c.at(p.decode)
	if err != nil {
		return firstByte, err
	}
	return c.askTwice(prefill, decode, p, b, id)
}

// check checks that the measured answer is one.
func (c *client) check(sh shape) error {
	if !sh.stream {
		if !bytes.Contains(c.answer, []byte(`"choices"`)) {
			return fmt.Errorf("not an answer: %.300s", c.answer)
		}
		return nil
	}
	if n := bytes.Count(c.answer, []byte("data: ")); n < sh.tokens ||
		!bytes.HasSuffix(c.answer, []byte("data: [DONE]\n\n")) {
		return fmt.Errorf("a stream of %d events for %d tokens: %.300s", n, sh.tokens, c.answer)
	}
	return nil
}
