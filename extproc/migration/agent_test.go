package migration

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"tandem/extproc/openai"
)

// agent is an engine whose parsers find reasoning, content and tool calls in what it writes. What it writes depends on
// the seed alone; how much an event has, and all ids, on the engine.
type agent struct {
	id    string
	chunk uint64 // seeds the sizes of events
	ids   bool   // it answers token ids
}

// said is a piece of an answer.
type said struct {
	kind kind
	name string // of a call
	text string
}

// script is what the model says.
func script(seed uint64) (all []said, finish string) {
	random := rand.New(rand.NewPCG(seed, 7))
	words := []string{"a", " né", "\n", " \"q\"", "\\", " 😀", "→", " {", "<tool", "_call>", "\t", "0"}
	text := func(n int) string {
		var b strings.Builder
		for range 1 + random.IntN(n) {
			b.WriteString(words[random.IntN(len(words))])
		}
		return b.String()
	}
	if seed%3 > 0 {
		all = append(all, said{reasoning, "", text(30)})
	}
	if seed%4 > 0 {
		all = append(all, said{content, "", text(20)})
	}
	calls := int(seed % 3)
	for i := range calls {
		args, _ := json.Marshal(map[string]any{"path": text(10), "n": i, "list": []int{1, 2}})
		all = append(all, said{call, fmt.Sprint("tool_", i), string(args)})
	}
	switch {
	case seed%7 == 6:
		return all, "length"
	case calls > 0:
		return all, "tool_calls"
	}
	return all, "stop"
}

// deltas cuts what is said into events of a few characters. An event may have pieces of several kinds.
func (a agent) deltas(all []said) (events [][]said) {
	random := rand.New(rand.NewPCG(a.chunk, 3))
	var now []said
	for _, s := range all {
		first := true
		for rest := []rune(s.text); len(rest) > 0 || first; {
			n := min(random.IntN(6), len(rest))
			if n == 0 && len(rest) > 0 && (!first || s.kind != call) {
				n = 1
			}
			one := said{s.kind, "", string(rest[:n])}
			if first {
				one.name = s.name
			}
			now, rest, first = append(now, one), rest[n:], false
			if random.IntN(4) > 0 {
				events, now = append(events, now), nil
			}
		}
	}
	if now != nil {
		events = append(events, now)
	}
	return events
}

// chat answers as /v1/chat/completions.
func (a agent) chat(seed uint64, usage bool) []byte {
	all, finish := script(seed)
	var out []byte
	head := fmt.Sprintf(`data: {"id":%q,"object":"chat.completion.chunk","created":%d,"model":"m"`, a.id, a.chunk)
	ids := func(i int) string {
		if a.ids {
			return fmt.Sprintf(`"token_ids":[%d]`, i)
		}
		return `"token_ids":null`
	}
	prompt := `null`
	if a.ids {
		prompt = `[1,2]`
	}
	write := func(delta, more, rest string) {
		out = fmt.Appendf(out, `%s,"choices":[{"index":0,"delta":%s,"logprobs":null,%s}]%s}`+"\n\n", head, delta, more, rest)
	}
	write(`{"role":"assistant","content":""}`, `"finish_reason":null`, `,"prompt_token_ids":`+prompt)
	events := a.deltas(all)
	calls := -1
	for i, event := range events {
		var delta struct {
			Content   *string          `json:"content,omitempty"`
			Reasoning *string          `json:"reasoning,omitempty"`
			Tools     []map[string]any `json:"tool_calls,omitempty"`
		}
		for _, s := range event {
			switch s.kind {
			case content:
				text := s.text
				if delta.Content != nil {
					text = *delta.Content + text
				}
				delta.Content = &text
			case reasoning:
				text := s.text
				if delta.Reasoning != nil {
					text = *delta.Reasoning + text
				}
				delta.Reasoning = &text
			default:
				function := map[string]any{"arguments": s.text}
				one := map[string]any{"index": calls, "function": function}
				if s.name != "" {
					calls++
					one["index"], one["id"], one["type"] = calls, fmt.Sprintf("%s-call-%d", a.id, calls), "function"
					if function["name"] = s.name; s.text == "" {
						delete(function, "arguments")
					}
				}
				delta.Tools = append(delta.Tools, one)
			}
		}
		text, _ := json.Marshal(delta)
		end := `null`
		if i == len(events)-1 && a.chunk%2 == 0 {
			end = `"` + finish + `"`
		}
		write(string(text), `"finish_reason":`+end+`,`+ids(i), "")
		if a.ids && i%5 == 4 {
			write(`{}`, `"finish_reason":null,`+ids(i), "")
		}
	}
	if a.chunk%2 > 0 || len(events) == 0 {
		write(`{}`, `"finish_reason":"`+finish+`","stop_reason":null,`+ids(0), "")
	}
	if usage {
		out = fmt.Appendf(out, `%s,"choices":[],"usage":{"prompt_tokens":2,"total_tokens":11,"completion_tokens":9}}`+"\n\n", head)
	}
	return append(out, "data: [DONE]\n\n"...)
}

// messages answers as /v1/messages.
func (a agent) messages(seed uint64, _ bool) []byte {
	all, finish := script(seed)
	var out []byte
	write := func(name, rest string) {
		out = fmt.Appendf(out, "event: %s\ndata: {\"type\":%q%s}\n\n", name, name, rest)
	}
	write("message_start", fmt.Sprintf(`,"message":{"id":%q,"type":"message","role":"assistant","content":[],"model":"m","usage":{"input_tokens":2,"output_tokens":0}}`, a.id))
	index, open := -1, kind(255)
	stop := func() {
		if open == 255 {
			return
		}
		if open == reasoning {
			write("content_block_delta", fmt.Sprintf(`,"index":%d,"delta":{"type":"signature_delta","signature":%q}`, index, a.id))
		}
		write("content_block_stop", fmt.Sprintf(`,"index":%d`, index))
	}
	for _, event := range a.deltas(all) {
		for _, s := range event {
			if open != s.kind || s.name != "" {
				stop()
				index, open = index+1, s.kind
				begin := map[kind]string{content: `{"type":"text","text":""}`, reasoning: `{"type":"thinking","thinking":""}`,
					call: fmt.Sprintf(`{"type":"tool_use","id":"%s-%d","name":%q,"input":{}}`, a.id, index, s.name)}[s.kind]
				write("content_block_start", fmt.Sprintf(`,"index":%d,"content_block":%s`, index, begin))
			}
			if s.text == "" {
				continue
			}
			text, _ := json.Marshal(s.text)
			of := map[kind]string{content: `"text_delta","text"`, reasoning: `"thinking_delta","thinking"`, call: `"input_json_delta","partial_json"`}[s.kind]
			write("content_block_delta", fmt.Sprintf(`,"index":%d,"delta":{"type":%s:%s}`, index, of, text))
		}
	}
	stop()
	reason := map[string]string{"length": "max_tokens", "stop": "end_turn", "tool_calls": "tool_use"}[finish]
	write("message_delta", fmt.Sprintf(`,"delta":{"stop_reason":%q,"stop_sequence":null},"usage":{"input_tokens":2,"output_tokens":9}`, reason))
	write("message_stop", "")
	return out
}

// responses answers as /v1/responses.
func (a agent) responses(seed uint64, _ bool) []byte {
	all, finish := script(seed)
	var out []byte
	number := 0
	write := func(name, members string) {
		out = fmt.Appendf(out, "event: %s\ndata: {%s\"sequence_number\":%d,\"type\":%q}\n\n", name, members, number, name)
		number++
	}
	response := func(status, items, usage string) string {
		return fmt.Sprintf(`"response":{"id":"resp_%s","created_at":%d,"output":[%s],"tools":[],"status":%q,"usage":%s},`, a.id, a.chunk, items, status, usage)
	}
	write("response.created", response("in_progress", "", "null"))
	write("response.in_progress", response("in_progress", "", "null"))
	var items []string
	open, name, text := kind(255), "", ""
	item := func(content, status string) string {
		id := fmt.Sprintf("%s_%d", a.id, len(items))
		switch open {
		case reasoning:
			return fmt.Sprintf(`{"id":"rs_%s","summary":[],"type":"reasoning","content":%s,"status":%q}`, id, content, status)
		case call:
			return fmt.Sprintf(`{"arguments":%s,"call_id":"call_%s","name":%q,"type":"function_call","id":"fc_%s","status":%q}`, content, id, name, id, status)
		}
		return fmt.Sprintf(`{"id":"msg_%s","content":%s,"role":"assistant","status":%q,"type":"message"}`, id, content, status)
	}
	at := func(part bool) string {
		where := fmt.Sprintf(`"item_id":"%s_%s_%d","output_index":%d,`, map[kind]string{reasoning: "rs", content: "msg", call: "fc"}[open], a.id, len(items), len(items))
		if part {
			where += `"content_index":0,`
		}
		return where
	}
	of := func() string { return map[kind]string{reasoning: "reasoning_text", content: "output_text"}[open] }
	part := func(text string) string {
		quoted, _ := json.Marshal(text)
		return fmt.Sprintf(`{"text":%s,"type":%q}`, quoted, of())
	}
	stop := func() {
		quoted, _ := json.Marshal(text)
		whole := string(quoted)
		switch open {
		case 255:
			return
		case call:
			write("response.function_call_arguments.done", fmt.Sprintf(`%s"arguments":%s,"name":%q,`, at(false), quoted, name))
		default:
			write("response."+of()+".done", fmt.Sprintf(`%s"text":%s,`, at(true), quoted))
			write("response.content_part.done", fmt.Sprintf(`%s"part":%s,`, at(true), part(text)))
			whole = "[" + part(text) + "]"
		}
		done := item(whole, "completed")
		write("response.output_item.done", fmt.Sprintf(`"item":%s,"output_index":%d,`, done, len(items)))
		items = append(items, done)
	}
	for _, event := range a.deltas(all) {
		for _, s := range event {
			if open != s.kind || s.name != "" {
				stop()
				open, name, text = s.kind, s.name, ""
				empty := "[]"
				if open == call {
					empty = `""`
				}
				write("response.output_item.added", fmt.Sprintf(`"item":%s,"output_index":%d,`, item(empty, "in_progress"), len(items)))
				if open != call {
					write("response.content_part.added", fmt.Sprintf(`%s"part":%s,`, at(true), part("")))
				}
			}
			if s.text == "" {
				continue
			}
			text += s.text
			quoted, _ := json.Marshal(s.text)
			name := "response.function_call_arguments.delta"
			if open != call {
				name = "response." + of() + ".delta"
			}
			write(name, fmt.Sprintf(`%s"delta":%s,`, at(open != call), quoted))
		}
	}
	stop()
	status := "completed"
	if finish == "length" {
		status = "incomplete"
	}
	write("response.completed", response(status, strings.Join(items, ","), `{"input_tokens":2,"output_tokens":9}`))
	return out
}

// agentAnswer is what a client makes of a stream.
type agentAnswer struct {
	parts  []said // in the order in which they began
	calls  map[int]string
	names  map[string]bool
	roles  int
	finish []string
	usage  int
	done   int
	signed int
	stops  int
	whole  []string // what the ends of responses say of their items
	ids    []agentItem
	events int
}

// agentItem is an item of a response.
type agentItem struct {
	Type, ID, Name, Arguments string
	CallID                    string `json:"call_id"`
	Content                   []struct{ Text string }
}

func (i agentItem) text() string {
	text := i.Arguments
	for _, c := range i.Content {
		text += c.Text
	}
	return text
}

// agentDelta is what an event adds: an object, or of responses a string.
type agentDelta struct {
	Type, Text, Thinking, Signature string
	Partial                         string `json:"partial_json"`
	Reason                          string `json:"stop_reason"`

	added string
}

func (d *agentDelta) UnmarshalJSON(b []byte) error {
	if b[0] == '"' {
		return json.Unmarshal(b, &d.added)
	}
	type plain agentDelta
	return json.Unmarshal(b, (*plain)(d))
}

func readAgent(t testing.TB, stream []byte) agentAnswer {
	t.Helper()
	a := agentAnswer{calls: map[int]string{}, names: map[string]bool{}}
	at := map[string]int{}
	add := func(key string, s said) {
		if i, ok := at[key]; ok {
			require.Empty(t, s.name, "a call begins twice")
			a.parts[i].text += s.text
			return
		}
		at[key] = len(a.parts)
		a.parts = append(a.parts, s)
	}
	require.True(t, len(stream) == 0 || strings.HasSuffix(string(stream), "\n\n"), "half an event: %.200q", stream)
	for event := range strings.SplitSeq(strings.TrimSuffix(string(stream), "\n\n"), "\n\n") {
		_, data, ok := strings.Cut("\n"+event, "\ndata: ")
		if !ok {
			continue
		}
		require.Zero(t, a.done, "an event behind the end: %s", event)
		if data == "[DONE]" {
			a.done++
			continue
		}
		var e struct {
			Type    string
			ID      string
			Created int
			Index   int
			Usage   any
			Number  *int    `json:"sequence_number"`
			Output  int     `json:"output_index"`
			ItemID  *string `json:"item_id"`
			Text    string
			Args    string `json:"arguments"`
			Item    agentItem
			Answer  struct {
				ID      string
				Created int `json:"created_at"`
				Status  string
				Output  []agentItem
				Usage   any
			} `json:"response"`
			Message struct{ ID string }
			Block   struct{ Type, ID, Name string } `json:"content_block"`
			Delta   agentDelta
			Choices []struct {
				IDs   []int `json:"token_ids"`
				Delta struct {
					Role, Content, Reasoning string
					Tools                    []struct {
						Index    int
						ID       string
						Function struct{ Name, Arguments string }
					} `json:"tool_calls"`
				}
				Finish string `json:"finish_reason"`
			}
		}
		require.NoError(t, json.Unmarshal([]byte(data), &e), data)
		for _, c := range e.Choices {
			require.Nil(t, c.IDs, "ids that nobody asked for")
			if c.Delta.Role != "" {
				a.roles++
			}
			if c.Delta.Reasoning != "" {
				add("reasoning", said{reasoning, "", c.Delta.Reasoning})
			}
			if c.Delta.Content != "" {
				add("content", said{content, "", c.Delta.Content})
			}
			for _, one := range c.Delta.Tools {
				if one.ID != "" {
					require.Empty(t, a.calls[one.Index], "a second id")
					a.calls[one.Index] = one.ID
				}
				add(fmt.Sprint("call ", one.Index), said{call, one.Function.Name, one.Function.Arguments})
			}
			if c.Finish != "" {
				a.finish = append(a.finish, c.Finish)
			}
		}
		if e.Number != nil {
			require.Equal(t, a.events, *e.Number, "events are numbered")
			a.events++
		}
		if e.ItemID != nil {
			require.Equal(t, a.ids[len(a.ids)-1].ID, *e.ItemID)
		}
		switch e.Type {
		case "response.created", "response.in_progress":
			a.roles++
			a.names[fmt.Sprint(e.Answer.ID, e.Answer.Created)] = true
		case "response.output_item.added":
			require.Equal(t, a.stops, e.Output, "behind the end of the item before")
			kind := map[string]kind{"message": content, "reasoning": reasoning, "function_call": call}[e.Item.Type]
			a.calls[e.Output], a.ids = e.Item.CallID, append(a.ids, e.Item)
			add(fmt.Sprint(e.Output), said{kind, e.Item.Name, ""})
		case "response.content_part.added", "response.content_part.done":
			a.signed++
		case "response.output_text.delta", "response.reasoning_text.delta", "response.function_call_arguments.delta":
			require.Equal(t, a.stops, e.Output)
			add(fmt.Sprint(e.Output), said{0, "", e.Delta.added})
		case "response.output_text.done", "response.reasoning_text.done", "response.function_call_arguments.done":
			a.whole = append(a.whole, e.Text+e.Args)
		case "response.output_item.done":
			require.Equal(t, a.stops, e.Output)
			require.Equal(t, []string{a.ids[a.stops].ID, a.ids[a.stops].CallID}, []string{e.Item.ID, e.Item.CallID})
			a.whole = append(a.whole, e.Item.text())
			a.stops++
		case "response.completed":
			a.names[fmt.Sprint(e.Answer.ID, e.Answer.Created)] = true
			require.Len(t, e.Answer.Output, a.stops)
			for i, item := range e.Answer.Output {
				require.Equal(t, []string{a.ids[i].ID, a.ids[i].CallID}, []string{item.ID, item.CallID})
				a.whole = append(a.whole, item.text())
			}
			require.NotNil(t, e.Answer.Usage)
			a.finish = append(a.finish, e.Answer.Status)
			a.done++
		case "message_start":
			a.roles++
			a.names[e.Message.ID] = true
		case "content_block_start":
			require.Equal(t, a.stops, e.Index, "behind the end of the block before")
			kind := map[string]kind{"text": content, "thinking": reasoning, "tool_use": call}[e.Block.Type]
			a.calls[e.Index] = e.Block.ID
			add(fmt.Sprint(e.Index), said{kind, e.Block.Name, ""})
		case "content_block_delta":
			require.Equal(t, a.stops, e.Index)
			if e.Delta.Signature != "" {
				a.signed++
			}
			add(fmt.Sprint(e.Index), said{0, "", e.Delta.Text + e.Delta.Thinking + e.Delta.Partial})
		case "content_block_stop":
			require.Equal(t, a.stops, e.Index)
			a.stops++
		case "message_delta":
			a.finish = append(a.finish, e.Delta.Reason)
		case "message_stop":
			a.done++
		default:
			a.names[fmt.Sprint(e.ID, e.Created)] = true
		}
		if e.Usage != nil {
			a.usage++
		}
	}
	return a
}

// requireSameAgent requires got to be what one engine would have answered, but for the ids.
func requireSameAgent(t testing.TB, want, got agentAnswer, msg ...any) {
	t.Helper()
	require.Len(t, got.names, 1, msg...)
	require.Len(t, got.calls, len(want.calls), msg...)
	for i, id := range want.calls {
		require.Equal(t, id == "", got.calls[i] == "", msg...)
	}
	for _, p := range got.parts {
		if p.kind == call && p.text != "" {
			require.True(t, json.Valid([]byte(p.text)), p.text)
		}
	}
	want.names, got.names, want.calls, got.calls, want.ids, got.ids = nil, nil, nil, nil, nil, nil
	want.events, got.events = 0, 0 // how many there are is the engine's
	require.Equal(t, want, got, msg...)
}

// agentRequests are the APIs, and how an agent answers each. plain has nothing that says what the parsers will find.
var agentRequests = map[string]struct {
	api    openai.API
	body   string
	answer func(a agent, seed uint64, usage bool) []byte
}{
	"chat":      {openai.Chat, `{"messages":[],"tools":[{"type":"function"}],"temperature":0,"stream":true,"stream_options":{"include_usage":true}}`, agent.chat},
	"seeded":    {openai.Chat, `{"messages":[],"tools":[{"type":"function"}],"temperature":1,"seed":5,"stream":true,"stream_options":{"include_usage":true}}`, agent.chat},
	"plain":     {openai.Chat, `{"messages":[],"temperature":0,"stream":true,"stream_options":{"include_usage":true}}`, agent.chat},
	"messages":  {openai.Messages, `{"messages":[],"tools":[{"name":"x"}],"temperature":0,"stream":true,"max_tokens":99}`, agent.messages},
	"responses": {openai.Responses, `{"input":[],"tools":[{"type":"function","name":"x"}],"temperature":0,"stream":true,"store":false}`, agent.responses},
}

// An answer with reasoning and tool calls whose engine dies at any place is what one engine would have answered: cut
// behind every event and inside of them, once and twice.
func TestAgentsAnswersAreRepeated(t *testing.T) {
	for name, x := range agentRequests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := scan(t, x.api, x.body)
			require.Empty(t, Refusal(r, Policy{}))
			cutsMade := 0
			for seed := range uint64(14) {
				if name == "plain" && seed%3 == 0 {
					continue // no reasoning at first: it is continued from its tokens
				}
				first := x.answer(agent{"one", seed, name == "plain"}, seed, true)
				want := readAgent(t, x.answer(agent{"one", seed, false}, seed, true))
				next := map[string][]byte{}              // by engine: most cuts need the same ones
				for _, cut := range cuts(first, false) { // behind every event, and inside of some
					s := NewStream(r, Policy{})
					got := s.Feed(nil, first[:cut])
					for i := range uint64(2) {
						_, reason := continued(r, &s)
						if reason == Complete {
							got = s.Finish(got)
							break
						}
						require.Empty(t, reason, "cut at %d", cut)
						key := fmt.Sprint("next", i, s.Repeats())
						if next[key] == nil {
							next[key] = x.answer(agent{key, seed + 3 + i, name == "plain" && !s.Repeats()}, seed, true)
						}
						next := next[key]
						if i == 0 && (cut+int(seed))%3 == 0 { // it dies, too
							got = s.Feed(got, next[:(cut*7)%len(next)])
							continue
						}
						got = s.End(s.Feed(got, next))
						break
					}
					require.Empty(t, s.Broken(), "seed %d, cut at %d of\n%s\ngot\n%s", seed, cut, first, got)
					require.True(t, s.Done())
					requireSameAgent(t, want, readAgent(t, got), "seed %d, cut at %d of\n%s\ngot\n%s", seed, cut, first, got)
					cutsMade++
				}
			}
			t.Logf("%d cuts", cutsMade)
		})
	}
}

// An engine that writes another answer gives the client nothing of it: the answer breaks off where it is.
func TestAnotherAnswerIsNoRepetition(t *testing.T) {
	for name, x := range agentRequests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := scan(t, x.api, x.body)
			broken := 0
			for seed := range uint64(7) {
				first := x.answer(agent{"one", seed, name == "plain"}, seed, true)
				for other := range uint64(7) {
					next := x.answer(agent{"next", 9, false}, other, true)
					for i, cut := range cuts(first, false) {
						if i%3 != int(other)%3 {
							continue
						}
						s := NewStream(r, Policy{})
						had := s.Feed(nil, first[:cut])
						if reason := s.Continue(); reason != "" || !s.Repeats() || s.Done() {
							continue
						}
						got := s.End(s.Feed(slices.Clone(had), next))
						if s.Broken() == "" {
							a, b := readAgent(t, had), readAgent(t, next)
							requireSameAgent(t, b, readAgent(t, got))
							for i, p := range a.parts { // what the client had is its beginning
								require.True(t, strings.HasPrefix(b.parts[i].text, p.text))
							}
							continue
						}
						broken++
						require.Equal(t, Different, s.Broken())
						require.True(t, bytes.HasPrefix(got, had))
					}
				}
			}
			require.Positive(t, broken)
		})
	}
}

// What an answer that is given up has passed is the whole answer, unchanged.
func TestAgentsAnswersPass(t *testing.T) {
	for name, x := range agentRequests {
		if name == "plain" {
			continue
		}
		r := scan(t, x.api, x.body)
		for seed := range uint64(21) {
			whole := x.answer(agent{"one", seed, false}, seed, true)
			for _, limit := range []int{0, 100, 300} {
				s := NewStream(r, Policy{MaxBytes: limit})
				var got []byte
				for event := range strings.SplitAfterSeq(string(whole), "\n\n") {
					got = s.Feed(got, []byte(event))
				}
				require.Equal(t, string(whole), string(s.End(got)))
				if limit == 0 {
					require.Equal(t, Complete, s.Continue())
				} else if s.Reason() != "" {
					require.Equal(t, TooLong, s.Reason())
					require.Zero(t, s.bytes())
				}
			}
		}
	}
}

// Usage has prefill's count of cached tokens, as that of a stream that is not insured.
func TestCachedTokensOfMessages(t *testing.T) {
	s := NewStream(scan(t, openai.Messages, agentRequests["messages"].body), Policy{})
	s.Cached = 3
	const end = `event: message_delta` + "\n" + `data: {"type":"message_delta","delta":{"stop_reason":"end_turn"},"usage":` +
		`{"input_tokens":1,"output_tokens":9,"cache_creation_input_tokens":0,"cache_read_input_tokens":9}}` + "\n\n"
	want := strings.NewReplacer(`"input_tokens":1`, `"input_tokens":7`, `"cache_read_input_tokens":9`, `"cache_read_input_tokens":3`).Replace(end)
	require.Equal(t, want, string(s.Feed(nil, []byte(end))))
}
