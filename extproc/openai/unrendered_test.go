package openai

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/cespare/xxhash/v2"
	"github.com/stretchr/testify/require"

	"tandem/internal/budget"
)

// agent writes the requests of a conversation as a coding agent does.
type agent struct {
	random   *rand.Rand
	messages []message
	line     bool // its system prompt begins with the line of Claude Code
	marks    int  // so many of the last messages are marked
	turns    int
}

// message is a text, or parts as they stand without marks.
type message struct {
	role, text string
	parts      []string
}

func (a *agent) words(most int) string {
	var b strings.Builder
	for range 1 + a.random.IntN(most) {
		fmt.Fprintf(&b, `%x \"cache_control\": \n`, a.random.Uint32())
	}
	return b.String()
}

// turn appends what the user or a tool says, with the answer before it.
func (a *agent) turn() {
	a.turns++
	if a.turns == 1 {
		a.messages = append(a.messages, message{role: "user", text: a.words(50)})
		return
	}
	call := fmt.Sprintf(`{"type":"tool_use","id":"t%d","name":"Read","input":{"path":"%d.go","cache_control":{"a":%[1]d}}}`, a.turns, a.turns)
	a.messages = append(a.messages, message{role: "assistant", parts: []string{`{"type":"text","text":"` + a.words(30) + `"}`, call}})
	switch a.random.IntN(3) {
	case 0:
		a.messages = append(a.messages, message{role: "user", text: a.words(200)})
	case 1:
		a.messages = append(a.messages, message{role: "user", parts: []string{`{"type":"text","text":"` + a.words(200) + `"}`}})
	default:
		a.messages = append(a.messages, message{role: "user", parts: []string{fmt.Sprintf(
			`{"type":"tool_result","tool_use_id":"t%d","content":"%s"}`, a.turns, a.words(400))}})
	}
}

const ephemeral = `"cache_control":{"type":"ephemeral"}`

// body returns the request, with marks as clients put them: on the last part, for which a text becomes a part.
func (a *agent) body() []byte {
	var b strings.Builder
	b.WriteString(`{"model":"m","system":[`)
	if a.line {
		fmt.Fprintf(&b, `{"type":"text","text":"x-anthropic-billing-header: cc_version=2.1.107.3d9; cc_entrypoint=cli; cch=%05x;"},`, a.random.IntN(1<<20))
	}
	b.WriteString(`{"type":"text","text":"You are a coding agent.",` + ephemeral + `}],"messages":[`)
	for i, m := range a.messages {
		marked := i >= len(a.messages)-a.marks
		parts := append([]string(nil), m.parts...)
		if marked && parts == nil {
			parts = []string{`{"type":"text","text":"` + m.text + `"}`}
		}
		if marked {
			last := &parts[len(parts)-1]
			*last = (*last)[:len(*last)-1] + "," + ephemeral + "}"
		}
		content := `"` + m.text + `"`
		if parts != nil {
			content = "[" + strings.Join(parts, ",") + "]"
		}
		fmt.Fprintf(&b, `{"role":"%s","content":%s}`, m.role, content)
		if i < len(a.messages)-1 {
			b.WriteByte(',')
		}
	}
	b.WriteString(`],"max_tokens":32000,"stream":true}`)
	return []byte(b.String())
}

// rendered returns the messages as engines see them, without the closing bracket: the dumb twin of what is hashed.
func (a *agent) rendered() string {
	var all []string
	for _, m := range a.messages {
		content := `"` + m.text + `"`
		if m.parts != nil {
			content = "[" + strings.Join(m.parts, ",") + "]"
		}
		if text, ok := strings.CutPrefix(content, `[{"type":"text","text":`); ok && len(m.parts) == 1 {
			content = strings.TrimSuffix(text, "}]")
		}
		all = append(all, fmt.Sprintf(`{"role":"%s","content":%s}`, m.role, content))
	}
	return "[" + strings.Join(all, ",")
}

// blocksOf hashes a text in the plainest way.
func blocksOf(h uint64, text string, size int) (out []uint64) {
	for ; len(text) >= size; text = text[size:] {
		h = chain(h, xxhash.Sum64String(text[:size]))
		out = append(out, h)
	}
	return out
}

// The hashes of a request cover what engines render, whatever marks it has, so each turn finds all blocks of the one before.
func FuzzTurnsOfAgents(f *testing.F) {
	for seed := range uint64(20) {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, seed uint64) {
		random := rand.New(rand.NewPCG(seed, 1))
		a := &agent{random: random, line: random.IntN(2) == 0, marks: random.IntN(4)}
		size := []int{16, 100, 512}[random.IntN(3)]
		var before []uint64
		for range 6 {
			a.turn()
			body := a.body()
			require.True(t, json.Valid(body))
			r := scanned(t, Messages, string(body))
			now := r.PromptHash(nil, size, 1<<20)
			require.Equal(t, len(before), shared(before, now))
			front := xxhash.Sum64String("m")
			system := `[{"type":"text","text":"You are a coding agent."}]`
			if a.line {
				system = `[{"type":"text","text":""},` + system[1:]
			}
			front = chain(front, xxhash.Sum64String(system)+2)
			require.Equal(t, blocksOf(front, a.rendered(), size), now)
			require.Equal(t, len(a.rendered())+1, r.PromptBytes())
			before = now
		}
	})
}

// What of a turn's prompt the next one finds, in twenty turns of one conversation: hashed as it stands, and as engines
// render it. A conversation is recognised by the last block of its prompt, so it is lost where that is not found.
func TestWhatTheNextTurnFinds(t *testing.T) {
	const turns = 20
	for _, c := range []struct {
		name       string
		line       bool
		marks      int
		raw        float64 // share of the blocks of a prompt that the next one has
		recognised int     // turns that have all of them
	}{
		{"no marks", false, 0, 1, 19},
		{"the last message is marked", false, 1, .89, 12},
		{"the last two are", false, 2, .80, 1},
		{"Claude Code: the last two, and its line", true, 2, 0, 0},
	} {
		a := &agent{random: rand.New(rand.NewPCG(1, 2)), line: c.line, marks: c.marks}
		var before, rawBefore []uint64
		share, recognised := 0.0, 0
		for turn := range turns {
			a.turn()
			r := scanned(t, Messages, string(a.body()))
			now := r.PromptHash(nil, 512, 1<<20)
			messages := string(r.Raw(FieldMessages))
			raw := blocksOf(xxhash.Sum64(r.Raw(FieldSystem)), messages[:len(messages)-1], 512)
			require.Equal(t, len(before), shared(before, now), c.name)
			if turn > 0 {
				n := shared(rawBefore, raw)
				share += float64(n) / float64(len(rawBefore)) / (turns - 1)
				if n == len(rawBefore) {
					recognised++
				}
			}
			before, rawBefore = now, raw
		}
		require.InDelta(t, c.raw, share, .005, c.name)
		require.Equal(t, c.recognised, recognised, c.name)
	}
}

// What is left out, and what is not.
func TestUnrendered(t *testing.T) {
	of := func(api API, body string) []uint64 { return hashes(t, api, body) }
	const long = `a text of some blocks, a text of some blocks`
	chat := func(content string) string { return `{"messages":[{"role":"user","content":` + content + `}]}` }
	text := of(Chat, chat(`"`+long+`"`))
	for _, same := range []string{
		`[{"type":"text","text":"` + long + `"}]`,
		`[{"text":"` + long + `", "type":"text"}]`,
		`[ { "type" : "text" , "cache_control" : null , "text" :"` + long + `" } ]`,
		`[{"type":"text","text":"` + long + `","cache_control":{"type":"ephemeral","ttl":"1h"}}]`,
	} {
		require.Equal(t, text, of(Chat, chat(same)), same)
		require.Equal(t, text, of(Messages, chat(same)), same)
	}
	for _, other := range []string{
		`[{"type":"text","text":"` + long + `"},{"type":"text","text":""}]`,
		`[{"type":"text","text":"` + long + `","citations":[]}]`,
		`[{"type":"thinking","text":"` + long + `"}]`,
		`["` + long + `"]`,
		`[]`,
		`[{}]`,
	} {
		require.NotEqual(t, text, of(Chat, chat(other)), other)
	}
	part := func(mark string) []uint64 {
		return of(Messages, chat(`[{"type":"text","text":"`+long+`"},{`+mark+`"type":"text","text":"`+long+`"}]`))
	}
	require.Equal(t, part(""), part(`"cache_control":{"type":"ephemeral","of":[{"cache_control":1}]},`))
	require.Equal(t, part(""), part(`"cache_control" : 1 , `))
	require.NotEqual(t, part(""), part(`"cache_controls":1,`))
	call := func(input string) []uint64 {
		return of(Messages, chat(`[{"type":"tool_use","id":"1","name":"n","input":{`+input+`}},{"type":"text","text":"`+long+`"}]`))
	}
	require.NotEqual(t, call(""), call(`"cache_control":1`), "engines render the arguments of a call")

	system := func(line string) string {
		return `{"messages":[{"role":"system","content":"` + line + `You are a coding agent."},{"role":"user","content":"Hi"}]}`
	}
	const line = `x-anthropic-billing-header: cc_version=2.1.1; cch=`
	require.Equal(t, of(Chat, system(line+`12345;\n`)), of(Chat, system(line+`54321;\n`)))
	keep := func(body string) []uint64 {
		r := scanned(t, Chat, body)
		r.KeepAttribution()
		return r.PromptHash(nil, 16, 100)
	}
	require.NotEqual(t, keep(system(line+`12345;\n`)), keep(system(line+`54321;\n`)))
	require.Equal(t, keep(chat(`"`+long+`"`)), keep(chat(`[{"type":"text","text":"`+long+`",`+ephemeral+`}]`)))
}

func TestUnrenderedAllocs(t *testing.T) {
	a := &agent{random: rand.New(rand.NewPCG(1, 2)), line: true, marks: 2}
	for range 30 {
		a.turn()
	}
	body := a.body()
	var r Request
	var out []uint64
	pass := func() {
		if err := r.Scan(Messages, body, Limits{}); err != nil {
			panic(err)
		}
		out = r.PromptHash(out[:0], 512, 2048)
	}
	pass()
	budget.Allocs(t, 20, 0, pass)
}
