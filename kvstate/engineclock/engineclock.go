// Package engineclock reads the clocks of vLLM's prefill engines. Leases of KV end by these clocks.
//
// vLLM counts leases by time.perf_counter of the process that runs its scheduler. The NIXL side channel of that process
// answers a handshake with its metadata and, from 0.26 on, with that clock (0.32.0, nixl/base_scheduler.py:340-378):
// decode engines learn it there, and so does this package. No step of the engine is needed for the answer.
//
// A reading is good for one engine id: an engine that was started again has another one. After a few seconds it is
// repeated, by one question for all requests. Until the answer comes, and while the engine is too busy to answer, the
// old reading stays in use. Clocks run on between readings, and the reading counts from the moment at which its answer
// had arrived, so the result is later than the engine's clock only by what the two clocks drift apart in a minute (6 ms
// at 100 ppm).
package engineclock

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"net"
	"strconv"
	"sync"
	"time"

	"github.com/vmihailenco/msgpack/v5"

	"tandem/internal/zmtp"
)

const (
	fresh    = 10 * time.Second // age from which on a reading is repeated
	trusted  = time.Minute      // age of a reading at most
	patience = time.Second      // of a question; requests that have no reading wait for it
	pause    = time.Second      // after a side channel that did not answer
	maxKnown = 4096             // side channels
	maxReply = 32 << 20         // bytes: the metadata of a model with many layers
)

// Clocks are the clocks of engines, by their side channels. It is safe for concurrent use.
type Clocks struct {
	mu    sync.Mutex
	known map[string]*sideChannel
}

type sideChannel struct {
	last   reading
	failed time.Time     // when it last did not answer
	asked  chan struct{} // closed when the question has ended; nil: there is none
}

// reading is what a side channel answered.
type reading struct {
	engine string
	clock  float64   // seconds; 0: none
	at     time.Time // when the answer had arrived
}

// New returns no clocks.
func New() *Clocks { return &Clocks{known: map[string]*sideChannel{}} }

// Now returns the earliest that the clock of an engine may show now, in seconds, at its side channel; false: it is not
// known, or another engine is there.
func (c *Clocks) Now(ctx context.Context, engine, host string, port int) (seconds float64, ok bool) {
	at := net.JoinHostPort(host, strconv.Itoa(port))
	c.mu.Lock()
	s := c.channel(at, engine)
	last, asked := s.last, s.asked
	c.mu.Unlock()
	if seconds, ok = last.now(engine); ok || asked == nil {
		return seconds, ok
	}
	select {
	case <-asked:
	case <-ctx.Done():
	}
	c.mu.Lock()
	last = s.last
	c.mu.Unlock()
	return last.now(engine)
}

// channel returns a side channel. It begins a question if the reading is another engine's or not fresh. The caller
// holds the lock.
func (c *Clocks) channel(at, engine string) *sideChannel {
	s := c.known[at]
	if s == nil {
		if len(c.known) >= maxKnown {
			clear(c.known)
		}
		s = &sideChannel{}
		c.known[at] = s
	}
	good := s.last.engine == engine && time.Since(s.last.at) < fresh
	if !good && s.asked == nil && time.Since(s.failed) >= pause {
		s.asked = make(chan struct{})
		go c.ask(s, at)
	}
	return s
}

// ask asks a side channel. It outlasts the request that began it, because others wait for it, too.
func (c *Clocks) ask(s *sideChannel, at string) {
	ctx, stop := context.WithTimeout(context.Background(), patience)
	defer stop()
	r, err := read(ctx, at)
	c.mu.Lock()
	defer c.mu.Unlock()
	if err == nil {
		s.last = r
	} else {
		s.failed = time.Now()
	}
	close(s.asked)
	s.asked = nil
}

// now returns what the clock shows by now, if the reading is of the engine and not too old.
func (r *reading) now(engine string) (seconds float64, ok bool) {
	age := time.Since(r.at)
	if r.clock == 0 || r.engine != engine || age > trusted {
		return 0, false
	}
	return r.clock + age.Seconds(), true
}

// question asks rank 0 for its metadata: a msgpack array of the message's name, pipeline rank and tensor rank.
func question() []byte {
	const name = "get_meta_msg"
	return append(append([]byte{0x93, 0xc4, byte(len(name))}, name...), 0, 0)
}

// read asks a side channel, a ROUTER that expects a REQ's empty frame.
func read(ctx context.Context, at string) (reading, error) {
	conn, err := zmtp.Dial(ctx, at, zmtp.Dealer, maxReply)
	if err != nil {
		return reading{}, fmt.Errorf("connecting to the side channel %s: %w", at, err)
	}
	defer conn.Close()
	if deadline, ok := ctx.Deadline(); ok {
		conn.SetReadDeadline(deadline)
	}
	if err := conn.Send(nil, question()); err != nil {
		return reading{}, fmt.Errorf("asking the side channel %s: %w", at, err)
	}
	frames, err := conn.Read()
	if err != nil {
		return reading{}, fmt.Errorf("reading the side channel %s: %w", at, err)
	}
	return parse(frames, time.Now())
}

var errNoClock = errors.New("the side channel says no clock: vLLM before 0.26, or another program")

// parse reads an answer: an empty frame, the metadata, the clock as a msgpack float.
func parse(frames [][]byte, at time.Time) (reading, error) {
	if len(frames) != 3 || len(frames[2]) != 9 || frames[2][0] != 0xcb {
		return reading{}, errNoClock
	}
	r := reading{at: at, clock: math.Float64frombits(binary.BigEndian.Uint64(frames[2][1:]))}
	if !(r.clock > 0 && r.clock < 1<<40) {
		return reading{}, errNoClock
	}
	inner, err := member(frames[1], "agent_metadata_bytes", (*msgpack.Decoder).DecodeBytes)
	if err != nil {
		return reading{}, err
	}
	r.engine, err = member(inner, "engine_id", (*msgpack.Decoder).DecodeString)
	return r, err
}

// member returns a member of a msgpack map.
func member[T any](text []byte, name string, decode func(*msgpack.Decoder) (T, error)) (value T, err error) {
	d := msgpack.NewDecoder(bytes.NewReader(text))
	n, err := d.DecodeMapLen()
	for ; err == nil && n > 0; n-- {
		var key string
		if key, err = d.DecodeString(); err != nil {
			break
		}
		if key == name {
			return decode(d)
		}
		err = d.Skip()
	}
	return value, fmt.Errorf("%s of an engine's metadata: %w", name, errors.Join(err, errNoClock))
}
