package redisclient

import (
	"bytes"
	"fmt"
	"net"
	"strconv"
	"sync/atomic"
)

// Bounds of what is read of Redis, in bytes: others who can write there may put anything under the keys that are read.
// The largest values of Tandem's own are P's answers (16 MiB), and answers to operators (8 MiB).
const (
	maxReply = 64 << 20 // of all replies to what was written at once
	maxValue = 32 << 20 // of one value in them
)

// perElement is what the client keeps of an element of an array at least, before it has come, in bytes.
const perElement = 16

// boundedConn closes a connection whose reply is too large before the client allocates memory for it: the client
// believes the lengths in the reply (go-redis 9.23, internal/proto/reader.go).
type boundedConn struct {
	net.Conn

	read atomic.Int64 // since the last Write
	skip int          // bytes of a value that are still to come
	line []byte       // the beginning of a line of RESP that is not complete
	err  error        // why nothing more is read: the client may look a second time
}

// maxLine bounds what is kept of a line: a type and a length are shorter.
const maxLine = 32

func (c *boundedConn) Write(b []byte) (int, error) {
	c.read.Store(0)
	return c.Conn.Write(b)
}

func (c *boundedConn) Read(b []byte) (int, error) {
	if c.err != nil {
		return 0, c.err
	}
	n, err := c.Conn.Read(b)
	read := c.read.Add(int64(n))
	if c.err = c.follow(b[:n], int(read)); c.err == nil && read > maxReply {
		c.err = fmt.Errorf("a reply of Redis is larger than %d MiB", maxReply>>20)
	}
	if c.err != nil {
		return 0, c.err
	}
	return n, err
}

// follow reads the lines between the values of what has come. read is how much that is since the last Write.
func (c *boundedConn) follow(b []byte, read int) error {
	for len(b) > 0 {
		if c.skip > 0 {
			n := min(c.skip, len(b))
			c.skip, b = c.skip-n, b[n:]
			continue
		}
		end := bytes.IndexByte(b, '\n')
		part := b
		if end >= 0 {
			part = b[:end+1]
		}
		c.line = append(c.line, part[:min(len(part), maxLine-len(c.line))]...)
		if b = b[len(part):]; end < 0 {
			return nil
		}
		if err := c.says(read - len(b)); err != nil {
			return err
		}
		c.line = c.line[:0]
	}
	return nil
}

// says checks the length in a line, if it has one. before is what has come up to here.
func (c *boundedConn) says(before int) error {
	line := bytes.TrimSpace(c.line)
	if len(line) < 2 {
		return nil
	}
	n, err := strconv.Atoi(string(line[1:]))
	if err != nil || n < 0 {
		return nil //nolint:nilerr // no length
	}
	switch line[0] {
	case '$', '=', '!':
		if n > maxValue || before+n > maxReply {
			return fmt.Errorf("a value in Redis has %d bytes, which is too much", n)
		}
		c.skip = n + len("\r\n")
	case '*', '~', '>', '%', '|':
		if n > maxReply/perElement {
			return fmt.Errorf("a list in Redis has %d elements, which is too much", n)
		}
	}
	return nil
}
