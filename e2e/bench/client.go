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
	answer []byte // of the last request
}

func dial(addr string) (*client, error) {
	conn, err := net.Dial("tcp", addr)
	if err != nil {
		return nil, err
	}
	return &client{conn: conn, in: bufio.NewReaderSize(conn, 64<<10), answer: make([]byte, 0, 64<<10)}, nil
}

func (c *client) close() { _ = c.conn.Close() }

// post sends one request, whose body is given in parts, and reads the answer into c.answer. The destination header is
// for the floor's Envoy. firstByte is the time of the answer body's first byte.
func (c *client) post(id uint64, destination string, parts ...[]byte) (firstByte time.Time, err error) {
	length := 0
	for _, p := range parts {
		length += len(p)
	}
	h := append(c.head[:0],
		"POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\naccept: "+
			"*/*\r\nx-request-id: bench-"...)
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
	if status != 200 {
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
		if value, ok := bytes.CutPrefix(line, []byte("content-length: ")); ok {
			length, err = strconv.Atoi(string(value))
			if err != nil {
				return 0, 0, false, err
			}
		}
		chunked = chunked || string(line) == "transfer-encoding: chunked"
	}
}

// line reads a line without its end. Envoy writes header names in lower case.
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

// ask sends request id of a shape to a stack: one request through Tandem, two through the floor.
func (c *client) ask(s *stack, sh shape, b *body, id uint64) (firstByte time.Time, err error) {
	b.number(id)
	if s.name != floorName {
		firstByte, err = c.post(id, "", b.client)
	} else {
		firstByte, err = c.askTwice(s.pairs[sh.model], b, id)
	}
	if err == nil {
		err = c.check(sh)
	}
	return firstByte, err
}

// askTwice makes the two requests of the floor's client, to the pairs in turn.
func (c *client) askTwice(pairs []pair, b *body, id uint64) (firstByte time.Time, err error) {
	p := pairs[id%uint64(len(pairs))]
	if _, err := c.post(id, p.prefill, b.prefill); err != nil {
		return firstByte, fmt.Errorf("prefill: %w", err)
	}
	params, ok := cutParams(c.answer)
	if !ok {
		return firstByte, fmt.Errorf("prefill: no KV parameters in %.300s", c.answer)
	}
	return c.post(id, p.decode, []byte(`{"kv_transfer_params":`), params, []byte(","), b.client[1:])
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
