package e2e

import (
	"context"
	"fmt"
	"net/http"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// A replica that hangs (SIGSTOP) costs no answer while another one is up: requests that wait for it are sent to the
// other, and after that it gets none until it continues.
func TestAHungReplicaCostsNoAnswer(t *testing.T) {
	t.Parallel()
	for name, fields := range map[string]string{"default": "", "buffered": ", bodyMode: buffered"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			hangOneOfTwo(t, start(t, options{replicas: 2, envoyFields: fields}))
		})
	}
}

func hangOneOfTwo(t *testing.T, f *fleet) {
	var mu sync.Mutex
	slowest, answers := time.Duration(0), 0
	ended := time.Now().Add(12 * time.Second)
	var clients sync.WaitGroup
	for c := range 6 {
		clients.Go(func() {
			tokens := []int{100, 12_000, 60_000}[c%3] // 0.4, 48 and 240 KB
			for i := 0; time.Now().Before(ended); i++ {
				got, err := f.try(context.Background(), http.MethodPost, "/v1/chat/completions", question(fmt.Sprintf("hung-%d-%d", c, i), tokens))
				mu.Lock()
				if err != nil {
					t.Errorf("client %d, request %d: %v", c, i, err)
				} else if got.status != 200 {
					t.Errorf("client %d, request %d after %v: %d %.300s", c, i, got.took, got.status, got.body)
				}
				answers, slowest = answers+1, max(slowest, got.took)
				mu.Unlock()
				time.Sleep(50 * time.Millisecond)
			}
		})
	}
	for range 2 {
		time.Sleep(1500 * time.Millisecond)
		require.NoError(t, f.tandems[0].cmd.Process.Signal(syscall.SIGSTOP))
		time.Sleep(3 * time.Second)
		require.NoError(t, f.tandems[0].cmd.Process.Signal(syscall.SIGCONT))
	}
	clients.Wait()
	t.Logf("%d answers, the slowest after %v", answers, slowest)
	require.Less(t, slowest, 10*time.Second)
	speed(t, slowest < time.Second, "the slowest of %d answers took %v", answers, slowest)
}

// Requests that wait in a replica for an endpoint continue with another one if it hangs, whether their bodies are
// buffered or streamed.
func TestRequestsThatWaitInAHungReplicaGoOn(t *testing.T) {
	t.Parallel()
	for _, mode := range []string{"buffered", "duplex"} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			f := start(t, options{
				replicas: 2, prefills: 1, decodes: 1, engineArgs: []string{"--prefill-speed", "2000"}, envoyFields: ", bodyMode: " + mode,
				pool: "  binding: late\n",
			})
			waiting := func(i int) float64 { return metric(t, f.admins[i], "tandem_queue_requests") }
			var clients sync.WaitGroup
			stopped := make(chan struct{})
			for i := range 16 {
				clients.Go(func() {
					for n := 0; ; n++ { // a busy machine may be slower than the engine
						got, err := f.try(context.Background(), http.MethodPost, "/v1/chat/completions", question(fmt.Sprintf("waits-%d-%d", i, n), 2000))
						if err != nil || got.status != 200 {
							t.Errorf("request %d of client %d: %v, %d %.300s", n, i, err, got.status, got.body)
						}
						select {
						case <-stopped:
							return
						default:
						}
					}
				})
			}
			hangs := 0 // Envoy chooses the distribution
			soon(t, "requests wait", func() bool {
				hangs = 1 - hangs
				return waiting(hangs) > 1
			})
			require.NoError(t, f.tandems[hangs].cmd.Process.Signal(syscall.SIGSTOP))
			close(stopped)
			clients.Wait()
			restarts := metric(t, f.admins[1-hangs], "tandem_replans_total", `cause="router"`)
			require.NoError(t, f.tandems[hangs].cmd.Process.Signal(syscall.SIGCONT))
			if mode == "buffered" {
				require.Positive(t, restarts)
			} else {
				require.Zero(t, restarts, "Envoy repeats what it sent by itself")
			}
		})
	}
}
