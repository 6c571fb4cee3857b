package main

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tandem/e2e/enginesim/engine"
	"tandem/internal/version"
)

var longPrompt = strings.Repeat("You are a helpful assistant. ", 30)

// edit changes members of a hand-over; a value "-" drops the member.
func edit(t *testing.T, params json.RawMessage, change map[string]string) json.RawMessage {
	t.Helper()
	var m map[string]json.RawMessage
	require.NoError(t, json.Unmarshal(params, &m))
	for k, v := range change {
		if v == "-" {
			delete(m, k)
		} else {
			m[k] = json.RawMessage(v)
		}
	}
	b, err := json.Marshal(m)
	require.NoError(t, err)
	return b
}

// TestPrefillLeg is the table of vLLM 0.32's answers to prefill legs.
func TestPrefillLeg(t *testing.T) {
	const kv = `"kv_transfer_params":{"do_remote_decode":true}`
	tests := []struct {
		name    string
		members string
		status  int
		message string
		tokens  int
		Params  bool
	}{
		{name: "minimal", members: `"max_tokens":1,` + kv, status: 200, tokens: 1, Params: true},
		{name: "min_tokens left in", members: `"max_tokens":1,"min_tokens":5,` + kv, status: 400,
			message: "min_tokens must be less than or equal to max_tokens=1, got 5."},
		{name: "min_tokens 1", members: `"max_tokens":1,"min_tokens":1,` + kv, status: 200, tokens: 1, Params: true},
		{name: "stream_options left in", members: `"max_tokens":1,"stream":false,"stream_options":{"include_usage":true},` + kv, status: 400,
			message: "Stream options can only be defined when `stream=True`. (parameter=stream_options)"},
		{name: "max_completion_tokens wins", members: `"max_tokens":1,"max_completion_tokens":50,` + kv, status: 200, tokens: 50, Params: true},
		{name: "n 2", members: `"max_tokens":1,"n":2,"temperature":0.7,` + kv, status: 200, tokens: 2, Params: true},
		{name: "unknown fields", members: `"max_tokens":1,"x_router":{"a":1},"priority":3,"cache_salt":"q",` + kv, status: 200, tokens: 1, Params: true},
		{name: "params a string", members: `"max_tokens":1,"kv_transfer_params":"junk"`, status: 400,
			message: "1 validation error:\n  {'type': 'dict_type', 'loc': 'body.kv_transfer_params', 'msg': 'Input should be a valid dictionary', 'input': 'junk'}"},
		{name: "params null", members: `"max_tokens":1,"kv_transfer_params":null`, status: 200, tokens: 1},
		{name: "both false", members: `"max_tokens":1,"kv_transfer_params":{"do_remote_decode":false}`, status: 200, tokens: 1},
		{name: "too many tokens", members: `"max_tokens":40000,` + kv, status: 400,
			message: "max_tokens=40000 cannot be greater than max_model_len=2048. Please request fewer output tokens. (parameter=max_tokens, value=40000)"},
		{name: "duplicate key", members: `"max_tokens":1,"max_tokens":2,` + kv, status: 400},
	}
	p := startEngine(t, "-role", "prefill", "-max-model-len", "2048")
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			r := p.post(t, chatPath, "x1", chat(longPrompt, test.members))
			require.Equal(t, test.status, r.status, r)
			if test.message != "" {
				require.Equal(t, test.message, r.str("error", "message"))
			}
			if test.status != 200 {
				require.Equal(t, "BadRequestError", r.str("error", "type"))
				require.Equal(t, 400, r.num("error", "code"))
				return
			}
			require.Equal(t, test.tokens, r.num("usage", "completion_tokens"))
			require.Equal(t, test.Params, r.get("kv_transfer_params") != nil)
			require.Equal(t, "chatcmpl-x1", r.str("id"))
			require.Equal(t, "x1", r.header.Get("X-Request-Id"))
		})
	}
	t.Run("stream answers no params and holds the blocks", func(t *testing.T) {
		before := p.Ledger.Given.Load()
		r := p.post(t, chatPath, "x2", chat(longPrompt, `"max_tokens":1,"stream":true,`+kv))
		require.Equal(t, 200, r.status)
		require.NotContains(t, r.String(), "kv_transfer_params")
		require.Equal(t, before+1, p.Ledger.Given.Load())
	})
	t.Run("two prompts, the first one's params", func(t *testing.T) {
		r := p.post(t, "/v1/completions", "x3", `{"model":"tiny","prompt":["one one one","two two two two two"],"max_tokens":1,`+kv+`}`)
		require.Equal(t, 200, r.status)
		require.Regexp(t, "^cmpl-x3-0-[0-9a-f]{8}$", r.str("kv_transfer_params", "remote_request_id"))
		require.Equal(t, 3, r.num("kv_transfer_params", "remote_num_tokens"))
	})
}

func TestConnectorNone(t *testing.T) {
	e := startEngine(t, "-connector", "none")
	for _, params := range []string{`{"do_remote_decode":true}`, `{"do_remote_prefill":true}`} {
		r := e.post(t, chatPath, "x", chat("hello", `"max_tokens":2,"kv_transfer_params":`+params))
		require.Equal(t, 200, r.status)
		require.Nil(t, r.get("kv_transfer_params"))
	}
	e.quiet(t)
}

// TestDecodeLegViolations has requests that vLLM answers with 200 and wrong or endangered text. In strict mode the
// answer is a counted 500; in faithful mode it is that 200, counted too, and the text is wrong exactly where the KV was.
func TestDecodeLegViolations(t *testing.T) {
	other := strings.Repeat("Something else altogether, and at length. ", 30)
	tests := []struct {
		kind  string
		wrong bool // the text is wrong in faithful mode
		run   func(t *testing.T, p, d *simulator) reply
	}{
		{"read_twice", false, func(t *testing.T, p, d *simulator) reply {
			params := p.prefill(t, "r", longPrompt)
			require.Equal(t, 200, d.post(t, chatPath, "r", chat(longPrompt, `"max_tokens":8`, decodeMembers(params))).status)
			return d.post(t, chatPath, "r", chat(longPrompt, `"max_tokens":8,"cache_salt":"z"`, decodeMembers(params)))
		}},
		{"read_twice", true, func(t *testing.T, p, d *simulator) reply {
			params := p.prefill(t, "r", longPrompt)
			require.Equal(t, 200, d.post(t, chatPath, "r", chat(longPrompt, `"max_tokens":8`, decodeMembers(params))).status)
			for i := range 8 { // 64 blocks: these overwrite the freed ones
				p.post(t, chatPath, "f", chat(string(rune('a'+i))+strings.Repeat("fill", 150), `"max_tokens":1`))
			}
			return d.post(t, chatPath, "r", chat(longPrompt, `"max_tokens":8,"cache_salt":"z"`, decodeMembers(params)))
		}},
		{"unknown_request", false, func(t *testing.T, p, d *simulator) reply {
			params := edit(t, p.prefill(t, "r", longPrompt), map[string]string{"remote_request_id": `"nope"`})
			return d.post(t, chatPath, "r", chat(longPrompt, `"max_tokens":8`, decodeMembers(params)))
		}},
		{"fewer_blocks", true, func(t *testing.T, p, d *simulator) reply {
			params := edit(t, p.prefill(t, "r", longPrompt), map[string]string{"remote_block_ids": `[[1]]`})
			return d.post(t, chatPath, "r", chat(longPrompt, `"max_tokens":8`, decodeMembers(params)))
		}},
		{"other_prompt", true, func(t *testing.T, p, d *simulator) reply {
			params := p.prefill(t, "r", other)
			return d.post(t, chatPath, "r", chat(longPrompt, `"max_tokens":8`, decodeMembers(params)))
		}},
		{"foreign_blocks", true, func(t *testing.T, p, d *simulator) reply {
			first, second := p.prefill(t, "a", longPrompt), p.prefill(t, "b", other)
			var m map[string]json.RawMessage
			require.NoError(t, json.Unmarshal(second, &m))
			params := edit(t, first, map[string]string{"remote_block_ids": string(m["remote_block_ids"])})
			return d.post(t, chatPath, "a", chat(longPrompt, `"max_tokens":8`, decodeMembers(params)))
		}},
		{"expired", false, func(t *testing.T, p, d *simulator) reply {
			params := p.prefill(t, "r", longPrompt)
			require.Eventually(t, func() bool { return p.Ledger.Expired.Load() == 1 }, patience, time.Millisecond)
			require.Zero(t, p.Ledger.Held.Load())
			return d.post(t, chatPath, "r", chat(longPrompt, `"max_tokens":8`, decodeMembers(params)))
		}},
		{"request_id_mismatch", false, func(t *testing.T, p, d *simulator) reply {
			params := p.prefill(t, "r", longPrompt)
			return d.post(t, chatPath, "another", chat(longPrompt, `"max_tokens":8`, decodeMembers(params)))
		}},
		{"missing_request_id", false, func(t *testing.T, p, d *simulator) reply {
			params := p.prefill(t, "r", longPrompt)
			return d.post(t, chatPath, "", chat(longPrompt, `"max_tokens":8`, decodeMembers(params)))
		}},
	}
	for _, test := range tests {
		t.Run(test.kind, func(t *testing.T) {
			lease := "30s"
			if test.kind == "expired" {
				lease = "50ms"
			}
			p := startEngine(t, "-role", "prefill", "-blocks", "65", "-lease", lease)
			strict, faithful := startEngine(t, "-role", "decode"), startEngine(t, "-role", "decode", "-faithful")
			want := strict.post(t, chatPath, "w", chat(longPrompt, `"max_tokens":8,"cache_salt":"w"`)).content()

			r := test.run(t, p, strict)
			require.Equal(t, 500, r.status, r)
			require.Contains(t, r.str("error", "message"), "violation "+test.kind)
			require.EqualValues(t, 1, strict.State().Violations)
			require.Equal(t, map[string]int64{test.kind: 1}, strict.State().ViolationsBy)

			p.post(t, "/sim/reset", "", "")
			r = test.run(t, p, faithful)
			require.Equal(t, 200, r.status, r)
			require.Equal(t, test.wrong, r.content() != want, r)
			require.EqualValues(t, 1, faithful.State().Violations)
			for _, e := range []*simulator{strict, faithful} {
				require.Eventually(t, func() bool { return e.State().BlocksUsed == 0 }, patience, time.Millisecond)
			}
		})
	}
}

// TestPoisonedCache: wrong KV that a faithful engine accepted stays in its prefix cache under the right name.
func TestPoisonedCache(t *testing.T) {
	p, d := startEngine(t), startEngine(t, "-faithful")
	want := d.post(t, chatPath, "w", chat(longPrompt, `"max_tokens":8,"cache_salt":"w"`)).content()
	params := p.prefill(t, "r", strings.Repeat("other", 200))
	bad := d.post(t, chatPath, "r", chat(longPrompt, `"max_tokens":8`, decodeMembers(params)))
	require.NotEqual(t, want, bad.content())
	later := d.post(t, chatPath, "q", chat(longPrompt, `"max_tokens":8`))
	require.Positive(t, later.num("usage", "prompt_tokens_details", "cached_tokens"))
	require.NotEqual(t, want, later.content())
}

// TestDecodeLegFailures has requests that fail in vLLM too, under both policies.
func TestDecodeLegFailures(t *testing.T) {
	tests := []struct {
		name   string
		change map[string]string
		slow   bool
	}{
		{"dead port", map[string]string{"remote_port": `1`}, true},
		{"wrong engine", map[string]string{"remote_engine_id": `"00000000-0000-0000-0000-000000000002"`}, false},
		{"no such blocks", map[string]string{"remote_block_ids": `[[999999,9998,9997]]`}, false},
	}
	p := startEngine(t, "-role", "prefill")
	const timeout = 60 * time.Millisecond
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			fail := startEngine(t, "-role", "decode", "-load-timeout", timeout.String())
			recompute := startEngine(t, "-role", "decode", "-load-timeout", timeout.String(), "-kv-load-failure", "recompute")
			want := fail.post(t, chatPath, "w", chat(longPrompt, `"max_tokens":8,"cache_salt":"w"`)).content()
			params := edit(t, p.prefill(t, "r", longPrompt), test.change)
			started := time.Now()
			r := fail.post(t, chatPath, "r", chat(longPrompt, `"max_tokens":8`, decodeMembers(params)))
			if test.slow {
				require.GreaterOrEqual(t, time.Since(started), timeout)
			}
			require.Equal(t, 500, r.status)
			require.JSONEq(t, `{"error":{"message":"Internal server error","type":"InternalServerError","param":null,"code":500}}`, r.String())
			r = fail.post(t, chatPath, "r", chat(longPrompt, `"max_tokens":8,"stream":true`, decodeMembers(params)))
			require.Equal(t, 200, r.status, "a stream has its 200 before the transfer starts")
			require.Contains(t, r.String(), `data: {"error": {"message": "Internal server error"`)

			r = recompute.post(t, chatPath, "r", chat(longPrompt, `"max_tokens":8`, decodeMembers(params)))
			require.Equal(t, 200, r.status)
			require.Equal(t, want, r.content())
			require.Positive(t, r.num("usage", "prompt_tokens_details", "created_cache_tokens"))
			fail.quiet(t)
			recompute.quiet(t)
			require.EqualValues(t, 2, fail.Metrics.FailedTransfers.Load())
		})
	}
	t.Run("its own params", func(t *testing.T) {
		params := p.prefill(t, "self", longPrompt)
		r := p.post(t, chatPath, "self", chat(longPrompt, `"max_tokens":8`, decodeMembers(params)))
		require.Equal(t, 500, r.status)
	})
}

// TestDecodeLegGood has odd requests that must work.
func TestDecodeLegGood(t *testing.T) {
	p, d := startEngine(t, "-role", "prefill"), startEngine(t, "-role", "decode")
	t.Run("optional members missing", func(t *testing.T) {
		params := edit(t, p.prefill(t, "r", longPrompt), map[string]string{
			"tp_size": "-", "dcp_size": "-", "pp_size": "-", "remote_num_tokens": "-", "transfer_mode": "-",
			"remote_blocks_expiry_time": "-", "remote_prefill_cached_tokens": "-",
		})
		r := d.post(t, chatPath, "r", chat(longPrompt, `"max_tokens":8`, decodeMembers(params)))
		require.Equal(t, 200, r.status)
		require.Equal(t, r.num("usage", "prompt_tokens"), r.num("usage", "prompt_tokens_details", "cached_tokens"))
	})
	t.Run("both flags", func(t *testing.T) {
		params := edit(t, p.prefill(t, "r", longPrompt), map[string]string{"do_remote_decode": "true"})
		r := d.post(t, chatPath, "r", chat(longPrompt, `"max_tokens":8`, decodeMembers(params)))
		require.Equal(t, 200, r.status)
		require.Equal(t, d.EngineID, r.str("kv_transfer_params", "remote_engine_id"))
		require.Equal(t, r.num("usage", "prompt_tokens")+7, r.num("kv_transfer_params", "remote_num_tokens"))
		d.Ledger.ReleaseAll()
	})
	t.Run("prompt_token_ids", func(t *testing.T) {
		r := p.post(t, chatPath, "ids", chat(longPrompt, `"return_token_ids":true`, prefillMembers))
		ids, _ := json.Marshal(r.get("prompt_token_ids"))
		params := edit(t, r.params(), map[string]string{"prompt_token_ids": string(ids)})
		got := d.post(t, chatPath, "ids", chat("not this text", `"max_tokens":8`, decodeMembers(params)))
		require.Equal(t, 200, got.status, got)
		want := d.post(t, chatPath, "w", chat(longPrompt, `"max_tokens":8,"cache_salt":"w"`))
		require.Equal(t, want.content(), got.content())
	})
	t.Run("multi-token prefill and more blocks than needed", func(t *testing.T) {
		r := p.post(t, chatPath, "many", chat(longPrompt, `"max_tokens":50,"kv_transfer_params":{"do_remote_decode":true}`))
		got := d.post(t, chatPath, "many", chat(longPrompt, `"max_tokens":8,"cache_salt":"new"`, decodeMembers(r.params())))
		require.Equal(t, 200, got.status, got)
		require.Equal(t, r.content()[:8*engine.TokenBytes], got.content())
	})
	p.quiet(t)
	d.quiet(t)
}

// TestRefusedDecodeReleases: a decode leg that is refused before it reaches the engine notifies P (0.21 and later).
func TestRefusedDecodeReleases(t *testing.T) {
	p, d := startEngine(t, "-role", "prefill"), startEngine(t, "-role", "decode", "-max-model-len", "2048")
	params := p.prefill(t, "r", longPrompt)
	r := d.post(t, chatPath, "r", chat(longPrompt, `"max_tokens":99999`, decodeMembers(params)))
	require.Equal(t, 400, r.status)
	require.Eventually(t, func() bool { return p.Ledger.Freed.Load() == 1 }, patience, time.Millisecond)
	p.quiet(t)
	d.quiet(t)
}

// TestHeartbeat: a decode leg that waits for blocks extends the prefill engine's lease.
func TestHeartbeat(t *testing.T) {
	p := startEngine(t, "-role", "prefill", "-lease", "9s")
	d := startEngine(t, "-role", "decode", "-lease", "600ms", "-blocks", "40") // and six beats in that time
	tokens := engine.NewTokenizer(16, false)
	tokens.Piece([]byte(strings.Repeat("busy", 600)))
	busy, err := d.Pool.Admit(t.Context(), []*engine.Prompt{tokens.Finish("")}, []int{600}, func(int64) {})
	require.NoError(t, err)
	params := p.prefill(t, "r", longPrompt)
	answered := make(chan reply, 1)
	go func() {
		r, _ := d.do(http.MethodPost, chatPath, "r", chat(longPrompt, `"max_tokens":4`, decodeMembers(params)))
		answered <- r
	}()
	require.Eventually(t, func() bool { return d.State().Waiting == 1 }, patience, time.Millisecond)
	expires := func() time.Time { return p.Ledger.Expires("r") }
	first := expires()
	require.Eventually(t, func() bool { return expires().After(first) }, patience, 10*time.Millisecond)
	d.Pool.Free(busy[0].Blocks)
	require.Equal(t, 200, (<-answered).status)
	p.quiet(t)
	d.quiet(t)
}

// TestFatal has requests that end a real engine's process.
func TestFatal(t *testing.T) {
	for name, params := range map[string]string{
		"alone":          `{"do_remote_prefill":true}`,
		"no blocks":      `{"do_remote_prefill":true,"remote_block_ids":[],"remote_engine_id":"e","remote_request_id":"r","remote_host":"127.0.0.1","remote_port":1}`,
		"string blocks":  `{"do_remote_prefill":true,"remote_block_ids":["a"],"remote_engine_id":"e","remote_request_id":"r","remote_host":"127.0.0.1","remote_port":1}`,
		"flat blocks":    `{"do_remote_prefill":true,"remote_block_ids":[1,2],"remote_engine_id":"e","remote_request_id":"r","remote_host":"127.0.0.1","remote_port":1}`,
		"through floats": `{"do_remote_prefill":true,"remote_block_ids":[[1.0]],"remote_engine_id":"e","remote_request_id":"r","remote_host":"127.0.0.1","remote_port":1}`,
	} {
		t.Run(name, func(t *testing.T) {
			d := startEngine(t, "-role", "decode")
			r := d.post(t, chatPath, "r", chat(longPrompt, `"max_tokens":8,"kv_transfer_params":`+params))
			require.Equal(t, 500, r.status)
			require.Contains(t, r.str("error", "message"), "EngineCore encountered an issue")
			<-d.Died
			_, err := d.do(http.MethodGet, "/health", "", "")
			require.ErrorContains(t, err, "refused")
		})
	}
}

// TestIncomplete: without one of the four coordinates the request waits for ever, and the engine dies when it is
// cancelled.
func TestIncomplete(t *testing.T) {
	p := startEngine(t, "-role", "prefill")
	for _, member := range []string{"remote_host", "remote_port", "remote_engine_id", "remote_request_id"} {
		t.Run(member, func(t *testing.T) {
			d := startEngine(t, "-role", "decode")
			params := edit(t, p.prefill(t, "r", longPrompt), map[string]string{member: "-"})
			ctx, cancel := context.WithCancel(t.Context())
			req, err := http.NewRequestWithContext(ctx, http.MethodPost, d.url+chatPath,
				strings.NewReader(chat(longPrompt, decodeMembers(params))))
			require.NoError(t, err)
			req.Header.Set("Content-Type", "application/json")
			req.Header.Set("X-Request-Id", "r")
			failed := make(chan error, 1)
			go func() {
				resp, err := client.Do(req)
				if err == nil {
					_, err = io.ReadAll(resp.Body)
				}
				failed <- err
			}()
			require.Eventually(t, func() bool { return d.State().Waiting == 1 }, patience, time.Millisecond)
			require.Equal(t, 200, d.get(t, "/health").status)
			cancel()
			require.Error(t, <-failed)
			<-d.Died
		})
	}
}

func TestRun(t *testing.T) {
	var log strings.Builder
	require.Equal(t, 2, run(t.Context(), []string{"-role", "nobody"}, io.Discard, &log))
	require.Contains(t, log.String(), `-role "nobody"`)
	require.Equal(t, 0, run(t.Context(), []string{"-h"}, io.Discard, io.Discard))

	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	log.Reset()
	require.Equal(t, 0, run(ctx, []string{"-listen", "127.0.0.1:0", "-side-channel", "127.0.0.1:0", "-role", "kv_producer"}, io.Discard, &log))
	require.Regexp(t, `^enginesim ready listen=127.0.0.1:\d+ side-channel=127.0.0.1:\d+ role=prefill engine=[0-9a-f-]{36}\n$`, log.String())
}

// Several engines of one process: each has a host of its own.
func TestRunHosts(t *testing.T) {
	ctx, stop := context.WithCancel(t.Context())
	log, ended := &readyLog{ready: make(chan string, 3)}, make(chan int, 1)
	args := []string{"-listen", "127.9.0.255:0", "-side-channel", "127.9.0.255:0", "-hosts", "3"}
	go func() { ended <- run(ctx, args, io.Discard, log) }()
	var hosts []string
	for range 3 {
		at := regexp.MustCompile(`listen=(\S+):\d+ side-channel=(\S+):`).FindStringSubmatch(<-log.ready)
		require.Equal(t, at[1], at[2])
		hosts = append(hosts, at[1])
	}
	require.ElementsMatch(t, []string{"127.9.0.255", "127.9.1.0", "127.9.1.1"}, hosts)
	stop()
	require.Zero(t, <-ended)

	for _, wrong := range [][]string{{"-hosts", "0"}, {"-hosts", "2", "-engine-id", "a"}, {"-hosts", "2", "-listen", ":8101"}} {
		require.Equal(t, 2, run(t.Context(), wrong, io.Discard, io.Discard), wrong)
	}
}

func TestVersionFlag(t *testing.T) {
	for _, flag := range []string{"--version", "-version"} {
		var out, log strings.Builder
		require.Equal(t, 0, run(t.Context(), []string{flag}, &out, &log), log.String())
		require.Equal(t, "enginesim "+version.Text(builtAs)+"\n", out.String())
		require.Empty(t, log.String())
	}
}

func TestRunDies(t *testing.T) {
	require.Equal(t, exitEngineDied, run(t.Context(),
		[]string{"-listen", "127.0.0.1:0", "-side-channel", "127.0.0.1:0", "-fail", `{"mode":"die"}`}, io.Discard, io.Discard))
}

func TestRoleMismatch(t *testing.T) {
	p, d := startEngine(t, "-role", "prefill"), startEngine(t, "-role", "decode")
	p.post(t, chatPath, "a", chat("hi", `"max_tokens":3`))
	d.prefill(t, "b", "hi")
	p.post(t, chatPath, "c", chat("hi", `"max_tokens":1`))
	counts := map[string]int64{}
	for _, e := range []*simulator{p, d} {
		e.Metrics.RoleMismatch.Each(func(kind string, n int64) { counts[kind] = n })
	}
	require.Equal(t, map[string]int64{"plain_on_prefill": 1, "prefill_on_decode": 1}, counts)
}

// A router that knows of orphaned blocks can have a decode engine fetch them, with a prompt that is not theirs: P
// frees them, and the one token generated from the wrong KV is neither shown nor found again, because of its salt.
func TestCleanupDecode(t *testing.T) {
	p, d := startEngine(t, "-role", "prefill"), startEngine(t, "-role", "decode")
	params := p.prefill(t, "r", longPrompt)
	require.NotZero(t, p.Ledger.Held.Load())
	body := func(salt string) string {
		return `{"prompt":"a","max_tokens":1,` + salt + `"kv_transfer_params":` + string(params) + `}`
	}
	require.Equal(t, 200, d.post(t, "/v1/completions", "r", body(`"cache_salt":"x",`)).status)
	require.Zero(t, p.Ledger.Held.Load())
	require.Zero(t, d.State().Violations)
	params = p.prefill(t, "s", longPrompt)
	require.Equal(t, 500, d.post(t, "/v1/completions", "s", body("")).status, "without a salt another may find it")
}
