package tokenize

import (
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tandem/kvstate"
	"tandem/kvstate/enginehttp"
)

func poolOf(t *testing.T, handler http.HandlerFunc) *kvstate.Pool {
	t.Helper()
	server := httptest.NewServer(handler)
	t.Cleanup(server.Close)
	s := kvstate.New(kvstate.Options{})
	addr := strings.TrimPrefix(server.URL, "http://")
	s.SetPool(kvstate.PoolSpec{Name: "p"}, []kvstate.EndpointSpec{{Name: addr, Addr: addr, Role: kvstate.RoleBoth}})
	return s.Pool("p")
}

func silent() *slog.Logger { return slog.New(slog.DiscardHandler) }

// patient returns a tokenizer whose timeout exceeds the stalls of a busy machine.
func patient() *Tokenizer {
	tok := New(silent())
	tok.client = enginehttp.New(time.Minute, func(*http.Transport) {})
	return tok
}

func wait(t *testing.T, done <-chan struct{}) {
	t.Helper()
	require.NotNil(t, done, "not asked")
	select {
	case <-done:
	case <-time.After(30 * time.Second):
		t.Fatal("it does not end")
	}
}

func TestTokenize(t *testing.T) {
	var path, body string
	pool := poolOf(t, func(w http.ResponseWriter, r *http.Request) {
		text, _ := io.ReadAll(r.Body)
		path, body = r.URL.Path, string(text)
		_, _ = io.WriteString(w, `{"count":3,"max_model_len":2048,"tokens":[1,2,300000],"token_strs":null}`)
	})
	var got []uint32
	wait(t, patient().Tokenize(t.Context(), pool, 1, "/tokenize", []byte(`{"prompt":"x"}`), func(ids []uint32) { got = ids }))
	require.Equal(t, []uint32{1, 2, 300000}, got)
	require.Equal(t, []string{"/tokenize", `{"prompt":"x"}`}, []string{path, body})
}

// Only one call for a prompt runs at a time, and few in total.
func TestTokenizeIsBounded(t *testing.T) {
	var asked atomic.Int32
	answer := make(chan struct{})
	pool := poolOf(t, func(w http.ResponseWriter, r *http.Request) {
		asked.Add(1)
		select {
		case <-answer:
		case <-r.Context().Done():
		}
		_, _ = io.WriteString(w, `{"tokens":[1]}`)
	})
	tok := patient()
	nothing := func([]uint32) {}
	first := tok.Tokenize(t.Context(), pool, 1, "/tokenize", nil, nothing)
	require.Equal(t, first, tok.Tokenize(t.Context(), pool, 1, "/tokenize", nil, nothing))
	for key := range uint64(atOnce - 1) {
		require.NotNil(t, tok.Tokenize(t.Context(), pool, key+2, "/tokenize", nil, nothing))
	}
	require.Nil(t, tok.Tokenize(t.Context(), pool, 99, "/tokenize", nil, nothing))
	close(answer)
	wait(t, first)
	require.LessOrEqual(t, asked.Load(), int32(atOnce))
}

// An engine that lacks the route is not asked for a while, on that route. One that fails, or refuses a request, is.
func TestTokenizeRests(t *testing.T) {
	recorded, err := os.ReadFile("testdata/vllm-0.32.0-unknown-model.json")
	require.NoError(t, err)
	for name, c := range map[string]struct {
		status int
		body   string
		rests  bool
	}{
		"failed":                           {http.StatusInternalServerError, "", false},
		"unknown model":                    {http.StatusNotFound, string(recorded), false},
		"unknown model, before vLLM 0.11":  {http.StatusNotFound, `{"object":"error","message":"The model ` + "`x`" + ` does not exist.","type":"NotFoundError","param":null,"code":404}`, false},
		"not implemented for this request": {http.StatusNotImplemented, `{"error":{"message":"x","type":"NotImplementedError","param":null,"code":501}}`, false},
		"no route":                         {http.StatusNotFound, `{"detail":"Not Found"}`, true},
		"no route behind a proxy":          {http.StatusNotFound, `<html>404</html>`, true},
		"no such method":                   {http.StatusMethodNotAllowed, `{"detail":"Method Not Allowed"}`, true},
	} {
		t.Run(name, func(t *testing.T) {
			pool := poolOf(t, func(w http.ResponseWriter, _ *http.Request) {
				w.WriteHeader(c.status)
				_, _ = io.WriteString(w, c.body)
			})
			tok := patient()
			never := func([]uint32) { t.Error("learned from an error") }
			wait(t, tok.Tokenize(t.Context(), pool, 1, "/tokenize", nil, never))
			again := tok.Tokenize(t.Context(), pool, 1, "/tokenize", nil, never)
			require.Equal(t, c.rests, again == nil)
			if !c.rests {
				wait(t, again)
				return
			}
			wait(t, tok.Tokenize(t.Context(), pool, 1, "/v1/completions/render", nil, never))
			addr := pool.Endpoints()[0].Addr
			tok.paused[routeOf{addr, "/tokenize"}] = time.Now().Add(-time.Second)
			wait(t, tok.Tokenize(t.Context(), pool, 1, "/tokenize", nil, never))
		})
	}
}

// If one engine of a pool lacks the route, the others are asked.
func TestOthersTokenize(t *testing.T) {
	lacks := poolOf(t, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNotFound) }).Endpoints()[0].Addr
	has := poolOf(t, func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, `{"tokens":[1]}`) }).Endpoints()[0].Addr
	s := kvstate.New(kvstate.Options{})
	s.SetPool(kvstate.PoolSpec{Name: "p"}, []kvstate.EndpointSpec{{Name: lacks, Addr: lacks, Role: kvstate.RoleBoth}, {Name: has, Addr: has, Role: kvstate.RoleBoth}})
	tok := patient()
	tok.pause(lacks, "/tokenize")
	for range 20 {
		var got []uint32
		wait(t, tok.Tokenize(t.Context(), s.Pool("p"), 1, "/tokenize", nil, func(ids []uint32) { got = ids }))
		require.Equal(t, []uint32{1}, got)
	}
}

func TestReadIDs(t *testing.T) {
	for text, want := range map[string][]uint32{
		`{"request_id":"x","token_ids":[1,2],"features":null}`: {1, 2},
		` [{"token_ids":[1]}]`:                                 {1},
		`[{"token_ids":[1]},{"token_ids":[2]}]`:                nil,
		`{"tokens":[]}`:                                        nil,
		`{"tokens":[-1]}`:                                      nil,
		`{"tokens":["a"]}`:                                     nil,
		`not JSON`:                                             nil,
		``:                                                     nil,
	} {
		got, err := readIDs([]byte(text))
		require.Equal(t, want == nil, err != nil, text)
		require.Equal(t, want, got, text)
	}
	recorded, err := os.ReadFile("../kvevents/testdata/vllm-0.32.0-tokenize-chat.json")
	require.NoError(t, err)
	at := strings.Index(string(recorded), `"response":`) + len(`"response":`)
	got, err := readIDs([]byte(strings.TrimSuffix(strings.TrimSpace(string(recorded)[at:]), "}")))
	require.NoError(t, err)
	require.Len(t, got, 116)
}
