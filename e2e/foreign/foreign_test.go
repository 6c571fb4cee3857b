//go:build foreign

package foreign

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tandem/e2e/loopback"
	"tandem/e2e/realengines"
)

// kind is a foreign engine.
type kind struct {
	dialect string
	start   func(t *testing.T, dir, port string)
	answers func(t *testing.T, text string, got string) // whether an answer is the one to text
}

// Every request crosses two engines, streamed or not, one at a time and eight at once. One that an engine refuses fails
// the test.
func TestForeignEngines(t *testing.T) {
	dir := os.Getenv("TANDEM_FOREIGN")
	require.DirExists(t, dir, "install.sh")
	for name, k := range map[string]kind{
		"llm-d's simulator": {dialect: "nixl", start: func(t *testing.T, logs, port string) {
			realengines.Start(t, logs, "sim "+port, filepath.Join(dir, "llm-d-inference-sim"), "--model", "tiny",
				"--port", port, "--mode", "echo", "--force-dummy-tokenizer", "--zmq-endpoint", "", "--max-num-seqs", "64")
		}, answers: func(t *testing.T, text, got string) { require.Equal(t, text, got) }},
		"AIBrix's mock": {dialect: "trtllm", start: func(t *testing.T, logs, port string) {
			// Flask does not end with status 0 after SIGTERM.
			realengines.Start(t, logs, "mock "+port, "env", "STANDALONE_MODE=true", "MODEL_NAME=tiny", "POD_NAME=pod-"+port,
				"bash", "-c", `trap 'kill $!; exit 0' TERM; "$@" & wait $!`, "mock", filepath.Join(dir, "venv/bin/flask"),
				"--app", filepath.Join(dir, "mock.py"), "run", "--host", "127.0.0.1", "--port", port)
		}, answers: func(t *testing.T, _, got string) { require.Contains(t, got, "pod-", "it names its engine") }},
	} {
		t.Run(name, func(t *testing.T) { k.run(t) })
	}
}

func (k kind) run(t *testing.T) {
	dir := t.TempDir()
	addrs, letGo, err := loopback.Take(4)
	require.NoError(t, err)
	t.Cleanup(letGo)
	for _, addr := range addrs {
		_, port, err := net.SplitHostPort(addr)
		require.NoError(t, err)
		k.start(t, dir, port)
	}
	for _, addr := range addrs {
		require.Eventually(t, func() bool { return realengines.OK(addr, "/health") }, time.Minute, 100*time.Millisecond)
	}
	front, admin := realengines.Serve(t, fmt.Sprintf(`- name: tiny
  models: ["*"]
  kvTransfer: %s
  split: always
  endpoints:
  - {address: %q, role: prefill}
  - {address: %q, role: prefill}
  - {address: %q, role: decode}
  - {address: %q, role: decode}
`, k.dialect, addrs[0], addrs[1], addrs[2], addrs[3]))

	ask := func(i int) {
		text := fmt.Sprintf("what is %d times %d", i, i+1)
		got, err := post(t.Context(), front, text, i%2 == 0)
		require.NoError(t, err)
		k.answers(t, text, strings.TrimSpace(got))
	}
	for i := range 8 {
		ask(i)
	}
	var clients sync.WaitGroup
	for c := range 8 {
		clients.Go(func() {
			for i := range 8 {
				ask(8 + 8*c + i)
			}
		})
	}
	clients.Wait()
	// Every request was planned once, for two engines.
	page, err := http.Get("http://" + admin + "/metrics")
	require.NoError(t, err)
	defer page.Body.Close()
	plans := map[string]string{}
	for lines := bufio.NewScanner(page.Body); lines.Scan(); {
		if labels, is := strings.CutPrefix(lines.Text(), "tandem_decisions_total{"); is {
			labels, count, _ := strings.Cut(labels, "} ")
			plans[labels] = count
		}
	}
	require.Equal(t, map[string]string{`pool="tiny",reason="",route="split"`: "72"}, plans)
}

// post asks for a chat and returns its text.
func post(ctx context.Context, addr, text string, stream bool) (string, error) {
	body, _ := json.Marshal(map[string]any{
		"model": "tiny", "stream": stream, "max_tokens": 32,
		"messages": []map[string]string{{"role": "user", "content": text}},
	})
	url := "http://" + addr + "/v1/chat/completions"
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, bytes.NewReader(body))
	if err != nil {
		return "", err
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(resp.Body)
		return "", fmt.Errorf("status %d: %s", resp.StatusCode, text)
	}
	type choices struct {
		Choices []struct {
			Message, Delta struct{ Content string }
		}
	}
	if !stream {
		var c choices
		err := json.NewDecoder(resp.Body).Decode(&c)
		if err != nil || len(c.Choices) != 1 {
			return "", fmt.Errorf("%d choices: %w", len(c.Choices), err)
		}
		return c.Choices[0].Message.Content, nil
	}
	var out strings.Builder
	lines := bufio.NewScanner(resp.Body)
	for lines.Scan() {
		data, is := strings.CutPrefix(lines.Text(), "data: ")
		if !is {
			continue
		}
		if data == "[DONE]" {
			return out.String(), nil
		}
		var c choices
		if err := json.Unmarshal([]byte(data), &c); err != nil {
			return "", err
		}
		for _, choice := range c.Choices {
			out.WriteString(choice.Delta.Content)
		}
	}
	return "", fmt.Errorf("no [DONE] after %q: %w", out.String(), lines.Err())
}
