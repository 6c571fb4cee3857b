package e2e

import (
	"context"
	"net/http"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// A stopped decode engine (SIGSTOP) keeps its connections and answers nothing: health checks detect it, and another
// one answers its requests, streamed or not.
func TestDecodeThatStandsStill(t *testing.T) {
	t.Parallel()
	for name, o := range map[string]options{
		"nixl":         {},
		"two replicas": {replicas: 2},
		"sglang":       {dialect: "sglang"},
		"alone":        {decodes: 2, pools: "pools:\n- name: chat\n  kvTransfer: none\n  endpoints: [{address: %D}, {address: %D}]\n"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := start(t, o)
			f.lenient = true // blocks that were not fetched wait for their lease
			d := f.decodes[0]
			require.NoError(t, d.cmd.Process.Signal(syscall.SIGSTOP))
			ask := func(i int) {
				path, body := loadBody("chat", i, i%2 == 0)
				got, err := f.try(context.Background(), http.MethodPost, path, body)
				if err != nil || got.status != 200 || i%2 == 0 && !complete(got.body) {
					t.Errorf("request %d after %v: %v, %d %.300s", i, got.took, err, got.status, got.body)
				}
				t.Logf("request %d took %v", i, got.took)
			}
			var clients sync.WaitGroup
			for i := range 8 {
				clients.Go(func() { ask(i) })
			}
			clients.Wait()
			soon(t, "it is left out by a replica that sent it requests", func() bool {
				return sum(t, f, "tandem_endpoint_health_changes_total", `endpoint="`+d.addr+`"`, `to="out"`) > 0
			})
			for i := range 8 {
				ask(100 + i)
			}
			for _, e := range f.engines() {
				if e != d {
					require.Zero(t, sum(t, f, "tandem_endpoint_health_changes_total", `endpoint="`+e.addr+`"`), "%s is well", e.role)
				}
			}
			require.NoError(t, d.cmd.Process.Signal(syscall.SIGCONT))
		})
	}
}

// slowDecode has two decode engines that work, but show nothing of a request for a while.
func slowDecode(t *testing.T, delay string) *fleet {
	f := start(t, options{prefills: 1, decodes: 2})
	for _, d := range f.decodes {
		f.inject(d, `{"mode":"slow","count":1,"leg":"decode","delay":"`+delay+`"}`)
		go func() {
			for t.Context().Err() == nil { // or its core would stand still
				resp, err := client.Post("http://"+d.addr+"/v1/completions", "application/json",
					strings.NewReader(`{"model":"tiny","prompt":"others","max_tokens":4}`))
				if err == nil {
					_ = resp.Body.Close()
				}
				time.Sleep(500 * time.Millisecond)
			}
		}()
	}
	return f
}

// A slow decode engine that works stays in use, however long it sends nothing of a request.
func TestDecodeThatIsSlow(t *testing.T) {
	t.Parallel()
	f := slowDecode(t, "22s")
	path, body := loadBody("chat", 0, false)
	got := f.post(path, body, "x-request-id", "slow")
	require.Equal(t, 200, got.status, got.body)
	require.Len(t, f.requests("slow", f.decodes...), 1)
	require.Zero(t, metric(t, f.admins[0], "tandem_replans_total"))
}

// If decode dies after a long silence, another one answers.
func TestDecodeThatIsSlowAndDies(t *testing.T) {
	t.Parallel()
	f := slowDecode(t, "14s")
	f.lenient = true // one is killed
	done := make(chan answer)
	go func() {
		path, body := loadBody("chat", 0, false)
		got, _ := f.try(context.Background(), http.MethodPost, path, body, "x-request-id", "dies")
		done <- got
	}()
	time.Sleep(11 * time.Second) // Envoy hedges
	for _, d := range f.decodes {
		if len(f.requests("dies", d)) > 0 {
			require.NoError(t, d.cmd.Process.Kill())
			break
		}
	}
	got := <-done
	t.Logf("answered after %v", got.took)
	require.Equal(t, 200, got.status, got.body)
	require.Positive(t, metric(t, f.admins[0], "tandem_replans_total"))
}
