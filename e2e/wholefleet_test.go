package e2e

import (
	"fmt"
	"io"
	"net/http"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

// What operators order or ask at one replica is about all of them, if they share a Redis.

// orderAt gives one replica an order, and returns which replicas it holds for, as the replica says.
func (f *fleet) orderAt(replica int, method, path, body string) (holds string) {
	f.t.Helper()
	req, err := http.NewRequest(method, f.admins[replica]+path, strings.NewReader(body))
	require.NoError(f.t, err)
	req.Header.Set("Authorization", "Bearer "+token)
	resp, err := client.Do(req)
	require.NoError(f.t, err)
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	require.NoError(f.t, err)
	require.Equal(f.t, 200, resp.StatusCode, "%s %s: %s", method, path, text)
	return resp.Header.Get("tandem-holds-for")
}

// An endpoint that was drained at one replica gets nothing through any, not through one that starts later either, until the order is
// taken back at another one.
func TestOrdersHoldForTheFleet(t *testing.T) {
	t.Parallel()
	r := startRedis(t)
	f := start(t, withOrders(t, options{replicas: 2, top: r.yaml(), engineArgs: []string{"--decode-step", "1ms"}}))
	f.allReplicas(2)
	load := f.wholeTraffic(6)
	load.more(t, 20)
	const confirmed = `{"fleet":true,"replicas":2,"redis":true}`
	for _, e := range []*engine{f.prefills[0], f.decodes[0]} {
		path := "/api/pools/chat/endpoints/" + e.addr
		soon(t, "both replicas confirm within a second", func() bool {
			return f.orderAt(0, "POST", path+"/drain", "") == confirmed
		})
		before := len(f.requests("", e))
		load.more(t, 40)
		require.Len(t, f.requests("", e), before, "drained at both replicas")
	}
	f.tandems[1].stop(syscall.SIGTERM)
	f.startTandem(1, filepath.Join(f.dir, "tandem-1.yaml"), f.admins[1])
	before := len(f.requests("", f.prefills[0], f.decodes[0]))
	decided := metric(t, f.admins[1], "tandem_decisions_total")
	soon(t, "the new replica decides", func() bool { return metric(t, f.admins[1], "tandem_decisions_total") > decided+20 })
	require.Len(t, f.requests("", f.prefills[0], f.decodes[0]), before, "one that starts later has the orders")

	f.allReplicas(2)
	for _, e := range []*engine{f.prefills[0], f.decodes[0]} {
		soon(t, "the order is taken back", func() bool {
			return f.orderAt(1, "POST", "/api/pools/chat/endpoints/"+e.addr+"/resume", "") == confirmed
		})
		for i := range f.admins {
			require.False(t, f.state(i)[e.addr].Paused, fmt.Sprint("replica ", i))
		}
	}
	load.end(t)
}
