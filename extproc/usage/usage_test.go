package usage

import (
	"bufio"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"

	"tandem/extproc/ended"
	"tandem/extproc/kvtransfer"
)

var came = time.Date(2026, 11, 27, 0, 0, 0, 0, time.UTC)

func said(n int64) ended.Count { return ended.Count{Tokens: n, Said: true} }

func text(n *int64) string {
	if n == nil {
		return "-"
	}
	return fmt.Sprint(*n)
}

// The tokens of a request are what its answer says, in any API's form.
func TestCounts(t *testing.T) {
	absurd := ended.Count{Said: true, Absurd: true}
	for name, c := range map[string]struct {
		usage ended.Usage
		want  string // prompt, cached, answer
	}{
		"nothing":                {ended.Usage{}, "- - -"},
		"chat":                   {ended.Usage{In: said(10), Out: said(3), Cached: said(8)}, "10 8 3"},
		"without a cache":        {ended.Usage{In: said(10), Out: said(3)}, "10 - 3"},
		"embeddings":             {ended.Usage{In: said(10)}, "10 - -"},
		"messages":               {ended.Usage{In: said(2), Out: said(3), CacheRead: said(7), CacheWritten: said(1)}, "10 7 3"},
		"more cached than there": {ended.Usage{In: said(10), Out: said(3), Cached: said(11)}, "- - - absurd"},
		"no number":              {ended.Usage{In: said(10), Out: absurd}, "- - - absurd"},
		"cached without prompt":  {ended.Usage{Out: said(3), Cached: said(8)}, "- - 3"},
	} {
		u := Of(&kvtransfer.Ticket{Started: came}, &ended.Pass{Answered: ended.Answered{Usage: c.usage}}, "ok", Promise{})
		got := text(u.Prompt) + " " + text(u.Cached) + " " + text(u.Answer)
		if u.Absurd {
			got += " absurd"
		}
		require.Equal(t, c.want, got, name)
	}
}

// Times count from the request's arrival. A promise is kept if the first token and those after it were in time, or the
// whole answer where it was not streamed.
func TestTimesAndPromises(t *testing.T) {
	promise := Promise{FirstToken: time.Second, PerToken: 50 * time.Millisecond}
	for name, c := range map[string]struct {
		stream           bool
		first, last      time.Duration // since the last pass began, 100 ms after the request came
		tokens           int64         // -1: not said
		ended            string
		token, per, want string
	}{
		"in time":                {true, 300 * time.Millisecond, 800 * time.Millisecond, 11, "ok", "400ms", "50ms", Kept},
		"one token":              {true, 300 * time.Millisecond, 800 * time.Millisecond, 1, "ok", "400ms", "0s", Kept},
		"late":                   {true, time.Second, 1010 * time.Millisecond, 11, "ok", "1.1s", "1ms", Late},
		"slow":                   {true, 300 * time.Millisecond, 900 * time.Millisecond, 11, "ok", "400ms", "60ms", Slow},
		"no usage":               {true, 300 * time.Millisecond, 900 * time.Millisecond, -1, "ok", "400ms", "0s", Unknown},
		"late without usage":     {true, time.Second, 2 * time.Second, -1, "ok", "1.1s", "0s", Late},
		"cut":                    {true, 300 * time.Millisecond, 400 * time.Millisecond, -1, "failed", "400ms", "0s", Failed},
		"the client left":        {true, 300 * time.Millisecond, 400 * time.Millisecond, -1, "client_gone", "400ms", "0s", ""},
		"refused":                {false, 0, 10 * time.Millisecond, -1, "refused", "0s", "0s", ""},
		"whole, in time":         {false, time.Second, 1400 * time.Millisecond, 11, "ok", "0s", "0s", Kept},
		"whole, late":            {false, time.Second, 1401 * time.Millisecond, 11, "ok", "0s", "0s", Late},
		"whole, of unknown size": {false, time.Second, 1400 * time.Millisecond, -1, "ok", "0s", "0s", Unknown},
		"whole, soon":            {false, 100 * time.Millisecond, 200 * time.Millisecond, -1, "ok", "0s", "0s", Kept},
	} {
		e := &ended.Pass{Start: came.Add(100 * time.Millisecond), Duration: c.last}
		e.Usage.FirstBody, e.Usage.LastByte = c.first, c.last
		if c.tokens >= 0 {
			e.Usage.Out = said(c.tokens)
		}
		u := Of(&kvtransfer.Ticket{Started: came, Stream: c.stream}, e, c.ended, promise)
		require.Equal(t, []string{c.token, c.per, c.want}, []string{u.FirstToken.String(), u.PerToken.String(), u.Promise}, name)
	}
	require.Empty(t, Of(&kvtransfer.Ticket{}, &ended.Pass{}, "ok", Promise{}).Promise, "nothing is promised")
}

// Labels have bounded values, whatever clients send: the first tenants have series of their own, and the others share
// sixteen.
func TestLabelsAreBounded(t *testing.T) {
	r, err := New(Options{Tenants: 3}, prometheus.NewRegistry(), slog.New(slog.DiscardHandler))
	require.NoError(t, err)
	for i := range 5000 {
		e := &ended.Pass{Status: 200}
		e.Usage.In, e.Usage.Tenant = said(1), fmt.Appendf(nil, "tenant %d %s\xff", i, strings.Repeat("x", i))
		r.Ended(&kvtransfer.Ticket{Pool: "chat", Model: fmt.Sprint("model ", i)}, e, "ok", "d:1", true)
	}
	require.LessOrEqual(t, testutil.CollectAndCount(r.promises), 3+16)
	require.LessOrEqual(t, testutil.CollectAndCount(r.tokens), (maxModels+1)*(3+16))
	require.InDelta(t, 5000, testutil.ToFloat64(r.endpoints.WithLabelValues("chat", "d:1", kindPrompt)), 0)
	require.Len(t, r.ByEndpoint(), 2)
	var none *Recorder
	require.Nil(t, none.Ended(nil, nil, "", "", true))
	require.Empty(t, none.ByEndpoint())
	none.Run(t.Context())
}

// A line of the ledger has what a bill needs, and nothing of the prompt. Only the replica that counts the request
// writes it.
func TestLedger(t *testing.T) {
	file := filepath.Join(t.TempDir(), "ledger")
	r, err := New(Options{Tenants: 3, Ledger: file}, prometheus.NewRegistry(), slog.New(slog.DiscardHandler))
	require.NoError(t, err)
	e := &ended.Pass{
		RequestID: []byte("id"), Reservation: []byte("key"), Status: 200, Start: came, Duration: time.Second,
		Answered: ended.Answered{Body: 900, Usage: ended.Usage{
			In: said(10), Out: said(3), Cached: said(8), Tenant: []byte("team-a"), FirstBody: 400 * time.Millisecond, LastByte: time.Second,
		}},
	}
	ticket := &kvtransfer.Ticket{Pool: "chat", Model: "m", Prefill: "p:1", Decode: "d:1", Started: came, Stream: true, Stage: kvtransfer.DecodeLeg}
	r.Promised = func(string) Promise { return Promise{time.Second, time.Second} }
	done := make(chan struct{})
	go func() { r.Run(t.Context()); close(done) }()
	r.Ended(ticket, e, "ok", "d:1", false)
	r.Ended(ticket, e, "ok", "d:1", true)
	require.Eventually(t, func() bool { text, _ := os.ReadFile(file); return len(text) > 0 }, time.Minute, time.Millisecond)
	open, err := os.Open(file)
	require.NoError(t, err)
	defer open.Close()
	lines := bufio.NewScanner(open)
	require.True(t, lines.Scan())
	require.JSONEq(t, `{"time":"2026-11-27T00:00:01Z","id":"id","key":"key","pool":"chat","model":"m","tenant":"team-a","prefill":"p:1",
"decode":"d:1","status":200,"ended":"ok","streamed":true,"prompt_tokens":10,"cached_tokens":8,"completion_tokens":3,"answer_bytes":900,
"first_token_ms":400,"per_token_ms":300,"took_ms":1000,"promise":"kept"}`, lines.Text())
	require.True(t, json.Valid(lines.Bytes()))
	require.False(t, lines.Scan(), "one line")
}
