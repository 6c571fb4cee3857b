package status

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"net/http"
	"net/http/httptest"
	"os"
	"regexp"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"tandem/extproc/telemetry"
	"tandem/kvstate"
	"tandem/status/words"
)

var update = flag.Bool("update", false, "rewrite testdata/status.txt")

// TestMain has the transcripts show the same time of day everywhere.
func TestMain(m *testing.M) {
	time.Local = time.UTC
	os.Exit(m.Run())
}

// fleet is a source with two pools and some requests.
func fleet(totals func() telemetry.Totals) Source {
	state := kvstate.New(kvstate.Options{})
	state.SetPool(kvstate.PoolSpec{Name: "chat", Models: []string{"*"}}, []kvstate.EndpointSpec{
		{Name: "p1", Addr: "10.0.1.1:8000", Role: kvstate.RolePrefill, Group: "rack-a"}, {Name: "d1", Addr: "10.0.2.1:8000", Role: kvstate.RoleDecode, Group: "rack-a"},
	})
	state.SetPool(kvstate.PoolSpec{Name: "small", Models: []string{"qwen"}}, []kvstate.EndpointSpec{{Name: "b\x1b[31m", Addr: "10.0.3.1:8000", Role: kvstate.RoleBoth}})
	chat := state.Pool("chat")
	state.Bookings.Reserve(chat.Endpoints()[0], kvstate.Booking{For: kvstate.RolePrefill, PromptTokens: 700})
	state.Routed(chat, chat.Endpoints()[0], []uint64{1, 2, 3})
	state.Health.MarkFailed(state.Pool("small").Endpoints()[0])
	now := time.Now()
	recent := []telemetry.Trace{
		{RequestID: "req-2", Pool: "chat", Route: "split", Prefill: "10.0.1.1:8000", Decode: "10.0.2.1:8000", PromptTokens: 100, CachedTokens: 25, PrefillTime: 12 * time.Millisecond, Foreseen: telemetry.Foreseen{ExpectedPrefill: 15 * time.Millisecond}, DecodeTime: 2 * time.Second, Status: 200, Started: now},
		{RequestID: "req-1", Pool: "chat", Route: "decode_alone", Reason: "no_prefill", Decode: "10.0.2.1:8000", PromptTokens: 50, CachedTokens: -1, Started: now.Add(-time.Second)},
		{RequestID: "req-0\x1b]0;", Pool: "chat", Route: "split", Prefill: "10.0.1.1:8000", Decode: "10.0.2.1:8000", PromptTokens: 100, CachedTokens: 50, Replans: 1, Status: 503, Started: now.Add(-time.Hour)},
	}
	return Source{Version: "v1", State: state, Totals: totals, Ready: func() bool { return true },
		Sharing: func() Sharing { return Sharing{Redis: true, Replicas: 2, KeysDiffer: 1} },
		Recent:  func(n int) []telemetry.Trace { return recent[:min(n, len(recent))] }}
}

func status(f *Feed, since int64) Status { return f.Status(context.Background(), View{Since: since}) }

func TestFeed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var mu sync.Mutex
		var totals telemetry.Totals
		f := NewFeed(fleet(func() telemetry.Totals { mu.Lock(); defer mu.Unlock(); return totals }))
		go f.Run(t.Context())
		synctest.Wait()
		for range 20 {
			mu.Lock()
			totals.Split += 10
			totals.OK += 8
			totals.FirstByte[40] += 8
			mu.Unlock()
			time.Sleep(time.Second)
			synctest.Wait()
		}
		s := status(f, 0)
		require.Len(t, s.Points, 20)
		require.Equal(t, s.Points[0].N+19, s.Points[19].N)
		require.InDelta(t, 10, s.Points[19].Split, 1e-9)
		require.InDelta(t, 10, s.Minute.Split, 1e-9)
		require.Positive(t, s.Minute.FirstByte99)
		require.Len(t, status(f, s.Points[17].N).Points, 2, "only what is new")
		require.Empty(t, status(f, s.Points[19].N).Points)
		require.Equal(t, []Flow{{"chat", "", "10.0.2.1:8000", 1}, {"chat", "10.0.1.1:8000", "10.0.2.1:8000", 1}}, s.Flow, "of the last minute")
		require.InDelta(t, 75./200, s.Pools[0].Endpoints[0].HitShare, 1e-9)

		time.Sleep(2 * keptPoints * time.Second)
		synctest.Wait()
		require.Len(t, status(f, 0).Points, keptPoints, "the history is bounded")
		require.Len(t, f.totals, keptTotals)
		require.Zero(t, status(f, 0).Minute.FirstByte99, "nothing in the last minute")
	})
}

func TestPrint(t *testing.T) {
	var totals telemetry.Totals
	var out bytes.Buffer
	synctest.Test(t, func(*testing.T) { // at a time of its own
		f := NewFeed(fleet(func() telemetry.Totals { return totals }))
		for i := range 45 {
			totals.OK += uint64(i % 9)
			totals.CachedTokens += 30
			totals.ComputedTokens += 90
			totals.Prefill[30]++
			time.Sleep(time.Second)
			f.sample()
		}
		s := status(f, 0)
		Print(&out, &s)
	})
	require.NotContains(t, out.String(), "\x1b", "names do not steer the terminal")
	if *update {
		require.NoError(t, os.WriteFile("testdata/status.txt", out.Bytes(), 0o600))
	}
	want, err := os.ReadFile("testdata/status.txt")
	require.NoError(t, err)
	require.Equal(t, string(want), out.String())
}

// A request whose end nobody reports is not shown as running forever.
func TestStatusOf(t *testing.T) {
	now := time.Now()
	require.Equal(t, "running", statusOf(&telemetry.Trace{Started: now.Add(-time.Minute)}, now))
	cut := telemetry.Trace{Status: 200}
	cut.Ended = telemetry.EndedCut
	require.Equal(t, "200, cut", statusOf(&cut, now))
	require.Contains(t, words.Paint("  200, cut  split\n"), "\x1b[31m")
	gone := telemetry.Trace{Started: now}
	gone.Ended = "client_gone"
	require.Equal(t, "client left", statusOf(&gone, now))
	require.Equal(t, "unknown", statusOf(&telemetry.Trace{Started: now.Add(-16 * time.Minute)}, now))
	require.Equal(t, "200", statusOf(&telemetry.Trace{Started: now.Add(-16 * time.Minute), Status: 200}, now))
	var out bytes.Buffer
	printDecided(&out, &telemetry.Trace{RequestID: "r", Started: now.Add(-16 * time.Minute)}, now)
	require.Contains(t, out.String(), "16m0s ago, its end is unknown.")
}

// A row tells why a request was not split, and how often it was planned.
func TestRoute(t *testing.T) {
	for want, r := range map[string]telemetry.Trace{
		"split":                                   {Route: "split"},
		"split, 2nd plan":                         {Route: "split", Replans: 1},
		"split, 3rd plan":                         {Route: "split", Replans: 2},
		"split, 4th plan":                         {Route: "split", Replans: 3},
		"split, 11th plan":                        {Route: "split", Replans: 10},
		"decode_alone (cheaper than two hops)":    {Route: "decode_alone", Reason: "cheaper"},
		"decode_alone (prefill_failed), 2nd plan": {Route: "decode_alone", Reason: "prefill_failed", Replans: 1},
	} {
		require.Equal(t, want, routeOf(&r))
	}
}

// Data-parallel ranks of one engine have different names, as configured and by address.
func TestRankNames(t *testing.T) {
	s := kvstate.New(kvstate.Options{})
	named := kvstate.EndpointSpec{Name: "engine:8000", Addr: "10.0.0.1:8000", Ranks: 2, Role: kvstate.RoleBoth}
	plain := kvstate.EndpointSpec{Addr: "10.0.0.2:8000", Ranks: 2, Role: kvstate.RoleBoth}
	s.SetPool(kvstate.PoolSpec{Name: "p"}, append(named.ByRank(), plain.ByRank()...))
	f := NewFeed(Source{State: s, Totals: func() telemetry.Totals { return telemetry.Totals{} }})
	var names []string
	for _, e := range f.pool(s.Pool("p")).Endpoints {
		names = append(names, e.Name)
	}
	require.Equal(t, []string{"engine:8000#0", "engine:8000#1", "10.0.0.2:8000#0", "10.0.0.2:8000#1"}, names)
}

func TestHandler(t *testing.T) {
	var totals telemetry.Totals
	h := Handler(NewFeed(fleet(func() telemetry.Totals { return totals })))
	get := func(path string) *httptest.ResponseRecorder {
		w := httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequest(http.MethodGet, path, nil))
		return w
	}
	var s Status
	require.NoError(t, json.Unmarshal(get("/status.json?since=nonsense").Body.Bytes(), &s))
	require.Len(t, s.Pools, 2)
	index := get("/")
	require.Equal(t, 200, index.Code)
	require.Contains(t, index.Header().Get("content-security-policy"), "default-src 'none'")
	for _, m := range regexp.MustCompile(`(?:src|href)="([^"]+)"`).FindAllStringSubmatch(index.Body.String(), -1) {
		if !strings.HasPrefix(m[1], "data:") && m[1] != "docs/" && m[1] != "metrics" { // TestPageInChromium asks for these
			require.Equal(t, 200, get("/"+m[1]).Code, m[1])
		}
	}
	require.Equal(t, 404, get("/nothing").Code)
	for query, want := range map[string]int{"": 200, "?n=": 200, "?n=5": 200, "?n=0": 400, "?n=-1": 400, "?n=x": 400, "?n=99999999999999999999": 400} {
		require.Equal(t, want, get("/debug/requests"+query).Code, query)
	}
	require.Len(t, strings.Split(get("/debug/requests?n=2").Body.String(), `"request_id"`), 1+2)
	one := get("/debug/requests?id=req-1")
	require.Equal(t, 200, one.Code)
	require.Equal(t, 1, strings.Count(one.Body.String(), `"request_id"`), one.Body)
	require.Equal(t, "this replica, 1 of 2: Redis does not answer", one.Header().Get(ScopeHeader))
	require.Equal(t, one.Header(), get("/debug/requests?n=2").Header())
	none := get("/debug/requests?id=req")
	require.Equal(t, 404, none.Code)
	require.Contains(t, none.Body.String(), "(asked: this replica, 1 of 2: Redis does not answer).\nA replica that ends takes the requests that it planned with it.\nRequests that")
}

// Nothing comes from elsewhere, and nothing that came with a request becomes markup.
func TestPageIsSelfContained(t *testing.T) {
	for _, file := range []string{"page/index.html", "page/page.js", "page/page.css"} {
		text, err := os.ReadFile(file)
		require.NoError(t, err)
		plain := strings.ReplaceAll(string(text), "http://www.w3.org/2000/svg", "")
		require.NotRegexp(t, `https?://|@import|url\(`, plain, file)
		require.NotRegexp(t, `innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(`, plain, file)
	}
}

// An endpoint whose engine fell silent is not shown as up.
func TestStates(t *testing.T) {
	s := kvstate.New(kvstate.Options{})
	s.SetPool(kvstate.PoolSpec{Name: "chat"}, []kvstate.EndpointSpec{{Addr: "10.0.0.1:1", Role: kvstate.RoleBoth}})
	e := s.Pool("chat").Endpoint("10.0.0.1:1")
	now := time.Now()
	require.Equal(t, "up", stateOf(e, now), "it never said anything")
	s.Observe(e, kvstate.Signals{Running: 1, Waiting: 0, KVUsage: .5, KVTokens: -1, At: now})
	require.Equal(t, "up", stateOf(e, now.Add(staleAfter)))
	require.Equal(t, "stale", stateOf(e, now.Add(staleAfter+time.Second)))
	_, err := s.SetOverride("chat", e.Addr, func(o *kvstate.Override) { o.Paused = true })
	require.NoError(t, err)
	require.Equal(t, "paused", stateOf(e, now))
	s.Health.MarkFailed(e)
	require.Equal(t, "out", stateOf(e, now))
}

// What an engine reported of its requests is not shown once it is out: they ended with it.
func TestReportOfAnEngineThatIsOut(t *testing.T) {
	s := kvstate.New(kvstate.Options{})
	s.SetPool(kvstate.PoolSpec{Name: "chat"}, []kvstate.EndpointSpec{{Addr: "10.0.0.1:1", Role: kvstate.RoleBoth}})
	e := s.Pool("chat").Endpoint("10.0.0.1:1")
	s.Observe(e, kvstate.Signals{Running: 2, Waiting: 0, KVUsage: .5, KVTokens: -1, At: time.Now()})
	f := NewFeed(Source{State: s, Ready: func() bool { return true }, Sharing: func() Sharing { return Sharing{} },
		Totals: func() telemetry.Totals { return telemetry.Totals{} }, Recent: func(int) []telemetry.Trace { return nil }})
	require.EqualValues(t, 2, status(f, 0).Pools[0].Endpoints[0].Running)
	s.Health.MarkFailed(e)
	require.EqualValues(t, -1, status(f, 0).Pools[0].Endpoints[0].Running)
}

// An endpoint that is back is up, though its engine's last report is from before it failed.
func TestStateAfterFailure(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := kvstate.New(kvstate.Options{})
		s.SetPool(kvstate.PoolSpec{Name: "chat"}, []kvstate.EndpointSpec{{Addr: "10.0.0.1:1", Role: kvstate.RoleBoth}})
		e := s.Pool("chat").Endpoint("10.0.0.1:1")
		s.Observe(e, kvstate.Signals{Running: 1, Waiting: 0, KVUsage: .5, KVTokens: -1, At: time.Now()})
		s.Health.MarkFailed(e)
		time.Sleep(time.Minute)
		require.Equal(t, "out", stateOf(e, time.Now()))
		s.Health.MarkHealthy(e)
		time.Sleep(staleAfter)
		require.Equal(t, "up", stateOf(e, time.Now()))
		time.Sleep(time.Millisecond)
		require.Equal(t, "stale", stateOf(e, time.Now()), "it came back without a word")
		s.Health.MarkFailed(e)
		require.Equal(t, "out", stateOf(e, time.Now()))
	})
}

// A prefill endpoint that pairs with no decode endpoint has a note in its row, whatever the states of others.
func TestUnpaired(t *testing.T) {
	s := kvstate.New(kvstate.Options{})
	s.SetPool(kvstate.PoolSpec{Name: "chat"}, []kvstate.EndpointSpec{
		{Name: "p1", Addr: "p1:1", Role: kvstate.RolePrefill, Group: "b"}, {Name: "p2", Addr: "p2:1", Role: kvstate.RolePrefill},
		{Name: "p3", Addr: "p3:1", Role: kvstate.RolePrefill, Engine: "2"}, {Name: "p4", Addr: "p4:1", Role: kvstate.RolePrefill},
		{Name: "d1", Addr: "d1:1", Role: kvstate.RoleDecode, Engine: "1"}, {Name: "d2", Addr: "d2:1", Role: kvstate.RoleDecode, Group: "c"},
	})
	f := NewFeed(Source{State: s, Totals: func() telemetry.Totals { return telemetry.Totals{} },
		Recent: func(int) []telemetry.Trace { return nil }, Ready: func() bool { return true }, Sharing: func() Sharing { return Sharing{} }})
	now := status(f, 0)
	require.Equal(t, []Notice{{Text: "chat: 2 prefill endpoints are never used: p3 (group none), p1 (group b). " +
		"No endpoint that decodes has the same group and fitting engines.", Doc: "howto/prefill-idles.md#prefill-endpoints-pair-with-nobody"}}, now.Attention)
	var out bytes.Buffer
	Print(&out, &now)
	notes := regexp.MustCompile(`(?m)^  (p\d|d\d).* never used: pairs with no decode endpoint$`).FindAllStringSubmatch(out.String(), -1)
	require.Len(t, notes, 2)
	require.Equal(t, []string{"p3", "p1"}, []string{notes[0][1], notes[1][1]})
}

// Prefill that works all the time is saturated, and no more a minute after there was less work.
func TestSaturated(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := kvstate.New(kvstate.Options{})
		s.SetPool(kvstate.PoolSpec{Name: "chat"}, []kvstate.EndpointSpec{
			{Addr: "p1:1", Role: kvstate.RolePrefill}, {Addr: "p2:1", Role: kvstate.RolePrefill}, {Addr: "d1:1", Role: kvstate.RoleDecode},
		})
		f := NewFeed(Source{State: s, Totals: func() telemetry.Totals { return telemetry.Totals{} },
			Recent: func(int) []telemetry.Trace { return nil }, Ready: func() bool { return true }, Sharing: func() Sharing { return Sharing{} }})
		run := func(seconds int, share float64) (most float64, notices []string) {
			for range seconds {
				for _, e := range s.Pool("chat").Endpoints()[:2] {
					s.Bookings.Release(s.Bookings.Reserve(e, kvstate.Booking{For: kvstate.RolePrefill, PromptTokens: 100, Uncached: 100, Work: time.Duration(share * float64(time.Second))}))
				}
				time.Sleep(time.Second)
				f.sample()
			}
			now := status(f, 0)
			for _, n := range now.Attention {
				notices = append(notices, n.Text)
			}
			return now.Pools[0].Busy, notices
		}
		busy, notices := run(120, .8)
		require.InDelta(t, .8, busy, .05)
		require.Empty(t, notices)
		busy, notices = run(120, 1.2)
		require.InDelta(t, 1, busy, .05)
		require.Equal(t, []string{"chat: prefill is saturated: in the last minute its endpoints were at times more than 90 % busy."}, notices)
		_, notices = run(30, .1)
		require.Len(t, notices, 1, "a pause does not hide it")
		_, notices = run(90, .1)
		require.Empty(t, notices)
	})
}

// The last minute is drawn whole: a burst 47 s ago is in it, and one before the minute is not.
func TestSpark(t *testing.T) {
	points := make([]Point, 100)
	points[10].OK, points[len(points)-48].OK, points[len(points)-1].OK = 100, 30, 1
	ok := func(p *Point) float64 { return p.OK }
	require.Equal(t, "▁▁▁▁▁▁█▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▂", spark(points, ok))
	require.Equal(t, "▁█", spark([]Point{{}, {OK: 1}, {OK: 2}}, ok), "a replica that has just started")
	require.Empty(t, spark(nil, ok))
}
