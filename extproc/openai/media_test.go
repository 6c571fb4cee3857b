package openai

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"tandem/internal/budget"
)

// picture returns the base64 of a picture, or of anything else, of n bytes of text.
func picture(seed uint64, n int) string {
	const digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
	rng := rand.New(rand.NewPCG(seed, 1))
	b := make([]byte, n)
	for i := range b {
		b[i] = digits[rng.IntN(len(digits))]
	}
	return string(b)
}

// TestSize: what a body counts for does not depend on the bytes of what is no text. Each case is the body with %s in the
// place of many bytes, or of a URL.
func TestSize(t *testing.T) {
	pic := picture(1, 4000)
	none := [NumMedia]int32{}
	of := func(k Medium, n int32) (c [NumMedia]int32) { c[k] = n; return c }
	for _, c := range []struct {
		name string
		api  API
		body string
		put  string
		want [NumMedia]int32
		text bool // the bytes count as text
	}{
		{"image", Chat, `{"messages":[{"role":"user","content":[{"type":"text","text":"what?"},{"type":"image_url","image_url":{"url":"%s"}}]}]}`, "data:image/png;base64," + pic, of(Image, 1), false},
		{"image, detail first", Chat, `{"messages":[{"content":[{"image_url":{"detail":"low","url" : "%s"},"type":"image_url"}]}]}`, "data:image/png;base64," + pic, of(Image, 1), false},
		{"image without an object (vLLM)", Chat, `{"messages":[{"content":[{"image_url":"%s"}]}]}`, "data:image/jpeg;base64," + pic, of(Image, 1), false},
		{"small image", Chat, `{"messages":[{"content":[{"type":"image_url","image_url":{"url":"%s"}}]}]}`, "data:image/png;base64,AAAA", of(Image, 1), false},
		{"image by URL", Chat, `{"messages":[{"content":[{"type":"image_url","image_url":{"url":"%s"}}]}]}`, "https://pictures.example/1.jpg", of(Image, 1), false},
		{"image with escaped slashes", Chat, `{"messages":[{"content":[{"type":"image_url","image_url":{"url":"%s"}}]}]}`, `data:image\/png;base64,\/9j\/` + pic, of(Image, 1), false},
		{"image of a tool", Chat, `{"messages":[{"role":"tool","content":[{"type":"image_url","image_url":{"url":"%s"}}]}]}`, "data:image/png;base64," + pic, of(Image, 1), false},
		{"embeddings of an image", Chat, `{"messages":[{"content":[{"type":"image_embeds","image_embeds":"%s"}]}]}`, pic, of(Image, 1), false},
		{"audio", Chat, `{"messages":[{"content":[{"type":"input_audio","input_audio":{"data":"%s","format":"wav"}}]}]}`, pic, of(Audio, 1), false},
		{"audio by URL", Chat, `{"messages":[{"content":[{"type":"audio_url","audio_url":{"url":"%s"}}]}]}`, "https://s.example/a.wav", of(Audio, 1), false},
		{"video", Chat, `{"messages":[{"content":[{"type":"video_url","video_url":{"url":"%s"}}]}]}`, "data:video/mp4;base64," + pic, of(Video, 1), false},
		{"file", Chat, `{"messages":[{"content":[{"type":"file","file":{"filename":"a.pdf","file_data":"%s"}}]}]}`, "data:application/pdf;base64," + pic, of(File, 1), false},
		{"image of Messages", Messages, `{"messages":[{"content":[{"type":"image","source":{"type":"base64","media_type":"image/png","data":"%s"}}]}]}`, pic, of(Image, 1), false},
		{"document of Messages", Messages, `{"messages":[{"content":[{"type":"document","source":{"type":"base64","media_type":"application/pdf","data":"%s"}}]}]}`, "JVBERi0" + pic, of(File, 1), false},
		{"image by URL of Messages", Messages, `{"messages":[{"content":[{"type":"image","source":{"type":"url","url":"%s"}}]}]}`, "https://pictures.example/1.jpg", of(Image, 1), false},
		{"image of a tool's result", Messages, `{"messages":[{"content":[{"type":"tool_result","content":[{"type":"image","source":{"type":"base64","data":"%s"}}]}]}]}`, pic, of(Image, 1), false},
		{"image of Responses", Responses, `{"input":[{"role":"user","content":[{"type":"input_image","image_url":"%s"}]}]}`, "data:image/png;base64," + pic, of(Image, 1), false},
		{"file of Responses", Responses, `{"input":[{"content":[{"type":"input_file","file_data":"%s"}]}]}`, "data:application/pdf;base64," + pic, of(File, 1), false},
		{"screenshot of Responses", Responses, `{"input":[{"type":"computer_call_output","output":{"type":"computer_screenshot","image_url":"%s"}}]}`, "data:image/png;base64," + pic, of(Image, 1), false},
		{"images of SGLang", SGLangGenerate, `{"text":"a","image_data":["%s"]}`, pic, of(Image, 1), false},
		{"images of SGLang, long", SGLangGenerate, `{"text":"` + strings.Repeat("word ", 100) + `","image_data":["%s"]}`, "data:image/png;base64," + pic, of(Image, 1), false},
		{"image of an embedding", PassThrough, `{"messages":[{"content":[{"type":"image_url","image_url":{"url":"%s"}}]}]}`, "data:image/png;base64," + pic, of(Image, 1), false},
		{"images of an embedding", PassThrough, `{"images":["%s"]}`, "data:image/png;base64," + pic, of(Image, 1), false},
		{"documents to rank", PassThrough, `{"query":"q","documents":{"content":[{"type":"image_url","image_url":{"url":"%s"}}]}}`, "data:image/png;base64," + pic, of(Image, 1), false},

		{"encrypted reasoning", Responses, `{"input":[{"type":"reasoning","encrypted_content":"%s"}]}`, pic, none, false},
		{"signature of thinking", Messages, `{"messages":[{"content":[{"type":"thinking","thinking":"a","signature":"%s"}]}]}`, pic, none, false},
		{"redacted thinking", Messages, `{"messages":[{"content":[{"type":"redacted_thinking","data":"%s"}]}]}`, pic, none, false},
		{"a schema", Chat, `{"messages":[],"response_format":{"type":"json_schema","json_schema":{"schema":{"description":"%s"}}}}`, pic, none, false},
		{"a schema of Responses", Responses, `{"input":"a","text":{"format":{"schema":{"description":"%s"}}}}`, pic, none, false},
		{"a grammar", Completions, `{"prompt":"a","structured_outputs":{"grammar":"%s"}}`, pic, none, false},
		{"logit_bias", Chat, `{"messages":[],"logit_bias":{"1":1,"%s":2}}`, strings.Repeat("1", 900), none, false},
		{"metadata", Responses, `{"input":"a","metadata":{"a":"%s"}}`, pic, none, false},

		{"text", Chat, `{"messages":[{"content":"%s"}]}`, strings.Repeat("word ", 400), none, true},
		{"text in a part", Chat, `{"messages":[{"content":[{"type":"text","text":"%s"}]}]}`, strings.Repeat("word ", 400), none, true},
		{"base64 in a text", Chat, `{"messages":[{"content":"%s"}]}`, "data:image/png;base64," + pic, none, true},
		{"base64 as input of a tool", Messages, `{"messages":[{"content":[{"type":"tool_use","input":{"data":"%s"}}]}]}`, pic, none, true},
		{"a link as input of a tool", Messages, `{"messages":[{"content":[{"type":"tool_use","input":{"image_url":"%s"}}]}]}`, "https://a.example/1.png", none, true},
		{"a tool's result", Messages, `{"messages":[{"content":[{"type":"tool_result","content":"%s"}]}]}`, strings.Repeat("word ", 400), none, true},
		{"arguments", Chat, `{"messages":[{"tool_calls":[{"function":{"arguments":"%s"}}]}]}`, strings.Repeat("word ", 400), none, true},
		{"a link in a citation", Responses, `{"input":[{"content":[{"annotations":[{"type":"url_citation","url":"%s"}]}]}]}`, "https://a.example/long", none, true},
		{"tools are prompt", Chat, `{"messages":[],"tools":[{"type":"function","function":{"name":"f","description":"%s"}}]}`, strings.Repeat("word ", 400), none, true},
		{"tools of Messages", Messages, `{"messages":[],"tools":[{"name":"f","input_schema":{"properties":{"url":{"description":"%s"}}}}]}`, strings.Repeat("word ", 400), none, true},
		{"system", Messages, `{"messages":[],"system":"%s"}`, strings.Repeat("word ", 400), none, true},
		{"instructions", Responses, `{"input":[],"instructions":"%s"}`, strings.Repeat("word ", 400), none, true},
		{"a completion", Completions, `{"prompt":"%s"}`, "data:image/png;base64," + pic, none, true},
		{"texts to embed", PassThrough, `{"input":["%s"]}`, strings.Repeat("word ", 400), none, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			var r Request
			body := fmt.Sprintf(c.body, c.put)
			require.NoError(t, r.Scan(c.api, []byte(body), Limits{}))
			s := r.Size()
			require.Equal(t, c.want, s.Media)
			require.Equal(t, c.want != none, s.HasMedia())
			if c.text {
				require.Equal(t, len(body), s.Text)
			} else {
				require.LessOrEqual(t, s.Text, len(c.body))
				require.Positive(t, s.Text)
			}
		})
	}
}

// TestSizeCounts: token ids and rows of embeddings are counted by themselves.
func TestSizeCounts(t *testing.T) {
	ids := strings.Repeat("128000,", 9999) + "1"
	for _, c := range []struct {
		api   API
		body  string
		least int64
		most  int64
	}{
		{Completions, `{"prompt":[1,2,3]}`, 3, 3},
		{Completions, `{"prompt":[[1,2,3],[4]]}`, 4, 4},
		{Completions, `{"prompt":[` + ids + `]}`, 9500, 10500},
		{Completions, `{"prompt":"1,2,3"}`, 0, 0},
		{Completions, `{"prompt":[]}`, 0, 0},
		{Completions, `{"prompt":["1,2"]}`, 0, 0},
		{Generate, `{"token_ids":[ 1, 2 ]}`, 2, 2},
		{SGLangGenerate, `{"input_ids":[1,2]}`, 2, 2},
		{PassThrough, `{"input":[` + ids + `]}`, 9500, 10500},
		{Completions, `{"prompt":"","prompt_embeds":"` + strings.Repeat("A", 100*rowBytes) + `"}`, 90, 110},
	} {
		var r Request
		require.NoError(t, r.Scan(c.api, []byte(c.body), Limits{}))
		s := r.Size()
		require.GreaterOrEqual(t, s.Counted, c.least)
		require.LessOrEqual(t, s.Counted, c.most)
		if c.most > 0 {
			require.Less(t, s.Text, 100)
		}
	}
}

// TestMediaHash: what engines compute of a medium depends on all of it, so two that begin alike share no block from
// there on, and a conversation goes on behind it.
func TestMediaHash(t *testing.T) {
	text := strings.Repeat("a long text before. ", 90) // with what is around it, three blocks
	chat := func(pic, after string) []uint64 {
		var r Request
		body := fmt.Sprintf(`{"model":"m","messages":[{"role":"user","content":[{"type":"text","text":"%s"},`+
			`{"type":"image_url","image_url":{"url":"data:image/png;base64,%s"}}]}%s]}`, text, pic, after)
		require.NoError(t, r.Scan(Chat, []byte(body), Limits{}))
		return r.PromptHash(nil, 512, 2048)
	}
	pic := picture(1, 3<<20)
	one := chat(pic, "")
	require.Len(t, one, 3+8, "an image has blocks for its tokens, and not for its bytes")
	other := chat(pic[:len(pic)-1]+"=", "")
	require.Equal(t, one[:3], other[:3])
	for i := 3; i < len(one); i++ {
		require.NotContains(t, other, one[i], "it differs in its last byte only")
	}
	more := chat(pic, `,{"role":"assistant","content":"`+strings.Repeat("an answer ", 100)+`"}`)
	require.Equal(t, one, more[:len(one)])
	require.Greater(t, len(more), len(one))
	require.Equal(t, one[:5], func() []uint64 {
		var r Request
		body := fmt.Sprintf(`{"model":"m","messages":[{"role":"user","content":[{"type":"text","text":"%s"},`+
			`{"type":"image_url","image_url":{"url":"data:image/png;base64,%s"}}]}]}`, text, pic)
		require.NoError(t, r.Scan(Chat, []byte(body), Limits{}))
		return r.PromptHash(nil, 512, 5)
	}())

	generate := func(pic string) []uint64 {
		var r Request
		body := fmt.Sprintf(`{"text":"%s","image_data":"%s"}`, text, pic)
		require.NoError(t, r.Scan(SGLangGenerate, []byte(body), Limits{}))
		return r.PromptHash(nil, 512, 2048)
	}
	require.Equal(t, generate(pic), generate(strings.Clone(pic)))
	require.NotEqual(t, generate(pic)[0], generate(pic[1:])[0])
}

// TestMediaAllocs: a body with media costs no allocation either, and no more media are remembered than are bounded.
func TestMediaAllocs(t *testing.T) {
	var parts strings.Builder
	for i := range 2 * maxMedia {
		fmt.Fprintf(&parts, `,{"type":"image_url","image_url":{"url":"https://a.example/%d"}}`, i)
	}
	body := []byte(`{"messages":[{"content":[{"type":"text","text":"` + strings.Repeat("long ", 500) + `"},` +
		`{"type":"image_url","image_url":{"url":"data:image/png;base64,` + picture(2, 5000) + `"}}` + parts.String() + `]}]}`)
	var r Request
	var hashes []uint64
	pass := func() {
		if err := r.Scan(Chat, body, Limits{}); err != nil {
			panic(err)
		}
		hashes = r.PromptHash(hashes[:0], 512, 2048)
	}
	pass()
	require.EqualValues(t, 2*maxMedia+1, r.Size().Media[Image])
	require.Len(t, r.beside.found, maxMedia)
	budget.Allocs(t, 20, 0, pass)
	r.Reset()
	require.Equal(t, Size{}, r.Size())
}

// slowMedia is the dumb twin of how media are found: it decodes the member, and asks for every string.
func slowMedia(t testing.TB, api API, body []byte) (count [NumMedia]int32) {
	t.Helper()
	finder := beside{api: api}
	var walk func(value string, names []string)
	walk = func(value string, names []string) {
		switch {
		case isObject(value):
			for _, m := range slowMembers(t, []byte(value)) {
				walk(m.value, append(slices.Clip(names), m.key))
			}
		case strings.HasPrefix(value, "["):
			var all []json.RawMessage
			require.NoError(t, json.Unmarshal([]byte(value), &all))
			for _, one := range all {
				walk(string(one), names)
			}
		case strings.HasPrefix(value, `"`) && mayBeMedium([]byte(value), 0, len(value)):
			parent := ""
			if len(names) > 1 {
				parent = names[len(names)-2]
			}
			kind := kindOf([]byte(names[0]), []byte(names[len(names)-1]), []byte(parent), []byte(value[1:len(value)-1]))
			if kind < NumMedia {
				count[kind]++
			}
		}
	}
	for _, m := range slowMembers(t, body) {
		if finder.in(scopeTop, []byte(m.key)) != nil {
			walk(m.value, []string{m.key})
		}
	}
	return count
}

// FuzzSize: whatever the body, what is found is what the twin finds, and no size is below 0.
func FuzzSize(f *testing.F) {
	for _, s := range []string{
		`{"messages":[{"role":"user","content":[{"type":"text","text":"data:a"},{"type":"image_url","image_url":{"detail":"low","url":"data:image/png;base64,AAAA"}}]}]}`,
		`{"input":[{"content":[{"type":"input_image","image_url":"https://a/b"},{"file_data":"data:application/pdf;base64,AA"}]}]}`,
		`{"messages":[{"content":[{"source":{"data":"` + picture(3, 600) + `"}},{"type":"tool_use","input":{"image_url":"http://a/b"}}]}]}`,
		`{"text":"a","image_data":["http://a/b",["data:audio/a,b"],{"url":"data:video/c"}],"input_ids":[1,2]}`,
		`{"text":"a","image_data":["data:image/png;base64,` + picture(4, 700) + `"],"input":[1,{"image_url":"` + picture(4, 700) + `"}]}`,
		`{"messages":[[["http://a/b"]]],"prompt":[[1,2],[3]],"prompt_embeds":"AAAA","token_ids":[1]}`,
	} {
		for api := PassThrough; api <= SGLangGenerate; api++ {
			f.Add(byte(api), []byte(s))
		}
	}
	f.Fuzz(func(t *testing.T, api byte, body []byte) {
		var r Request
		if api > byte(SGLangGenerate) || r.Scan(API(api), body, Limits{MaxDepth: keptNames}) != nil {
			return
		}
		s := r.Size()
		require.GreaterOrEqual(t, s.Text, 0)
		require.LessOrEqual(t, s.Text, len(body))
		require.GreaterOrEqual(t, s.Counted, int64(0))
		hashes := r.PromptHash(nil, 64, 100)
		require.LessOrEqual(t, len(hashes), 100)
		if !strings.Contains(string(body), `\`) { // names with escapes are not found
			require.Equal(t, slowMedia(t, API(api), body), s.Media)
		}
	})
}
