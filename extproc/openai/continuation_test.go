package openai

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/require"
)

func newContinuation(chat bool) *Continuation {
	return &Continuation{Chat: chat, ID: []byte(`"x"`), Created: []byte("1"), Text: []byte(`" A"`), Cached: 2}
}

// clientStream returns the client's stream, if decode's comes in pieces of n bytes.
func clientStream(stream string, chat bool, n int) (out []byte, err error) {
	c := newContinuation(chat)
	var events Events
	each := func(event []byte) { out = c.Event(out, event) }
	out = c.Begin(out)
	for rest := []byte(stream); len(rest) > 0 && err == nil; {
		k := min(n, len(rest))
		err = events.Feed(rest[:k], each)
		rest = rest[k:]
	}
	events.End(each)
	return out, err
}

const streamed = "data: {\"id\":\"y\",\"object\":\"text_completion\",\"model\":\"m\",\"choices\":[{\"index\":0,\"text\":\" \\u00e9\"}]}\r\n\r\n" +
	"data: {\"object\":\"text_completion\",\"choices\":[],\"usage\":{\"prompt_tokens\":3,\"completion_tokens\":1}}\n\ndata: [DONE]\n\n"

// The places where a stream is cut make no difference to the client.
func TestContinuationPieces(t *testing.T) {
	for _, chat := range []bool{false, true} {
		want, err := clientStream(streamed, chat, len(streamed))
		require.NoError(t, err)
		require.Contains(t, string(want), `" A"`)
		require.Contains(t, string(want), `{"prompt_tokens":2,"completion_tokens":2}`)
		for n := 1; n < len(streamed); n++ {
			got, err := clientStream(streamed, chat, n)
			require.NoError(t, err)
			require.Equal(t, string(want), string(got), "in pieces of %d bytes", n)
		}
	}
}

func TestContinuationRefuses(t *testing.T) {
	for _, answer := range []string{``, `[]`, `{}`, `{"object":"chat.completion","choices":[]}`, `{"object":"text_completion","choices":{}}`} {
		_, err := newContinuation(true).Whole(nil, []byte(answer))
		require.Error(t, err, answer)
	}
}

// FuzzContinuation: however decode's stream is cut, the client's is the same, and JSON stays JSON.
func FuzzContinuation(f *testing.F) {
	f.Add(streamed, uint8(3))
	f.Add(`data: {"object":"text_completion","choices":[1,[],{"text":null,"a\"b":2},{}],"usage":7}`, uint8(0))
	f.Fuzz(func(t *testing.T, stream string, n uint8) {
		for _, chat := range []bool{false, true} {
			want, err := clientStream(stream, chat, max(len(stream), 1))
			require.NoError(t, err)
			got, err := clientStream(stream, chat, int(n)+1)
			require.NoError(t, err)
			require.Equal(t, string(want), string(got))
			for _, data := range eventsOf(string(got)) {
				if len(data) > 0 && data[0] == '{' && json.Valid([]byte(stream)) {
					require.True(t, json.Valid([]byte(data)), "%q", data)
				}
			}
			if whole, err := newContinuation(chat).Whole(nil, []byte(stream)); err == nil {
				require.True(t, json.Valid(whole), "%q", whole)
			}
		}
	})
}
