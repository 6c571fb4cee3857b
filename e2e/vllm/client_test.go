//go:build vllm

package vllm

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net/http"
	"strconv"
	"strings"
)

// api is one of the request shapes.
type api struct {
	name, path, tokenLimit string
}

var (
	chat        = api{"chat", "/v1/chat/completions", "max_tokens"}
	completions = api{"completions", "/v1/completions", "max_tokens"}
	responses   = api{"responses", "/v1/responses", "max_output_tokens"}
	messages    = api{"messages", "/v1/messages", "max_tokens"}
	generate    = api{"generate", "/inference/v1/generate", "max_tokens"} // tokens in, tokens out; a token for each byte of the prompt
)

// request is one greedy request.
type request struct {
	api      api
	prompt   string
	tokens   int // of the answer, at most
	stream   bool
	two      bool   // several choices, so not split; greedy by top_k, as vLLM refuses temperature 0 with n
	extra    string // further members, JSON with a comma in front
	sampling string // generate: further sampling_params, JSON with a comma in front
	header   http.Header
}

// body returns the request's JSON.
func (r request) body() string {
	quoted, err := json.Marshal(r.prompt)
	if err != nil {
		panic(err) // a string always has a JSON form
	}
	var input string
	switch r.api {
	case chat, messages:
		input = fmt.Sprintf(`"messages":[{"role":"user","content":%s}]`, quoted)
	case completions:
		input = fmt.Sprintf(`"prompt":%s`, quoted)
	case responses:
		input = fmt.Sprintf(`"input":%s`, quoted)
	}
	mode := `,"temperature":0`
	if r.two {
		mode = `,"temperature":1,"top_k":1,"n":2`
	}
	if r.stream {
		mode += `,"stream":true`
	}
	if r.api == generate {
		return fmt.Sprintf(`{"model":"tiny","token_ids":%s,"sampling_params":{%q:%d,"temperature":0%s}%s%s}`,
			tokenIDs(r.prompt), r.api.tokenLimit, r.tokens, r.sampling, strings.TrimPrefix(mode, `,"temperature":0`), r.extra)
	}
	return fmt.Sprintf(`{"model":"tiny",%s,%q:%d%s%s}`, input, r.api.tokenLimit, r.tokens, mode, r.extra)
}

func tokenIDs(prompt string) string {
	ids := make([]string, len(prompt))
	for i := range ids {
		ids[i] = strconv.Itoa(300 + int(prompt[i]))
	}
	return "[" + strings.Join(ids, ",") + "]"
}

func (r request) String() string {
	mode := "plain"
	if r.stream {
		mode = "stream"
	}
	return fmt.Sprintf("%s/%s/%dB", r.api.name, mode, len(r.prompt))
}

// answer is the answer. text has an entry for each choice.
type answer struct {
	status       int
	text         []string
	promptTokens int64
	raw          []byte
}

// payload has the members, of all APIs, of answers and of their SSE events.
type payload struct {
	Choices []struct {
		Index    int
		Text     string
		Message  struct{ Content string }
		Delta    struct{ Content string }
		TokenIDs []int `json:"token_ids"` // generate
	}
	Usage struct {
		PromptTokens int64 `json:"prompt_tokens"`
	}
	Output  []struct{ Content []struct{ Text string } } // responses
	Content []struct{ Text string }                     // messages
	Type    string                                      // events of responses and messages
	Delta   json.RawMessage
}

// send makes the request at addr and reads the answer to its end. If abort is positive the client leaves after that
// many events of the stream.
func send(ctx context.Context, addr string, r request, abort int) (answer, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+addr+r.api.path, strings.NewReader(r.body()))
	if err != nil {
		return answer{}, err
	}
	req.Header.Set("Content-Type", "application/json")
	maps.Copy(req.Header, r.header)
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		return answer{}, err
	}
	defer func() { _ = res.Body.Close() }()
	if r.stream && res.StatusCode == http.StatusOK {
		return readEvents(res, abort)
	}
	raw, err := io.ReadAll(res.Body)
	if err != nil {
		return answer{}, fmt.Errorf("reading the answer: %w", err)
	}
	a := answer{status: res.StatusCode, raw: raw}
	if a.status != http.StatusOK {
		return a, nil
	}
	var p payload
	if err := json.Unmarshal(raw, &p); err != nil {
		return a, fmt.Errorf("answer %.200q: %w", raw, err)
	}
	a.promptTokens = p.Usage.PromptTokens
	for _, c := range p.Choices {
		a.add(c.Index, c.Text+c.Message.Content)
		a.addTokens(c.Index, c.TokenIDs)
	}
	for _, o := range p.Output {
		for _, c := range o.Content {
			a.add(0, c.Text)
		}
	}
	for _, c := range p.Content {
		a.add(0, c.Text)
	}
	return a, nil
}

func (a *answer) add(choice int, text string) {
	for len(a.text) <= choice {
		a.text = append(a.text, "")
	}
	a.text[choice] += text
}

func (a *answer) addTokens(choice int, ids []int) {
	for _, id := range ids {
		a.add(choice, strconv.Itoa(id)+" ")
	}
}

var errLeft = errors.New("the client left, as it was told to")

func readEvents(res *http.Response, abort int) (answer, error) {
	a := answer{status: res.StatusCode}
	lines := bufio.NewScanner(res.Body)
	lines.Buffer(nil, 16<<20)
	ended, seen := false, 0
	for lines.Scan() {
		data, isData := bytes.CutPrefix(lines.Bytes(), []byte("data: "))
		if !isData {
			continue
		}
		a.raw = append(append(a.raw, data...), '\n')
		if string(data) == "[DONE]" {
			ended = true
			continue
		}
		var p payload
		if err := json.Unmarshal(data, &p); err != nil {
			return a, fmt.Errorf("event %.200q: %w", data, err)
		}
		ended = ended || p.Type == "response.completed" || p.Type == "response.incomplete" || p.Type == "message_stop"
		if err := a.addEvent(p); err != nil {
			return a, err
		}
		if seen++; seen == abort {
			return a, errLeft
		}
	}
	if err := lines.Err(); err != nil {
		return a, fmt.Errorf("reading events: %w", err)
	}
	if !ended {
		return a, fmt.Errorf("the stream ended without its last event: %.300q", a.raw[max(0, len(a.raw)-300):])
	}
	return a, nil
}

func (a *answer) addEvent(p payload) error {
	for _, c := range p.Choices {
		a.add(c.Index, c.Text+c.Delta.Content)
		a.addTokens(c.Index, c.TokenIDs)
	}
	switch p.Type {
	case "response.output_text.delta":
		var text string
		if err := json.Unmarshal(p.Delta, &text); err != nil {
			return fmt.Errorf("delta %.200q: %w", p.Delta, err)
		}
		a.add(0, text)
	case "content_block_delta":
		var delta struct{ Text string }
		if err := json.Unmarshal(p.Delta, &delta); err != nil {
			return fmt.Errorf("delta %.200q: %w", p.Delta, err)
		}
		a.add(0, delta.Text)
	}
	return nil
}

// prompts are fresh in every run, so that nothing in them is cached anywhere.
type prompts struct{ rand *rand.Rand }

// words makes a prompt of n words, about six tokens each.
func (p prompts) words(n int) string {
	var b strings.Builder
	for range n {
		fmt.Fprintf(&b, "word%05d ", p.rand.IntN(100000))
	}
	return b.String()
}
