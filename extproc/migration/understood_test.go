package migration

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"tandem/extproc/openai"
)

// What a client got, and Tandem did not understand, is not written again by another engine, wherever the first one
// ends: the client gets every byte, and the answer cannot be continued.
func TestWhatIsNotUnderstoodEndsContinuing(t *testing.T) {
	const hello = `data: {"id":"x","object":"o","created":1,"model":"m","choices":[{"index":0,"delta":{"content":"HELLO"},"finish_reason":null}]}`
	for name, text := range map[string]string{
		"no token ids":                 hello + "\n\n",
		"gzip without a header":        "\x1f\x8b\x08\x00 an answer\n\n without lines",
		"lines that end in CR":         strings.ReplaceAll(hello+"\n\n"+hello+"\n\n", "\n", "\r"),
		"a CR in an event":             strings.Replace(hello, `,"object"`, ",\r\"object\"", 1) + "\n\n",
		"JSON, a line each":            "{\"choices\":[{\"text\":\"HELLO\"}]}\n{\"choices\":[]}\n",
		"JSON, a paragraph each":       "{\"text\":\"HELLO\"}\n\n{\"text\":\"done\"}\n\n",
		"text":                         "HELLO\n\nHELLO\n\n",
		"another member has the text":  `data: {"id":"x","object":"o","created":1,"model":"m","text":"HELLO","choices":[]}` + "\n\n",
		"a choice's unknown member":    strings.Replace(hello, `"index":0`, `"index":0,"answer":["HELLO"]`, 1) + "\n\n",
		"an object of an unknown name": strings.Replace(hello, `"id"`, `"output":{"text":"HELLO"},"id"`, 1) + "\n\n",
		"data behind a space":          " " + hello + "\n\n",
		"DATA":                         strings.Replace(hello, "data", "DATA", 1) + "\n\n",
		"a byte order mark":            "\xef\xbb\xbf" + hello + "\n\n",
		"an event of another type":     "event: text\n" + hello + "\n\n",
		"an id":                        "id: 7\n" + hello + "\n\n",
		"lines of no meaning":          "HELLO\n" + hello + "\n\n",
		"two lines of data":            "data: {\ndata: \"text\":\"HELLO\"}\n\n",
		"an event without its end":     "DATA: {\"text\":\"HELLO\"",
	} {
		for _, ended := range []bool{false, true} {
			for _, piece := range []int{1, 1 << 20} {
				t.Run(fmt.Sprintf("%s, ended %v, %d bytes a time", name, ended, piece), func(t *testing.T) {
					s := NewStream(scan(t, openai.Chat, `{"messages":[],"temperature":0,"stream":true}`), Policy{})
					var got []byte
					for rest := text; rest != ""; rest = rest[min(piece, len(rest)):] {
						got = s.Feed(got, []byte(rest[:min(piece, len(rest))]))
					}
					if ended {
						got = s.End(got)
					}
					require.Equal(t, text, string(got), "at once: it does not wait for an end that does not come")
					require.Empty(t, s.Broken())
					require.NotEmpty(t, s.Continue())
				})
			}
		}
	}
}

// The same in an answer that is continued: the client does not get it.
func TestWhatIsNotUnderstoodOfTheNextEngine(t *testing.T) {
	for _, text := range []string{"HELLO\n\n", "DATA: 1\n\n", "data: {\"id\":\"b\",\"created\":1,\"text\":\"HELLO\"}\n\n", "data: 1\r\r"} {
		s := flowing(t, true)
		require.Empty(t, s.Feed(nil, []byte(text)), text)
		require.Equal(t, Format, s.Broken(), text)
	}
}

// An answer that ended regularly and said nothing is not asked for again. Nor do comments come twice.
func TestCommentsAreNoAnswer(t *testing.T) {
	r := scan(t, openai.Chat, `{"messages":[],"temperature":0,"stream":true}`)
	s := NewStream(r, Policy{})
	require.Equal(t, ": HELLO\n\n", string(s.End(s.Feed(nil, []byte(": HELLO\n\n")))))
	require.Equal(t, Format, s.Continue())

	s = NewStream(r, Policy{})
	require.NotEmpty(t, s.Feed(nil, []byte(": HELLO\n\n")))
	require.Empty(t, s.Continue(), "its connection broke")
	require.Empty(t, s.Feed(nil, []byte(": HELLO\n\n")))
	require.NotEmpty(t, s.Feed(nil, []byte(firstEvent)))
	require.NotEmpty(t, s.Feed(nil, []byte(": ping\n\n")), "from its first event on the next engine is as any other")
}

// An engine that says that the request is at fault is believed: another one would say the same.
func TestErrorsOfTheRequest(t *testing.T) {
	for text, want := range map[string]Reason{
		`{"error":{"message":"too long","code":400}}`: Refused,
		`{"error":{"message":"busy","code":429}}`:     "",
		`{"error":{"message":"died","code":500}}`:     "",
		`{"error":"died"}`:                            "",
	} {
		s := flowing(t, false)
		got := s.Feed(nil, []byte("data: "+text+"\n\n"))
		require.Equal(t, want == "", s.Broken() == Failed, text)
		require.Equal(t, want, s.Continue(), text)
		require.Equal(t, want != "", len(got) > 0, text)
	}
}

// An engine that ignores the ids of a continuation, as another release does, begins the answer anew. Its first event says
// so: the client gets nothing of it, and a third engine continues.
func TestAContinuationIsCheckedToBeOne(t *testing.T) {
	for _, api := range []openai.API{openai.Chat, openai.Completions} {
		text := fmt.Sprintf(`{"stream":true,"temperature":0,"max_tokens":30,%s}`, prompts(api, 1))
		r := scan(t, api, text)
		one, two := engine{id: "one", created: 1, perEvent: 1}, engine{id: "two", created: 2, perEvent: 1}
		want := read(t, one.stream(t, []byte(text)))
		for name, anew := range map[string]string{
			"begins anew":        string(two.stream(t, asked(r, new(NewStream(r, Policy{}))))),
			"does not say where": string(two.stream(t, []byte(text))), // and answers no ids either
		} {
			t.Run(api.String()+" "+name, func(t *testing.T) {
				s := NewStream(r, Policy{})
				raw := one.stream(t, asked(r, &s))
				got := s.Feed(nil, raw[:len(raw)/2])
				_, reason := continued(r, &s)
				require.Empty(t, reason)
				require.Empty(t, s.Feed(nil, []byte(anew)))
				require.Equal(t, OtherStart, s.Broken())

				next, reason := continued(r, &s)
				require.Empty(t, reason)
				requireSame(t, want, read(t, s.End(s.Feed(got, two.stream(t, next)))))
			})
		}
	}
}

// Memory that ends ends only continuing: whenever that is, the client gets the whole answer, and what is held is freed.
func TestForgottenAnywhere(t *testing.T) {
	for name, members := range requests {
		for _, api := range []openai.API{openai.Chat, openai.Completions} {
			t.Run(name+" "+api.String(), func(t *testing.T) {
				t.Parallel()
				if name == "sampled" { // continued only where nothing has to be written again
					t.Skip()
				}
				text := fmt.Sprintf(`{"temperature":0,"stream":true,%s,%s}`, members, prompts(api, 1))
				one, two := engine{id: "one", created: 1}, engine{id: "two", created: 2}
				if strings.Contains(text, "%STOP%") {
					text = strings.Replace(text, `"%STOP%"`, stopOf(t, one.stream(t, []byte(text))), 1)
				}
				r := scan(t, api, text)
				want := read(t, one.stream(t, []byte(text)))
				first := one.stream(t, asked(r, new(NewStream(r, Policy{}))))
				random := rand.New(rand.NewPCG(1, 2))
				for _, cut := range cuts(first, false) {
					s := NewStream(r, Policy{})
					got := s.Feed(nil, first[:cut])
					next, reason := continued(r, &s)
					if reason != "" {
						continue
					}
					forget, bound := random.IntN(len(first)), random.IntN(2) == 0
					for rest := two.stream(t, next); len(rest) > 0; {
						if forget < 100 && bound {
							s.of.maxBytes = s.bytes() // nothing more fits: an event has to come whole
						} else if forget < 100 {
							s.Forget("memory")
						}
						n := bytes.Index(rest, []byte("\n\n")) + 2
						got, rest, forget = s.Feed(got, rest[:n]), rest[n:], forget-n
					}
					got = s.End(got)
					require.Empty(t, s.Broken(), "cut at %d", cut)
					requireSame(t, want, read(t, got), "cut at %d", cut)
					if s.Reason() != "" {
						require.Zero(t, s.bytes(), "cut at %d", cut)
						require.NotEmpty(t, s.Continue())
					}
				}
			})
		}
	}
}
