//go:build vllm

package vllm

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// used are the tokens of answers, as someone counts them.
type used struct{ prompt, cached, answer int64 }

func (u *used) add(o used) {
	u.prompt, u.cached, u.answer = u.prompt+o.prompt, u.cached+o.cached, u.answer+o.answer
}

// usageOf returns the tokens that an answer of vLLM told its client; false: it told none.
func usageOf(a answer) (u used, said bool) {
	type tokens struct {
		Prompt        *int64 `json:"prompt_tokens"`
		Completion    int64  `json:"completion_tokens"`
		Input         *int64 `json:"input_tokens"`
		Output        int64  `json:"output_tokens"`
		CacheRead     int64  `json:"cache_read_input_tokens"`
		CacheWrite    int64  `json:"cache_creation_input_tokens"`
		PromptDetails struct {
			Cached int64 `json:"cached_tokens"`
		} `json:"prompt_tokens_details"`
		InputDetails struct {
			Cached int64 `json:"cached_tokens"`
		} `json:"input_tokens_details"`
	}
	for text := range bytes.Lines(a.raw) {
		var body struct {
			Usage    *tokens
			Message  struct{ Usage *tokens }
			Response struct{ Usage *tokens }
		}
		if json.Unmarshal(text, &body) != nil {
			continue
		}
		for _, t := range []*tokens{body.Message.Usage, body.Response.Usage, body.Usage} {
			switch {
			case t == nil:
			case t.Prompt != nil:
				u, said = used{*t.Prompt, t.PromptDetails.Cached, t.Completion}, true
			case t.Input != nil:
				u = used{*t.Input + t.CacheRead + t.CacheWrite, t.InputDetails.Cached + t.CacheRead, t.Output}
				said = true
			}
		}
	}
	return u, said
}

// tokensAgree: of every API, streamed and not, over two hops and one, what Envoy counts is to the token what the answers
// told their clients, and what decode engines counted; streams that say nothing and clients that leave add nothing.
func (s *suite) tokensAgree(t *testing.T) {
	counted := func() (u used) {
		m, err := scrape(s.admin)
		require.NoError(t, err)
		of := func(kind string) int64 { return int64(m.sum("tandem_tokens_total", `kind="`+kind+`"`)) }
		return used{of("prompt"), of("cached"), of("generation")}
	}
	generated := func() int64 { return int64(total(t, s.decode, "vllm:generation_tokens_total")) }
	time.Sleep(2 * time.Second) // what ran before is counted
	before, written := counted(), generated()
	const n = 120
	var mu sync.Mutex
	var told used
	var silent int64 // tokens of streams that say nothing
	kinds, errs := map[string]int{}, make([]error, n)
	work := make(chan int)
	var group sync.WaitGroup
	for range 8 {
		group.Go(func() {
			for i := range work {
				r := request{api: []api{chat, completions, responses, messages, generate}[i%5], stream: i/5%2 == 1, tokens: 4 + i%21,
					prompt: fmt.Sprint("request ", i, " of those that are counted")}
				asks := (r.api == chat || r.api == completions) && r.stream
				switch {
				case asks && i%4 != 0:
					r.extra = `,"stream_options":{"include_usage":true}`
				case r.api == completions && !r.stream:
					r.two = true
				}
				got, err := send(t.Context(), s.front.addr, r, 0)
				if err == nil && got.status != 200 {
					err = fmt.Errorf("%s: %d %s", r, got.status, got.raw)
				}
				mu.Lock()
				u, said := usageOf(got)
				kinds[fmt.Sprintf("%s, stream %t, said %t", r.api.name, r.stream, said)]++
				if told.add(u); !said {
					silent += int64(r.tokens)
				}
				errs[i] = err
				mu.Unlock()
			}
		})
	}
	for i := range n {
		work <- i
	}
	close(work)
	group.Wait()
	require.NoError(t, errors.Join(errs...))
	want := used{before.prompt + told.prompt, before.cached + told.cached, before.answer + told.answer}
	require.Eventually(t, func() bool { return counted() == want }, time.Minute, 100*time.Millisecond,
		"answers told %+v, before them %+v had been counted; kinds %v", told, before, kinds)
	t.Logf("kinds: %v; told and counted: %+v", kinds, told)
	for _, kind := range []string{"chat, stream true", "completions, stream false", "responses, stream true", "messages, stream true"} {
		require.Positive(t, kinds[kind+", said true"], "%s: %v", kind, kinds)
	}
	engines := generated() - written
	require.GreaterOrEqual(t, engines, told.answer)
	require.LessOrEqual(t, engines, told.answer+silent, "decode engines wrote more than answers have")
	s.report.row("Tokens counted by Envoy", n, fmt.Sprintf(
		"equal to what the answers told, to the token: %d of prompts (%d cached), %d of answers; the decode engines wrote %d (at most %d in streams that say none)",
		told.prompt, told.cached, told.answer, engines, silent))
}
