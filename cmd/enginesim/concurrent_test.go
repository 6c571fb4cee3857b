package main

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tandem/e2e/enginesim/fault"
)

// roomPair returns an SGLang prefill and decode server.
func roomPair(t *testing.T, timeout string) (p, d *simulator, room func(n int) string) {
	args := []string{"-connector", "sglang", "-transfer-timeout", timeout, "-bootstrap", "127.0.0.1:0"}
	p, d = startEngine(t, append(args, "-role", "prefill")...), startEngine(t, append(args, "-role", "decode")...)
	_, port, _ := strings.Cut(p.BootstrapAddr, ":")
	return p, d, func(n int) string {
		return fmt.Sprintf(`"bootstrap_host":"127.0.0.1","bootstrap_port":%s,"bootstrap_room":%d`, port, n)
	}
}

// both sends a body to both engines at once.
func both(t *testing.T, p, d *simulator, path, id, prefill, decode string) (fromP, fromD reply) {
	t.Helper()
	var legs sync.WaitGroup
	legs.Go(func() { fromP = p.post(t, path, id, prefill) })
	legs.Go(func() { fromD = d.post(t, path, id, decode) })
	legs.Wait()
	return fromP, fromD
}

func TestSGLangRooms(t *testing.T) {
	p, d, room := roomPair(t, "5m")
	whole := startEngine(t, "-connector", "sglang")
	body := chat("meet me in the room, please", `"max_tokens":8`)
	roomed := chat("meet me in the room, please", `"max_tokens":8`, room(1<<62))
	fromP, fromD := both(t, p, d, chatPath, "", roomed, roomed)
	require.Equal(t, 200, fromP.status, fromP)
	require.Equal(t, 1, fromP.num("usage", "completion_tokens"), "P makes one token, whatever it was told")
	require.Equal(t, whole.post(t, chatPath, "", body).content(), fromD.content())
	p.quiet(t)
	d.quiet(t)

	t.Run("a room is good once", func(t *testing.T) {
		_, fromD := both(t, p, d, chatPath, "", roomed, roomed)
		require.Equal(t, 500, fromD.status)
		require.Contains(t, fromD.String(), "key_reused")
	})
	t.Run("another prompt is noticed", func(t *testing.T) {
		_, fromD := both(t, p, d, chatPath, "", chat("one prompt", room(2)), chat("other prompt", room(2)))
		require.Contains(t, fromD.String(), "other_prompt")
	})
	for name, members := range map[string]string{
		"no room": `"max_tokens":1`, "a float": `"bootstrap_host":"h","bootstrap_room":1.5`, "64 bits": `"bootstrap_host":"h","bootstrap_room":9223372036854775808`,
		"no host": `"bootstrap_room":1`, "too few": `"bootstrap_host":[],"bootstrap_port":[],"bootstrap_room":[]`,
	} {
		t.Run(name, func(t *testing.T) {
			require.Equal(t, 400, p.post(t, chatPath, "", chat("x", members)).status)
			require.Equal(t, 400, d.post(t, chatPath, "", chat("x", members)).status)
		})
	}
	t.Run("one room twice", func(t *testing.T) {
		require.Equal(t, 400, p.post(t, "/v1/completions", "", `{"model":"tiny","prompt":["a","b"],"bootstrap_host":"h","bootstrap_room":[3,3]}`).status)
	})
	t.Run("bootstrap", func(t *testing.T) {
		for query, status := range map[string]int{"": 400, "prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1": 200,
			"prefill_dp_rank=7&prefill_cp_rank=0&target_tp_rank=0&target_pp_rank=0": 404} {
			resp, err := http.Get("http://" + p.BootstrapAddr + "/route?" + query)
			require.NoError(t, err)
			_ = resp.Body.Close()
			require.Equal(t, status, resp.StatusCode, query)
		}
	})
}

// Several choices of one prompt have one room, whatever rooms the request names: P answers, D waits in vain.
func TestSGLangChoices(t *testing.T) {
	p, d, room := roomPair(t, "300ms")
	for name, members := range map[string]string{"one room": room(5), "a list of rooms": strings.Replace(room(7), ":7", ":[7,8]", 1)} {
		began := time.Now()
		fromP, fromD := both(t, p, d, chatPath, "", chat("two of one", `"n":2`, members), chat("two of one", `"n":2`, members))
		require.Equal(t, 200, fromP.status, "%s: %v", name, fromP)
		require.Equal(t, 500, fromD.status, "%s: %v", name, fromD)
		require.GreaterOrEqual(t, time.Since(began), 300*time.Millisecond)
	}
	p.quiet(t)
	d.quiet(t)
}

// Each leg waits for the other until its timeout, and keeps its blocks meanwhile.
func TestSGLangWaits(t *testing.T) {
	p, d, room := roomPair(t, "300ms")
	for name, e := range map[string]*simulator{"prefill": p, "decode": d} {
		began := time.Now()
		require.Equal(t, 500, e.post(t, chatPath, "", chat("alone", room(len(name)))).status, name)
		require.GreaterOrEqual(t, time.Since(began), 300*time.Millisecond, name)
		e.quiet(t)
	}
	// D leaves before P has computed: P is not notified, and continues to wait.
	p, d, room = roomPair(t, "1s")
	p.Faults.Add([]fault.Rule{{Mode: fault.Slow, Wait: 3 * time.Second}})
	var legs sync.WaitGroup
	legs.Go(func() { require.Equal(t, 500, p.post(t, chatPath, "", chat("x y z", room(9))).status) })
	d.leftWaiting(t, "", chat("x y z", room(9)))
	legs.Wait()
	p.quiet(t)
}

// leftWaiting sends a request whose client leaves as soon as it waits for the other leg.
func (e *simulator) leftWaiting(t *testing.T, id, body string) {
	t.Helper()
	ctx, leave := context.WithCancel(t.Context())
	defer leave()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, e.url+chatPath, strings.NewReader(body))
	require.NoError(t, err)
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("X-Request-Id", id)
	failed := make(chan error, 1)
	go func() { _, err := client.Do(req); failed <- err }()
	require.Eventually(t, func() bool { return e.Rooms.Held.Load() > 0 }, patience, time.Millisecond)
	leave()
	require.ErrorIs(t, <-failed, context.Canceled)
}

func TestMooncake(t *testing.T) {
	pair := func(timeout string) (p, d *simulator) {
		args := []string{"-connector", "mooncake", "-transfer-timeout", timeout, "-bootstrap", "127.0.0.1:0"}
		return startEngine(t, append(args, "-role", "prefill")...), startEngine(t, append(args, "-role", "decode")...)
	}
	p, d := pair("5m")
	ask := func(id string) string {
		return `"max_tokens":1,"kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false,"transfer_id":"` + id + `"}`
	}
	from := func(id string) string {
		return `"max_tokens":8,"kv_transfer_params":{"do_remote_prefill":true,"do_remote_decode":false,"remote_bootstrap_addr":"http://` + p.BootstrapAddr +
			`","remote_engine_id":"` + p.EngineID + `","transfer_id":"` + id + `"}`
	}
	alone := d.post(t, chatPath, "", chat("over the lake", `"max_tokens":8`)).content()
	_, fromD := both(t, p, d, chatPath, "m1", chat("over the lake", ask("t1")), chat("over the lake", from("t1")))
	require.Equal(t, 200, fromD.status, fromD)
	require.Equal(t, alone, fromD.content())
	p.quiet(t)
	d.quiet(t)
	t.Run("the wrong role dies", func(t *testing.T) {
		require.Equal(t, 500, d.post(t, chatPath, "m3", chat("x", ask("t3"))).status)
		<-d.Died
	})
	p, d = pair("500ms")
	t.Run("a leg that ends for another reason than length is cancelled", func(t *testing.T) {
		stops := strings.Replace(ask("t2"), `"max_tokens":1,`, "", 1) // the text ends before
		fromP, fromD := both(t, p, d, chatPath, "m2", chat("ends", stops), chat("ends", from("t2")))
		require.Equal(t, "stop", fromP.str("choices", "0", "finish_reason"))
		require.Equal(t, 500, fromD.status, "D waited in vain")
		p.quiet(t)
		d.quiet(t)
	})
}

// NIXL push: D's blocks are freed only when P has sent, even if the client has left.
func TestNIXLPush(t *testing.T) {
	args := []string{"-connector", "nixl-push", "-transfer-timeout", "5m", "-lease", "5m"}
	p, d := startEngine(t, append(args, "-role", "prefill")...), startEngine(t, append(args, "-role", "decode")...)
	host, port, _ := strings.Cut(p.Side.Addr().String(), ":")
	from := fmt.Sprintf(`"max_tokens":8,"kv_transfer_params":{"do_remote_prefill":true,"remote_engine_id":%q,"remote_host":%q,"remote_port":%s,"tp_size":1,"remote_request_id":"any","remote_block_ids":[]}`,
		p.EngineID, host, port)
	alone := d.post(t, chatPath, "", chat("push it over", `"max_tokens":8`)).content()
	fromP, fromD := both(t, p, d, chatPath, "push-1", chat("push it over", prefillMembers), chat("push it over", from))
	require.Contains(t, string(fromP.params()), `"transfer_mode":"push"`)
	require.Equal(t, alone, fromD.content())

	d.leftWaiting(t, "push-2", chat("left behind", from))
	require.Eventually(t, func() bool { return d.Metrics.Aborted.Load() == 1 }, patience, time.Millisecond)
	require.Positive(t, d.State().BlocksHeld, "the client has left, the blocks are still taken")
	require.Equal(t, 200, p.post(t, chatPath, "push-2", chat("left behind", prefillMembers)).status)
	d.quiet(t)
	p.quiet(t)

	require.Equal(t, 500, d.post(t, chatPath, "push-3", chat("x", strings.Replace(from, `"tp_size":1,`, "", 1))).status)
	<-d.Died
}
