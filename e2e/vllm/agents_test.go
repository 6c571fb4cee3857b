//go:build vllm

package vllm

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/http"
	"os"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
)

// agentRequests are what agents send, as members of a body: the model is random, so a grammar has it write tool calls.
func agentRequests() (all []request) {
	const (
		schema = `{"type":"object","properties":{"path":{"type":"string","maxLength":20},"n":{"type":"integer"}},"required":["path","n"]}`
		nested = `,"tools":[{"type":"function","function":{"name":"read","parameters":` + schema + `}}]`
		flat   = `,"tools":[{"type":"function","name":"read","parameters":` + schema + `}]`
		claude = `,"tools":[{"name":"read","input_schema":` + schema + `}]`
		one    = `<tool_call>\\n\\{\"name\": \"read\", \"arguments\": \\{\"path\": \"[a-zA-Z ]{5,25}\", \"n\": [0-9]{1,4}\\}\\}\\n</tool_call>`
		calls  = `,"structured_outputs":{"regex":"[a-z <]{10,40}(` + one + `\\n){2}"}`
		quick  = `,"logit_bias":{"7":100}` // of </think>
	)
	for _, r := range []struct {
		api     api
		members string
	}{
		{chat, nested + calls + quick}, {chat, nested + `,"tool_choice":"required"` + quick}, {chat, nested},
		{responses, flat + calls + quick}, {responses, flat + `,"tool_choice":"required"` + quick}, {responses, flat},
		{messages, claude}, {messages, claude + `,"tool_choice":{"type":"any"}`},
	} {
		all = append(all, request{api: r.api, extra: r.members, tokens: 160, stream: true})
	}
	return all
}

// written is what a client has of a stream: its parts by kind and place, without ids and the sizes of events.
func written(raw []byte) string {
	parts := map[string]string{}
	for line := range strings.SplitSeq(strings.TrimSpace(string(raw)), "\n") {
		var e struct {
			Type    string
			Index   int
			Output  int `json:"output_index"`
			Delta   any
			Item    struct{ Type, Name string }
			Block   struct{ Type, Name string } `json:"content_block"`
			Choices []struct {
				Delta struct {
					Content, Reasoning string
					Tools              []struct {
						Index    int
						Function struct{ Name, Arguments string }
					} `json:"tool_calls"`
				}
				Finish string `json:"finish_reason"`
			}
		}
		if json.Unmarshal([]byte(line), &e) != nil { // [DONE]
			continue
		}
		for _, c := range e.Choices {
			parts["content"] += c.Delta.Content
			parts["reasoning"] += c.Delta.Reasoning
			parts["finish"] += c.Finish
			for _, one := range c.Delta.Tools {
				parts[fmt.Sprint("call ", one.Index)] += one.Function.Name + one.Function.Arguments
			}
		}
		switch delta := e.Delta.(type) {
		case string:
			parts[fmt.Sprint("item ", e.Output)] += delta
		case map[string]any:
			for _, key := range []string{"text", "thinking", "partial_json", "stop_reason"} {
				if text, ok := delta[key].(string); ok {
					parts[fmt.Sprint(key, e.Index)] += text
				}
			}
		}
		parts[fmt.Sprint("begins ", e.Output, e.Index)] += e.Item.Type + e.Item.Name + e.Block.Type + e.Block.Name
		if e.Type == "response.completed" || e.Type == "message_stop" {
			parts["ends"] += e.Type
		}
	}
	return fmt.Sprint(parts)
}

// TestRealAgents cuts agents' streams of real vLLM, with its parsers, between their decode engine and an Envoy that has
// Tandem loaded, and requires what an engine that was left alone writes. Then it kills an engine under 16 streams.
//
//	AGENT=1 ENGINES=1 DECODES=2 REFERENCE=prefill TANDEM_LIBRARY=$PWD/bin \
//	  e2e/vllm/run.sh go test -tags vllm -count 1 -run TestRealAgents -v ./e2e/vllm
func TestRealAgents(t *testing.T) {
	if os.Getenv("TANDEM_VLLM_AGENT") == "" {
		t.Skip("TANDEM_VLLM_AGENT is not set")
	}
	s, cut := insured(t, 2)
	ask := func(addr string, r request) (string, error) {
		a, err := send(t.Context(), addr, r, 0)
		if err == nil && a.status != http.StatusOK {
			err = fmt.Errorf("%d: %.300s", a.status, a.raw)
		}
		return written(a.raw), err
	}
	kinds := agentRequests()
	const streams = 64
	for i := range streams {
		r := kinds[i%len(kinds)]
		r.prompt = s.prompts.words(10 + 3*i)
		want, err := ask(s.reference.addr, r)
		require.NoError(t, err, r.body())
		r.header = http.Header{"X-Request-Id": {fmt.Sprintf("insured-%d-cut-%d", i, 1+rand.IntN(60))}}
		got, err := ask(s.front.addr, r)
		require.NoError(t, err, r.body())
		require.Equal(t, want, got, "%d: %s", i, r.body())
	}
	before := s.continued(t)
	t.Logf("%d streams, %d times cut, %v times repeated: all equal", streams, cut.cuts.Load(), before)

	written := total(t, s.decode[:1], generated)
	var wg sync.WaitGroup
	asked := make([]request, 16)
	got := make([]string, len(asked))
	for i := range asked {
		asked[i] = kinds[i%len(kinds)]
		asked[i].prompt = s.prompts.words(40)
		wg.Go(func() {
			var err error
			if got[i], err = ask(s.front.addr, asked[i]); err != nil {
				got[i] = err.Error()
			}
		})
	}
	killAtWork(t, s.decode[0], written)
	wg.Wait()
	for i, r := range asked {
		want, err := ask(s.reference.addr, r)
		require.NoError(t, err)
		require.Equal(t, want, got[i], r.body())
	}
	require.Positive(t, s.continued(t)-before)
	t.Logf("%v of %d streams repeated when an engine was killed", s.continued(t)-before, len(asked))
}
