package openai

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestAppendEncode(t *testing.T) {
	const image, sound = `{"type":"image_url", "image_url":{"url":"data:image/png;base64,AA=="},"uuid":"a"}`, `{"input_audio":{"data":"\u0041","format":"wav"},"type":"input_audio"}`
	for body, want := range map[string]string{
		`{"model":"m","messages":[{"role":"user","content":"Hi"}]}`:                                        "",
		`{"model":"m","messages":[{"role":"user","content":[{"type":"text","text":"image_url"}]}]}`:        "",
		`{"model":"m","messages":[{"role":"user","content":[{"type":"file","file":{}}, 7, "image_url"]}]}`: "",
		`{"model":"m","messages":[{"role":"system","content":"Be brief."},{"content":[{"type":"text","text":"What is this?"},` + image +
			`],"role":"user"},{"role":"assistant","content":"A"},{"role":"user","content":[` + sound + `]}],"max_tokens":9,"stream":true,"stream_options":{},"stop":["x"]}`: `{"model":"m","stream":false,"messages":[{"role":"user","content":[` + image + "," + sound + `]}]}`,
		`{"priority":1,"messages":[{"role":"user","content":[` + image + `]}],"mm_processor_kwargs":{"n": 4},"media_io_kwargs":null,"session_id":"s"}`: `{"mm_processor_kwargs":{"n": 4},"priority":1,"session_id":"s",` +
			`"stream":false,"messages":[{"role":"user","content":[` + image + `]}]}`,
	} {
		var r Request
		require.NoError(t, r.Scan(Chat, []byte(body), Limits{}), body)
		require.Equal(t, want != "", r.HasMedia(), body)
		if want != "" {
			got := string(r.AppendEncode(nil))
			require.Equal(t, want, got)
			require.True(t, json.Valid([]byte(got)))
		}
	}
	var r Request
	require.NoError(t, r.Scan(Completions, []byte(`{"prompt":"x","messages":[{"role":"user","content":[`+image+`]}]}`), Limits{}))
	require.False(t, r.HasMedia(), "a completion has no media")
}
