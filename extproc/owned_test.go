package extproc

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"tandem/extproc/core"
	"tandem/extproc/openai"
	"tandem/extproc/plan"
	"tandem/picker"
)

// sentinels are values that a client sends and that Tandem never does.
var sentinels = map[string]string{
	"kv_transfer_params": `{"do_remote_prefill":true}`, "ec_transfer_params": `{"a":"client"}`, "bootstrap_host": `"client"`,
	"bootstrap_port": `4711`, "bootstrap_room": `4711`, "disaggregated_params": `{"a":"client"}`,
	"disagg_request_id": `4711`, "routed_dp_rank": `4711`, "data_parallel_rank": `4711`, "do_local_prefill": `true`,
	"prompt_token_ids": `[4711]`, "nvext": `{"a":"client"}`, "priority": `-1000000`,
	"max_tokens": `4711`, "max_completion_tokens": `4711`, "max_output_tokens": `4711`, "min_tokens": `2`,
	"min_completion_tokens": `2`, "stream": `true`, "stream_options": `{"include_usage":true}`, "stop": `["client"]`,
	"stop_token_ids": `[4711]`, "stop_sequences": `["client"]`, "include_stop_str_in_output": `true`,
	"temperature": `0.4711`, "seed": `4711`, "user": `"client"`, "metadata": `{"a":"client"}`, "logit_bias": `{"4711":1}`,
	"response_format": `{"type":"text"}`, "cache_salt": `"client"`, "unknown_member": `{"a":["client"]}`,
}

// shapes are a small body of each path, and whether it is split.
var shapes = []struct {
	path, body string
	split      bool
	takes      bool // engines read priority there
}{
	{"/v1/chat/completions", `"messages":[{"role":"user","content":"hi"}]`, true, true},
	{"/v1/completions", `"prompt":"hi"`, true, true},
	{"/v1/responses", `"input":"hi","store":false`, true, true},
	{"/v1/messages", `"messages":[{"role":"user","content":"hi"}]`, true, true},
	{"/inference/v1/generate", `"token_ids":[1,2,3]`, true, true},
	{"/v1/embeddings", `"input":"hi"`, false, true},
	{"/pooling", `"input":"hi"`, false, true},
	{"/score", `"text_1":"a","text_2":"b"`, false, true},
	{"/v1/score", `"text_1":"a","text_2":"b"`, false, true},
	{"/rerank", `"query":"a","documents":["b"]`, false, true},
	{"/v1/rerank", `"query":"a","documents":["b"]`, false, true},
	{"/v2/rerank", `"query":"a","documents":["b"]`, false, true},
	{"/classify", `"input":"hi"`, false, true},
	{"/v1/chat/completions/batch", `"messages":[[{"role":"user","content":"hi"}]]`, false, true},
	{"/tokenize", `"prompt":"hi"`, false, false},
	{"/detokenize", `"tokens":[1]`, false, false},
	{"/v1/messages/count_tokens", `"messages":[{"role":"user","content":"hi"}]`, false, false},
	{"/invocations", `"messages":[{"role":"user","content":"hi"}]`, false, false},
	{"/v1/chat/completions/render", `"messages":[{"role":"user","content":"hi"}]`, false, false},
}

func membersOf(t *testing.T, body []byte) (m map[string]json.RawMessage) {
	t.Helper()
	require.NoError(t, json.Unmarshal(body, &m), "%s", body)
	return m
}

// TestOwnedMembers holds the table of ownedMembers both ways, on every leg and path: what Tandem owns there is never
// the client's, whatever that sends; and everything else reaches the engine exactly as the client has sent it.
func TestOwnedMembers(t *testing.T) {
	for _, priorities := range []plan.EnginePriority{plan.NoEnginePriority, plan.VLLMPriority, plan.SGLangPriority} {
		s := newStand(t, core.Options{})
		policy := wishing(picker.MissGoOn)
		policy.Priorities = priorities
		s.pool("chat", policy, "p1", "d1", "d2")
		// check compares an engine's body with the client's, on one leg
		check := func(t *testing.T, leg ownLeg, path string, sent, got []byte, takes bool) (priority string) {
			t.Helper()
			client, engine := membersOf(t, sent), membersOf(t, got)
			all := maps.Clone(client)
			maps.Copy(all, engine)
			for name := range all {
				its, ours := engine[name], owns(name)
				owned := ours != nil && ours.in(leg, openai.Classify("POST", path)) && (name != "priority" || priorities != plan.NoEnginePriority)
				switch {
				case owned && ours.Added && client[name] == nil:
					require.NotNil(t, its, "%s is added", name)
				case owned && !ours.Added:
					if client[name] != nil && its != nil && string(client[name]) == sentinels[name] {
						require.NotEqual(t, string(client[name]), string(its), "%s is the client's", name)
					}
				default:
					require.Equal(t, string(client[name]), string(its), "%s is the client's business", name)
				}
			}
			if priorities != plan.NoEnginePriority && takes {
				require.NotNil(t, engine["priority"], "the operator's")
			}
			return string(engine["priority"])
		}
		n := 0
		for _, shape := range shapes {
			names := slices.Sorted(maps.Keys(sentinels))
			bodies := []string{`{"model":"m",` + shape.body + `}`}
			everything := `{"model":"m",` + shape.body
			for _, name := range names {
				more := ""
				if name == "stream_options" { // else engines refuse it
					more = `"stream":true,`
				}
				bodies = append(bodies, fmt.Sprintf(`{"model":"m",%s"%s":%s,%s}`, more, name, sentinels[name], shape.body))
				everything += fmt.Sprintf(`,"%s":%s`, name, sentinels[name])
			}
			for _, body := range append(bodies, everything+"}") {
				n++
				id := fmt.Sprintf("r%d", n)
				t.Run(fmt.Sprintf("%d %s %.60s", priorities, shape.path, body), func(t *testing.T) {
					q := s.newRequest(shape.path, id, body)
					q.headers["x-llm-d-inference-objective"] = "gold"
					require.Zero(t, q.pass().status())
					if !shape.split {
						check(t, onOther, shape.path, []byte(body), q.body, shape.takes)
						return
					}
					first := check(t, onPrefill, shape.path, []byte(body), q.body, true)
					q.prefillLeg(engineAnswer{status: 200, body: prefilled(params(3))})
					q.follow()
					require.Zero(t, q.pass().status())
					second := check(t, onDecode, shape.path, []byte(body), q.body, true)
					if priorities != plan.NoEnginePriority {
						require.Equal(t, first, second, "both engines get the same")
					}
					q.replan() // D has failed
					q.follow()
					require.Zero(t, q.pass().status())
					check(t, onPrefill, shape.path, []byte(body), q.body, true)
					s.server.passes.Revoke(id)
				})
			}
		}
		for name, body := range map[string]string{
			"alone":  `{"n":2,"priority":-1000000,"model":"m","messages":[{"role":"user","content":"hi"}]}`,
			"silent": `{"n":2,"model":"m","messages":[{"role":"user","content":"hi"}]}`,
			"long":   `{"n":2,"priority":-1000000,"model":"m","messages":[{"role":"user","content":"` + strings.Repeat("hi ", 20_000) + `"}]}`,
		} {
			q := s.newRequest("/v1/chat/completions", "alone-"+name, body)
			require.Zero(t, q.pass().status())
			check(t, onAlone, "/v1/chat/completions", []byte(body), q.body, true)
		}
		for name, body := range map[string]string{
			"stored":    `{"model":"m","input":"hi","store":true,"priority":-1000000}`,
			"silent":    `{"model":"m","input":"hi","store":true}`,
			"continued": `{"model":"m","input":"hi","previous_response_id":"resp_0","priority":-1000000}`,
			"named":     `{"model":"m","input":"hi","store":true,"request_id":"mine","priority":-1000000}`,
		} {
			q := s.newRequest("/v1/responses", "stored-"+name, body)
			require.Zero(t, q.pass().status())
			leg := onStored
			if name == "continued" {
				leg = onAlone // nobody has that one
			}
			check(t, leg, "/v1/responses", []byte(body), q.body, true)
		}
	}
}

// TestOwnedMembersAreDocumented: docs/security.md has the same table.
func TestOwnedMembersAreDocumented(t *testing.T) {
	text, err := os.ReadFile("../docs/security.md")
	require.NoError(t, err)
	var table strings.Builder
	table.WriteString("| member | prefill | decode | alone | stored | other paths |\n|---|---|---|---|---|---|\n")
	for _, o := range ownedMembers() {
		fmt.Fprintf(&table, "| `%s`", o.Member)
		if o.APIs != nil {
			table.WriteString(" of " + strings.Trim(fmt.Sprint(o.APIs), "[]")) //nolint:staticcheck // names of APIs, not bytes
		}
		if o.If != "" {
			fmt.Fprintf(&table, ", with `%s`", o.If)
		}
		for leg := onPrefill; leg <= onOther; leg <<= 1 {
			switch {
			case o.Legs&leg == 0:
				table.WriteString(" | client's")
			case o.Added:
				table.WriteString(" | added")
			default:
				table.WriteString(" | **Tandem's**")
			}
		}
		table.WriteString(" |\n")
	}
	require.Contains(t, string(text), table.String(), "docs/security.md should have this table")
}
