package engineclock

import (
	"context"
	"encoding/binary"
	"math"
	"net"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-zeromq/zmq4"
	"github.com/stretchr/testify/require"
	"github.com/vmihailenco/msgpack/v5"
)

// metadata is what vLLM 0.32.0 answers before the clock, as far as it is read.
func metadata(t *testing.T, engine string) []byte {
	inner, err := msgpack.Marshal(map[string]any{
		"agent_metadata": []byte{1, 2}, "kv_caches_base_addr": []int{7}, "engine_id": engine})
	require.NoError(t, err)
	outer, err := msgpack.Marshal(map[string]any{"compatibility_hash": "x", "agent_metadata_bytes": inner})
	require.NoError(t, err)
	return outer
}

func float(v float64) []byte {
	return binary.BigEndian.AppendUint64([]byte{0xcb}, math.Float64bits(v))
}

// listen starts a side channel, a ROUTER that answers as engine, with a clock that stands at clock.
func listen(t *testing.T, engine *atomic.Value, clock float64) (port int, asked *atomic.Int64) {
	ctx, stop := context.WithCancel(context.Background())
	router := zmq4.NewRouter(ctx)
	require.NoError(t, router.Listen("tcp://127.0.0.1:0"))
	t.Cleanup(func() { stop(); _ = router.Close() })
	asked = &atomic.Int64{}
	go func() {
		for {
			m, err := router.Recv()
			if err != nil {
				return
			}
			asked.Add(1)
			var question []any
			if len(m.Frames) != 3 || len(m.Frames[1]) != 0 || msgpack.Unmarshal(m.Frames[2], &question) != nil ||
				len(question) != 3 || string(question[0].([]byte)) != "get_meta_msg" {
				continue
			}
			_ = router.Send(zmq4.NewMsgFrom(m.Frames[0], nil, metadata(t, engine.Load().(string)), float(clock))) //nolint:testifylint // it cannot fail
		}
	}()
	return router.Addr().(*net.TCPAddr).Port, asked
}

func TestClock(t *testing.T) {
	var engine atomic.Value
	engine.Store("a")
	port, asked := listen(t, &engine, 4093.5)
	c := New()
	now := func(engine string) (float64, bool) {
		var seconds float64
		var ok bool
		require.Eventually(t, func() bool { // a machine that stands still takes longer than a request may wait
			seconds, ok = c.Now(t.Context(), engine, "127.0.0.1", port)
			return ok
		}, time.Minute, time.Millisecond)
		return seconds, ok
	}
	before := time.Now()
	first, _ := now("a")
	require.InDelta(t, 4093.5, first, time.Since(before).Seconds()+.001)
	n := asked.Load()
	again, ok := c.Now(t.Context(), "a", "127.0.0.1", port)
	require.True(t, ok)
	require.GreaterOrEqual(t, again, first, "it runs on")
	require.Equal(t, n, asked.Load(), "it is remembered")

	_, ok = c.Now(t.Context(), "b", "127.0.0.1", port)
	require.False(t, ok, "another engine is there")
	_, ok = c.Now(t.Context(), "a", "127.0.0.1", port)
	require.True(t, ok, "as it was asked by its address")
	engine.Store("b")
	_, ok = now("b")
	require.True(t, ok, "it was started again")
}

func TestNobodyAnswers(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	_, text, _ := net.SplitHostPort(l.Addr().String())
	port, _ := strconv.Atoi(text)
	defer l.Close() // it accepts, and says nothing
	c := New()
	_, ok := c.Now(t.Context(), "a", "127.0.0.1", port)
	require.False(t, ok)
	began := time.Now()
	for range 100 {
		_, ok = c.Now(t.Context(), "a", "127.0.0.1", port)
		require.False(t, ok)
	}
	require.Less(t, time.Since(began), time.Minute, "not each request waits for it")
}

// An engine that is too busy to answer keeps the clock that it had, for a minute, and no request waits.
func TestBusyEngine(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close() // it accepts, and says nothing
	for age, known := range map[time.Duration]bool{fresh + time.Second: true, trusted + time.Second: false} {
		c := New()
		c.known[l.Addr().String()] = &sideChannel{last: reading{engine: "a", clock: 100, at: time.Now().Add(-age)}}
		ctx, stop := context.WithCancel(t.Context())
		stop()
		seconds, ok := c.Now(ctx, "a", "127.0.0.1", l.Addr().(*net.TCPAddr).Port)
		require.Equal(t, known, ok, age)
		if known {
			require.InDelta(t, 100+age.Seconds(), seconds, 60)
		}
	}
}

// Requests that come together ask once.
func TestOneQuestion(t *testing.T) {
	var engine atomic.Value
	engine.Store("a")
	port, asked := listen(t, &engine, 4093.5)
	c := New()
	var all sync.WaitGroup
	for range 100 {
		all.Go(func() { _, _ = c.Now(t.Context(), "a", "127.0.0.1", port) })
	}
	all.Wait()
	require.LessOrEqual(t, asked.Load(), int64(2), "a machine that stands still may ask again after a second")
}

func TestParse(t *testing.T) {
	good := metadata(t, "a")
	for name, frames := range map[string][][]byte{
		"before 0.26": {nil, good}, "no clock": {nil, good, float(0)}, "no number": {nil, good, float(math.NaN())},
		"endless": {nil, good, float(math.Inf(1))}, "an integer": {nil, good, {1}}, "no map": {nil, {0x93}, float(1)},
		"another program": {{0x80}, {0x80}, float(1)}, "nothing": nil,
	} {
		_, err := parse(frames, time.Now())
		require.Error(t, err, name)
	}
}

func FuzzParse(f *testing.F) {
	f.Add([]byte{0x81, 0xa1}, float(1))
	f.Fuzz(func(t *testing.T, meta, clock []byte) {
		r, err := parse([][]byte{nil, meta, clock}, time.Now())
		if err == nil {
			require.Positive(t, r.clock)
		}
	})
}
