//go:build sglang

package sglang

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// answer is a server's answer.
type answer struct {
	status int
	stream bool
	raw    []byte
}

func post(ctx context.Context, addr, path, body string, header ...string) (answer, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+addr+path, strings.NewReader(body))
	if err != nil {
		return answer{}, err
	}
	req.Header.Set("Content-Type", "application/json")
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		return answer{}, err
	}
	defer func() { _ = res.Body.Close() }()
	raw, err := io.ReadAll(res.Body)
	return answer{res.StatusCode, strings.HasPrefix(res.Header.Get("Content-Type"), "text/event-stream"), raw}, err
}

// complete returns an error for an incomplete answer: a stream must end with its last event, and have no error in it.
func (a answer) complete() error {
	switch {
	case a.status != http.StatusOK:
		return fmt.Errorf("status %d: %.300s", a.status, a.raw)
	case bytes.Contains(a.raw, []byte(`{"error"`)):
		return fmt.Errorf("an error in the answer: %.300s", a.raw[max(0, len(a.raw)-300):])
	case a.stream && !bytes.Contains(a.raw, []byte("[DONE]")) && !bytes.Contains(a.raw, []byte("message_stop")) &&
		!bytes.Contains(a.raw, []byte("response.completed")) && !bytes.Contains(a.raw, []byte("response.incomplete")):
		return fmt.Errorf("the stream was cut: %.300s", a.raw[max(0, len(a.raw)-300):])
	}
	return nil
}

// told returns an answer for comparison: without the parts that differ between two runs of one server, and a stream as
// its text.
func (a answer) told(t *testing.T) any {
	t.Helper()
	if !a.stream {
		var v any
		require.NoError(t, json.Unmarshal(a.raw, &v), "%s", a.raw)
		return plain(v)
	}
	text := map[string]string{}
	for line := range strings.Lines(string(a.raw)) {
		data, ok := strings.CutPrefix(strings.TrimSpace(line), "data: ")
		if !ok || data == "[DONE]" {
			continue
		}
		var e event
		require.NoError(t, json.Unmarshal([]byte(data), &e), data)
		e.add(text)
	}
	require.NotEmpty(t, text, "%s", a.raw)
	return text
}

// event has the members of an event that are read, of all APIs.
type event struct {
	Choices []struct {
		Index        int
		Text         string
		Delta        struct{ Content string }
		FinishReason *string `json:"finish_reason"`
	}
	Usage *struct {
		Prompt     int `json:"prompt_tokens"`
		Completion int `json:"completion_tokens"`
	}
	Type  string
	Delta json.RawMessage
	Text  *string // of /generate: all so far
	Index int
	Meta  struct {
		PromptTokens int `json:"prompt_tokens"`
	} `json:"meta_info"`
}

func (e *event) add(text map[string]string) {
	for _, c := range e.Choices {
		text[fmt.Sprint("choice ", c.Index)] += c.Text + c.Delta.Content
		if c.FinishReason != nil {
			text[fmt.Sprint("finish ", c.Index)] = *c.FinishReason
		}
	}
	if e.Usage != nil {
		text["usage"] = fmt.Sprint(e.Usage.Prompt, e.Usage.Completion)
	}
	if e.Text != nil {
		text[fmt.Sprint("text ", e.Index)] = *e.Text
		text[fmt.Sprint("prompt ", e.Index)] = fmt.Sprint(e.Meta.PromptTokens)
	}
	switch e.Type {
	case "response.output_text.delta":
		var piece string
		if json.Unmarshal(e.Delta, &piece) == nil {
			text["response"] += piece
		}
	case "content_block_delta":
		var piece struct{ Text string }
		if json.Unmarshal(e.Delta, &piece) == nil {
			text["message"] += piece.Text
		}
	}
}

// different reports whether a member may differ between the roles or between two runs although the answer is right:
// ids and times; cached tokens, which a decode server counts differently; measurements that only a server that
// computes prompts makes (meta_info).
func different(name string) bool {
	switch name {
	case "id", "created", "created_at", "completed_at", "item_id", "request_id", "system_fingerprint", "num_retractions",
		"prompt_tokens_details", "input_tokens_details", "cache_read_input_tokens", "cache_creation_input_tokens", "cached_tokens", "cached_tokens_details",
		"metadata", "weight_version", "weight_versions":
		return true
	}
	for _, suffix := range []string{"_ts", "_time", "_latency", "_throughput", "_wait", "_delay"} {
		if strings.HasSuffix(name, suffix) {
			return true
		}
	}
	return false
}

func plain(v any) any {
	switch v := v.(type) {
	case map[string]any:
		for name, value := range v {
			if different(name) {
				delete(v, name)
			} else {
				v[name] = plain(value)
			}
		}
	case []any:
		for i := range v {
			v[i] = plain(v[i])
		}
	case float64: // log probabilities: sums in another order
		return fmt.Sprintf("%.2f", v)
	}
	return v
}
