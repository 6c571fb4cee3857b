package status

import (
	"bytes"
	"encoding/json"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tandem/extproc/telemetry"
	"tandem/kvstate"
	"tandem/kvstate/operator"
	"tandem/status/written"
)

// What three replicas report, one of which does not answer, is one status: testdata/fleet.txt.
func TestPrintFleet(t *testing.T) {
	now := time.Date(2026, 11, 23, 12, 0, 0, 0, time.UTC)
	of := func(name string, requests int64, state string, last int64, traces ...telemetry.Trace) report {
		e := Endpoint{Name: "d1", Address: "10.0.2.1:8000", Role: "decode", Up: state == "up", State: state, Requests: requests, Tokens: 10 * requests, HitShare: -1, Running: -1, Waiting: -1, KVUsage: -1, Output: written.Output{Rate: -1}}
		if name == "tandem-1:9090" { // all know what engines report; this one has just started
			e.Output = written.Output{Rate: 812.4, PerToken: 14.25}
		}
		r := report{
			Name: name, Version: "v1", Started: now.Add(-time.Hour), Ready: true, Sharing: Sharing{Redis: true, Up: true, Replicas: 3}, Reservations: int(requests),
			Pools: []Pool{{Name: "chat", Models: []string{"*"}, IndexBlocks: 7, Output: e.Output, Endpoints: []Endpoint{e}}}, Seconds: 60, Last: last, Traces: traces,
			Minute: telemetry.Totals{OK: 120, Split: 60, Failed: 1},
		}
		r.Minute.FirstByte[30] = 100
		for n := last - 39; n <= last; n++ {
			r.Points = append(r.Points, Point{N: n, OK: 2, FirstByte50: 100 * float64(requests), FirstByte99: 1000 * float64(requests)})
		}
		return r
	}
	began := now.Add(-10 * time.Second)
	a := of("tandem-0:9090", 1, "up", 1000, telemetry.Trace{RequestID: "one", Pool: "chat", Route: "split", Prefill: "10.0.1.1:8000", Decode: "10.0.2.9:8000", PromptTokens: 100, CachedTokens: -1, Served: telemetry.Served{Plans: 1}, Status: 200, Started: began})
	b := of("tandem-1:9090", 3, "out", 999, telemetry.Trace{RequestID: "one", Served: telemetry.Served{Pass: 1}, Decode: "10.0.2.1:8000", CachedTokens: 25, PromptTokens: 80,
		PrefillTime: 12 * time.Millisecond, DecodeTime: 2 * time.Second, Started: began})
	a.Config, b.Version, b.Ready, b.Config = "af", "v2", false, "07"
	text, err := json.Marshal(b) // as it comes from another replica
	require.NoError(t, err)
	b = report{}
	require.NoError(t, json.Unmarshal(text, &b))

	s := merge(answers{reports: []report{a, b}, silent: []string{"tandem-2:9090"},
		gone: []operator.Gone{{Name: "tandem-3:9090", Heard: now.Add(-90 * time.Second)}}}, now, &Wanted{N: shownRecent})
	require.Len(t, s.Points, 40, "up to the last second that both have")
	require.Equal(t, Point{N: 999, OK: 4, FirstByte50: 200, FirstByte99: 3000}, s.Points[39])
	require.Equal(t, int64(4), s.Pools[0].Endpoints[0].Requests)
	var out bytes.Buffer
	Print(&out, &s)
	if *update {
		require.NoError(t, os.WriteFile("testdata/fleet.txt", out.Bytes(), 0o600))
	}
	want, err := os.ReadFile("testdata/fleet.txt")
	require.NoError(t, err)
	require.Equal(t, string(want), out.String())
}

// A report arrives as it was sent; anything that is no report is refused.
func TestReportsArePacked(t *testing.T) {
	f := NewFeed(fleet(func() telemetry.Totals { return telemetry.Totals{OK: 7} }))
	r, err := unpack(f.answer([]byte(`{"status":true,"traces":1000}`)))
	require.NoError(t, err)
	require.Len(t, r.Pools, 2)
	require.Len(t, r.Traces, 3)
	require.Equal(t, kvstate.RoleDecode.String(), r.Pools[0].Endpoints[1].Role)
	require.Nil(t, f.answer([]byte("{")))
	_, err = unpack([]byte("no report"))
	require.Error(t, err)
	_, err = unpack(f.answer([]byte(`{"status":true}`))[:30])
	require.Error(t, err)
}

// An answer about requests names the replicas that were asked, unless they are all, and where requests were lost.
func TestAsked(t *testing.T) {
	const two = 2
	gone := []operator.Gone{{Name: "c:1"}, {Name: "d:1"}}
	for _, c := range []struct {
		got     answers
		sharing Sharing
		asked   string
		all     bool
	}{
		{answers{reports: make([]report, 1)}, Sharing{}, "this replica).\nA replica that ends takes the requests that it planned with it.\nRequests", true},
		{answers{reports: make([]report, 1)}, Sharing{Replicas: two, Configured: two}, "this replica, 1 of 2).\nA replica that ends takes the requests that it planned with it.\nRequests", false},
		{answers{reports: make([]report, 1)}, Sharing{Redis: true, Replicas: 1}, "this replica: Redis does not answer).\nA replica that ends takes the requests that it planned with it.\nRequests", false},
		{answers{reports: make([]report, two)}, Sharing{Redis: true, Up: true, Replicas: two}, "all 2 replicas).\nA replica that ends takes the requests that it planned with it.\nRequests", true},
		{answers{reports: make([]report, 1), silent: []string{"b:1"}}, Sharing{Redis: true, Up: true, Replicas: two},
			"1 of 2 replicas; no answer from b:1).\nA replica that ends takes the requests that it planned with it.\nRequests", false},
		{answers{reports: make([]report, 1), silent: []string{"b:1"}, noRedis: true}, Sharing{Redis: true, Up: true, Replicas: two},
			"1 of 2 replicas: Redis does not answer).\nA replica that ends takes the requests that it planned with it.\nRequests", false},
		{answers{reports: make([]report, 1), gone: gone[:1]}, Sharing{Redis: true, Up: true, Replicas: 1, Configured: two},
			"1 of 2 replicas).\nA replica that ends takes the requests that it planned with it, as did c:1.\nRequests", false},
		{answers{reports: make([]report, two), gone: gone}, Sharing{Redis: true, Up: true, Replicas: two},
			"all 2 replicas).\nA replica that ends takes the requests that it planned with it, as did c:1, d:1.\nRequests", true},
		{answers{reports: make([]report, two), gone: gone[:1], restarted: gone[1:]}, Sharing{Redis: true, Up: true, Replicas: two},
			"all 2 replicas).\nA replica that ends takes the requests that it planned with it, as did c:1, d:1 before it was started again.\nRequests", true},
	} {
		f := Feed{source: Source{Sharing: func() Sharing { return c.sharing }}}
		asked := f.asked(&c.got)
		require.Contains(t, asked.missing(), "(asked: "+c.asked)
		require.Equal(t, c.all, asked.all, c.asked)
	}
}

// The header says whose part is shown.
func TestScope(t *testing.T) {
	for want, s := range map[string]Status{
		"this replica":         {Replicas: make([]Replica, 1)},
		"this replica, 1 of 3": {Replicas: make([]Replica, 1), Sharing: Sharing{Replicas: 3}},
		"the only replica":     {Replicas: make([]Replica, 1), Sharing: Sharing{Redis: true, Up: true, Replicas: 1}},
		"all 2 replicas":       {Replicas: make([]Replica, 2), Sharing: Sharing{Redis: true, Up: true, Replicas: 2}},
		"1 of 2 replicas":      {Replicas: make([]Replica, 1), Sharing: Sharing{Redis: true, Up: true, Replicas: 1, Configured: 2}},
		"this replica, 1 of 2": {Replicas: make([]Replica, 1), Sharing: Sharing{Redis: true, Replicas: 1, Configured: 2}},
		"this replica, 1 of 4": {Replicas: make([]Replica, 1), Sharing: Sharing{Redis: true, Up: true, Replicas: 3, Configured: 4}},
		"2 of 4 replicas":      {Replicas: make([]Replica, 2), Silent: []string{"c"}, Sharing: Sharing{Redis: true, Up: true, Replicas: 3, Configured: 4}},
		"2 of 3 replicas":      {Replicas: make([]Replica, 2), Silent: []string{"c"}},
	} {
		require.Equal(t, want, scopeOf(&s))
	}
	died := Status{Replicas: make([]Replica, 1), Gone: make([]operator.Gone, 1), Sharing: Sharing{Redis: true, Up: true, Replicas: 2}}
	require.Equal(t, "1 of 2 replicas", scopeOf(&died), "it was asked, and its lease has not ended")
}
