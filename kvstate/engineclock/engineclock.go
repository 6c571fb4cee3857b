// Package engineclock reads the clocks of vLLM's prefill engines, by which leases of KV end.
//
// vLLM counts leases by time.perf_counter of the process that runs its scheduler. The NIXL side channel of that process
// answers a handshake with its metadata and, from 0.26 on, with that clock (0.32.0, nixl/base_scheduler.py:340-378):
// decode engines learn it there, and so does this package. No step of the engine is needed for the answer.
//
// A clock is trusted for a few seconds and for one engine id: an engine that was started again has another one. Clocks
// run on between readings, and the reading counts from the moment at which its answer had arrived, so the result is
// never later than the engine's clock.
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
	trusted  = 10 * time.Second       // age of a reading at most
	patience = 250 * time.Millisecond // of a reading: a request waits for it
	pause    = time.Second            // after a side channel that did not answer
	maxKnown = 4096                   // side channels
	maxReply = 32 << 20               // bytes: the metadata of a model with many layers
)

// Clocks are the clocks of engines, by their side channels. It is safe for concurrent use.
type Clocks struct {
	mu    sync.Mutex
	known map[string]reading
}

// reading is what a side channel answered.
type reading struct {
	engine string
	clock  float64   // seconds; 0: it did not answer
	at     time.Time // when the answer had arrived
}

// New returns no clocks.
func New() *Clocks { return &Clocks{known: map[string]reading{}} }

// Now returns the earliest that the clock of an engine may show now, in seconds, at its side channel; false: it is not
// known, or another engine is there.
func (c *Clocks) Now(ctx context.Context, engine, host string, port int) (seconds float64, ok bool) {
	at := net.JoinHostPort(host, strconv.Itoa(port))
	c.mu.Lock()
	r, known := c.known[at]
	c.mu.Unlock()
	if known && r.clock == 0 && time.Since(r.at) < pause {
		return 0, false
	}
	if !known || r.clock == 0 || r.engine != engine || time.Since(r.at) > trusted {
		ctx, stop := context.WithTimeout(ctx, patience)
		defer stop()
		var err error
		if r, err = read(ctx, at); err != nil {
			r = reading{at: time.Now()}
		}
		c.mu.Lock()
		if len(c.known) >= maxKnown {
			clear(c.known)
		}
		c.known[at] = r
		c.mu.Unlock()
	}
	if r.clock == 0 || r.engine != engine {
		return 0, false
	}
	return r.clock + time.Since(r.at).Seconds(), true
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
