package openai

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// turnResult is a TurnAnswer's result.
type turnResult struct {
	out, params string
	ids         []uint32
	calls       int
}

func rewriteTurn(t testing.TB, answer string, stream, ownIDs bool, chunk int) (h turnResult) {
	t.Helper()
	a := TurnAnswer{OwnIDs: ownIDs, Kept: func(params []byte, ids []uint32) {
		h.params, h.ids = string(params), append([]uint32(nil), ids...)
		h.calls++
	}}
	if !stream {
		out, err := a.Whole(nil, []byte(answer))
		require.NoError(t, err)
		h.out = string(out)
		return h
	}
	var events Events
	var out []byte
	each := func(event []byte) { out = a.Event(out, event) }
	for len(answer) > 0 {
		n := min(chunk, len(answer))
		require.NoError(t, events.Feed([]byte(answer[:n]), each))
		answer = answer[n:]
	}
	events.End(each)
	h.out = string(out)
	return h
}

const turnObject = `{"do_remote_decode":true,"remote_block_ids":[[1]]}`

// TestTurnAnswerWhole: the ids of prompt and answer stand at an answer's top or in its choice, in any order; members
// that the client did not request become null.
func TestTurnAnswerWhole(t *testing.T) {
	for name, c := range map[string]struct {
		answer, out string
		own         bool
		ids         []uint32
	}{
		"a chat": {answer: `{"id":"x","choices":[{"message":{"content":"a"},"token_ids":[3,4]}],"prompt_token_ids":[1,2],"kv_transfer_params":` + turnObject + `}`,
			out: `{"id":"x","choices":[{"message":{"content":"a"},"token_ids":null}],"prompt_token_ids":null,"kv_transfer_params":null}`, ids: []uint32{1, 2, 3, 4}},
		"a completion": {answer: `{"kv_transfer_params":` + turnObject + `,"choices":[{"token_ids":[3],"text":"b","prompt_token_ids":[1]}]}`,
			// the answer's ids may stand before the prompt's
			out: `{"kv_transfer_params":null,"choices":[{"token_ids":null,"text":"b","prompt_token_ids":null}]}`, ids: nil},
		"whose client keeps ids": {answer: `{"choices":[{"text":"b","token_ids":[3],"prompt_token_ids":[1]}],"kv_transfer_params":` + turnObject + `}`, own: true,
			out: `{"choices":[{"text":"b","token_ids":[3],"prompt_token_ids":[1]}],"kv_transfer_params":null}`, ids: []uint32{1, 3}},
		"nothing kept":    {answer: `{"choices":[{"token_ids":[3]}],"prompt_token_ids":[1],"kv_transfer_params":null}`, out: `{"choices":[{"token_ids":null}],"prompt_token_ids":null,"kv_transfer_params":null}`},
		"no ids":          {answer: `{"choices":[{"text":"b"}],"kv_transfer_params":` + turnObject + `}`, out: `{"choices":[{"text":"b"}],"kv_transfer_params":null}`},
		"two choices":     {answer: `{"choices":[{"token_ids":[3]},{"token_ids":[4]}],"prompt_token_ids":[1],"kv_transfer_params":` + turnObject + `}`, out: `{"choices":[{"token_ids":null},{"token_ids":null}],"prompt_token_ids":null,"kv_transfer_params":null}`},
		"ids that aren't": {answer: `{"choices":[{"token_ids":[3.5]}],"prompt_token_ids":[1],"kv_transfer_params":` + turnObject + `}`, out: `{"choices":[{"token_ids":null}],"prompt_token_ids":null,"kv_transfer_params":null}`},
		"responses":       {answer: `{"object":"response","output":[{"token_ids":[5]}],"kv_transfer_params":` + turnObject + `}`, out: `{"object":"response","output":[{"token_ids":[5]}],"kv_transfer_params":null}`},
	} {
		t.Run(name, func(t *testing.T) {
			got := rewriteTurn(t, c.answer, false, c.own, 0)
			require.JSONEq(t, c.out, got.out)
			if name == "a completion" {
				c.ids = []uint32{1, 3}
			}
			require.Equal(t, c.ids, got.ids)
			if c.ids != nil {
				require.JSONEq(t, turnObject, got.params)
			}
		})
	}
	_, err := (&TurnAnswer{}).Whole(nil, []byte("<html>"))
	require.Error(t, err)
}

// TestTurnAnswerStream: however the stream is cut, its events are the client's own, and the kept parts are known with
// the last of them.
func TestTurnAnswerStream(t *testing.T) {
	stream := strings.Join([]string{
		`data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}],"prompt_token_ids":[1,2]}`,
		`data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null,"token_ids":[3]}]}`,
		`data: {"choices":[{"index":0,"delta":{},"logprobs":null,"finish_reason":null,"token_ids":[4]}]}`,
		`data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop","token_ids":[5]}],"kv_transfer_params":` + turnObject + `}`,
		`data: {"choices":[],"usage":{"prompt_tokens":2}}`,
		"data: [DONE]", "",
	}, "\n\n")
	whole := rewriteTurn(t, stream, true, false, len(stream))
	require.Equal(t, []uint32{1, 2, 3, 4, 5}, whole.ids)
	require.JSONEq(t, turnObject, whole.params)
	require.NotContains(t, whole.out, "kv_transfer_params")
	require.NotContains(t, whole.out, "token_ids\":[")
	require.Equal(t, 5, strings.Count(whole.out, "data: "), "the event of token 4 was there for its id alone:\n%s", whole.out)
	require.True(t, strings.HasSuffix(whole.out, "data: [DONE]\n\n"))
	for _, line := range []string{"\n", "\r\n"} {
		for chunk := 1; chunk < 90; chunk += 7 {
			got := rewriteTurn(t, strings.ReplaceAll(stream, "\n", line), true, false, chunk)
			require.Equal(t, whole, got, "in pieces of %d", chunk)
		}
	}
	own := rewriteTurn(t, stream, true, true, 50)
	require.Equal(t, whole.ids, own.ids)
	require.Equal(t, 6, strings.Count(own.out, "data: "))
	require.Contains(t, own.out, `"token_ids":[4]`)

	unused := TurnAnswer{OwnIDs: true}
	require.Equal(t, "data: {\"type\":\"response.completed\",\"response\":{\"id\":\"r\",\"kv_transfer_params\":null}}\n\n",
		string(unused.Event(nil, []byte(`data: {"type":"response.completed","response":{"id":"r","kv_transfer_params":`+turnObject+`}}`))))
	require.Equal(t, "event: ping\ndata: x\n\n", string(unused.Event(nil, []byte("event: ping\ndata: x"))))
}

// The ids of an answer take memory for as long as it lasts: Room is called with the bytes, and may refuse. Then the
// turn is not kept, but the answer is cleaned all the same.
func TestTurnAnswerRoom(t *testing.T) {
	for _, room := range []int{0, 100, 1 << 20} {
		var said []int
		kept := 0
		a := TurnAnswer{
			Kept: func(_ []byte, ids []uint32) { kept = len(ids) },
			Room: func(bytes int) bool { said = append(said, bytes); return bytes <= room },
		}
		a.Event(nil, []byte(`data: {"choices":[],"prompt_token_ids":[1,2]}`))
		for range 1000 {
			out := a.Event(nil, []byte(`data: {"choices":[{"delta":{"content":"a"},"token_ids":[3]}]}`))
			require.NotContains(t, string(out), "[3]")
		}
		a.Event(nil, []byte(`data: {"choices":[],"kv_transfer_params":`+turnObject+`}`))
		require.Less(t, len(said), 30, "not for every token")
		require.Zero(t, said[len(said)-1])
		require.Equal(t, map[bool]int{true: 1002}[room > 4000], kept, room)
		require.Nil(t, a.ids)
	}
}

// TestTurnAnswerOutOfOrder: ids in an unexpected order are useless.
func TestTurnAnswerOutOfOrder(t *testing.T) {
	for name, events := range map[string][]string{
		"answer before prompt": {`{"choices":[{"token_ids":[3]}]}`, `{"choices":[],"prompt_token_ids":[1]}`, `{"choices":[],"kv_transfer_params":` + turnObject + `}`},
		"prompt twice":         {`{"choices":[],"prompt_token_ids":[1]}`, `{"choices":[],"prompt_token_ids":[1]}`, `{"choices":[],"kv_transfer_params":` + turnObject + `}`},
		"no prompt":            {`{"choices":[{"token_ids":[3]}],"kv_transfer_params":` + turnObject + `}`},
	} {
		got := rewriteTurn(t, "data: "+strings.Join(events, "\n\ndata: ")+"\n\n", true, false, 1000)
		require.Zero(t, got.calls, name)
		require.NotContains(t, got.out, "remote_", name)
	}
}

// TestBoth: an answer through two rewriters, one of which drops an event.
func TestBoth(t *testing.T) {
	b := Both{&TurnAnswer{Kept: func([]byte, []uint32) {}}, CachedTokens{N: 7, Written: -1}}
	require.Empty(t, b.Begin(nil))
	require.Empty(t, b.Event(nil, []byte(`data: {"choices":[{"delta":{},"finish_reason":null,"token_ids":[4]}]}`)))
	require.Equal(t, `data: {"usage":{"prompt_tokens_details":{"cached_tokens":7}}}`+"\n\n",
		string(b.Event(nil, []byte(`data: {"usage":{"prompt_tokens_details":{"cached_tokens":99}},"kv_transfer_params":{}}`))))
	out, err := b.Whole(nil, []byte(`{"usage":{"prompt_tokens_details":{"cached_tokens":99}},"kv_transfer_params":{}}`))
	require.NoError(t, err)
	require.JSONEq(t, `{"usage":{"prompt_tokens_details":{"cached_tokens":7}},"kv_transfer_params":null}`, string(out))
	_, err = b.Whole(nil, []byte(`{`))
	require.Error(t, err)
}

// FuzzTurnAnswer: whatever an engine answers, JSON stays JSON, and no parameters get through.
func FuzzTurnAnswer(f *testing.F) {
	f.Add([]byte(`{"choices":[{"token_ids":[3],"prompt_token_ids":[1]}],"kv_transfer_params":`+turnObject+`}`), false)
	f.Add([]byte(`{"response":{"kv_transfer_params":`+turnObject+`},"choices":[1,null,{}]}`), true)
	f.Add([]byte(`{"choices":{},"usage":null,"prompt_token_ids":[[1]]}`), false)
	f.Fuzz(func(t *testing.T, answer []byte, own bool) {
		keep := func([]byte, []uint32) {}
		out, err := (&TurnAnswer{OwnIDs: own, Kept: keep}).Whole(nil, answer)
		if err != nil {
			return
		}
		require.True(t, json.Valid(out), "%q became %q", answer, out)
		var v map[string]json.RawMessage
		if json.Unmarshal(out, &v) == nil {
			require.Contains(t, []string{"", "null"}, string(v["kv_transfer_params"]))
		}
		(&TurnAnswer{OwnIDs: own, Kept: keep}).Event(nil, append([]byte("data: "), answer...))
	})
}

// TestPromptIsAll has the other members from which an engine might build the prompt.
func TestPromptIsAll(t *testing.T) {
	for body, want := range map[string]bool{
		`{"messages":[{"role":"user","content":"a"}]}`:                                               true,
		`{"messages":[{"role":"user","content":[{"type":"text","text":"a"},"b"]},{"content":null}]}`: true,
		`{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"x"}}]}]}`:    false,
		`{"messages":[{"role":"user","content":[{"type":"refusal","refusal":"x"}]}]}`:                false,
		`{"messages":[{"role":"user","content":[{"text":"of no type"}]}]}`:                           false,
		`{"messages":[{"role":"user","content":"a"}],"truncate_prompt_tokens":10}`:                   false,
		`{"messages":[{"role":"user","content":"a"}],"truncate_prompt_tokens":null}`:                 true,
	} {
		var r Request
		require.NoError(t, r.Scan(Chat, []byte(body), Limits{}))
		require.Equal(t, want, r.PromptIsAll(), body)
	}
}
