package e2e

import (
	"fmt"
	"io"
	"net/http"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

// Operators' orders and questions at one replica apply to all of them, if they share a Redis.

// orderAt gives one replica an order, and returns the replicas that it applies to, as reported.
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

// An endpoint that was drained at one replica gets no request through any, nor through one that starts later, until
// the order is revoked at another one.
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

// shownFleet is what any replica shows of all.
type shownFleet struct {
	Scope    string `json:"scope"`
	Silent   []string
	Replicas []struct{ Name string }
	Recent   []row
	Pools    []struct {
		Rate      float64 `json:"output_tokens_per_second"`
		PerToken  float64 `json:"time_per_output_token_ms"`
		Endpoints []struct {
			Address  string
			Requests int64
		}
	}
}

// row is a request as the list of requests shows it.
type row struct {
	ID       string `json:"request_id"`
	Replicas []string
	Route    string
	Prefill  string
	Decode   string
	Hop1     int64 `json:"prefill_ns"`
	Hop2     int64 `json:"decode_ns"`
	Status   int
	Ended    string
	Took     int64    `json:"took_ns"`
	GoneWith []string `json:"end_gone_with"`
}

// Each replica shows the whole fleet, and each request in one row with both hops, whichever replicas served its passes. One that hangs is
// named; without Redis a replica says that it shows its own part.
func TestAnyReplicaShowsTheFleet(t *testing.T) {
	t.Parallel()
	r := startRedis(t)
	f := start(t, options{replicas: 2, top: r.yaml(), engineArgs: []string{"--decode-step", "1ms"}})
	f.allReplicas(2)
	const many = 40
	for i := range many {
		require.Equal(t, 200, f.post("/v1/chat/completions", chat(fmt.Sprintf("%d: %s", i, strings.Repeat("a prompt to be split ", 200)))).status)
	}
	for i, admin := range f.admins {
		soon(t, "every request is one whole row", func() bool {
			var rows []row
			require.NoError(t, getJSON(admin+"/debug/requests?n=100", &rows))
			passedOn := 0
			for _, row := range rows {
				if row.Route != "split" || row.Prefill == "" || row.Decode == "" || row.Hop1 == 0 || row.Hop2 == 0 || row.Status != 200 {
					return false
				}
				if len(row.Replicas) > 1 {
					passedOn++
				}
			}
			t.Logf("replica %d: %d rows, %d of them served by both", i, len(rows), passedOn)
			return len(rows) >= many && passedOn > 0
		})
		soon(t, "both answer within a second", func() bool {
			var s shownFleet
			require.NoError(t, getJSON(admin+"/status.json", &s))
			return s.Scope == "all 2 replicas" && len(s.Replicas) == 2 && len(s.Recent) == 30
		})
		soon(t, "it knows what all engines write, whichever replica asks them", func() bool {
			require.Equal(t, 200, f.post("/v1/chat/completions", chat("some more tokens")).status)
			var s shownFleet
			require.NoError(t, getJSON(admin+"/status.json", &s))
			return s.Pools[0].Rate > 0 && s.Pools[0].PerToken > 0
		})
		var one shownFleet
		require.NoError(t, getJSON(admin+"/status.json?scope=replica", &one))
		require.Len(t, one.Replicas, 1)
		require.Equal(t, "this replica, 1 of 2", one.Scope)
	}
	require.NoError(t, f.tandems[1].cmd.Process.Signal(syscall.SIGSTOP))
	var s shownFleet
	soon(t, "one is missing", func() bool { // a signal takes a moment to reach all threads
		s = shownFleet{}
		require.NoError(t, getJSON(f.admins[0]+"/status.json", &s))
		return s.Scope == "1 of 2 replicas"
	})
	require.NoError(t, f.tandems[1].cmd.Process.Signal(syscall.SIGCONT))
	require.Len(t, s.Silent, 1)
	_, port, _ := strings.Cut(strings.TrimPrefix(f.admins[1], "http://"), ":")
	require.True(t, strings.HasSuffix(s.Silent[0], ":"+port), s.Silent[0])

	decided := metric(t, f.admins[1], "tandem_decisions_total")
	soon(t, "Envoy asks it again", func() bool { // it may have noticed
		require.Equal(t, 200, f.post("/v1/chat/completions", chat("are you back?")).status)
		return metric(t, f.admins[1], "tandem_decisions_total") > decided
	})
	for i := range many { // nobody asks how they ended: an end that was shown once is kept
		require.Equal(t, 200, f.post("/v1/chat/completions", chat(fmt.Sprintf("%d, and then it dies", i))).status)
		if i%3 == 0 { // Envoy asks in turn: with two passes each, one replica could get all first ones
			require.Equal(t, 200, f.statusOf(f.url+"/v1/models"))
		}
	}
	f.tandems[1].stop(syscall.SIGKILL)
	unknown := 0
	othersKnown := func() bool {
		var rows []row
		require.NoError(t, getJSON(f.admins[0]+"/debug/requests?n=100", &rows))
		unknown = 0
		for _, row := range rows {
			if len(row.GoneWith) > 0 {
				unknown++
				require.Zero(t, row.Status)
				require.True(t, strings.HasSuffix(row.GoneWith[0], ":"+port), row.GoneWith[0])
			} else if row.Status == 0 {
				return false
			}
		}
		t.Logf("%d of %d ends are unknown", unknown, len(rows))
		return unknown > 0 && unknown < len(rows)
	}
	soon(t, "the ends that it alone knew are unknown, and the others known", othersKnown)
	before := unknown
	f.startTandem(1, filepath.Join(f.dir, "tandem-1.yaml"), f.admins[1])
	soon(t, "both replicas are there", func() bool {
		s = shownFleet{}
		require.NoError(t, getJSON(f.admins[0]+"/status.json", &s))
		return s.Scope == "all 2 replicas"
	})
	require.True(t, othersKnown(), "its name runs again, and what it knew is lost")
	require.Equal(t, before, unknown)
	var shown [2][]row
	for i, admin := range f.admins {
		require.NoError(t, getJSON(admin+"/debug/requests?n=100", &shown[i]))
	}
	require.Equal(t, shown[0], shown[1], "ends that were shown before it died are shown by both")
}

// Without Redis a replica says that what it shows, and what it is ordered, is about itself.
func TestOneReplicaOfTwo(t *testing.T) {
	t.Parallel()
	f := start(t, withOrders(t, options{replicas: 2}))
	var s shownFleet
	require.NoError(t, getJSON(f.admins[0]+"/status.json", &s))
	require.Equal(t, "this replica, 1 of 2", s.Scope)
	require.Equal(t, `{"fleet":false,"replicas":1,"redis":false}`, f.orderAt(0, "POST", "/api/pools/chat/endpoints/"+f.decodes[0].addr+"/pause", ""))
	require.False(t, f.state(1)[f.decodes[0].addr].Paused)
	require.Equal(t, 200, f.post("/v1/chat/completions", chat("who answers?")).status)

	resp, err := client.Get(f.admins[0] + "/debug/requests?id=nobody")
	require.NoError(t, err)
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	require.Contains(t, string(text), "(asked: this replica, 1 of 2)")
}

// Without Redis the row of a request names the decode endpoint that answered, also if the other replica chose it.
func TestRowsNameWhoAnswered(t *testing.T) {
	t.Parallel()
	f := start(t, options{replicas: 2, prefills: 2, decodes: 4, engineArgs: []string{"--decode-step", "1ms"}})
	var others []row // of requests that the other replica passed on
	soon(t, "a replica knows the end of requests that the other one passed on", func() bool {
		var posts sync.WaitGroup
		for i := range 20 {
			posts.Go(func() {
				f.post("/v1/chat/completions", chat(fmt.Sprintf("%d: %s", i, strings.Repeat("a prompt to be split ", 200))))
			})
		}
		posts.Wait()
		others = nil
		for _, admin := range f.admins {
			var rows []row
			require.NoError(t, getJSON(admin+"/debug/requests?n=100", &rows))
			for _, row := range rows {
				if row.Status == 200 && row.Route == "split" && row.Hop1 == 0 {
					others = append(others, row)
				}
			}
		}
		return len(others) > 10
	})
	for _, row := range others {
		_, decode := f.hops(row.ID)
		require.Equal(t, decode.Engine, row.Decode, row)
	}
	t.Logf("%d rows", len(others))
}
