package e2e

import (
	"bufio"
	"cmp"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// insurance is a pool whose streams outlive their engines.
const insurance = "  engine: vllm\n  continueStreams: {}\n"

// insuredFleet starts a fleet inside Envoy with insurance.
func insuredFleet(t *testing.T, o options) *fleet {
	t.Helper()
	onlyInside(t)
	o.inside = true
	o.pool += insurance
	if o.engineArgs == nil {
		o.engineArgs = []string{"--decode-step", "2ms"}
	}
	f := start(t, o)
	f.lenient = true // engines die
	return f
}

// read is what a client reads of a stream.
type read struct {
	text, finish, usage string
	names               map[string]bool // id and created
	roles, events, done int
	silence             time.Duration // the longest between two events
	err                 error
}

// same is what a client may compare of two answers.
func (r read) same() []any {
	return []any{r.text, r.finish, r.usage, r.roles, r.done, len(r.names), r.err}
}

// stream reads a stream of url. on is called behind each event.
func stream(ctx context.Context, url, path, id, body string, on func(events int)) (r read) {
	r.names = map[string]bool{}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url+path, strings.NewReader(body))
	if err != nil {
		r.err = err
		return r
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("X-Request-Id", id)
	resp, err := client.Do(req)
	if err != nil {
		r.err = err
		return r
	}
	defer resp.Body.Close()
	if resp.StatusCode != 200 {
		text, _ := io.ReadAll(resp.Body)
		r.err = fmt.Errorf("%d: %s", resp.StatusCode, text)
		return r
	}
	last := time.Now()
	lines := bufio.NewReader(resp.Body)
	for {
		line, err := lines.ReadString('\n')
		if err != nil {
			if err != io.EOF {
				r.err = err
			}
			return r
		}
		data, ok := strings.CutPrefix(strings.TrimSpace(line), "data: ")
		if !ok {
			continue
		}
		if r.events > 0 {
			r.silence = max(r.silence, time.Since(last))
		}
		last = time.Now()
		r.events++
		r.add(data)
		if on != nil {
			on(r.events)
		}
	}
}

func (r *read) add(data string) {
	if data == "[DONE]" {
		r.done++
		return
	}
	var e struct {
		ID      string
		Created int64
		Error   any
		Usage   *struct {
			Prompt     int `json:"prompt_tokens"`
			Total      int `json:"total_tokens"`
			Completion int `json:"completion_tokens"`
		}
		Choices []struct {
			Text         string
			Delta        struct{ Role, Content string }
			FinishReason string `json:"finish_reason"`
			TokenIDs     []int  `json:"token_ids"`
		}
	}
	if err := json.Unmarshal([]byte(data), &e); err != nil || e.Error != nil {
		r.err = fmt.Errorf("%s: %w", data, cmp.Or(err, errors.New("it is an error")))
		return
	}
	r.names[fmt.Sprint(e.ID, e.Created)] = true
	if e.Usage != nil {
		r.usage += fmt.Sprint(*e.Usage)
	}
	for _, c := range e.Choices {
		if c.TokenIDs != nil {
			r.err = fmt.Errorf("ids that nobody asked for: %s", data)
		}
		r.text += c.Text + c.Delta.Content
		r.finish += c.FinishReason
		if c.Delta.Role != "" {
			r.roles++
		}
	}
}

// asks returns a request for a stream of so many tokens, by API.
func asks(api, id string, tokens int) (path, body string) {
	more := fmt.Sprintf(`"model":"tiny","stream":true,"temperature":0,"max_tokens":%d,"stream_options":{"include_usage":true}`, tokens)
	text := "Tell me of " + id + ". " + strings.Repeat("It matters. ", 20)
	if api == "chat" {
		return "/v1/chat/completions", fmt.Sprintf(`{%s,"messages":[{"role":"user","content":%q}]}`, more, text)
	}
	return "/v1/completions", fmt.Sprintf(`{%s,"prompt":%q}`, more, text)
}

// A stream whose engine dies at any place is what one engine would have answered, in fleets of all shapes.
func TestInsideStreamsOutliveD(t *testing.T) {
	for name, o := range map[string]options{
		"1+1": {prefills: 1, decodes: 1}, "1+2": {prefills: 1, decodes: 2}, "2+2": {prefills: 2, decodes: 2},
		"three of both roles":      {decodes: 3, decodeRole: "both", split: "auto"},
		"late binding":             {prefills: 1, decodes: 2, split: "always\n  decodeAlone: fallback\n  binding: late"},
		"decode alone":             {prefills: 1, decodes: 2, split: "never"},
		"without KV transfer":      {decodes: 2, decodeRole: "both", dialect: "none", split: "never"},
		"expired KV is declined":   {prefills: 1, decodes: 2, split: "always\n  nixl: {lease: 120s, declineExpired: true}", engineArgs: []string{"--decode-step", "2ms", "--lease", "120s", "--bidirectional"}},
		"with prefill's token ids": {prefills: 1, decodes: 2, split: "always\n  nixl: {reuseTokenIds: true}"},
	} {
		t.Run(name, func(t *testing.T) {
			f := insuredFleet(t, o)
			for _, api := range []string{"chat", "completions"} {
				for _, at := range []int{0, 1, 2, 100, 150, 151, 152, 153} { // of 153 events or less
					id := fmt.Sprintf("%s-%d", api, at)
					path, body := asks(api, id, 150)
					decodes := f.decodes // a continuation asks for fewer tokens
					if at < 2 {
						decodes = decodes[:1] // than nobody has written yet
					}
					for _, d := range decodes {
						f.inject(d, fmt.Sprintf(`{"mode":"stream-reset-after","events":%d,"count":1,"contains":"\"max_tokens\":150"}`, at))
					}
					got := stream(t.Context(), f.url, path, id, body, nil)
					for _, d := range f.decodes {
						f.clear(d)
					}
					want := stream(t.Context(), "http://"+f.decodes[0].addr, path, "reference-"+id, body, nil)
					require.NoError(t, want.err)
					require.Equal(t, want.same(), got.same(), "cut behind event %d", at)
				}
			}
			require.Positive(t, metric(t, f.admins[0], "tandem_streams_continued_total", `result="continued"`))
			require.Positive(t, metric(t, f.admins[0], "tandem_streams_insured_total", `result="insured"`))
		})
	}
}

// agentAsks returns a request as agents send it: its answer is a tool call, or begins with reasoning.
func agentAsks(api, id string, tokens int, calls bool) (path, body string) {
	const schema = `{"type":"object","properties":{"path":{"type":"string"},"n":{"type":"integer"},"text":{"type":"string"},` +
		`"more":{"type":"object","properties":{"a":{"type":"string"},"b":{"type":"string"},"c":{"type":"string"}}}}}`
	more := fmt.Sprintf(`"model":"tiny","stream":true,"temperature":0,"max_tokens":%d,"messages":[{"role":"user","content":%q}]`, tokens, id)
	if api == "messages" {
		if calls {
			more += `,"tool_choice":{"type":"any"}`
		}
		return "/v1/messages", fmt.Sprintf(`{%s,"tools":[{"name":"write","input_schema":%s}]}`, more, schema)
	}
	if calls {
		more += `,"tool_choice":"required"`
	}
	if api == "responses" {
		more = strings.NewReplacer("max_tokens", "max_output_tokens", "messages", "input").Replace(more)
		return "/v1/responses", fmt.Sprintf(`{%s,"tools":[{"type":"function","name":"write","parameters":%s}]}`, more, schema)
	}
	return "/v1/chat/completions", fmt.Sprintf(
		`{%s,"stream_options":{"include_usage":true},"tools":[{"type":"function","function":{"name":"write","parameters":%s}}]}`, more, schema)
}

// withPicture puts a picture behind the text of a body of agentAsks.
func withPicture(api, body, id string) string {
	part := map[string]string{
		"chat":      `{"type":"image_url","image_url":{"url":"data:image/png;base64,%s"}}`,
		"messages":  `{"type":"image","source":{"type":"base64","media_type":"image/png","data":"%s"}}`,
		"responses": `{"type":"input_image","image_url":"data:image/png;base64,%s"}`,
	}[api]
	part = fmt.Sprintf(part, base64.StdEncoding.EncodeToString([]byte(strings.Repeat(id, 200))))
	text := fmt.Sprintf(`{"type":"text","text":%q}`, id)
	if api == "responses" {
		text = fmt.Sprintf(`{"type":"input_text","text":%q}`, id)
	}
	return strings.Replace(body, fmt.Sprintf(`"content":%q`, id), fmt.Sprintf(`"content":[%s,%s]`, text, part), 1)
}

// agentRead is what an agent reads of a stream: its tool call, its reasoning, and how it ended.
type agentRead struct {
	read
	call, args, reasoning string
	ids                   map[string]bool // of the call, and of responses those of all items
}

func (r *agentRead) add(data string) {
	var e struct {
		Type  string
		Usage *struct {
			Output int `json:"output_tokens"`
		}
		Message struct{ ID string }
		Block   struct{ Type, ID, Name string } `json:"content_block"`
		Index   int
		Delta   struct {
			Text, Thinking string
			Partial        string `json:"partial_json"`
			Reason         string `json:"stop_reason"`
		}
		Choices []struct {
			Delta struct {
				Reasoning string
				Tools     []struct {
					ID       string
					Function struct{ Name, Arguments string }
				} `json:"tool_calls"`
			}
		}
	}
	if data != "[DONE]" && json.Unmarshal([]byte(data), &e) == nil && e.Type == "" {
		for _, c := range e.Choices {
			r.reasoning += c.Delta.Reasoning
			for _, one := range c.Delta.Tools {
				r.ids[one.ID] = r.ids[one.ID] || one.ID != ""
				r.call, r.args = r.call+one.Function.Name, r.args+one.Function.Arguments
			}
		}
	}
	if strings.HasPrefix(e.Type, "response.") {
		r.addOutput(data)
		return
	}
	switch e.Type {
	case "":
		r.read.add(data)
	case "message_start":
		r.roles++
		r.names[e.Message.ID] = true
	case "content_block_start":
		r.call += fmt.Sprint(e.Index, e.Block.Type, e.Block.Name)
		r.ids[e.Block.ID] = r.ids[e.Block.ID] || e.Block.ID != ""
	case "content_block_delta":
		r.text, r.reasoning, r.args = r.text+e.Delta.Text, r.reasoning+e.Delta.Thinking, r.args+e.Delta.Partial
	case "message_delta":
		r.finish += e.Delta.Reason
		r.usage += fmt.Sprint(e.Usage.Output)
	case "message_stop":
		r.done++
	case "error":
		r.err = errors.New(data)
	}
}

// addOutput reads an event of /v1/responses.
func (r *agentRead) addOutput(data string) {
	type item struct {
		Type, ID, Name string
		CallID         string `json:"call_id"`
	}
	var e struct {
		Type           string
		SequenceNumber int    `json:"sequence_number"`
		ItemID         string `json:"item_id"`
		Delta          string
		Item           item
		Response       struct {
			ID, Status string
			Output     []item
			Usage      *struct {
				Output int `json:"output_tokens"`
			}
		}
	}
	if err := json.Unmarshal([]byte(data), &e); err != nil {
		r.err = err
		return
	}
	if e.SequenceNumber != r.events {
		r.err = fmt.Errorf("event %d has the number %d", r.events, e.SequenceNumber)
	}
	r.events++
	for _, id := range []string{e.ItemID, e.Item.ID, e.Item.CallID} {
		r.ids[id] = true
	}
	switch e.Type {
	case "response.created":
		r.roles++
		r.names[e.Response.ID] = true
	case "response.output_item.added":
		r.call += e.Item.Type + e.Item.Name
	case "response.output_text.delta":
		r.text += e.Delta
	case "response.reasoning_text.delta":
		r.reasoning += e.Delta
	case "response.function_call_arguments.delta":
		r.args += e.Delta
	case "response.completed":
		r.names[e.Response.ID] = true
		for _, item := range e.Response.Output {
			r.ids[item.ID], r.ids[item.CallID] = true, true
		}
		r.finish, r.usage = e.Response.Status, fmt.Sprint(e.Response.Usage.Output)
		r.done++
	}
}

// same is what a client may compare of two answers.
func (r *agentRead) same() []any {
	delete(r.ids, "")
	return append(r.read.same(), r.call, r.args, r.reasoning, len(r.ids))
}

// agent reads a stream of url as an agent does.
func (f *fleet) agent(url, path, id, body string) *agentRead {
	f.t.Helper()
	r := &agentRead{ids: map[string]bool{}}
	r.names = map[string]bool{}
	req, err := http.NewRequestWithContext(f.t.Context(), http.MethodPost, url+path, strings.NewReader(body))
	require.NoError(f.t, err)
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("X-Request-Id", id)
	resp, err := client.Do(req)
	require.NoError(f.t, err)
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if r.err = err; err == nil && resp.StatusCode != 200 {
		r.err = fmt.Errorf("%d: %s", resp.StatusCode, text)
	}
	for line := range strings.SplitSeq(string(text), "\n") {
		if data, ok := strings.CutPrefix(line, "data: "); ok {
			r.add(data)
		}
	}
	return r
}

// A stream with a tool call or with reasoning whose engine dies at any place is what one engine would have answered, with
// the ids that its client has.
func TestInsideAgentsOutliveD(t *testing.T) {
	for name, o := range map[string]options{
		"1+2": {prefills: 1, decodes: 2}, "decode alone": {prefills: 1, decodes: 2, split: "never"},
	} {
		t.Run(name, func(t *testing.T) {
			o.engineArgs = []string{"--decode-step", "2ms", "--reasoning"}
			f := insuredFleet(t, o)
			for _, api := range []string{"chat", "messages", "responses"} {
				for _, calls := range []bool{true, false} {
					for at := 0; at < 60; at += 1 + at/4 {
						id := fmt.Sprintf("%s-%v-%d", api, calls, at)
						path, body := agentAsks(api, id, 60, calls)
						if at%2 > 0 {
							body = withPicture(api, body, id)
						}
						d := f.decodes[at%2]
						if at < 2 {
							d = f.decodes[0] // than nobody has written yet
						}
						f.inject(d, fmt.Sprintf(`{"mode":"stream-reset-after","events":%d,"count":1}`, at))
						got := f.agent(f.url, path, id, body)
						for _, d := range f.decodes {
							f.clear(d)
						}
						want := f.agent("http://"+f.decodes[0].addr, path, "reference-"+id, body)
						require.NoError(t, want.err)
						require.Equal(t, calls, want.args != "", want)
						require.Equal(t, want.same(), got.same(), "%s cut behind event %d", id, at)
					}
				}
			}
			require.Positive(t, metric(t, f.admins[0], "tandem_streams_continued_total", `result="continued"`))
			require.Zero(t, metric(t, f.admins[0], "tandem_streams_insured_total", `result="sampled"`))
			path, body := agentAsks("chat", "sampled", 60, true)
			require.NoError(t, f.agent(f.url, path, "sampled", strings.Replace(body, `"temperature":0`, `"temperature":1`, 1)).err)
			require.Positive(t, metric(t, f.admins[0], "tandem_streams_insured_total", `result="sampled"`))
		})
	}
}

// answersUnderWay are streams that have begun.
type answersUnderWay struct {
	f      *fleet
	name   string
	tokens int
	got    []read
	wg     sync.WaitGroup
}

// begin starts streams of so many tokens, and waits until each has sent so many events.
func (f *fleet) begin(name string, streams, tokens, events int) *answersUnderWay {
	f.t.Helper()
	a := &answersUnderWay{f: f, name: name, tokens: tokens, got: make([]read, streams)}
	var underWay atomic.Int64
	for i := range streams {
		a.wg.Go(func() {
			a.got[i] = a.ask(i, f.url, name, func(n int) {
				if n == events {
					underWay.Add(1)
				}
			})
		})
	}
	soon(f.t, "all are under way", func() bool { return underWay.Load() == int64(streams) })
	return a
}

func (a *answersUnderWay) ask(i int, url, id string, on func(events int)) read {
	path, body := asks([]string{"chat", "completions"}[i%2], fmt.Sprint(a.name, "-", i), a.tokens)
	return stream(a.f.t.Context(), url, path, fmt.Sprint(id, "-", i), body, on)
}

// whole waits for their ends: each is what an engine answers that is left alone.
func (a *answersUnderWay) whole(alone *engine) {
	t := a.f.t
	t.Helper()
	a.wg.Wait()
	want := make([]read, len(a.got))
	for i := range want {
		a.wg.Go(func() { want[i] = a.ask(i, "http://"+alone.addr, "reference-"+a.name, nil) })
	}
	a.wg.Wait()
	for i, got := range a.got {
		require.NoError(t, want[i].err)
		require.Equal(t, want[i].same(), got.same(), "stream %d", i)
	}
}

// A D that is killed under a hundred streams costs no client a word.
func TestInsideHundredStreamsOutliveD(t *testing.T) {
	f := insuredFleet(t, options{prefills: 2, decodes: 3, engineArgs: []string{"--decode-step", "15ms"}})
	const streams = 120
	running := f.begin("hundred", streams, 200, 20)
	f.decodes[0].stop(syscall.SIGKILL)
	running.whole(f.decodes[1])
	var silences []time.Duration
	for _, got := range running.got {
		silences = append(silences, got.silence)
	}
	slices.Sort(silences)
	moved := metric(t, f.admins[0], "tandem_streams_continued_total", `result="continued"`)
	t.Logf("%v streams were continued; the longest silence of each: median %v, p99 %v", moved, silences[streams/2], silences[streams*99/100])
	require.Positive(t, moved)
}

// A stream that several engines wrote is one request, whose tokens are those that its client was told; an operator who
// asks for its decision gets it, too.
func TestInsideContinuedStreamsCountOnce(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	token := filepath.Join(dir, "token")
	require.NoError(t, os.WriteFile(token, []byte("0123456789abcdef\n"), 0o600))
	f := insuredFleet(t, options{prefills: 1, decodes: 3, adminFields: fmt.Sprintf(", tokenFile: %q", token),
		top: fmt.Sprintf("usage: {ledger: %q}\n", filepath.Join(dir, "ledger-%i"))})
	for _, d := range f.decodes {
		f.inject(d, `{"mode":"stream-reset-after","events":40,"count":1,"contains":"\"max_tokens\":150"}`)
	}
	path, body := asks("chat", "twice", 150)
	got := f.post(path, body, "x-request-id", "twice", "tandem-explain", "0123456789abcdef")
	require.Equal(t, 200, got.status)
	require.Contains(t, got.header.Get("x-tandem-explain"), f.prefills[0].addr)
	want := usageOf(got)
	require.True(t, want.Said)
	var line ledgerLine
	soon(t, "it is in the ledger", func() bool {
		var there bool
		line, there = readLedgers(t, dir)["twice"]
		return there
	})
	require.Equal(t, want, line.used())
	require.Equal(t, "ok", line.Ended)
	require.Positive(t, line.First)
	require.Positive(t, line.PerToken)
	require.Positive(t, metric(t, f.admins[0], "tandem_streams_continued_total", `result="continued"`))
	for kind, n := range map[string]int{"prompt": want.Prompt, "generation": want.Answer} {
		require.InDelta(t, n, metric(t, f.admins[0], "tandem_tokens_total", fmt.Sprintf("kind=%q", kind)), 0, kind)
	}
}

// A D that hangs is left as soon as its health says so.
func TestInsideStreamsLeaveAFrozenD(t *testing.T) {
	f := insuredFleet(t, options{prefills: 1, decodes: 2, engineArgs: []string{"--decode-step", "10ms"}})
	path, body := asks("chat", "ice", 300)
	var frozen *engine
	got := stream(t.Context(), f.url, path, "frozen", body, func(events int) {
		if events == 50 {
			frozen = f.servingOf("frozen")
			require.NoError(t, frozen.cmd.Process.Signal(syscall.SIGSTOP))
		}
	})
	require.NoError(t, frozen.cmd.Process.Signal(syscall.SIGCONT))
	other := f.decodes[0]
	if other == frozen {
		other = f.decodes[1] // the frozen one may reset connections that came meanwhile
	}
	want := stream(t.Context(), "http://"+other.addr, path, "reference", body, nil)
	require.Equal(t, want.same(), got.same())
	t.Logf("silence: %v", got.silence)
}

// The run of [TestChaos] with insurance: no stream ends before its time, whatever dies.
func TestInsideChaos(t *testing.T) {
	onlyInside(t)
	for _, policy := range []string{"recompute", "fail"} {
		t.Run(policy, func(t *testing.T) { chaos(t, policy, insurance) })
	}
}

// servingOf returns the decode engine that answers a request now.
func (f *fleet) servingOf(id string) *engine {
	f.t.Helper()
	for _, d := range f.decodes {
		if len(f.requests(id, d)) > 0 {
			return d
		}
	}
	require.Fail(f.t, "nobody answers "+id)
	return nil
}

// A core that stands still behind an API server that answers is left, too.
func TestInsideStreamsLeaveAStandingCore(t *testing.T) {
	f := insuredFleet(t, options{prefills: 1, decodes: 2, engineArgs: []string{"--decode-step", "10ms"}})
	path, body := asks("completions", "stone", 300)
	got := stream(t.Context(), f.url, path, "standing", body, func(events int) {
		if events == 50 {
			f.inject(f.servingOf("standing"), `{"mode":"stall"}`)
		}
	})
	for _, d := range f.decodes {
		f.clear(d)
	}
	want := stream(t.Context(), "http://"+f.decodes[0].addr, path, "reference", body, nil)
	require.Equal(t, want.same(), got.same())
	t.Logf("silence: %v", got.silence)
}

// An order to drain moves streams, and ends none: not even where there is no other engine.
func TestInsideDrainMovesStreams(t *testing.T) {
	for _, decodes := range []int{2, 1} {
		t.Run(fmt.Sprint("1+", decodes), func(t *testing.T) {
			f := insuredFleet(t, withOrders(t, options{prefills: 1, decodes: decodes, engineArgs: []string{"--decode-step", "20ms"}}))
			const streams = 16
			var wg sync.WaitGroup
			var underWay atomic.Int64
			got := make([]read, streams)
			for i := range streams {
				wg.Go(func() {
					path, body := asks("chat", fmt.Sprint("drained-", i), 300)
					got[i] = stream(t.Context(), f.url, path, fmt.Sprint("drained-", i), body, func(events int) {
						if events == 20 {
							underWay.Add(1)
						}
					})
				})
			}
			soon(t, "all are under way", func() bool { return underWay.Load() == streams })
			d := f.decodes[0]
			busy := metric(t, "http://"+d.addr, "vllm:num_requests_running")
			began := time.Now()
			f.order(http.MethodPost, "/api/pools/chat/endpoints/"+d.addr+"/drain", "")
			if decodes > 1 {
				soon(t, "it has nothing to do", func() bool { return metric(t, "http://"+d.addr, "vllm:num_requests_running") == 0 })
				t.Logf("%v answers left it within %v", busy, time.Since(began))
			}
			wg.Wait()
			f.order(http.MethodPost, "/api/pools/chat/endpoints/"+d.addr+"/resume", "")
			if moved := metric(t, f.admins[0], "tandem_streams_continued_total", `cause="moved"`, `result="continued"`); decodes > 1 {
				require.InDelta(t, busy, moved, 0, "as many were moved as it had")
			} else {
				require.Zero(t, moved)
			}
			want := make([]read, streams)
			for i := range streams {
				wg.Go(func() {
					path, body := asks("chat", fmt.Sprint("drained-", i), 300)
					want[i] = stream(t.Context(), "http://"+d.addr, path, fmt.Sprint("reference-", i), body, nil)
				})
			}
			wg.Wait()
			for i := range streams {
				require.NoError(t, want[i].err)
				require.Equal(t, want[i].same(), got[i].same(), "stream %d", i)
			}
		})
	}
}

// Without another engine a stream ends with its own, as it does without insurance, and it is counted.
func TestInsideNobodyElse(t *testing.T) {
	f := insuredFleet(t, options{prefills: 1, decodes: 1, engineArgs: []string{"--decode-step", "5ms"}})
	path, body := asks("chat", "one", 300)
	got := stream(t.Context(), f.url, path, "alone", body, func(events int) {
		if events == 50 {
			f.decodes[0].stop(syscall.SIGKILL)
		}
	})
	require.Error(t, got.err)
	require.Zero(t, got.done)
	require.Positive(t, metric(t, f.admins[0], "tandem_streams_continued_total", `cause="reset"`, `result="no_endpoint"`))
	f.restart(f.decodes[0])
}

// A client that leaves ends everything at once; one that reads slowly gets all; one that reads nothing costs its own
// answer only.
func TestInsideInsuredClients(t *testing.T) {
	f := insuredFleet(t, options{prefills: 1, decodes: 2, engineArgs: []string{"--decode-step", "200us"}})
	path, body := asks("chat", "patience", 2000)
	want := stream(t.Context(), "http://"+f.decodes[0].addr, path, "reference", body, nil)
	t.Run("it leaves", func(t *testing.T) {
		for i := range 20 {
			ctx, leave := context.WithCancel(t.Context())
			stream(ctx, f.url, path, fmt.Sprint("left-", i), body, func(events int) {
				if events == 1+i*10 {
					leave()
				}
			})
			leave()
		}
		for _, e := range f.engines() {
			soon(t, "the engines are free", func() bool { return metric(t, "http://"+e.addr, "vllm:num_requests_running") == 0 })
		}
		soon(t, "all is released", func() bool { return metric(t, f.admins[0], "tandem_reservations") == 0 })
	})
	t.Run("it is slow", func(t *testing.T) {
		got := stream(t.Context(), f.url, path, "slow", body, func(events int) {
			if events%200 == 0 {
				time.Sleep(50 * time.Millisecond)
			}
		})
		require.Equal(t, want.same(), got.same())
	})
	t.Run("it takes nothing", func(t *testing.T) { // Envoy keeps 8 MiB, and what the network takes comes before that
		f := insuredFleet(t, options{
			prefills: 1, decodes: 2, envoyFields: ", maxBodyBytes: 2048",
			engineArgs: []string{"--decode-step", "10us", "--max-model-len", "1000000", "--blocks", "100000"},
		})
		path, body := asks("chat", "nothing", 150_000) // 36 MB
		c, err := net.Dial("tcp", strings.TrimPrefix(f.url, "http://"))
		require.NoError(t, err)
		defer c.Close()
		require.NoError(t, c.(*net.TCPConn).SetReadBuffer(4096))
		fmt.Fprintf(c, "POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", path, len(body), body)
		soon(t, "its answer is ended", func() bool {
			return metric(t, f.admins[0], "tandem_streams_continued_total", `cause="slow_client"`) == 1
		})
		soon(t, "all is released", func() bool { return metric(t, f.admins[0], "tandem_reservations") == 0 })
	})
}

// One request that kills the engines that answer it kills two, and its client gets what the first one wrote. It is in the
// metrics and on the page. Others' streams go on elsewhere.
func TestInsidePoison(t *testing.T) {
	f := insuredFleet(t, options{prefills: 1, decodes: 5, engineArgs: []string{"--decode-step", "10ms"}})
	for _, d := range f.decodes {
		f.inject(d, `{"mode":"die-in-stream","events":5,"contains":"of poison."}`)
	}
	path, body := asks("chat", "poison", 150)
	got := stream(t.Context(), f.url, path, "poison", body, nil)
	require.Error(t, got.err)
	require.NotEmpty(t, got.text)
	soon(t, "it is counted", func() bool {
		return metric(t, f.admins[0], "tandem_streams_continued_total", `result="died_again"`) == 1
	})
	running := 0
	for _, d := range f.decodes {
		if d.running() {
			running++
		}
	}
	require.Equal(t, 3, running)
	var status struct {
		Attention []struct{ Text string }
	}
	require.NoError(t, getJSON(f.admins[0]+"/status.json", &status))
	require.Contains(t, fmt.Sprint(status.Attention), "under one request")
}

// Engines of two releases in one pool: what one of them does not continue, the other one does, and nobody gets a text
// twice.
func TestInsideEnginesThatBeginAnew(t *testing.T) {
	f := insuredFleet(t, options{prefills: 1, decodes: 3, split: "never", engineArgs: []string{"--decode-step", "2ms"},
		engine: func(role string, i int, _ func() string) (args []string, fields string) {
			if role == "decode" && i == 0 {
				return []string{"--begin-anew"}, ""
			}
			return nil, ""
		}})
	for i := range 6 {
		id := fmt.Sprint("upgrade-", i)
		path, body := asks([]string{"chat", "completions"}[i%2], id, 150)
		for _, d := range f.decodes[1:] {
			f.inject(d, `{"mode":"stream-reset-after","events":20,"count":1,"contains":"\"max_tokens\":150"}`)
		}
		got := stream(t.Context(), f.url, path, id, body, nil)
		for _, d := range f.decodes {
			f.clear(d)
		}
		want := stream(t.Context(), "http://"+f.decodes[1].addr, path, "reference-"+id, body, nil)
		require.Equal(t, want.same(), got.same())
	}
	require.Positive(t, metric(t, f.admins[0], "tandem_streams_continued_total", `result="continued"`))
}
