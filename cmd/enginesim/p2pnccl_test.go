package main

import (
	"context"
	"strings"
	"testing"

	"github.com/go-zeromq/zmq4"
	"github.com/stretchr/testify/require"
	"github.com/vmihailenco/msgpack/v5"
)

// P2P-NCCL: engines register at the proxy, and read each other's address from the request id.
func TestP2PNCCL(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	proxy := zmq4.NewRouter(ctx)
	defer proxy.Close()
	require.NoError(t, proxy.Listen("tcp://127.0.0.1:0"))
	args := []string{"-connector", "p2p-nccl", "-proxy", proxy.Addr().String(), "-heartbeat", "50ms"}
	p, d := startEngine(t, append(args, "-role", "prefill")...), startEngine(t, append(args, "-role", "decode")...)

	kinds := map[string]string{}
	for len(kinds) < 2 {
		beat, err := proxy.Recv()
		require.NoError(t, err)
		require.Len(t, beat.Frames, 2, "identity and beat, no delimiter")
		var registered map[string]string
		require.NoError(t, msgpack.Unmarshal(beat.Frames[1], &registered))
		require.Equal(t, registered["zmq_address"], string(beat.Frames[0]))
		kinds[registered["type"]] = registered["http_address"] + " " + registered["zmq_address"]
	}
	require.Equal(t, map[string]string{"P": p.Addr() + " " + p.Side.Addr().String(), "D": d.Addr() + " " + d.Side.Addr().String()}, kinds)

	id := func(n string) string {
		return "___prefill_addr_" + p.Side.Addr().String() + "___decode_addr_" + d.Side.Addr().String() + "_" + strings.Repeat(n, 32)
	}
	whole := startEngine(t, "-connector", "none").post(t, chatPath, "", chat("two sockets", `"max_tokens":8`)).content()
	require.Equal(t, 200, p.post(t, chatPath, id("1"), chat("two sockets", `"max_tokens":1`)).status)
	fromD := d.post(t, chatPath, id("1"), chat("two sockets", `"max_tokens":8`))
	require.Equal(t, 200, fromD.status, fromD)
	require.Equal(t, whole, fromD.content())
	p.quiet(t)
	d.quiet(t)

	t.Run("decode before prefill stops the engine", func(t *testing.T) {
		require.Contains(t, d.post(t, chatPath, id("2"), chat("too early")).String(), "decode_before_kv")
	})
	t.Run("another prompt is noticed", func(t *testing.T) {
		require.Equal(t, 200, p.post(t, chatPath, id("3"), chat("one prompt", `"max_tokens":1`)).status)
		require.Contains(t, d.post(t, chatPath, id("3"), chat("other prompt")).String(), "other_prompt")
	})
	t.Run("a request id without addresses kills", func(t *testing.T) {
		for _, e := range []*simulator{p, d} {
			require.Equal(t, 500, e.post(t, chatPath, "plain", chat("x")).status)
			<-e.Died
		}
	})
}
