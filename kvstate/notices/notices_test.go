package notices

import (
	"bytes"
	"context"
	"encoding/hex"
	"fmt"
	"log/slog"
	"net"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-zeromq/zmq4"
	"github.com/stretchr/testify/require"
	"github.com/vmihailenco/msgpack/v5"
)

// LMCache's messages in msgspec's bytes, and other messages.
func TestParse(t *testing.T) {
	for name, tt := range map[string]struct{ wire, id string }{
		"ProxyNotif, LMCache 0.3.7":     {"82a474797065aa50726f78794e6f746966a67265715f6964a131", "1"},
		"NixlProxyNotif, LMCache 0.3.5": {"82a474797065ae4e69786c50726f78794e6f746966a67265715f6964a23432", "42"},
		"a uuid (str8)": {"82a474797065aa50726f78794e6f746966a67265715f6964d92433663163396135322d376430622d346530652d396633652d326631663562306339643131",
			"3f1c9a52-7d0b-4e0e-9f3e-2f1f5b0c9d11"},
		"the other order":          {"82a67265715f6964a131a474797065aa50726f78794e6f746966", "1"},
		"more members":             {"83a474797065aa50726f78794e6f746966a46d6f7265919301c0a178a67265715f6964a131", "1"},
		"of a later name":          {hex.EncodeToString(pack(t, map[string]any{"type": "PdProxyNotif", "req_id": "7"})), "7"},
		"AllocRequest":             {hex.EncodeToString(pack(t, map[string]any{"type": "AllocRequest", "req_id": "7", "keys": []int{1}})), ""},
		"CancelNotif":              {hex.EncodeToString(pack(t, map[string]any{"type": "CancelNotif", "req_id": "7"})), ""},
		"no id":                    {"81a474797065aa50726f78794e6f746966", ""},
		"an empty id":              {hex.EncodeToString(pack(t, map[string]any{"type": "ProxyNotif", "req_id": ""})), ""},
		"a number":                 {hex.EncodeToString(pack(t, map[string]any{"type": "ProxyNotif", "req_id": 7})), ""},
		"an endless id":            {hex.EncodeToString(pack(t, map[string]any{"type": "ProxyNotif", "req_id": strings.Repeat("x", MaxID+1)})), ""},
		"a list":                   {"9201", ""},
		"nothing":                  {"", ""},
		"cut off":                  {"82a474797065aa50726f78794e6f746966a67265715f6964a2", ""},
		"a map that is too big":    {"dfffffffff", ""},
		"a text that is not there": {"82a474797065dbffffffff", ""},
	} {
		t.Run(name, func(t *testing.T) {
			wire, err := hex.DecodeString(tt.wire)
			require.NoError(t, err)
			id, err := Parse(wire)
			require.Equal(t, tt.id, id)
			require.Equal(t, tt.id == "", err != nil, "%v", err)
		})
	}
}

func pack(t testing.TB, v any) []byte {
	b, err := msgpack.Marshal(v)
	require.NoError(t, err)
	return b
}

func FuzzParse(f *testing.F) {
	f.Add(pack(f, map[string]any{"type": "ProxyNotif", "req_id": "1"}))
	f.Add(bytes.Repeat([]byte{0x91}, 100))
	f.Fuzz(func(t *testing.T, message []byte) {
		if id, err := Parse(message); err == nil {
			require.NotEmpty(t, id)
			require.LessOrEqual(t, len(id), MaxID)
		} else {
			require.Empty(t, id)
		}
	})
}

// A notification before its wait, during it, twice, for each of two ranks, late and never. Time is synthetic: a wait
// that polled would take some.
func TestWaiters(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := NewWaiters(time.Minute, 0)
		ctx, cancel := context.WithCancel(t.Context())
		go b.Run(ctx)
		defer func() { cancel(); synctest.Wait() }()
		wait := func(id string, n int) bool {
			ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
			defer cancel()
			return b.Wait(ctx, id, n)
		}

		b.Arrived("before")
		began := time.Now()
		require.True(t, wait("before", 1))
		require.Zero(t, time.Since(began))

		time.AfterFunc(3*time.Second, func() { b.Arrived("during") })
		require.True(t, wait("during", 1))
		require.Equal(t, 3*time.Second, time.Since(began), "the notice wakes, at once")

		b.Arrived("two ranks")
		time.AfterFunc(time.Second, func() { b.Arrived("two ranks") })
		require.True(t, wait("two ranks", 2))
		require.Equal(t, 4*time.Second, time.Since(began))

		b.Arrived("twice")
		b.Arrived("twice")
		require.True(t, wait("twice", 1))

		require.False(t, wait("never", 1))
		require.Equal(t, 14*time.Second, time.Since(began))
		b.Arrived("never") // late
		require.Equal(t, 1, b.Held())
		time.Sleep(2 * time.Minute)
		require.Zero(t, b.Held(), "what nobody wants is forgotten")
		require.Empty(t, b.order)
		require.Equal(t, Counts{Received: 7, Unwanted: 1, First: 2, Woken: 2, Missed: 1}, b.Counts())

		b.ArrivedAtReplica("elsewhere") // received by another replica
		require.True(t, wait("elsewhere", 1))
		time.AfterFunc(time.Second, func() { b.ArrivedAtReplica("elsewhere, during") })
		require.True(t, wait("elsewhere, during", 1))
		b.ArrivedAtReplica("nobody's")
		b.ArrivedAtReplica("nobody's")
		b.Ignored()
		time.Sleep(2 * time.Minute)
		require.Equal(t, Counts{Received: 7, Forwarded: 4, Ignored: 1, Unwanted: 2, First: 3, Woken: 3, Missed: 1}, b.Counts(), "an id that nobody wants counts once")
	})
}

// An early notification is kept as long as notices.keep says: a wait that begins later finds it no more.
func TestWaitersKeep(t *testing.T) {
	for _, keep := range []time.Duration{time.Second, time.Minute, 10 * time.Minute} {
		synctest.Test(t, func(t *testing.T) {
			b := NewWaiters(keep, 0)
			ctx, cancel := context.WithCancel(t.Context())
			go b.Run(ctx)
			defer func() { cancel(); synctest.Wait() }()
			for at, want := range map[time.Duration]bool{keep * 9 / 10: true, keep * 3: false} {
				b.Arrived(at.String())
				time.Sleep(at)
				short, cancel := context.WithTimeout(ctx, time.Millisecond)
				require.Equal(t, want, b.Wait(short, at.String(), 1), "%s after it arrived, kept for %s", at, keep)
				cancel()
			}
		})
	}
}

// A flood of unwanted ids takes no more than its share, and does not end a wait.
func TestWaitersAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := NewWaiters(time.Minute, 100)
		done := make(chan bool)
		go func() { done <- b.Wait(t.Context(), "mine", 1) }()
		synctest.Wait()
		for i := range 10_000 {
			b.Arrived(fmt.Sprint(i))
		}
		require.LessOrEqual(t, b.Held(), 101)
		b.Arrived("mine")
		require.True(t, <-done)
		require.LessOrEqual(t, len(b.order), 100)
		require.Equal(t, Counts{Received: 10_001, Unwanted: 9_900, Woken: 1}, b.Counts())
		require.Equal(t, 100, b.Held())
	})
}

// The socket, with go-zeromq's PUSH in place of LMCache's.
func TestServe(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	b := NewWaiters(0, 0)
	ended := make(chan error, 1)
	var forwarded []string // to other replicas
	go func() {
		ended <- Serve(ctx, l, b, func(id string) { forwarded = append(forwarded, id) }, slog.New(slog.DiscardHandler))
	}()
	push := zmq4.NewPush(ctx)
	defer push.Close()
	require.NoError(t, push.Dial("tcp://"+l.Addr().String()))
	require.NoError(t, push.Send(zmq4.NewMsgFrom(pack(t, map[string]any{"type": "ProxyNotif", "req_id": "b"}), []byte("another frame"))))
	for _, m := range []any{"hello", map[string]any{"type": "AllocRequest"}, map[string]any{"type": "ProxyNotif", "req_id": "a"}} {
		require.NoError(t, push.Send(zmq4.NewMsg(pack(t, m))))
	}
	waiting, stop := context.WithTimeout(ctx, time.Minute)
	defer stop()
	require.True(t, b.Wait(waiting, "a", 1))
	cancel()
	require.NoError(t, <-ended)
	counts := b.Counts()
	require.EqualValues(t, 1, counts.First+counts.Woken) // whichever came first
	counts.First, counts.Woken = 0, 0
	require.Equal(t, Counts{Received: 1, Ignored: 3}, counts)
	require.Equal(t, []string{"a"}, forwarded)
}
