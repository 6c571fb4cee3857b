package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tandem/e2e/enginesim/jsontext"
)

// testdata/vllm-0.32.0 has requests to a real vLLM 0.32.0 (CPU, one tiny model, block size 32, 512 blocks, NIXL 1.5.1)
// and its answers. Here the same bytes are sent to faithful simulators and the answers compared: status, error bodies
// word for word, every key of every object and their order, and those values that do not depend on the model.

type recordedHop struct {
	Request struct {
		Path      string
		RequestID string `json:"request_id"`
		Body      string
	}
	Response struct {
		Status      int
		ContentType string `json:"content_type"`
		RequestID   string `json:"request_id"`
		Body        string
	}
}

type recording struct {
	recordedHop
	Prefill   *recordedHop
	Decode    *recordedHop
	Aggregate *recordedHop       `json:"aggregate_reference"`
	DeltaP    map[string]float64 `json:"metrics_delta_prefill"`
	DeltaD    map[string]float64 `json:"metrics_delta_decode"`
}

func load(t *testing.T, name string) recording {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("testdata", "vllm-0.32.0", name+".json"))
	require.NoError(t, err)
	var r recording
	require.NoError(t, json.Unmarshal(b, &r))
	return r
}

func startRecorded(t *testing.T, role string, more ...string) *simulator {
	args := []string{"-role", role, "-faithful", "-block-size", "32", "-blocks", "512", "-max-model-len", "2048", "-load-timeout", "1s"}
	return startEngine(t, append(args, more...)...)
}

// replay sends a recorded request, with the hand-over of this run in place of the recorded one.
func (e *simulator) replay(t *testing.T, h *recordedHop, params json.RawMessage) reply {
	t.Helper()
	body := h.Request.Body
	if params != nil {
		old := jsontext.Get([]byte(body), "kv_transfer_params")
		require.NotNil(t, old)
		body = strings.Replace(body, string(old), string(params), 1)
	}
	r := e.post(t, h.Request.Path, h.Request.RequestID, body)
	require.Equal(t, h.Response.Status, r.status, r)
	require.Equal(t, h.Response.ContentType, r.header.Get("Content-Type"))
	require.Equal(t, h.Response.RequestID, r.header.Get("X-Request-Id"))
	return r
}

// altered returns this run's parameters, with the recorded decode leg's changes to the recorded ones.
func altered(t *testing.T, recorded, sent, mine json.RawMessage) json.RawMessage {
	t.Helper()
	var was, is, own map[string]json.RawMessage
	for raw, into := range map[*json.RawMessage]*map[string]json.RawMessage{&recorded: &was, &sent: &is, &mine: &own} {
		require.NoError(t, json.Unmarshal(*raw, into))
	}
	for k := range own {
		if _, ok := is[k]; !ok {
			delete(own, k)
		}
	}
	for k, v := range is {
		if !bytes.Equal(jsontext.Compact(was[k]), jsontext.Compact(v)) {
			own[k] = v
		}
	}
	b, err := json.Marshal(own)
	require.NoError(t, err)
	return b
}

// sameShape compares two JSON values; free names the members whose value depends on the model.
func sameShape(t *testing.T, path string, want, got []byte) {
	t.Helper()
	name := path[strings.LastIndexByte(path, '.')+1:]
	require.Equalf(t, kind(want), kind(got), "%s: %s and %s", path, want, got)
	switch kind(want) {
	case "object":
		if name == "kv_transfer_params" {
			require.Equal(t, keys(want), keys(got))
		}
		require.Equalf(t, keys(want), keys(got), "members of %s", path)
		jsontext.EachMember(want, func(key, val []byte) { sameShape(t, path+"."+string(key), val, jsontext.Get(got, string(key))) })
	case "array":
		w, g := elements(want), elements(got)
		if name == "choices" || len(w) == 0 || len(g) == 0 {
			require.Lenf(t, g, len(w), "%s", path)
		}
		if len(w) > 0 {
			sameShape(t, path+".0", w[0], g[0])
		}
	default:
		switch {
		case exact[name]:
			require.Equalf(t, string(want), string(got), "%s", path)
		case name == "id" && !bytes.HasPrefix(want, []byte(`"resp_`)) && !bytes.HasPrefix(want, []byte(`"msg_`)):
			require.Equalf(t, string(want), string(got), "%s", path)
		case name == "cached_tokens" || name == "remote_prefill_cached_tokens" || name == "cache_read_input_tokens":
			w, _ := jsontext.Integer(want)
			g, _ := jsontext.Integer(got)
			require.Equalf(t, w > 0, g > 0, "%s: %s and %s", path, want, got)
		case name == "remote_request_id":
			hex := regexp.MustCompile(`(resp_[0-9a-f]{16}|[0-9a-f]{8}"$)`)
			require.Equal(t, hex.ReplaceAllString(string(want), "#"), hex.ReplaceAllString(string(got), "#"))
		}
	}
}

var exact = set("object", "model", "role", "type", "code", "param", "message", "do_remote_prefill", "do_remote_decode",
	"tp_size", "dcp_size", "pp_size", "transfer_mode", "remote_host", "index", "completion_tokens", "output_tokens", "status",
	"finish_reason", "reason", "service_tier", "truncation", "tool_choice", "max_output_tokens", "temperature", "count")

func set(names ...string) map[string]bool {
	m := map[string]bool{}
	for _, n := range names {
		m[n] = true
	}
	return m
}

func kind(raw []byte) string {
	switch {
	case jsontext.IsObject(raw):
		return "object"
	case jsontext.IsArray(raw):
		return "array"
	case jsontext.IsString(raw):
		return "string"
	case jsontext.IsNumber(raw):
		return "number"
	case jsontext.IsNull(raw):
		return "null"
	}
	return "bool"
}

func keys(raw []byte) (out []string) {
	jsontext.EachMember(raw, func(key, _ []byte) { out = append(out, string(key)) })
	return out
}

func elements(raw []byte) (out [][]byte) {
	jsontext.EachElement(raw, func(e []byte) bool { out = append(out, e); return true })
	return out
}

func sameAnswer(t *testing.T, h *recordedHop, got reply) {
	t.Helper()
	if strings.HasPrefix(h.Response.ContentType, "text/event-stream") {
		sameStream(t, h.Response.Body, got.String())
		return
	}
	if h.Response.Status >= 400 {
		require.Equal(t, h.Response.Body, got.String())
		return
	}
	require.True(t, json.Valid(got.body), got)
	sameShape(t, "", []byte(h.Response.Body), got.body)
}

// sameStream compares the first event, the second, the one with the finish reason, and those after it. In the real
// engine the number of tokens in an event depends on timing.
func sameStream(t *testing.T, want, got string) {
	t.Helper()
	w, g := events(want), events(got)
	pick := func(list []string) (out []string) {
		end := slices.IndexFunc(list, func(e string) bool { return strings.Contains(e, `"stop_reason"`) })
		require.Positive(t, end, "no event with a finish reason")
		return append(append(out, list[0], list[min(1, end)]), list[end:]...)
	}
	w, g = pick(w), pick(g)
	require.Len(t, g, len(w), got)
	for i := range w {
		if w[i] == "[DONE]" {
			require.Equal(t, w[i], g[i])
			continue
		}
		sameShape(t, fmt.Sprint("event", i), []byte(w[i]), []byte(g[i]))
	}
}

func events(stream string) (out []string) {
	for e := range strings.SplitSeq(strings.TrimSuffix(stream, "\n\n"), "\n\n") {
		out = append(out, strings.TrimPrefix(e, "data: "))
	}
	return out
}

// streamText joins a chat stream's deltas.
func streamText(stream string) string {
	var b strings.Builder
	for _, e := range events(stream) {
		if r := (reply{body: []byte(e)}); r.get("choices", "0") != nil {
			b.WriteString(r.str("choices", "0", "delta", "content"))
		}
	}
	return b.String()
}

// TestReplaySingle: one engine without P/D.
func TestReplaySingle(t *testing.T) {
	e := startRecorded(t, "both", "-connector", "none")
	for _, name := range []string{
		"chat-plain", "chat-plain-again", "chat-turn2", "completion", "completion-tokens", "completion-tokens-salt",
		"chat-stream", "kvparams-noconnector", "err-len", "err-model", "reset-prefix-cache",
	} {
		t.Run(name, func(t *testing.T) {
			rec := load(t, "single-"+name)
			sameAnswer(t, &rec.recordedHop, e.replay(t, &rec.recordedHop, nil))
		})
	}
	rec := load(t, "single-tokenize-chat")
	r := e.replay(t, &rec.recordedHop, nil)
	require.Equal(t, keys([]byte(rec.Response.Body)), keys(r.body))
	require.Len(t, elements(jsontext.Get(r.body, "tokens")), r.num("count"))
	e.quiet(t)
}

// prefills lists the recorded prefill legs that were sent to an engine whose cache knew the system prompt.
func prefills(t *testing.T) (names []string) {
	files, err := filepath.Glob("testdata/vllm-0.32.0/edge-prefill-*.json")
	require.NoError(t, err)
	for _, f := range files {
		names = append(names, strings.TrimSuffix(strings.TrimPrefix(filepath.Base(f), "edge-prefill-"), ".json"))
	}
	return names
}

func TestReplayPrefillLeg(t *testing.T) {
	without := set("tools_auto", "tools_named", "tools_required") // recorded before the tool parser was switched on
	for _, name := range prefills(t) {
		t.Run(name, func(t *testing.T) {
			rec := load(t, "edge-prefill-"+name)
			p := startRecorded(t, "prefill", fmt.Sprintf("-tool-call-parser=%t", !without[name]))
			warm := load(t, "edge-prefill-minimal_kv")
			if warm.Prefill.Request.Path == rec.Prefill.Request.Path {
				p.replay(t, warm.Prefill, nil)
				p.Ledger.ReleaseAll()
			}
			r := p.replay(t, rec.Prefill, nil)
			if name == "eos_stop" && r.str("choices", "0", "finish_reason") == "length" { // the model decides whether the one token contains "a" or "e"
				rec.Prefill.Response.Body = strings.Replace(rec.Prefill.Response.Body,
					`"finish_reason":"stop","stop_reason":"a"`, `"finish_reason":"length","stop_reason":null`, 1)
			}
			sameAnswer(t, rec.Prefill, r)
			if r.status != 200 {
				p.quiet(t)
				return
			}
			if params := r.params(); params != nil {
				var ids [][]int
				require.NoError(t, json.Unmarshal(jsontext.Get(params, "remote_block_ids"), &ids))
				require.Len(t, ids[0], (r.num("kv_transfer_params", "remote_num_tokens")+31)/32)
				require.Equal(t, p.EngineID, r.str("kv_transfer_params", "remote_engine_id"))
				require.Equal(t, p.SidePort, r.num("kv_transfer_params", "remote_port"))
			}
			require.Positive(t, p.Ledger.Held.Load())
		})
	}
}

// TestReplayDecodeLeg runs each recorded decode leg after the prefill leg whose hand-over it used.
func TestReplayDecodeLeg(t *testing.T) {
	tests := []struct {
		prefill, decode string
		onPrefillPod    bool
		before          []string // earlier decode legs with the same hand-over
		wait            bool     // until the lease ends
		right           string   // "yes": the text is that of a plain run; "no"; "": not compared
	}{
		{prefill: "for-dead", decode: "good", right: "yes"},
		{prefill: "for-dead", decode: "reuse-same-params-full-local-hit", before: []string{"good"}, right: "yes"},
		{prefill: "for-dead", decode: "reuse-same-params-new-salt", before: []string{"good"}, right: "yes"},
		{prefill: "for-dead", decode: "reuse-after-overwrite", before: []string{"good"}, right: "no"},
		{prefill: "for-deadport", decode: "dead-port"},
		{prefill: "for-deadport", decode: "wrong-engine-id"},
		{prefill: "for-deadport", decode: "unknown-request-id", right: "yes"},
		{prefill: "min-fields", decode: "missing-tp", right: "yes"},
		{prefill: "nullp", decode: "null-params", right: "yes"},
		{prefill: "bool", decode: "both-flags", right: "yes"},
		{prefill: "tokids", decode: "prompt_token_ids"},
		{prefill: "diffprompt", decode: "different-prompt", right: "no"},
		{prefill: "toolong", decode: "400-on-decode"},
		{prefill: "kvprod", decode: "decode-sent-to-prefill-pod", onPrefillPod: true},
		{prefill: "ttl", decode: "after-lease-expiry", wait: true, right: "yes"},
	}
	for _, test := range tests {
		t.Run(test.decode, func(t *testing.T) {
			lease := "30s"
			if test.wait {
				lease = "30ms"
			}
			p, d := startRecorded(t, "prefill", "-lease", lease), startRecorded(t, "decode")
			rec, dec := load(t, "edge-prefill-"+test.prefill), load(t, "edge-decode-"+test.decode)
			for _, e := range []*simulator{p, d} { // the system prompt was known to both caches
				e.post(t, chatPath, "warm", strings.Replace(rec.Prefill.Request.Body, "do_remote_decode", "x", 1))
			}
			own := p.replay(t, rec.Prefill, nil)
			if test.wait {
				require.Eventually(t, func() bool { return p.Ledger.Expired.Load() == 1 }, patience, time.Millisecond)
			}
			recorded := jsontext.Get([]byte(rec.Prefill.Response.Body), "kv_transfer_params")
			change := func(h *recordedHop) json.RawMessage {
				sent := jsontext.Get([]byte(h.Request.Body), "kv_transfer_params")
				if jsontext.IsNull(sent) {
					return nil
				}
				return altered(t, recorded, sent, own.params())
			}
			for _, name := range test.before {
				b := load(t, "edge-decode-"+name)
				d.replay(t, b.Decode, change(b.Decode))
			}
			if test.right == "no" && test.before != nil {
				for i := range 2 * 512 / 3 { // other prompts take P's blocks
					p.post(t, "/v1/completions", "fill", fmt.Sprintf(`{"model":"tiny","prompt":"%04d%s","max_tokens":1}`, i, strings.Repeat("fill", 90)))
				}
			}
			at := d
			if test.onPrefillPod {
				at = p
			}
			r := at.replay(t, dec.Decode, change(dec.Decode))
			sameAnswer(t, dec.Decode, r)
			if test.right != "" {
				plain := startRecorded(t, "both").post(t, chatPath, "w", strings.Replace(dec.Decode.Request.Body, "do_remote_prefill", "x", 1))
				require.Equal(t, test.right == "yes", plain.content() == r.content(), "%s and %s", plain.content(), r.content())
			}
		})
	}
}

// TestReplayPairs runs the recorded pairs of hops in order: same text as the aggregated run, and the same counters
// move.
func TestReplayPairs(t *testing.T) {
	p, d := startRecorded(t, "prefill"), startRecorded(t, "decode")
	for _, name := range []string{"d-chat", "d-chat-stream", "d-completion", "d-completion-short", "d-chat-repeat", "d-chat-repeat2", "c-chat-long"} {
		t.Run(name, func(t *testing.T) {
			rec := load(t, "nixl-0.32.0-"+name)
			beforeP, beforeD := scrape(t, p), scrape(t, d)
			first := p.replay(t, rec.Prefill, nil)
			sameAnswer(t, rec.Prefill, first)
			second := d.replay(t, rec.Decode, first.params())
			moved(t, rec.DeltaP, beforeP, scrape(t, p))
			moved(t, rec.DeltaD, beforeD, scrape(t, d))
			sameAnswer(t, rec.Decode, second)
			plain := d.replay(t, rec.Aggregate, nil)
			sameAnswer(t, rec.Aggregate, plain)
			answerText := func(r reply) string {
				if strings.HasPrefix(r.String(), "data: ") {
					return streamText(r.String())
				}
				return r.content() + r.str("choices", "0", "text")
			}
			require.NotEmpty(t, answerText(plain))
			require.Equal(t, answerText(plain), answerText(second))
			require.True(t, strings.HasPrefix(answerText(second), answerText(first)))
			p.quiet(t)
			d.quiet(t)
		})
	}
}

// TestReplayRecompute: the policy recompute turns failed loads into right answers.
func TestReplayRecompute(t *testing.T) {
	good := load(t, "recompute-good")
	recorded := jsontext.Get([]byte(good.Request.Body), "kv_transfer_params")
	for _, name := range []string{"good", "bad-blocks", "unknown-engine", "dead-port"} {
		t.Run(name, func(t *testing.T) {
			p, d := startRecorded(t, "prefill"), startRecorded(t, "decode", "-kv-load-failure", "recompute")
			rec := load(t, "recompute-"+name)
			body := strings.Replace(good.Request.Body, string(recorded), `{"do_remote_decode":true}`, 1)
			own := p.post(t, chatPath, "rc", strings.Replace(body, `"max_tokens": 8`, `"max_tokens": 1`, 1))
			params := altered(t, recorded, jsontext.Get([]byte(rec.Request.Body), "kv_transfer_params"), own.params())
			r := d.replay(t, &rec.recordedHop, params)
			sameAnswer(t, &rec.recordedHop, r)
			loaded := name == "good"
			require.Equal(t, loaded, r.num("usage", "prompt_tokens_details", "created_cache_tokens") == 0)
			plain := d.post(t, chatPath, "w", chat("x"))
			require.Equal(t, 200, plain.status)
		})
	}
}

// TestReplaySafety replays attempts to kill a decode engine.
func TestReplaySafety(t *testing.T) {
	files, err := filepath.Glob("testdata/vllm-0.32.0/safety-*.json")
	require.NoError(t, err)
	for _, f := range files {
		b, err := os.ReadFile(f)
		require.NoError(t, err)
		var rec struct {
			Name   string
			KV     json.RawMessage
			Result []any
			Health any `json:"health_after"`
		}
		require.NoError(t, json.Unmarshal(b, &rec))
		if rec.Name == "missing-remote_host" {
			continue // TestIncomplete
		}
		t.Run(rec.Name, func(t *testing.T) {
			p, d := startRecorded(t, "prefill"), startRecorded(t, "decode")
			params := p.prefill(t, "s", longPrompt)
			if rec.Name == "stale-reuse" {
				require.Equal(t, 200, d.post(t, chatPath, "s", chat(longPrompt, `"max_tokens":8`, decodeMembers(params))).status)
			}
			switch rec.Name {
			case "bad-blocks-fail-policy", "remote_block_ids-strings":
				params = edit(t, params, map[string]string{"remote_block_ids": string(jsontext.Get(rec.KV, "remote_block_ids"))})
			case "fewer-blocks-than-prompt":
				params = edit(t, params, map[string]string{"remote_block_ids": `[[3]]`})
			case "client-sends-do_remote_prefill-only", "kv-params-string":
				params = rec.KV
			}
			r := d.post(t, chatPath, "s", chat(longPrompt, `"max_tokens":8`, decodeMembers(params)))
			require.EqualValues(t, rec.Result[0], r.status, r)
			if r.status != 200 {
				require.True(t, strings.HasPrefix(r.String(), rec.Result[2].(string)), "%s\n%s", rec.Result[2], r)
			}
			if rec.Health == float64(200) {
				require.Equal(t, 200, d.get(t, "/health").status)
			} else {
				<-d.Died
			}
		})
	}
}
