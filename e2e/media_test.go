package e2e

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// planned returns the tokens that a request was thought to have when it was planned.
func planned(t *testing.T, f *fleet, body, path string) (route string, tokens float64) {
	t.Helper()
	var explained []struct {
		Route  string  `json:"route"`
		Tokens float64 `json:"prompt_tokens"`
	}
	id := fmt.Sprintf("media-%d", len(body))
	got := f.post(path, body, "x-request-id", id)
	require.Equal(t, 200, got.status, got.body)
	require.NoError(t, getJSON(f.admins[0]+"/debug/requests?id="+id, &explained))
	require.NotEmpty(t, explained)
	return explained[0].Route, explained[0].Tokens
}

// TestMedia: an image, a sound or a video is no text, whatever its bytes, in every API. Afterwards texts are thought to be
// as long as before, and are routed as before.
func TestMedia(t *testing.T) {
	t.Parallel()
	f := start(t, options{})
	data := strings.Repeat("iVBORw0KGgoAAAANSUhEUgAAAAEAAAAB", 16<<10) // half a megabyte
	text := fmt.Sprintf(`{"model":"tiny","max_tokens":2,"messages":[{"role":"user","content":%q}]}`, strings.Repeat("some words ", 2000))
	_, before := planned(t, f, text, "/v1/chat/completions")
	for _, c := range []struct{ path, body string }{
		{"/v1/chat/completions", `"messages":[{"role":"user","content":[{"type":"text","text":"a"},{"type":"image_url","image_url":{"url":"data:image/png;base64,%s"}}]}]`},
		{"/v1/chat/completions", `"messages":[{"role":"user","content":[{"type":"text","text":"ab"},{"type":"input_audio","input_audio":{"data":"%s","format":"wav"}}]}]`},
	} {
		body := `{"model":"tiny","max_tokens":2,` + fmt.Sprintf(c.body, data) + `}`
		for range 3 {
			_, tokens := planned(t, f, body, c.path)
			require.Less(t, tokens, 20_000., "half a megabyte of text would have 131,072")
		}
	}
	_, after := planned(t, f, text+" ", "/v1/chat/completions")
	require.InEpsilon(t, before, after, .3)
}
