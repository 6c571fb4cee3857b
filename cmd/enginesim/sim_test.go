package main

import (
	"bytes"
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tandem/e2e/enginesim/api"
)

// patience allows for busy machines.
const patience = 30 * time.Second

// simulator is a simulator in this process, on ports of the kernel's choice.
type simulator struct {
	*api.Server
	url string
}

func startEngine(t testing.TB, args ...string) *simulator {
	t.Helper()
	args = append([]string{"-listen", "127.0.0.1:0", "-side-channel", "127.0.0.1:0", "-blocks", "4096"}, args...)
	cfg, err := parseFlags(args, io.Discard)
	require.NoError(t, err)
	s, err := api.Start(cfg, logWriter{t})
	require.NoError(t, err)
	t.Cleanup(s.Close)
	return &simulator{s, "http://" + s.Addr()}
}

type logWriter struct{ t testing.TB }

func (w logWriter) Write(b []byte) (int, error) {
	if testing.Verbose() {
		w.t.Log(strings.TrimSpace(string(b)))
	}
	return len(b), nil
}

// reply is an answer, read to its end.
type reply struct {
	status int
	header http.Header
	body   []byte
}

func (r reply) String() string { return string(r.body) }

// get returns the member at a path of the answer's JSON, as "usage.prompt_tokens" or "choices.0.text".
func (r reply) get(path ...string) any {
	var v any
	d := json.NewDecoder(bytes.NewReader(r.body))
	d.UseNumber()
	if d.Decode(&v) != nil {
		return nil
	}
	for _, p := range path {
		switch x := v.(type) {
		case map[string]any:
			v = x[p]
		case []any:
			if i := int(p[0] - '0'); i < len(x) {
				v = x[i]
			} else {
				return nil
			}
		default:
			return nil
		}
	}
	return v
}

func (r reply) num(path ...string) int {
	n, ok := r.get(path...).(json.Number)
	if !ok {
		return -1
	}
	i, _ := n.Int64()
	return int(i)
}

func (r reply) str(path ...string) string { s, _ := r.get(path...).(string); return s }

func (r reply) params() json.RawMessage {
	var v struct {
		Params json.RawMessage `json:"kv_transfer_params"`
	}
	_ = json.Unmarshal(r.body, &v)
	return v.Params
}

var client = &http.Client{Timeout: 5 * time.Minute, Transport: &http.Transport{MaxIdleConnsPerHost: 512}}

func (e *simulator) do(method, path, id, body string) (reply, error) {
	req, err := http.NewRequest(method, e.url+path, strings.NewReader(body))
	if err != nil {
		return reply{}, err
	}
	if method == http.MethodPost {
		req.Header.Set("Content-Type", "application/json")
	}
	if id != "" {
		req.Header.Set("X-Request-Id", id)
	}
	return send(req)
}

func send(req *http.Request) (reply, error) {
	resp, err := client.Do(req)
	if err != nil {
		return reply{}, err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	return reply{resp.StatusCode, resp.Header, b}, err
}

func read(t testing.TB, req *http.Request) reply {
	t.Helper()
	r, err := send(req)
	require.NoError(t, err)
	return r
}

func (e *simulator) post(t testing.TB, path, id, body string) reply {
	t.Helper()
	r, err := e.do(http.MethodPost, path, id, body)
	require.NoError(t, err)
	return r
}

func (e *simulator) get(t testing.TB, path string) reply {
	t.Helper()
	r, err := e.do(http.MethodGet, path, "", "")
	require.NoError(t, err)
	return r
}

const chatPath = "/v1/chat/completions"

// chat returns a body with one user message and more members, given as JSON without braces.
func chat(prompt string, members ...string) string {
	content, _ := json.Marshal(prompt)
	b := `{"model":"tiny","messages":[{"role":"user","content":` + string(content) + `}]`
	for _, m := range members {
		b += "," + m
	}
	return b + "}"
}

const prefillMembers = `"max_tokens":1,"min_tokens":1,"stream":false,"kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}`

// prefill runs a prefill leg and returns its hand-over.
func (e *simulator) prefill(t testing.TB, id, prompt string) json.RawMessage {
	t.Helper()
	r := e.post(t, chatPath, id, chat(prompt, prefillMembers))
	require.Equal(t, 200, r.status, r)
	require.NotEqual(t, "null", string(r.params()))
	return r.params()
}

func decodeMembers(params json.RawMessage) string { return `"kv_transfer_params":` + string(params) }

func (r reply) content() string { return r.str("choices", "0", "message", "content") }

// quiet asserts that nothing is held, running or counted as a violation.
func (e *simulator) quiet(t testing.TB) {
	t.Helper()
	require.Eventually(t, func() bool {
		st := e.State()
		return st.Running == 0 && st.Waiting == 0 && st.BlocksUsed == 0 && st.BlocksHeld == 0
	}, patience, time.Millisecond, "%+v", e.State())
	require.Zero(t, e.State().Violations)
}

func TestTwoLegs(t *testing.T) {
	p, d := startEngine(t, "-role", "prefill"), startEngine(t, "-role", "decode")
	prompt := strings.Repeat("How are the KV blocks moved? ", 40)
	want := d.post(t, chatPath, "plain", chat(prompt, `"max_tokens":24,"cache_salt":"reference"`))
	params := p.prefill(t, "r1", prompt)
	require.Positive(t, p.State().BlocksHeld)
	got := d.post(t, chatPath, "r1", chat(prompt, `"max_tokens":24`, decodeMembers(params)))
	require.Equal(t, 200, got.status, got)
	require.Equal(t, want.content(), got.content())
	require.Equal(t, want.num("usage", "prompt_tokens"), got.num("usage", "prompt_tokens"))
	require.EqualValues(t, got.num("usage", "prompt_tokens"), d.Metrics.External.Load())
	require.Zero(t, d.Metrics.LocalHit.Load())
	p.quiet(t)
	d.quiet(t)

	// The conversation's next turn: both caches have its beginning, and only the rest is transferred.
	longer := prompt + "And then?"
	before := d.Metrics.External.Load()
	params = p.prefill(t, "r2", longer)
	got = d.post(t, chatPath, "r2", chat(longer, `"max_tokens":8`, decodeMembers(params)))
	require.Equal(t, 200, got.status, got)
	require.Positive(t, got.num("usage", "prompt_tokens_details", "cached_tokens"))
	require.Less(t, d.Metrics.External.Load()-before, int64(40))
}
