package e2e

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
)

// A decode engine that is busy with external requests gets fewer of ours as soon as its metrics have reported them
// twice, and the same as the other again when that is over.
func TestExternalRequests(t *testing.T) {
	t.Parallel()
	const many = 12
	f := start(t, options{prefills: 1, decodes: 2, engineArgs: []string{"--decode-step", "10ms", "--blocks", "100000"}})
	busy, idle := f.decodes[0], f.decodes[1]
	elsewhere := func(e *engine) float64 {
		return metric(t, f.admins[0], "tandem_engine_requests_external", `endpoint="`+e.addr+`"`)
	}

	ctx, leave := context.WithCancel(context.Background())
	var all sync.WaitGroup
	t.Cleanup(func() { leave(); all.Wait() })
	for i := range many {
		all.Go(func() {
			body := fmt.Sprintf(`{"model":"tiny","max_tokens":30000,"ignore_eos":true,"stream":true,"messages":[{"role":"user","content":"of others %d"}]}`, i)
			req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+busy.addr+"/v1/chat/completions", strings.NewReader(body))
			if err != nil {
				return
			}
			req.Header.Set("Content-Type", "application/json")
			if resp, err := client.Do(req); err == nil {
				_, _ = readAnswer(resp)
			}
		})
	}
	soon(t, "the engine says it twice", func() bool { return elsewhere(busy) == many })
	for i := range 8 {
		id := fmt.Sprintf("ours-%d", i)
		require.Equal(t, 200, f.post("/v1/chat/completions", chat(id), "x-request-id", id).status)
		require.Empty(t, f.requests(id, busy), "nobody else's answers get slower for it")
		require.Len(t, f.requests(id, idle), 1)
	}
	require.Zero(t, elsewhere(idle), "what was booked is nobody else's")
	leave()
	all.Wait()
	soon(t, "they have left", func() bool { return elsewhere(busy) == 0 })
	again := 0
	soon(t, "it gets its part again", func() bool {
		again++
		id := fmt.Sprintf("again-%d", again)
		f.post("/v1/chat/completions", chat(id), "x-request-id", id)
		return len(f.requests(id, busy)) > 0
	})
}
