// Package http1 is the client of the measurements.
package http1

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

// Conn is one HTTP/1.1 connection with one request after the other. net/http writes a request in pieces and costs
// more CPU than the measured Envoy; this writes head and body in one call.
type Conn struct {
	conn   net.Conn
	in     *bufio.Reader
	head   []byte
	Answer []byte           // of the last request
	others map[string]*Conn // by address, for requests that do not go to the stack's own
}

// Dial connects.
func Dial(addr string) (*Conn, error) {
	conn, err := net.Dial("tcp", addr)
	if err != nil {
		return nil, err
	}
	return &Conn{conn: conn, in: bufio.NewReaderSize(conn, 64<<10), Answer: make([]byte, 0, 64<<10)}, nil
}

// Close closes it, and those to other addresses.
func (c *Conn) Close() {
	_ = c.conn.Close()
	for _, o := range c.others {
		o.Close()
	}
}

// At returns the client's connection to another address.
func (c *Conn) At(addr string) (*Conn, error) {
	if o := c.others[addr]; o != nil {
		return o, nil
	}
	o, err := Dial(addr)
	if err != nil {
		return nil, err
	}
	if c.others == nil {
		c.others = map[string]*Conn{}
	}
	c.others[addr] = o
	return o, nil
}

// Post sends a chat completion. The destination header is for the floor's Envoy.
func (c *Conn) Post(id uint64, destination string, parts ...[]byte) (firstByte time.Time, err error) {
	return c.Send("POST /v1/chat/completions", id, destination, parts...)
}

// Send sends one request, whose body is given in parts, and reads the answer into c.Answer. line is its method and
// path. firstByte is the time of the answer body's first byte.
func (c *Conn) Send(line string, id uint64, destination string, parts ...[]byte) (firstByte time.Time, err error) {
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
	c.Answer = c.Answer[:0]
	if chunked {
		firstByte, err = c.readChunks()
	} else {
		firstByte, err = time.Now(), c.readBytes(length)
	}
	if err != nil {
		return firstByte, fmt.Errorf("reading the answer: %w", err)
	}
	if status/100 != 2 {
		return firstByte, fmt.Errorf("status %d: %.300s", status, c.Answer)
	}
	return firstByte, nil
}

func (c *Conn) readHead() (status, length int, chunked bool, err error) {
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
func (c *Conn) line() ([]byte, error) {
	line, err := c.in.ReadSlice('\n')
	return bytes.TrimRight(line, "\r\n"), err
}

func (c *Conn) readBytes(n int) error {
	at := len(c.Answer)
	if cap(c.Answer) < at+n {
		c.Answer = append(make([]byte, 0, 2*(at+n)), c.Answer...)
	}
	c.Answer = c.Answer[:at+n]
	_, err := io.ReadFull(c.in, c.Answer[at:])
	return err
}

func (c *Conn) readChunks() (firstByte time.Time, err error) {
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
