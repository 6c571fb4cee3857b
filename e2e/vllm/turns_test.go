//go:build vllm

package vllm

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestRealTurns runs NIXL in both directions: decode keeps answers, prefill fetches them in the conversation's next turn.
//
//	BIDIRECTIONAL=1 e2e/vllm/run.sh go test -tags vllm -count 1 -run TestRealTurns -v ./e2e/vllm
func TestRealTurns(t *testing.T) {
	if !bidirectional() {
		t.Skip("engines without bidirectional_kv_xfer")
	}
	s := newSuite(t, uint64(time.Now().UnixNano()))
	defer s.report.print(t)
	s.run(t, "completions of token ids", s.turnsOfIDs)
	s.run(t, "chats", s.turnsOfChats)
	s.run(t, "other prompts", s.turnsOfOthers)
	s.run(t, "nothing left", s.turnsLeft)
}

// bidirectional reports whether run.sh started the engines so.
func bidirectional() bool { return os.Getenv("TANDEM_VLLM_BIDIRECTIONAL") != "" }

// turnBody returns one turn's request.
func turnBody(prompt any, chat, stream bool, tokens int) (path, body string) {
	text, err := json.Marshal(prompt)
	if err != nil {
		panic(err) // numbers and texts have a JSON form
	}
	if chat {
		return "/v1/chat/completions", fmt.Sprintf(`{"model":"tiny","messages":%s,"max_tokens":%d,"temperature":0,"stream":%v}`, text, tokens, stream)
	}
	return "/v1/completions", fmt.Sprintf(`{"model":"tiny","prompt":%s,"max_tokens":%d,"temperature":0,"return_token_ids":true,"stream":%v}`, text, tokens, stream)
}

// turnAnswer has the members of an answer that are read.
type turnAnswer struct {
	raw  string
	text string
	ids  []int
}

func say(t *testing.T, addr, session, path, body string) (a turnAnswer) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://"+addr+path, strings.NewReader(body))
	require.NoError(t, err)
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("X-Session", session)
	res, err := http.DefaultClient.Do(req)
	require.NoError(t, err)
	defer func() { _ = res.Body.Close() }()
	raw, err := io.ReadAll(res.Body)
	require.NoError(t, err)
	require.Equal(t, 200, res.StatusCode, "%s", raw)
	a.raw = string(raw)
	objects := [][]byte{raw}
	if strings.HasPrefix(res.Header.Get("Content-Type"), "text/event-stream") {
		objects = nil
		for line := range bytes.Lines(raw) {
			if data, ok := bytes.CutPrefix(bytes.TrimSpace(line), []byte("data: {")); ok {
				objects = append(objects, append([]byte("{"), data...))
			}
		}
	}
	for _, object := range objects {
		var v struct {
			Choices []struct {
				Text           string
				Message, Delta struct{ Content string }
				IDs            []int `json:"token_ids"`
			}
		}
		require.NoError(t, json.Unmarshal(object, &v), "%s", object)
		for _, c := range v.Choices {
			a.text += c.Text + c.Message.Content + c.Delta.Content
			a.ids = append(a.ids, c.IDs...)
		}
	}
	return a
}

// turnsNow returns tandem_turns_total for a result.
func (s *suite) turnsNow(t *testing.T, what string) float64 {
	t.Helper()
	m, err := scrape(s.admin)
	require.NoError(t, err)
	return m.sum("tandem_turns_total", `what="`+what+`"`)
}

func (s *suite) ids(n int) (ids []int) {
	for range n {
		ids = append(ids, 300+s.prompts.rand.IntN(90))
	}
	return ids
}

// turnsOfIDs: clients that keep token ids. Every later turn is fetched from decode, as far as it was computed there,
// and the text is a single engine's.
func (s *suite) turnsOfIDs(t *testing.T) {
	const talks, turns = 4, 4
	before, kept, told := promptTokens(t, s.prefill...), s.turnsNow(t, "kept"), s.turnsNow(t, "used")
	for c := range talks {
		prompt := s.ids(300 + 40*c)
		for range turns {
			path, body := turnBody(prompt, false, false, 80)
			want := say(t, s.reference.addr, "", path, body)
			got := say(t, s.front.addr, fmt.Sprint("ids-", c), path, body)
			require.Equal(t, want.ids, got.ids)
			require.NotContains(t, got.raw, "remote_")
			prompt = append(append(slices.Clone(prompt), got.ids...), s.ids(50)...)
		}
	}
	got := promptTokens(t, s.prefill...).minus(before)
	require.InDelta(t, talks*turns, s.turnsNow(t, "kept")-kept, 0, "unusable: %v", s.turnsNow(t, "unusable"))
	require.InDelta(t, talks*(turns-1), s.turnsNow(t, "used")-told, 0)
	require.Greater(t, got.transferred, float64(talks*(turns-1)*64), "prefill: %s", got)
	s.report.row("Turns, prompts of token ids", talks*turns, fmt.Sprintf("text as aggregated; %d turns told to prefill, where of all prompts: %s", talks*(turns-1), got))
}

// turnsOfChats: an engine renders each later turn, and if its ids continue the answer, prefill fetches it. This
// model's text seldom becomes its own tokens again; then nothing is fetched, and the text is right as well. In an
// answer of one token only the prompt has KV, so there every later turn continues it. Streams of 0.32 do not report
// the kept blocks.
func (s *suite) turnsOfChats(t *testing.T) {
	s.chats(t, "chats, every third streamed", 80)
	require.Positive(t, s.chats(t, "chats of one token, every third streamed", 1))
}

// chats returns the number of turns that prefill was given.
func (s *suite) chats(t *testing.T, name string, tokens int) (told float64) {
	t.Helper()
	const talks, turns = 6, 3
	before := promptTokens(t, s.prefill...)
	counts := map[string]float64{}
	for _, what := range []string{"kept", "used", "other_prompt", "no_ids"} {
		counts[what] = -s.turnsNow(t, what)
	}
	for c := range talks {
		var messages []map[string]string
		for range turns {
			messages = append(messages, map[string]string{"role": "user", "content": s.prompts.words(60)})
			path, body := turnBody(messages, true, c%3 == 2, tokens)
			want := say(t, s.reference.addr, "", path, body)
			got := say(t, s.front.addr, fmt.Sprint("chat-", tokens, "-", c), path, body)
			require.Equal(t, want.text, got.text)
			require.NotContains(t, got.raw, "remote_")
			require.NotContains(t, got.raw, `token_ids":[`)
			messages = append(messages, map[string]string{"role": "assistant", "content": got.text})
		}
	}
	for what := range counts {
		counts[what] += s.turnsNow(t, what)
	}
	require.Zero(t, counts["no_ids"], "the engines do not render")
	s.report.row("Turns, "+name, talks*turns, fmt.Sprintf("text as aggregated; %.0f kept, %.0f told to prefill, %.0f not how the chat went on; prefill: %s",
		counts["kept"], counts["used"], counts["other_prompt"], promptTokens(t, s.prefill...).minus(before)))
	return counts["used"]
}

// turnsOfOthers: prompts that do not continue the last turn, one of them only because of its last token.
func (s *suite) turnsOfOthers(t *testing.T) {
	const talks = 6
	told := s.turnsNow(t, "used")
	for c := range talks {
		prompt, session := s.ids(400), fmt.Sprint("others-", c)
		path, body := turnBody(prompt, false, false, 80)
		first := say(t, s.front.addr, session, path, body)
		other := append(append(slices.Clone(prompt), first.ids...), s.ids(40)...)
		at := len(prompt) + []int{0, len(first.ids) / 2, len(first.ids) - 2}[c%3]
		other[at] = 300 + (other[at]-299)%90
		path, body = turnBody(other, false, false, 80)
		require.Equal(t, say(t, s.reference.addr, "", path, body).ids, say(t, s.front.addr, session, path, body).ids)
	}
	require.InDelta(t, told, s.turnsNow(t, "used"), 0)
	s.report.row("Turns, prompts that go on otherwise", 2*talks, "text as aggregated, none told")
}

// turnsLeft: unfetched blocks are freed when their time is over, on decode as on prefill.
func (s *suite) turnsLeft(t *testing.T) {
	began := time.Now()
	s.freed(t, s.engines())
	for _, counter := range counters[1:] {
		require.Zero(t, s.since(t, counter), counter)
	}
	s.report.row("Left at the end", 0, fmt.Sprintf("after %.0f s no block held on any engine, no failed transfer, none after its time", time.Since(began).Seconds()))
}
