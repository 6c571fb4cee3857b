package e2e

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// What a request costs does not grow with the number of replicas that share a Redis: the end of each of its two passes is logged to the
// replica that decided it, and to no other, and nothing that was booked stays. What all must learn is logged to all: a
// client's error.
func TestTheLogGoesToTheReplicaThatDecided(t *testing.T) {
	t.Parallel()
	const replicas, requests = 4, 60
	r := startRedis(t)
	f := start(t, options{replicas: replicas, top: r.yaml(), engineArgs: []string{"--decode-step", "1ms"}})
	f.allReplicas(replicas)
	const written = "access_logs.grpc_access_log.logs_written"
	asked := 0
	ask := func(n int) {
		asked += n
		for i := range n {
			require.Equal(t, 200, f.post("/v1/chat/completions", chat(fmt.Sprintf("%d: %s", i, strings.Repeat("a prompt to be split ", 100)))).status)
		}
	}
	soon(t, "all of Envoy's workers log to all replicas", func() bool {
		ask(5)
		before := f.envoyStat(written)
		ask(10)
		return f.envoyStat(written) == before+2*10
	})
	before := f.envoyStat(written)
	ask(requests)
	soon(t, "every end is counted once", func() bool { return f.endedAnywhere() == asked })
	require.Equal(t, before+2*requests, f.envoyStat(written), "one entry for each pass, to one replica")
	for i := range f.admins {
		for _, e := range append(f.prefills, f.decodes...) {
			soon(t, "nothing stays booked", func() bool { return f.state(i)[e.addr].Requests == 0 })
		}
	}
}

// endedAnywhere counts the requests whose end a replica has counted as its own.
func (f *fleet) endedAnywhere() (n int) {
	for _, admin := range f.admins {
		n += int(metric(f.t, admin, "tandem_request_duration_seconds_count"))
	}
	return n
}
