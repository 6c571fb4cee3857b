package e2e

import (
	"fmt"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// Two replicas, one Redis, one prefill endpoint that does not answer: requests wait, each replica knows those of the
// other one, and when the endpoint continues each dispatches its own in the order of priority, whatever their arrival.
// None waits for ever, and nothing is left.
//
// The order between the two replicas is not asserted: a replica that is late by more than 150 ms is not waited for,
// and a busy machine is. The number of such cases is logged.
func TestTwoReplicasBindLate(t *testing.T) {
	t.Parallel()
	const n = 6 // and more, if chance sends all of these to one replica
	priority := func(i int) int { return min(i*3/n, 2) }
	r := startRedis(t)
	f := start(t, options{
		replicas: 2, prefills: 1, decodes: 1, top: r.yaml(), madeKeys: true, engineArgs: []string{"--prefill-speed", "16000"}, envoyFields: ", bodyMode: duplex",
		pool: "  binding: late\n  queue: {maxWait: 600s}\n  objectives: {fromHeaders: true, named: [{name: p0, priority: 0}, {name: p1, priority: 1}, {name: p2, priority: 2}]}\n",
	})
	f.allReplicas(2)
	queued := func(replica int, where string) float64 {
		return metric(t, f.admins[replica], "tandem_queue_requests"+where)
	}
	answers := make(chan answer, 100)
	send := func(id, objective string, tokens int) {
		go func() {
			answers <- f.post("/v1/chat/completions", question(id, tokens), "x-request-id", id, "x-llm-d-inference-objective", objective)
		}()
	}
	require.NoError(t, f.prefills[0].cmd.Process.Signal(syscall.SIGSTOP))
	send("blocks", "p2", 60_000)
	for replica := range f.admins {
		require.Eventually(t, func() bool {
			return metric(t, f.admins[replica], "tandem_reservations") > 0 || f.known(replica).others() > 0
		}, patience, 5*time.Millisecond)
	}
	where, before, sent := map[string]int{}, [2]float64{}, 0
	for ; sent < n || before[0] == 0 || before[1] == 0; sent++ { // the least important first
		require.Less(t, sent, 60, "all come to one replica")
		id := fmt.Sprintf("waits-%d", sent)
		send(id, fmt.Sprintf("p%d", priority(sent)), 20_000)
		require.Eventually(t, func() bool {
			now := [2]float64{queued(0, ""), queued(1, "")}
			if now[0]+now[1] != float64(sent+1) {
				return false
			}
			if now[1] > before[1] {
				where[id] = 1
			}
			before = now
			return true
		}, patience, 5*time.Millisecond)
	}
	require.Eventually(t, func() bool { return queued(0, "_remote") == before[1] && queued(1, "_remote") == before[0] }, patience, 5*time.Millisecond)
	require.NoError(t, f.prefills[0].cmd.Process.Signal(syscall.SIGCONT))
	for range sent + 1 {
		a := <-answers
		require.Equal(t, 200, a.status, "%.300s", a.body)
	}
	var order []seen
	require.NoError(t, getJSON("http://"+f.prefills[0].addr+"/sim/requests", &order))
	last, worst, swapped := [2]int{3, 3}, 3, 0
	for _, s := range order {
		var i int
		if _, err := fmt.Sscanf(s.RequestID, "waits-%d", &i); err != nil {
			continue
		}
		own := priority(i)
		require.LessOrEqual(t, own, last[where[s.RequestID]], "%s of replica %d", s.RequestID, where[s.RequestID])
		last[where[s.RequestID]] = own
		if own > worst {
			swapped++
		}
		worst = min(worst, own)
	}
	require.Zero(t, min(last[0], last[1]))
	t.Logf("%d of %d went behind one of the other replica that is less important", swapped, sent)
	bound := 0.0
	for replica, admin := range f.admins {
		bound += metric(t, admin, "tandem_queue_wait_seconds_count", `end="bound"`)
		require.Eventually(t, func() bool { return queued(replica, "") == 0 && queued(replica, "_remote") == 0 }, patience, 10*time.Millisecond)
	}
	require.InDelta(t, sent, bound, 0, "all in their turn")
	for replica := range f.admins {
		require.Eventually(t, func() bool { return f.known(replica).others() == 0 }, patience, 10*time.Millisecond)
	}
}

// A decode engine with slow KV transfers reports them in its metrics, and gets fewer requests.
func TestSlowTransfersAreLearned(t *testing.T) {
	f := start(t, options{prefills: 1, decodes: 2, engine: func(role string, i int, _ func() string) ([]string, string) {
		if role == "decode" && i == 1 {
			return []string{"--model", "tiny", "--transfer-rate", "2e7"}, "" // 50 ms for 2,000 tokens
		}
		return []string{"--model", "tiny"}, ""
	}})
	slow, fast := f.decodes[0].addr, f.decodes[1].addr
	ask := func(id string) (decode string) {
		require.Eventually(t, func() bool { return metric(t, f.admins[0], "tandem_reservations") == 0 }, patience, 5*time.Millisecond)
		a := f.post("/v1/chat/completions", question(id, 2000), "x-request-id", id)
		require.Equal(t, 200, a.status, "%.300s", a.body)
		_, d := f.hops(id)
		return d.Engine
	}
	learned := func(addr string) float64 {
		return metric(t, f.admins[0], "tandem_engine_transfer_bytes_per_second", `endpoint="`+addr+`"`)
	}
	for i := 0; learned(slow) == 0 || learned(slow)*1.3 > learned(fast); i++ { // some hundred of each
		require.Less(t, i, 200, "not learned: %v and %v bytes/s", learned(slow), learned(fast))
		var batch sync.WaitGroup
		for j := range 16 {
			batch.Go(func() {
				id := fmt.Sprintf("learning-%d-%d", i, j)
				a := f.post("/v1/chat/completions", question(id, 2000), "x-request-id", id)
				if a.status != 200 {
					t.Errorf("%d %.300s", a.status, a.body)
				}
			})
		}
		batch.Wait()
	}
	for i := range 10 {
		require.Equal(t, fast, ask(fmt.Sprintf("learned-%d", i)))
	}
	require.InDelta(t, 512, metric(t, f.admins[0], "tandem_kv_bytes_per_token"), 64)
	var status struct {
		Pools []struct {
			Endpoints []struct {
				Address  string
				Transfer float64 `json:"transfer_bytes_per_second"`
			}
		}
	}
	require.NoError(t, getJSON(f.admins[0]+"/status.json", &status))
	for _, e := range status.Pools[0].Endpoints {
		require.Equal(t, e.Address != f.prefills[0].addr, e.Transfer > 0, e.Address)
	}
}
