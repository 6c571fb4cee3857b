package main

import (
	"encoding/json"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// MoRIIO, mode WRITE: each leg's request names the other engine, and incomplete parameters kill.
func TestMoRIIO(t *testing.T) {
	args := []string{"-connector", "moriio", "-transfer-timeout", "10s"}
	p, d := startEngine(t, append(args, "-role", "prefill")...), startEngine(t, append(args, "-role", "decode")...)
	params := func(flag, id string, other *simulator) string {
		host, port, _ := net.SplitHostPort(other.Side.Addr().String())
		return `"kv_transfer_params":{"` + flag + `":true,"transfer_id":"` + id + `","remote_host":"` + host + `","remote_handshake_port":6301,"remote_notify_port":` + port +
			`,"remote_tp_size":1,"remote_dp_size":1,"remote_block_ids":[],"remote_engine_id":"any"}`
	}
	whole := d.post(t, chatPath, "", chat("written layer by layer", `"max_tokens":8,"cache_salt":"reference"`)).content()
	fromP, fromD := both(t, p, d, chatPath, "w1", chat("written layer by layer", `"max_tokens":1`, params("do_remote_decode", "tx-1", d)),
		chat("written layer by layer", `"max_tokens":8`, params("do_remote_prefill", "tx-1", p)))
	require.Equal(t, 200, fromP.status, fromP)
	require.Equal(t, 200, fromD.status, fromD)
	require.Equal(t, whole, fromD.content())
	p.quiet(t)
	d.quiet(t)

	good := params("do_remote_prefill", "tx-2", p)
	for name, bad := range map[string]string{
		"an id without tx": strings.Replace(good, "tx-2", "2", 1), "no handshake port": strings.Replace(good, "remote_handshake_port", "x", 1),
		"no ranks": strings.Replace(good, "remote_tp_size", "x", 1), "no blocks": strings.Replace(good, "remote_block_ids", "x", 1),
	} {
		t.Run(name, func(t *testing.T) {
			d := startEngine(t, append(args, "-role", "decode")...)
			require.Equal(t, 500, d.post(t, chatPath, "w2", chat("x", bad)).status)
			<-d.Died
		})
	}
}

// MoRIIO, mode READ: D pulls with parameters of P's answer.
func TestMoRIIORead(t *testing.T) {
	const ask = `"kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false,"transfer_id":"tx-1","remote_tp_size":1,"remote_dp_size":1}`
	args := []string{"-connector", "moriio-read", "-transfer-timeout", "2s"}
	p, d := startEngine(t, append(args, "-role", "prefill")...), startEngine(t, append(args, "-role", "decode")...)
	whole := d.post(t, chatPath, "", chat("pull it over", `"max_tokens":8,"cache_salt":"reference"`)).content()
	fromP := p.post(t, chatPath, "r1", chat("pull it over", `"max_tokens":1,"min_tokens":1`, ask))
	require.Equal(t, 200, fromP.status, fromP)
	require.True(t, json.Valid(fromP.params()))
	fromD := d.post(t, chatPath, "r1", chat("pull it over", `"max_tokens":8`, decodeMembers(fromP.params())))
	require.Equal(t, 200, fromD.status, fromD)
	require.Equal(t, whole, fromD.content())
	p.quiet(t)
	d.quiet(t)

	// Blocks that are not fetched are kept until their time is over.
	left := p.post(t, chatPath, "r2", chat("left behind", `"max_tokens":1,"min_tokens":1`, strings.Replace(ask, "tx-1", "tx-2", 1)))
	require.Equal(t, 200, left.status, left)
	require.Positive(t, p.State().BlocksHeld)
	require.Eventually(t, func() bool { return p.Ledger.Expired.Load() == 1 }, patience, time.Millisecond)
	p.quiet(t)
	require.Equal(t, 500, d.post(t, chatPath, "r2", chat("left behind", `"max_tokens":8`, decodeMembers(left.params()))).status, "too late")
}
