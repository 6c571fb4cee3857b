package e2e

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// Requests with the same x-request-id, from constant or retried ids, are booked separately: they spread over the
// decode engines, and at their end nothing is booked any more, even if clients left.
func TestOneRequestIDForMany(t *testing.T) {
	t.Parallel()
	const many = 12
	f := start(t, options{prefills: 2, decodes: 3, engineArgs: []string{"--decode-step", "20ms"}})
	ctx, leave := context.WithCancel(t.Context())
	defer leave()
	var answers sync.WaitGroup
	for i := range many {
		body := fmt.Sprintf(`{"model":"tiny","prompt":"long answer %d","ignore_eos":true,"max_tokens":10000,"stream":true}`, i)
		req, err := http.NewRequestWithContext(ctx, http.MethodPost, f.url+"/v1/completions", strings.NewReader(body))
		require.NoError(t, err)
		req.Header.Set("Content-Type", "application/json")
		req.Header.Set("X-Request-Id", "always-the-same")
		answers.Go(func() {
			if resp, err := client.Do(req); err == nil {
				_, _ = readAnswer(resp)
			}
		})
	}
	soon(t, "all are booked", func() bool { return f.known(0).Reservations == many })
	running := map[string]float64{}
	require.Eventually(t, func() bool {
		var all float64
		for _, e := range f.decodes {
			running[e.addr] = metric(t, "http://"+e.addr, "vllm:num_requests_running")
			all += running[e.addr]
		}
		return all == many
	}, patience, 10*time.Millisecond, "all run")
	for addr, n := range running { // not many/3: the learned pace of engines differs a little
		require.GreaterOrEqual(t, n, float64(many/6), "they spread, but for %s: %v", addr, running)
	}
	leave()
	answers.Wait()
	soon(t, "all are over", func() bool { return f.known(0).Reservations == 0 })
	f.lenient = true // clients left in the middle of answers
}

// Of two replicas with different ticket keys the younger is not ready, at the start and when a key changes, and
// reports why; no request fails. When the keys are the same again both serve.
func TestReplicasWithDifferentKeys(t *testing.T) {
	t.Parallel()
	r := startRedis(t)
	f := start(t, options{replicas: 2, top: r.yaml(), separateKeys: true})
	f.allReplicas(2)
	write := func(replica int, key string) {
		file := filepath.Join(f.dir, fmt.Sprintf("ticket-%d.key", replica))
		require.NoError(t, os.WriteFile(file, []byte(strings.Repeat(key, 64/len(key))+"\n"), 0o600))
	}
	differ := func(what string) {
		t.Helper()
		soon(t, what, func() bool {
			status, body := f.ready(1)
			return status == 503 && strings.Contains(body, "the keys are not those of 1 other replicas")
		})
		require.InDelta(t, 1, metric(t, f.admins[1], "tandem_ticket_keys_differ"), 0)
		soon(t, "the older knows", func() bool { _, body := f.ready(0); return strings.Contains(body, "the keys are not those of 1 other") })
		soon(t, "the older serves", func() bool { status, _ := f.ready(0); return status == 200 })
		soon(t, "Envoy leaves the younger out", func() bool {
			text, err := readURL(f.envoyURL + "/clusters")
			return err == nil && strings.Count(text, "/failed_active_hc") == 2 // of ext_proc and of the replan port
		})
		// Envoy's workers learn it a moment after its main thread.
		soon(t, "no request fails", func() bool {
			for i := range 20 {
				if f.post("/v1/chat/completions", chat(fmt.Sprintf("%s %d", what, i))).status != 200 {
					return false
				}
			}
			return true
		})
	}
	write(1, "fedcba9876543210")
	differ("a key changes")

	write(1, "0123456789abcdef")
	soon(t, "both serve", func() bool { status, _ := f.ready(1); return status == 200 })
	soon(t, "the older knows that, too", func() bool { return metric(t, f.admins[0], "tandem_ticket_keys_differ") == 0 })

	f.tandems[1].stop(syscall.SIGTERM)
	write(1, "fedcba9876543210")
	f.launchTandem(1, f.fileOf(1), f.admins[1])
	soon(t, "it answers", func() bool { _, err := readURL(f.admins[1] + "/healthz"); return err == nil })
	differ("it starts with another key")
}
