package kvtransfer

import (
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/rogpeppe/go-internal/txtar"
	"github.com/stretchr/testify/require"

	"tandem/extproc/openai"
	"tandem/kvstate"
)

// FuzzAnswers: whatever P answers, in any dialect, D's body is JSON without duplicate members, and a client gets
// nothing that is between engines.
func FuzzAnswers(f *testing.F) {
	files, err := filepath.Glob("testdata/*/*.txtar")
	require.NoError(f, err)
	for _, file := range files {
		text, err := os.ReadFile(file)
		require.NoError(f, err)
		f.Add(section(txtar.Parse(text), "prefill answer"))
	}
	f.Add([]byte(` {"choices":[{"finish_reason":"stop","disaggregated_params":{}}]}`))
	f.Add([]byte(`{"object":"chat.completion","choices":[{"disaggregated_params":{"ctx_request_id":7,"a\"\u0001":1}}],"prompt_token_ids_b64":"AQ=="}`))
	pair := &Pair{Attempt: testAttempt, Prefill: Side{Addr: "10.0.0.5:8000"}, Decode: Side{Addr: "10.0.0.6:8000"}}
	f.Fuzz(func(t *testing.T, answer []byte) {
		for i, name := range append(sequential(), "lmcache") {
			d, err := New(Options{Name: name, Members: []string{"nixl", "offload"}, RetFirstToken: i == len(sequential())})
			require.NoError(t, err)
			a, err := d.ReadAnswer(answer, pair)
			if err != nil {
				require.Nil(t, a.Params)
				require.Nil(t, a.Final)
				require.Less(t, len(err.Error()), 400)
				continue
			}
			require.True(t, json.Valid(answer), "%s took %q", name, answer)
			if a.Final != nil {
				require.True(t, json.Valid(a.Final), "%s: %q", name, a.Final)
				var top map[string]json.RawMessage
				require.NoError(t, json.Unmarshal(a.Final, &top))
				require.NotContains(t, top, "disaggregated_params")
				require.NotContains(t, top, "prompt_token_ids")
			}
			if d.Continue != nil && a.Params != nil {
				requireContinues(t, d, a.Params)
			} else if a.Params != nil {
				require.LessOrEqual(t, len(a.Params), MaxParamsBytes+256)
				body := append(append(d.DecodeMember([]byte{'{'}, a.Params), ','), `"model":"m"}`...)
				var r openai.Request
				require.NoError(t, r.Scan(openai.Chat, body, openai.Limits{MaxDepth: 1024}), "%s: %q", name, body)
			}
		}
	})
}

// requireContinues: a hand-over yields a body that scans, and an answer that is JSON.
func requireContinues(t *testing.T, d Dialect, params []byte) {
	var r openai.Request
	var p openai.Patch
	request := []byte(`{"model":"m","messages":[],"max_tokens":9}`)
	require.NoError(t, r.Scan(openai.Chat, request, openai.Limits{}))
	p.Reset(&r)
	answer, err := d.Continue(&r, &p, params)
	require.NoError(t, err)
	requireScans(t, openai.Completions, p.Edits().Apply(nil, request))
	to, err := ReadContinuation(answer)
	require.NoError(t, err)
	whole, err := to.Whole(nil, []byte(`{"object":"text_completion","choices":[{"index":0,"text":" b"}]}`))
	require.NoError(t, err)
	require.True(t, json.Valid(whole), "%q", whole)
}

// arrivals has notifications that have already arrived.
type arrivals struct {
	id string
	n  int
}

func (a *arrivals) Wait(ctx context.Context, id string, n int) bool {
	if a.id != id {
		<-ctx.Done()
		return false
	}
	return a.n >= n
}

// Await waits for P's notifications, one for each of D's ranks, for at most the configured time.
func TestLMCacheAwaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		await := func(a Arrivals, tp int) (bool, time.Duration) {
			d, err := New(Options{Name: "lmcache", Arrivals: a, NoticeTimeout: 3 * time.Second})
			require.NoError(t, err)
			began := time.Now()
			ok := d.Push.Await(t.Context(), &Pair{Attempt: testAttempt, Decode: Side{Transfer: kvstate.Transfer{TP: tp}}})
			return ok, time.Since(began)
		}
		ok, took := await(&arrivals{strings.Repeat("0123456789abcdef", 2), 2}, 2)
		require.True(t, ok)
		require.Zero(t, took)
		ok, _ = await(&arrivals{strings.Repeat("0123456789abcdef", 2), 1}, 2)
		require.False(t, ok)
		ok, took = await(&arrivals{id: "another"}, 0)
		require.False(t, ok)
		require.Equal(t, 3*time.Second, took)
		ok, took = await(nil, 2)
		require.True(t, ok, "engines without notices: P's answer is all there is")
		require.Zero(t, took)
	})
}

func TestPatience(t *testing.T) {
	for _, tt := range []struct {
		a    Arrivals
		set  time.Duration
		want time.Duration
	}{{nil, time.Second, 0}, {&arrivals{}, 0, DefaultNoticeTimeout}, {&arrivals{}, time.Second, time.Second}} {
		require.Equal(t, tt.want, newLMCache(tt.a, tt.set).Patience())
	}
}

func TestTokenIDs(t *testing.T) {
	for list, want := range map[string]bool{
		"[0]": true, "[1,2 , 4294967295]": true, "[]": false, "[4294967296]": false, "[-1]": false, "[1.0]": false, "[[1]]": false,
		"[1,]": false, "{}": false, `["1"]`: false, "[01]": false, "[null]": false, "[1 2]": false,
	} {
		require.Equal(t, want, tokenIDs([]byte(list)), list)
	}
}

// What a dialect adds to D's body steers the engine, so a client must not send it: isControl (openai/fields.go) cuts it.
func TestClientsCannotSendWhatDGets(t *testing.T) {
	// A client may send these: members of the API, and what the engine does not read. Where Tandem sets one, it takes
	// the place of the client's.
	harmless := []string{"prompt", "prompt_of_client", "max_tokens", "return_token_ids", "request_id"}
	files, err := filepath.Glob("testdata/*/*.txtar")
	require.NoError(t, err)
	var checked []string
	for _, file := range files {
		a, err := txtar.ParseFile(file)
		require.NoError(t, err)
		var client, decode map[string]json.RawMessage
		if body := section(a, "decode request"); body == nil || json.Unmarshal(body, &decode) != nil {
			continue
		}
		require.NoError(t, json.Unmarshal(section(a, "request"), &client), file)
		for name := range decode {
			if _, ok := client[name]; ok || slices.Contains(harmless, name) {
				continue
			}
			checked = append(checked, name)
			var r openai.Request
			require.NoError(t, r.Scan(openai.Chat, []byte(`{"model":"m","`+name+`":1}`), openai.Limits{}))
			require.True(t, r.HasControl(), "%s: D is sent %q, which a client may send too: add it to isControl (openai/fields.go)",
				file, name)
		}
	}
	require.Subset(t, checked, []string{"kv_transfer_params", "bootstrap_room", "disaggregated_params"})
}
