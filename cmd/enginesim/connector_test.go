package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-zeromq/zmq4"
	"github.com/stretchr/testify/require"

	"tandem/e2e/enginesim/engine"
	"tandem/e2e/enginesim/jsontext"
)

// manyBlocks fills several blocks.
var manyBlocks = strings.Repeat("How are the KV blocks moved? ", 40)

const oneToken = `"max_tokens":1,"min_tokens":1,"stream":false`

// reference returns an engine's answer to the prompt without any transfer.
func reference(t testing.TB, d *simulator, members ...string) reply {
	t.Helper()
	r := d.post(t, chatPath, "plain", chat(manyBlocks, append(members, `"cache_salt":"reference"`)...))
	require.Equal(t, 200, r.status, r)
	return r
}

func (e *simulator) violations(kind string) (n int64) {
	e.Metrics.Violations.Each(func(k string, v int64) {
		if k == kind {
			n = v
		}
	})
	return n
}

func TestNeuronPassesTheWholeAnswer(t *testing.T) {
	p, d := startEngine(t, "-role", "prefill", "-connector", "neuron"), startEngine(t, "-role", "decode", "-connector", "neuron")
	want := reference(t, d, `"max_tokens":9`)
	first := p.post(t, chatPath, "r", chat(manyBlocks, oneToken))
	require.Equal(t, 200, first.status, first)
	require.Positive(t, p.State().BlocksHeld)
	got := d.post(t, chatPath, "r", chat(manyBlocks, `"max_tokens":9`, `"disagg_prefill_resp":`+first.String()))
	require.Equal(t, want.content(), got.content())
	require.Positive(t, d.Metrics.External.Load())
	p.quiet(t)
	d.quiet(t)
}

func TestOffload(t *testing.T) {
	p, d := startEngine(t, "-role", "prefill", "-connector", "offload"), startEngine(t, "-role", "decode", "-connector", "offload", "-load-timeout", "30s")
	decoder := func(id string) string {
		return fmt.Sprintf(`"kv_transfer_params":{"remote_decoder":{"kv_request_id":%q}}`, id)
	}
	prefiller := func(id string) string {
		return fmt.Sprintf(`"kv_transfer_params":{"remote_prefiller":{"kv_request_id":%q,"remote_host":"127.0.0.1","remote_port":%d}}`, id, p.SidePort)
	}
	want := reference(t, d, `"max_tokens":9`)
	require.Equal(t, 200, p.post(t, chatPath, "r1", chat(manyBlocks, oneToken, decoder("k1"))).status)
	got := d.post(t, chatPath, "r1", chat(manyBlocks, `"max_tokens":9`, prefiller("k1")))
	require.Equal(t, want.content(), got.content())
	moved := d.Metrics.External.Load()
	require.Positive(t, moved)

	got = d.post(t, chatPath, "r2", chat(manyBlocks, `"max_tokens":9`, `"cache_salt":"2"`, prefiller("never")))
	require.Equal(t, want.content(), got.content(), "a miss is computed")
	require.Equal(t, moved, d.Metrics.External.Load())

	source := fmt.Sprintf(`"kv_transfer_params":{"remote_kv_source":{"kv_request_id":"s","remote_host":"127.0.0.1","remote_port":%d}}`, p.SidePort)
	fresh := startEngine(t, "-role", "decode", "-connector", "offload")
	got = fresh.post(t, chatPath, "rs", chat(manyBlocks, `"max_tokens":9`, source))
	require.Equal(t, want.content(), got.content())
	require.Positive(t, fresh.Metrics.External.Load(), "the beginning came from P's cache")

	short := startEngine(t, "-role", "prefill", "-connector", "offload", "-lease", "50ms")
	require.Equal(t, 200, short.post(t, chatPath, "r3", chat(manyBlocks, oneToken, decoder("k3"))).status)
	short.quiet(t) // D never came: the offered blocks are freed after their time
	require.EqualValues(t, 1, short.Ledger.Expired.Load())
	p.quiet(t)
	d.quiet(t)

	for name, params := range map[string]string{
		"forbidden_keys":    `{"remote_prefiller":{"kv_request_id":"a","remote_host":"x","remote_port":1},"remote_decoder":{"kv_request_id":"a"}}`,
		"incomplete_params": `{"remote_prefiller":{"kv_request_id":"a","remote_host":"x"}}`,
	} {
		require.Equal(t, 500, d.post(t, chatPath, "bad", chat("hi", `"kv_transfer_params":`+params)).status)
		require.EqualValues(t, 1, d.violations(name), name)
	}
}

func TestTRTLLM(t *testing.T) {
	p, d := startEngine(t, "-role", "prefill", "-connector", "trtllm"), startEngine(t, "-role", "decode", "-connector", "trtllm")
	const id = "9007199254740993" // 2^53+1: a float loses it
	context := func(id string) string {
		return `"disaggregated_params":{"request_type":"context_only","disagg_request_id":` + id + `}`
	}
	generation := func(t *testing.T, first reply) string {
		var answer struct {
			Choices []struct {
				FinishReason string                     `json:"finish_reason"`
				Params       map[string]json.RawMessage `json:"disaggregated_params"`
			}
			IDs json.RawMessage `json:"prompt_token_ids"`
		}
		require.NoError(t, json.Unmarshal(first.body, &answer))
		require.Equal(t, "not_finished", answer.Choices[0].FinishReason)
		params := answer.Choices[0].Params
		require.Equal(t, id, string(params["disagg_request_id"]))
		n, err := strconv.ParseUint(string(params["ctx_request_id"]), 10, 64)
		require.NoError(t, err)
		require.Greater(t, n, uint64(1)<<53)
		params["request_type"] = json.RawMessage(`"generation_only"`)
		text, err := json.Marshal(params)
		require.NoError(t, err)
		return `"disaggregated_params":` + string(text) + `,"prompt_token_ids":` + string(answer.IDs)
	}
	want := reference(t, d, `"max_tokens":9`)
	first := p.post(t, chatPath, "r1", chat(manyBlocks, `"max_tokens":9`, context(id)))
	got := d.post(t, chatPath, "r1", chat(manyBlocks, `"max_tokens":9`, generation(t, first)))
	require.Equal(t, 200, got.status, got)
	require.Equal(t, want.content(), got.content(), "D's answer has the first token too")
	require.Positive(t, d.Metrics.External.Load())
	p.quiet(t)
	d.quiet(t)

	// The first token ends the text: nothing is kept.
	first = p.post(t, chatPath, "r2", chat(manyBlocks, `"max_tokens":9`, `"stop":`+quote(want.content()[:engine.TokenBytes]), context(id)))
	require.Equal(t, "stop", first.str("choices", "0", "finish_reason"))
	require.Nil(t, first.get("choices", "0", "disaggregated_params"))
	p.quiet(t)

	first = p.post(t, chatPath, "r3", chat(manyBlocks, `"max_tokens":9`, context(id)))
	float := strings.Replace(generation(t, first), id, "9007199254740992", 1)
	require.Equal(t, 500, d.post(t, chatPath, "r3", chat(manyBlocks, `"max_tokens":9`, float)).status)
	require.EqualValues(t, 1, d.violations("unknown_request"), "an id that went through a float")
	require.Equal(t, 500, p.post(t, chatPath, "r4", chat("x", context("7"))).status)
	require.EqualValues(t, 1, p.violations("bad_disagg_id"))
	require.Equal(t, 500, d.post(t, chatPath, "r5", chat("x", `"disaggregated_params":{"request_type":"generation_only"}`)).status)
	require.EqualValues(t, 1, d.violations("incomplete_params"))
}

func quote(s string) string {
	b, _ := json.Marshal(s)
	return string(b)
}

func TestSharedStore(t *testing.T) {
	p := startEngine(t, "-role", "prefill", "-connector", "shared")
	d := startEngine(t, "-role", "decode", "-connector", "shared", "-store", p.Side.Addr().String())
	want := d.post(t, chatPath, "plain", chat(manyBlocks, `"max_tokens":9`))
	require.Zero(t, d.Metrics.External.Load())
	other := manyBlocks + "And then?"
	require.Equal(t, 200, p.post(t, chatPath, "r", chat(other, oneToken)).status)
	require.Equal(t, 200, d.post(t, chatPath, "r", chat(other, `"max_tokens":9`, `"cache_salt":"x"`)).status)
	require.Positive(t, d.Metrics.External.Load())
	require.Equal(t, want.content(), d.post(t, chatPath, "again", chat(manyBlocks, `"max_tokens":9`)).content())
	p.quiet(t)
	d.quiet(t)
}

// lmcachePair returns a prefill and a decode engine, and the notifications that arrive.
func lmcachePair(t *testing.T, more ...string) (p, d *simulator, spec func(reqID string) string, notices chan string) {
	t.Helper()
	pull := zmq4.NewPull(context.Background())
	require.NoError(t, pull.Listen("tcp://127.0.0.1:0"))
	t.Cleanup(func() { _ = pull.Close() })
	notices = make(chan string, 100)
	go func() {
		for {
			m, err := pull.Recv()
			if err != nil {
				return
			}
			notices <- string(m.Bytes())
		}
	}()
	args := append([]string{"-connector", "lmcache", "-proxy", pull.Addr().String()}, more...)
	p = startEngine(t, append(args, "-role", "prefill")...)
	d = startEngine(t, append(args, "-role", "decode", "-lmcache-init-port", "0", "-lmcache-alloc-port", "0")...)
	port := func(i int) int { return d.ReceiverPort(i) }
	init, alloc := port(0), port(1)
	return p, d, func(reqID string) string {
		return fmt.Sprintf(`"kv_transfer_params":{"disagg_spec":{"req_id":%q,"receiver_host":"127.0.0.1","receiver_init_port":[%d],"receiver_alloc_port":[%d]}}`, reqID, init, alloc)
	}, notices
}

func (e *simulator) noticed(t *testing.T, notices chan string) string {
	t.Helper()
	select {
	case n := <-notices:
		return n
	case <-time.After(patience):
		require.Fail(t, "no notice")
		return ""
	}
}

func TestLMCache(t *testing.T) {
	p, d, spec, notices := lmcachePair(t)
	want := reference(t, d, `"max_tokens":9`)
	require.Equal(t, 200, p.post(t, chatPath, "r1", chat(manyBlocks, oneToken, spec("id-1"))).status)
	require.Equal(t, "\x82\xa4type\xaaProxyNotif\xa6req_id\xa4id-1", p.noticed(t, notices))
	require.Positive(t, d.State().BlocksHeld)
	got := d.post(t, chatPath, "r1", chat(manyBlocks, `"max_tokens":9`))
	require.Equal(t, want.content(), got.content())
	require.Positive(t, d.Metrics.External.Load())
	require.Zero(t, d.State().BlocksHeld)

	require.Equal(t, 200, p.post(t, chatPath, "r3", chat(manyBlocks, oneToken, spec("id-3"))).status)
	p.noticed(t, notices)
	require.Equal(t, 500, d.post(t, chatPath, "r3", chat(manyBlocks+"?", `"max_tokens":9`)).status)
	require.EqualValues(t, 1, d.violations("other_prompt"))
	require.Equal(t, 500, d.post(t, chatPath, "r4", chat("x", spec("id-4"))).status)
	require.EqualValues(t, 1, d.violations("spec_on_decode"))
	require.Equal(t, 500, d.post(t, chatPath, "r6", chat("x", `"kv_transfer_params":{"first_tok":1}`)).status)
	require.EqualValues(t, 1, d.violations("params_on_decode"))

	p, d, spec, notices = lmcachePair(t, "-lease", "50ms")
	require.Equal(t, 200, p.post(t, chatPath, "r2", chat(manyBlocks, oneToken, spec("id-2"))).status)
	p.noticed(t, notices)
	d.quiet(t) // no request came for it
	p.quiet(t)
}

// ret_first_tok: P answers its token, and D continues after it: the text is that of a single engine. Another token
// there is a violation.
func TestLMCacheFirstToken(t *testing.T) {
	p, d, spec, notices := lmcachePair(t)
	want := reference(t, d, `"max_tokens":9`).content()
	ask := func(id, prompt string) (text, ids, first string) {
		t.Helper()
		got := p.post(t, chatPath, id, chat(prompt, oneToken, `"return_token_ids":true`, strings.Replace(spec(id), `"disagg_spec"`, `"ret_first_tok":false,"disagg_spec"`, 1)))
		require.Equal(t, 200, got.status)
		p.noticed(t, notices)
		return got.content(), string(jsontext.Get(got.body, "prompt_token_ids")), string(jsontext.Get(jsontext.Get(got.body, "kv_transfer_params"), "first_tok"))
	}
	text, ids, first := ask("r1", manyBlocks)
	require.Equal(t, want[:len(text)], text)
	rest := func(id, ids, first string) reply {
		return d.post(t, "/v1/completions", id, `{"model":"tiny","prompt":`+strings.TrimSuffix(ids, "]")+","+first+`],"max_tokens":8,"messages":[]}`)
	}
	got := rest("r1", ids, first)
	require.Equal(t, 200, got.status, got)
	require.Equal(t, want, text+got.str("choices", "0", "text"))
	require.Positive(t, d.Metrics.External.Load())

	_, ids, _ = ask("r2", "Another. "+manyBlocks)
	require.Equal(t, 500, rest("r2", ids, "7").status)
	require.EqualValues(t, 1, d.violations("other_first_token"))
}

func TestLMCacheNoticesAsConfigured(t *testing.T) {
	for how, want := range map[string][]string{
		"twice": {"\x82\xa4type\xaaProxyNotif\xa6req_id\xa1x", "\x82\xa4type\xaaProxyNotif\xa6req_id\xa1x"},
		"old":   {"\x82\xa4type\xaeNixlProxyNotif\xa6req_id\xa1x"},
		"noisy": {"\x82\xa4type\xacAllocRequest\xa6req_id\xa1x", "\xc1", "", "\x82\xa4type\xaaProxyNotif\xa6req_id\xa1x"},
	} {
		t.Run(how, func(t *testing.T) {
			p, _, spec, notices := lmcachePair(t, "-notices", how, "-kv-delay", "-1ms")
			require.Equal(t, 200, p.post(t, chatPath, "r", chat(manyBlocks, oneToken, spec("x"))).status)
			for _, n := range want {
				require.Equal(t, n, p.noticed(t, notices))
			}
		})
	}
}

// A spec without one of its four members, or without a port for each rank, is an exception in P's scheduler.
func TestLMCacheDiesOfHalfASpec(t *testing.T) {
	for name, edit := range map[string][2]string{
		"no alloc ports": {`,"receiver_alloc_port"`, `,"x"`}, "no id": {`"req_id"`, `"x"`}, "two ports": {`[`, `[1,`},
	} {
		t.Run(name, func(t *testing.T) {
			p, _, spec, _ := lmcachePair(t)
			require.Equal(t, 500, p.post(t, chatPath, "r", chat("x", oneToken, strings.Replace(spec("x"), edit[0], edit[1], 1))).status)
			select {
			case <-p.Died:
			case <-time.After(patience):
				require.Fail(t, "it lives")
			}
		})
	}
}

// Generation first: P waits in its scheduler until D is there, under an id that both legs share.
func TestTRTLLMGenerationFirst(t *testing.T) {
	p, d := startEngine(t, "-role", "prefill", "-connector", "trtllm"), startEngine(t, "-role", "decode", "-connector", "trtllm")
	want := reference(t, d, `"max_tokens":9`).content()
	const id = "4611686018427387905"
	context := func(id string) string {
		return chat(manyBlocks, `"max_tokens":9`, `"disaggregated_params":{"request_type":"context_only","disagg_request_id":`+id+`,"schedule_style":1}`)
	}
	generation := func(contextID, id, endpoint string) string {
		return chat(manyBlocks, `"max_tokens":9`, `"disaggregated_params":{"request_type":"generation_only","disagg_request_id":`+id+`,"ctx_request_id":`+contextID+
			`,"schedule_style":1,"ctx_info_endpoint":"`+endpoint+`"}`)
	}
	endpoint := "tcp://" + p.Side.Addr().String()
	require.Contains(t, p.get(t, "/server_info").String(), endpoint)
	var first reply
	var leg sync.WaitGroup
	leg.Go(func() { first, _ = p.do(http.MethodPost, chatPath, "r1", context(id)) })
	got := d.post(t, chatPath, "r1", generation(id, id, endpoint))
	require.Equal(t, 200, got.status, got)
	require.Equal(t, want, got.content())
	leg.Wait()
	require.Equal(t, 200, first.status, first)
	require.Positive(t, d.Metrics.External.Load())

	left := startEngine(t, "-role", "prefill", "-connector", "trtllm", "-transfer-timeout", "50ms")
	require.Equal(t, 500, left.post(t, chatPath, "r2", context("4611686018427387906")).status, "a P whose D does not come")
	left.quiet(t)
	p.quiet(t)
	d.quiet(t)
	for _, body := range []string{generation(id, "4611686018427387907", endpoint), generation(id, id, ""), generation(id, id, "10.0.0.1:1")} {
		require.Equal(t, 500, d.post(t, chatPath, "r3", body).status)
	}
	require.EqualValues(t, 3, d.violations("incomplete_params"))
}
