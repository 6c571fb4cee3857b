// Package capacity finds the rate at which a latency doubles, and holds streams open.
package capacity

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"math"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// step is the factor between rates. At the end one in the middle of the last two is tried.
const step = 1.5

// Doubles returns the latency at the lowest rate, and the highest rate at which it was less than twice that. A rate is
// too high if it was so in both of two tries: machines falter.
func Doubles(
	lowest float64, measure func(rate float64) (time.Duration, error),
) (low time.Duration, held float64, err error) {
	if low, err = measure(lowest); err != nil {
		return 0, 0, err
	}
	holds := func(rate float64) bool {
		for range 2 {
			latency, failed := measure(rate)
			if err = failed; err != nil {
				return false
			}
			if latency < 2*low {
				held = rate
				return true
			}
		}
		return false
	}
	held = lowest
	for more := true; more; {
		more = holds(held * step)
	}
	if err == nil {
		holds(held * math.Sqrt(step))
	}
	return low, held, err
}

// Streams are answers that go on until they are closed.
type Streams struct {
	addr    string
	body    func() []byte
	conns   []net.Conn
	readers sync.WaitGroup
	closed  atomic.Bool
	ended   atomic.Int64
}

// NewStreams returns none. Each will ask an address with a body of its own.
func NewStreams(addr string, body func() []byte) *Streams { return &Streams{addr: addr, body: body} }

// atOnce are so many streams that open at the same time.
const atOnce = 64

// Open opens streams until n are open, and returns when all have got a token.
func (s *Streams) Open(ctx context.Context, n int) error {
	for missing := n - len(s.conns); missing > 0; missing = n - len(s.conns) {
		opened := make(chan error, atOnce)
		var mu sync.Mutex
		batch := min(missing, atOnce)
		for range batch {
			body := s.body()
			go func() {
				conn, err := s.open(ctx, body)
				if err == nil {
					mu.Lock()
					s.conns = append(s.conns, conn)
					mu.Unlock()
				}
				opened <- err
			}()
		}
		var failed error
		for range batch {
			if err := <-opened; err != nil {
				failed = err
			}
		}
		if failed != nil {
			return fmt.Errorf("opening stream %d: %w", len(s.conns)+1, failed)
		}
	}
	return nil
}

func (s *Streams) open(ctx context.Context, body []byte) (net.Conn, error) {
	conn, err := new(net.Dialer).DialContext(ctx, "tcp", s.addr)
	if err != nil {
		return nil, err
	}
	_ = conn.SetDeadline(time.Now().Add(time.Minute))
	head := fmt.Appendf(nil, "POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"+
		"content-length: %d\r\n\r\n", len(body))
	if _, err := conn.Write(append(head, body...)); err != nil {
		return nil, err
	}
	in := bufio.NewReaderSize(conn, 512) // thousands of them
	line, err := in.ReadString('\n')
	if err == nil && !strings.Contains(line, " 200 ") {
		return nil, fmt.Errorf("not a stream: %s", line)
	}
	for err == nil && !strings.HasPrefix(line, "data: ") {
		line, err = in.ReadString('\n')
	}
	if err != nil {
		return nil, err
	}
	_ = conn.SetDeadline(time.Time{})
	s.readers.Go(func() {
		_, _ = io.Copy(io.Discard, conn)
		if !s.closed.Load() {
			s.ended.Add(1)
		}
	})
	return conn, nil
}

// Ended returns how many streams ended by themselves.
func (s *Streams) Ended() int64 { return s.ended.Load() }

// Close closes all of them.
func (s *Streams) Close() {
	s.closed.Store(true)
	for _, c := range s.conns {
		_ = c.Close()
	}
	s.readers.Wait()
}
