package e2e

import (
	"cmp"
	"compress/gzip"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// recordedLine is a line of a recording, as docs/recordings.md has it.
type recordedLine struct {
	Version int `json:"tandem_recording"`
	Usage   bool
	Fleet   *struct {
		Pools []struct{ Engines []struct{ Role string } }
	}
	N, On                  uint64
	Same, Bytes            int
	Blocks, Who            string
	Model, Route           string
	Prefill, Decode, Ended string
	Prompt, Cached, Answer *int
	Gap, Head, First, Took float64
	Status                 int
	Stream                 bool
}

// readRecording returns the lines of a folder's files, as far as they are written.
func readRecording(t *testing.T, folder string) (out []recordedLine, text string) {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(folder, "*.jsonl.gz"))
	require.NoError(t, err)
	for _, name := range files {
		file, err := os.Open(name)
		require.NoError(t, err)
		if from, err := gzip.NewReader(file); err == nil {
			got, _ := io.ReadAll(from) // it has no end yet
			text += string(got)
		}
		_ = file.Close()
	}
	for line := range strings.Lines(text) {
		var l recordedLine
		if strings.HasSuffix(line, "\n") {
			require.NoError(t, json.Unmarshal([]byte(line), &l), line)
			out = append(out, l)
		}
	}
	return out, text
}

// What is recorded of two turns of a conversation, and of a request that is refused: beside Envoy and inside it.
func TestRecording(t *testing.T) {
	t.Parallel()
	folder := filepath.Join(t.TempDir(), "recordings")
	f := start(t, options{top: fmt.Sprintf("usage: {tenantHeader: x-tenant}\nrecord: {folder: %q}\n", folder)})
	ask := func(id string, messages ...string) answer {
		var list []map[string]string
		for i, m := range messages {
			list = append(list, map[string]string{"role": []string{"user", "assistant"}[i%2], "content": m})
		}
		body, err := json.Marshal(map[string]any{"model": "tiny", "messages": list, "max_tokens": 12, "stream": true,
			"stream_options": map[string]bool{"include_usage": true}})
		require.NoError(t, err)
		return f.post("/v1/chat/completions", string(body), "x-request-id", id, "x-tenant", "team-zebra")
	}
	secret := strings.Repeat("The secret of the zebra is 42. ", 80)
	require.Equal(t, 200, ask("first", secret).status)
	require.Equal(t, 200, ask("second", secret, "Is it?", "Yes. "+secret).status)
	require.Equal(t, 400, f.post("/v1/completions", `{"model":"tiny","prompt":"x","max_tokens":99000000}`).status)
	var requests []recordedLine
	require.Eventually(t, func() bool {
		lines, text := readRecording(t, folder)
		require.NotContains(t, strings.ToLower(text), "zebra")
		requests = nil
		for _, l := range lines {
			if l.N > 0 {
				requests = append(requests, l)
			} else if l.Version > 0 {
				require.True(t, l.Usage)
			} else {
				require.NotEmpty(t, l.Fleet.Pools[0].Engines)
			}
		}
		return len(requests) == 3
	}, time.Minute, 100*time.Millisecond)
	slices.SortFunc(requests, func(a, b recordedLine) int { return cmp.Compare(a.N, b.N) }) // they are in the order of ends
	first, second, refused := requests[0], requests[1], requests[2]
	require.Equal(t, [...]uint64{0, first.N}, [...]uint64{first.On, second.On})
	require.Equal(t, len(first.Blocks)/8, second.Same)
	require.NotEmpty(t, second.Blocks)
	require.GreaterOrEqual(t, second.Gap, 0.)
	require.Equal(t, 12, *second.Answer)
	require.Greater(t, *second.Prompt, *first.Prompt)
	require.NotEmpty(t, second.Who)
	require.Equal(t, first.Who, second.Who)
	for _, l := range []recordedLine{first, second} {
		require.Equal(t, "ok", l.Ended)
		require.Equal(t, 200, l.Status)
		require.Equal(t, "tiny", l.Model)
		require.True(t, l.Stream)
		require.Greater(t, l.First, 0.)
		require.GreaterOrEqual(t, l.Took, l.First)
	}
	require.Equal(t, "refused", refused.Ended)
	require.Equal(t, 400, refused.Status)
}
