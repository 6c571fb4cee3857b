package main

import (
	"encoding/json"
	"fmt"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/tools/txtar"
)

// plainEvent returns an event without the parts that differ between runs.
func plainEvent(t *testing.T, event string) string {
	name, data, _ := strings.Cut(strings.TrimSpace(event), "data: ")
	if data == "[DONE]" {
		return name + data
	}
	data = regexp.MustCompile(`"(created|created_at)":\d+`).ReplaceAllString(data, `"$1":0`)
	data = regexp.MustCompile(`"input_tokens":\d+`).ReplaceAllString(data, `"input_tokens":0`)
	data = regexp.MustCompile(`resp_[0-9a-f]+`).ReplaceAllString(data, "resp_")
	var v any
	require.NoError(t, json.Unmarshal([]byte(data), &v), data)
	text, err := json.Marshal(v)
	require.NoError(t, err)
	return name + string(text)
}

func plainEvents(t *testing.T, stream string) (out []string) {
	for event := range strings.SplitSeq(strings.TrimSpace(stream), "\n\n") {
		out = append(out, plainEvent(t, event))
	}
	return out
}

// TestLoadFailureStreams: streams whose KV load fails have the events of the real engine, and nearly its length.
func TestLoadFailureStreams(t *testing.T) {
	recorded, err := txtar.ParseFile("testdata/vllm-0.32.0/streams.txtar")
	require.NoError(t, err)
	p := startEngine(t, "-role", "prefill")
	d := startEngine(t, "-role", "decode", "-load-timeout", "50ms")
	words, ids := strings.Repeat("hello world this is a long prompt ", 12), strings.Trim(strings.Repeat("7,", 125), ",")
	bodies := map[string][2]string{
		"chat":        {"/v1/chat/completions", `"max_tokens":1,"messages":[{"role":"user","content":"` + words + `"}]`},
		"completions": {"/v1/completions", `"max_tokens":1,"prompt":"` + words + `"`},
		"responses":   {"/v1/responses", `"max_output_tokens":1,"input":"` + words + `"`},
		"messages":    {"/v1/messages", `"max_tokens":1,"messages":[{"role":"user","content":"` + words + `"}]`},
		"generate":    {"/inference/v1/generate", `"sampling_params":{"max_tokens":1},"token_ids":[` + ids + `]`},
	}
	for _, f := range recorded.Files {
		name, failed := strings.CutPrefix(f.Name, "failed ")
		if !failed {
			continue
		}
		t.Run(name, func(t *testing.T) {
			path, body := bodies[name][0], bodies[name][1]
			leg := p.post(t, path, "a", fmt.Sprintf(`{"model":"tiny",%s,"kv_transfer_params":{"do_remote_decode":true}}`, body))
			require.Equal(t, 200, leg.status, leg.String())
			p.failWith(t, `{"mode":"unreachable"}`)
			defer func() {
				_, err := p.do("DELETE", "/sim/fail", "", "")
				require.NoError(t, err)
			}()
			stream := d.post(t, path, "a", fmt.Sprintf(`{"model":"tiny",%s,"stream":true,%s}`, body, decodeMembers(leg.params())))
			require.Equal(t, 200, stream.status)
			require.Equal(t, plainEvents(t, string(f.Data)), plainEvents(t, stream.String()))
			require.InDelta(t, len(f.Data), len(stream.body), 4)
		})
	}
	require.Positive(t, p.Held(), "the lease has them")
	p.Ledger.ReleaseAll()
}
