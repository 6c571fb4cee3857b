package migration

import (
	"encoding/json"
	"fmt"
	"hash/fnv"
	"slices"
	"strings"
	"sync"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/require"
)

// engine is a vLLM as far as streams go: the next token is a function of all tokens before, some tokens end inside a
// character, text that a stop string may begin with is held back, and a prompt that ends inside a character is answered
// with all of its text. perEvent is how many tokens an event has; 0: one to three.
type engine struct {
	id       string
	created  int
	perEvent int
	fault    int // this token is another one than it should be; 0: none
}

// vocabulary are the tokens; the last one ends an answer.
var vocabulary = []string{" a", " b", "c", "d ", "é", "\xe2\x82", "\xac", "\xf0\x9f", "\x98\x80", " \"q\"", "\\", "\n", "→x",
	"\xe2", "\x86\x92", "stop", "st", "op", " z", "<end>"}

const endOfText = 19

func tokenText(ids []uint32) string {
	var b []byte
	for _, id := range ids {
		if id >= 1000 { // a byte of a prompt's text
			b = append(b, byte(id-1000))
		} else {
			b = append(b, vocabulary[id]...)
		}
	}
	var out strings.Builder
	for len(b) > 0 {
		r, n := utf8.DecodeRune(b)
		if r == utf8.RuneError && n == 1 {
			for n < len(b) && n < 3 && b[n]&0xC0 == 0x80 {
				n++
			}
		}
		out.WriteRune(r)
		b = b[n:]
	}
	return out.String()
}

// after returns the token that follows ids.
func after(ids []uint32) uint32 {
	h := fnv.New64a()
	for _, id := range ids {
		_, _ = h.Write([]byte{byte(id), byte(id >> 8)})
	}
	x := h.Sum64() >> 7
	switch last := ids[len(ids)-1]; {
	case last == 5 && x%4 > 0: // mostly the rest of the character
		return 6
	case last == 7 && x%4 > 0:
		return 8
	case last == 13 && x%4 > 0:
		return 14
	case x%97 == 0:
		return endOfText
	}
	return uint32(x % endOfText)
}

type body struct {
	Messages      []struct{ Content string }
	Prompt        any
	MaxTokens     int             `json:"max_tokens"`
	MinTokens     int             `json:"min_tokens"`
	Stop          []string        `json:"stop"`
	IncludeStop   bool            `json:"include_stop_str_in_output"`
	ReturnIDs     bool            `json:"return_token_ids"`
	StreamOptions map[string]bool `json:"stream_options"`
	KV            struct {
		Prompt []uint32 `json:"prompt_token_ids"`
	} `json:"kv_transfer_params"`
}

func (b *body) prompt() (ids []uint32) {
	text := func(s string) {
		for _, c := range []byte(s) {
			ids = append(ids, 1000+uint32(c))
		}
	}
	switch p := b.Prompt.(type) {
	case string:
		text(p)
	case []any:
		for _, id := range p {
			ids = append(ids, uint32(id.(float64)))
		}
	default:
		if b.KV.Prompt != nil {
			return b.KV.Prompt
		}
		for _, m := range b.Messages {
			text("<u>" + m.Content)
		}
	}
	return ids
}

// answers are those given before: most cuts need the same ones.
var answers sync.Map

// stream answers a request.
func (en engine) stream(t testing.TB, raw []byte) []byte {
	t.Helper()
	key := fmt.Sprint(en, string(raw))
	if known, ok := answers.Load(key); ok {
		return known.([]byte)
	}
	var b body
	require.NoError(t, json.Unmarshal(raw, &b), string(raw))
	if b.Prompt != nil && b.MaxTokens == 0 {
		b.MaxTokens = 16 // vLLM: CompletionRequest
	}
	w := writer{engine: en, b: &b, chat: b.Prompt == nil, prompt: b.prompt()}
	longest := 0
	for _, s := range b.Stop {
		longest = max(longest, utf8.RuneCountInString(s))
	}
	if longest > 0 && !b.IncludeStop {
		w.hold = longest - 1
	}
	w.run()
	answers.Store(key, w.out)
	return w.out
}

type writer struct {
	engine
	b       *body
	chat    bool
	hold    int
	prompt  []uint32
	out     []byte
	ids     []uint32 // of the answer
	text    []rune
	written int // characters
	told    int // tokens
}

func (w *writer) run() {
	if w.chat {
		w.event(map[string]any{"delta": map[string]any{"role": "assistant", "content": ""}, "finish_reason": nil}, true, true)
	}
	all := slices.Clone(w.prompt)
	decoded := tokenText(all)
	if strings.HasSuffix(decoded, "\uFFFD") {
		decoded = "" // the trap
	}
	finish := ""
	for finish == "" {
		next := after(all)
		if w.fault > 0 && len(w.ids)+1 == w.fault {
			next = (next + 1) % endOfText
		}
		if next == endOfText && len(w.ids) < w.b.MinTokens {
			next = 0
		}
		all, w.ids = append(all, next), append(w.ids, next)
		if next == endOfText {
			finish = "stop"
		} else if now := tokenText(all); !strings.HasSuffix(now, "\uFFFD") && len(now) > len(decoded) {
			fresh := []rune(now[len(decoded):])
			decoded, w.text = now, append(w.text, fresh...)
			if w.stopped(len(fresh)) {
				finish = "stop"
			}
		}
		if finish == "" && w.b.MaxTokens > 0 && len(w.ids) == w.b.MaxTokens {
			finish = "length"
		}
		per := w.perEvent
		if per == 0 {
			per = 1 + int(next+uint32(len(all)))%3
		}
		if finish != "" || len(w.ids)-w.told >= per {
			w.tokens(finish)
		}
	}
	if w.b.StreamOptions["include_usage"] {
		w.event(nil, false, false)
	}
	w.out = append(w.out, "data: [DONE]\n\n"...)
}

// stopped cuts the text at a stop string that ends in its last fresh characters.
func (w *writer) stopped(fresh int) bool {
	if len(w.ids) <= w.b.MinTokens {
		return false
	}
	text := string(w.text)
	first := -1
	stop := ""
	for _, s := range w.b.Stop {
		from := max(0, len(w.text)-fresh-utf8.RuneCountInString(s)+1)
		skip := len(string(w.text[:from]))
		if at := strings.Index(text[skip:], s); at >= 0 && (first < 0 || skip+at+len(s) < first+len(stop)) {
			first, stop = skip+at, s
		}
	}
	if first < 0 {
		return false
	}
	if w.b.IncludeStop {
		first += len(stop)
	}
	w.text = []rune(text[:first])
	return true
}

func (w *writer) tokens(finish string) {
	until := len(w.text)
	if finish == "" {
		until = max(w.written, until-w.hold)
	}
	text := string(w.text[min(w.written, until):until])
	choice := map[string]any{"finish_reason": nil, "token_ids": nil}
	if w.chat {
		choice["delta"] = map[string]any{"content": text}
	} else {
		choice["text"] = text
	}
	if finish != "" {
		choice["finish_reason"] = finish
	}
	if w.b.ReturnIDs {
		choice["token_ids"] = w.ids[w.told:]
	}
	first := w.told == 0
	w.written, w.told = until, len(w.ids)
	if !w.chat {
		choice["prompt_token_ids"] = nil
		if first && w.b.ReturnIDs {
			choice["prompt_token_ids"] = w.prompt
		}
	}
	w.event(choice, false, true)
}

// event writes an event with a choice, or the usage at the end.
func (w *writer) event(choice map[string]any, first, choices bool) {
	e := fmt.Sprintf(`data: {"id":%q,"object":"chunk","created":%d,"model":"m","choices":[`, w.id, w.created)
	if choices {
		choice["index"] = 0
		text, _ := json.Marshal(choice)
		e += string(text)
	}
	e += "]"
	if first {
		e += `,"prompt_token_ids":`
		if w.b.ReturnIDs {
			text, _ := json.Marshal(w.prompt)
			e += string(text)
		} else {
			e += "null"
		}
	}
	if !choices || w.b.StreamOptions["continuous_usage_stats"] {
		e += fmt.Sprintf(`,"usage":{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d}`, len(w.prompt),
			len(w.prompt)+len(w.ids), len(w.ids))
	}
	w.out = append(append(w.out, e...), "}\n\n"...)
}
