package extproc

import (
	"context"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/types/known/durationpb"

	"tandem/extproc/core"
	"tandem/extproc/envoywire"
	"tandem/extproc/kvtransfer"
	"tandem/extproc/names"
	"tandem/extproc/pass"
	"tandem/extproc/reclaim"
	"tandem/kvstate"
)

// A client that leaves between the hops strands P's blocks. If the pool wants it, a decode endpoint fetches them:
// once, with parameters that nothing else can use after, and a prompt of which nobody sees the answer.
func TestCleanupDecode(t *testing.T) {
	for _, c := range []struct {
		name    string
		cleanup bool
		blocks  int // of the hand-over: many go by reference
		status  int
		result  string
	}{
		{"off", false, 2, 200, ""},
		{"on", true, 2, 200, "ok"},
		{"by reference", true, 200_000, 200, "ok"},
		{"the engine refuses", true, 2, 400, "failed"},
	} {
		t.Run(c.name, func(t *testing.T) {
			type call struct{ path, id, body string }
			calls := make(chan call, 4)
			engine := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				body, _ := io.ReadAll(r.Body)
				calls <- call{r.URL.Path, r.Header.Get(names.HeaderRequestID), string(body)}
				w.WriteHeader(c.status)
			}))
			defer engine.Close()

			s := newStand(t, core.Options{})
			policy := splitting()
			policy.CleanupDecode = c.cleanup
			s.pool("chat", policy)
			s.state.SetPool(kvstate.PoolSpec{Name: "chat", Models: []string{"*"}}, []kvstate.EndpointSpec{
				{Name: "p1", Addr: addressOf("p1"), Role: kvstate.RolePrefill},
				{Name: "d1", Addr: engine.Listener.Addr().String(), Role: kvstate.RoleDecode},
			})
			q := s.newRequest("/v1/chat/completions", "r1", `{"model":"m","messages":[{"role":"user","content":"hi"}]}`)
			q.goOn(q.pass())
			given := randomParams(c.blocks)
			q.prefillLeg(engineAnswer{status: 200, body: prefilled(given)})
			q.follow()
			hanging := s.ticket(q.headers[names.HeaderTicket], "r1")
			require.Equal(t, kvtransfer.HandOver, hanging.Stage)
			s.log(q.entry(0, "downstream_remote_disconnect"))

			require.Eventually(t, func() bool {
				return s.count("tandem_handovers_orphaned_total", "chat", addressOf("p1"), "client_gone") == 1
			}, 30*time.Second, time.Millisecond)
			if !c.cleanup {
				require.Empty(t, calls)
				require.True(t, s.state.HandOvers.Consume(hanging.ID), "left as it was")
				return
			}
			require.Eventually(t, func() bool {
				return s.count("tandem_cleanup_decodes_total", "chat", c.result) == 1
			}, 30*time.Second, time.Millisecond)
			got := <-calls
			require.Equal(t, "/v1/completions", got.path)
			require.Equal(t, "r1", got.id)
			require.Regexp(t, `^\{"prompt":"a","max_tokens":1,"cache_salt":"[A-Z2-7]{26}","kv_transfer_params":`, got.body)
			require.Contains(t, got.body, given)
			require.False(t, s.state.HandOvers.Consume(hanging.ID), "nothing else may use the parameters")
			require.Empty(t, calls)
		})
	}
}

// A hand-over that was sent is reclaimed if the access log shows that no decode endpoint can have got it, whatever
// became of the ticket; once; and never if one may have.
func TestHandOversThatNobodyGot(t *testing.T) {
	const gone = "downstream_remote_disconnect"
	for name, c := range map[string]struct {
		end    func(s *stand, q *request)
		reason string // "": it is not known to be stranded
		result string // "": there is no cleanup
	}{
		"the 307 was not followed": {func(s *stand, q *request) {
			e := q.entry(0, gone)
			e.CommonProperties.UpstreamRequestAttemptCount, e.CommonProperties.UpstreamWireBytesSent = 1, 500 // to the leg's listener
			s.log(e, e)
		}, "client_gone", "ok"},
		"pass 2 did not begin": {func(s *stand, q *request) { q.follow(); s.log(q.entry(0, gone)) }, "client_gone", "ok"},
		"pass 2's answer was not taken in": {func(s *stand, q *request) {
			q.follow()
			e := q.entry(0, gone)
			q.pass()
			s.log(e)
			s.log(e)
		}, "client_gone", "ok"},
		"no connection yet": {func(s *stand, q *request) {
			q.follow()
			q.pass()
			e := q.entry(0, gone)
			e.CommonProperties.UpstreamRequestAttemptCount = 1
			s.log(e)
		}, "client_gone", "ok"},
		"a connection": {func(s *stand, q *request) {
			q.follow()
			q.pass()
			e := q.entry(0, gone)
			e.CommonProperties.UpstreamRequestAttemptCount, e.CommonProperties.TimeToFirstUpstreamTxByte = 1, durationpb.New(time.Millisecond)
			s.log(e)
		}, "", ""},
		"bytes went out": {func(s *stand, q *request) {
			q.follow()
			q.pass()
			e := q.entry(0, gone)
			e.CommonProperties.UpstreamRequestAttemptCount, e.CommonProperties.UpstreamWireBytesSent = 1, 1
			s.log(e)
		}, "", ""},
		"a second try": {func(s *stand, q *request) {
			q.follow()
			q.pass()
			e := q.entry(0, gone)
			e.CommonProperties.UpstreamRequestAttemptCount = 2
			s.log(e)
		}, "", ""},
		"decode refused, replanned": {func(s *stand, q *request) {
			q.follow()
			q.pass()
			e := q.entry(0, "")
			e.CommonProperties.UpstreamRequestAttemptCount, e.CommonProperties.UpstreamCluster = 1, "tandem-pod-h2c"
			s.logAs(envoywire.LogNameFailed, e, e)
			q.replan()
		}, "decode_failed", "ok"},
		"the replan port refused": {func(s *stand, q *request) {
			q.follow()
			q.pass()
			e := q.entry(0, "")
			e.CommonProperties.UpstreamRequestAttemptCount, e.CommonProperties.UpstreamCluster = 2, "tandem-replan"
			s.logAs(envoywire.LogNameFailed, e)
			e.Response.ResponseCode.Value = 503
			s.log(e)
		}, "", ""},
		"prefill answered too late": {func(_ *stand, q *request) { q.replan() }, "replanned", "ok"},
		"no decode endpoint any more": {func(s *stand, q *request) {
			s.state.SetPool(kvstate.PoolSpec{Name: "chat", Models: []string{"*"}}, []kvstate.EndpointSpec{{Name: "p1", Addr: addressOf("p1"), Role: kvstate.RolePrefill}})
			q.follow()
			require.Equal(s.t, 503, q.pass().status())
			s.log(q.entry(503, "tandem_no_endpoint"))
		}, "no_decode", "no_endpoint"},
	} {
		t.Run(name, func(t *testing.T) {
			calls := make(chan string, 4)
			engine := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { calls <- r.Header.Get(names.HeaderRequestID) }))
			defer engine.Close()
			s := newStand(t, core.Options{})
			policy := splitting()
			policy.CleanupDecode = true
			s.pool("chat", policy)
			s.state.SetPool(kvstate.PoolSpec{Name: "chat", Models: []string{"*"}}, []kvstate.EndpointSpec{
				{Name: "p1", Addr: addressOf("p1"), Role: kvstate.RolePrefill},
				{Name: "d1", Addr: engine.Listener.Addr().String(), Role: kvstate.RoleDecode},
			})
			q := s.newRequest("/v1/chat/completions", "r1", chatBody)
			q.goOn(q.pass())
			q.prefillLeg(engineAnswer{status: 200, body: prefilled(params(2))})
			c.end(s, q)
			if c.result != "" {
				require.Eventually(t, func() bool { return s.count("tandem_cleanup_decodes_total", "chat", c.result) == 1 }, 30*time.Second, time.Millisecond)
			} else {
				require.Zero(t, s.count("tandem_cleanup_decodes_total"))
			}
			if c.reason != "" {
				require.InDelta(t, 1, s.count("tandem_handovers_orphaned_total", "chat", addressOf("p1"), c.reason), 0)
			} else {
				require.Zero(t, s.count("tandem_handovers_orphaned_total"))
			}
			if c.result == "ok" {
				require.Equal(t, "r1", <-calls)
			}
			require.Empty(t, calls)
			requireNoneRecorded(t, s)
		})
	}
}

// A second pass that is refused while its client leaves: nobody fetches what P keeps, which is counted once. A short
// answer of P's comes with the second pass.
func TestRefusedAndLeft(t *testing.T) {
	for name, inline := range map[string]bool{"by a ticket": false, "with the answer": true} {
		t.Run(name, func(t *testing.T) {
			s := newStand(t, core.Options{})
			s.pool("chat", splitting())
			s.state.SetPool(kvstate.PoolSpec{Name: "chat", Models: []string{"*"}}, []kvstate.EndpointSpec{
				{Name: "p1", Addr: addressOf("p1"), Role: kvstate.RolePrefill},
				{Name: "d1", Addr: addressOf("d1"), Role: kvstate.RoleDecode},
			})
			q := s.newRequest("/v1/chat/completions", "r1", chatBody)
			q.goOn(q.pass())
			if inline {
				q.carry(prefilled(params(2)))
			} else {
				q.prefillLeg(engineAnswer{status: 200, body: prefilled(params(2))})
			}
			q.follow()
			s.state.SetPool(kvstate.PoolSpec{Name: "chat", Models: []string{"*"}}, []kvstate.EndpointSpec{{Name: "p1", Addr: addressOf("p1"), Role: kvstate.RolePrefill}})
			require.Equal(t, 503, q.pass().status())
			s.log(q.entry(0, "downstream_remote_disconnect")) // with the ticket that Envoy has
			require.InDelta(t, 1, s.count("tandem_handovers_orphaned_total"), 0)
		})
	}
}

// requireNoneRecorded waits until no cleanup is under way and checks that no parameters are recorded.
func requireNoneRecorded(t *testing.T, s *stand) {
	t.Helper()
	requireIdle(t, s)
	recorded, _ := s.server.reclaim.Held()
	require.Zero(t, recorded)
}

// requireIdle waits until no cleanup is queued or under way.
func requireIdle(t *testing.T, s *stand) {
	t.Helper()
	require.Eventually(t, func() bool { _, queued := s.server.reclaim.Held(); return queued == 0 }, 30*time.Second, time.Millisecond)
}

// cleaners are replicas that know of each other only by the tickets' keys, with a pool that cleans up at a decode endpoint which tells calls.
func cleaners(t *testing.T, n int) (replicas []*stand, calls chan string) {
	t.Helper()
	keys, err := kvtransfer.GenerateKeys()
	require.NoError(t, err)
	calls = make(chan string, 16)
	engine := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { calls <- r.Header.Get(names.HeaderRequestID) }))
	t.Cleanup(engine.Close)
	for range n {
		s := newStand(t, core.Options{Settings: pass.Settings{Keys: keys}})
		policy := splitting()
		policy.CleanupDecode = true
		s.pool("chat", policy)
		s.state.SetPool(kvstate.PoolSpec{Name: "chat", Models: []string{"*"}}, []kvstate.EndpointSpec{
			{Name: "p1", Addr: addressOf("p1"), Role: kvstate.RolePrefill},
			{Name: "d1", Addr: engine.Listener.Addr().String(), Role: kvstate.RoleDecode},
		})
		replicas = append(replicas, s)
	}
	return replicas, calls
}

// settled waits until so many cleanups have ended, of all replicas, and checks that the endpoint saw no other.
func settled(t *testing.T, replicas []*stand, calls chan string, n int) {
	t.Helper()
	require.Eventually(t, func() bool {
		ok := 0.0
		for _, s := range replicas {
			ok += s.count("tandem_cleanup_decodes_total", "chat", "ok")
		}
		return int(ok) == n
	}, 30*time.Second, time.Millisecond)
	for _, s := range replicas {
		requireIdle(t, s)
	}
	require.Len(t, calls, n)
}

// Access log entries come by a stream of their own. One that is there before P's answer is noted is not forgotten.
func TestTheEndIsToldBeforeTheAnswer(t *testing.T) {
	r, calls := cleaners(t, 1)
	s := r[0]
	q := s.newRequest("/v1/chat/completions", "r1", chatBody)
	q.goOn(q.pass())
	s.log(q.entry(0, "downstream_remote_disconnect"))
	q.prefillLeg(engineAnswer{status: 200, body: prefilled(params(2))})
	settled(t, r, calls, 1)
	require.InDelta(t, 1, s.count("tandem_handovers_orphaned_total", "chat", addressOf("p1"), "client_gone"), 0)

	q = s.newRequest("/v1/chat/completions", "r2", chatBody)
	q.goOn(q.pass())
	late := *q
	q.replan()
	late.prefillLeg(engineAnswer{status: 200, body: prefilled(params(2))})
	settled(t, r, calls, 2)
	requireNoneRecorded(t, s)
	require.InDelta(t, 1, s.count("tandem_handovers_orphaned_total", "chat", addressOf("p1"), "replanned"), 0)
}

// Where the connection to a replica breaks Envoy asks another, so two may have had the same hand-over in hands. Both see the end; one cleans up.
func TestOneOfSeveralCleansUp(t *testing.T) {
	const gone = "downstream_remote_disconnect"
	for name, end := range map[string]func(a, b *request){
		"the answer was read twice, and not followed": func(a, b *request) {
			a.breaks = true
			a.prefillLeg(engineAnswer{status: 200, body: prefilled(params(2))})
			b.prefillLeg(engineAnswer{status: 200, body: prefilled(params(2))})
			e := a.entry(0, gone)
			a.s.log(e)
			b.s.log(e)
		},
		"the answer was read twice, and pass 2 did not begin": func(a, b *request) {
			a.s.server.passes.HandOverTTL = 5 * time.Second
			a.prefillLeg(engineAnswer{status: 200, body: prefilled(params(2))})
			b.s.server.passes.HandOverTTL = 6 * time.Second // as if it came later
			b.prefillLeg(engineAnswer{status: 200, body: prefilled(params(2))})
			b.follow()
			e := b.entry(0, gone)
			a.s.log(e)
			b.s.log(e)
		},
		"two decided": func(a, b *request) {
			a.prefillLeg(engineAnswer{status: 200, body: prefilled(params(2))})
			a.follow()
			b.headers = maps.Clone(a.headers)
			b.body = a.body
			a.pass()
			b.pass()
			e := b.entry(0, gone)
			a.s.log(e)
			b.s.log(e)
		},
		"two decided, and decode was not reached": func(a, b *request) {
			a.prefillLeg(engineAnswer{status: 200, body: prefilled(params(2))})
			a.follow()
			b.headers = maps.Clone(a.headers)
			b.body = a.body
			a.pass()
			b.pass()
			e := b.entry(0, "")
			e.CommonProperties.UpstreamRequestAttemptCount, e.CommonProperties.UpstreamCluster = 1, "tandem-pod"
			a.s.logAs(envoywire.LogNameFailed, e)
			b.s.logAs(envoywire.LogNameFailed, e)
		},
	} {
		t.Run(name, func(t *testing.T) {
			r, calls := cleaners(t, 2)
			a := r[0].newRequest("/v1/chat/completions", "r1", chatBody)
			a.goOn(a.pass())
			b := *a
			b.s = r[1]
			b.headers = maps.Clone(a.headers)
			end(a, &b)
			settled(t, r, calls, 1)
			if requireNoneRecorded(t, b.s); !a.breaks { // of what is not sure nothing is forgotten before its time
				requireNoneRecorded(t, a.s)
			}
		})
	}
}

// Where other replicas cannot be asked nobody cleans up.
func TestNoCleanupWithoutTheOthersWord(t *testing.T) {
	r, calls := cleaners(t, 1)
	s := r[0]
	s.state.Connect(silentReplicas{})
	q := s.newRequest("/v1/chat/completions", "r1", chatBody)
	q.goOn(q.pass())
	q.prefillLeg(engineAnswer{status: 200, body: prefilled(params(2))})
	s.log(q.entry(0, "downstream_remote_disconnect"))
	require.Eventually(t, func() bool {
		return s.count("tandem_cleanup_decodes_total", "chat", "unsure") == 1
	}, 30*time.Second, time.Millisecond)
	settled(t, r, calls, 0)
}

// A hand-over whose client left while P's answer waited is counted by the leg that read it, and not again at the request's end, in whatever
// order the two come.
func TestStrandedIsCountedOnce(t *testing.T) {
	for _, first := range []string{"leg", "log"} {
		t.Run(first, func(t *testing.T) {
			s := newStand(t, core.Options{})
			s.pool("chat", splitting(), "p1", "d1")
			q := s.newRequest("/v1/chat/completions", "r1", chatBody)
			q.goOn(q.pass())
			q.prefillLeg(engineAnswer{status: 200, body: prefilled(params(2))})
			next := s.ticket(q.taken, "r1")
			if first == "leg" {
				s.server.reclaim.Orphaned(next, "r1", reclaim.ClientGone) // as the leg does when Envoy has let go of it
			}
			s.log(q.entry(0, "downstream_remote_disconnect"))
			if first == "log" {
				s.server.reclaim.Orphaned(next, "r1", reclaim.ClientGone)
			}
			require.InDelta(t, 1, s.count("tandem_handovers_orphaned_total", "chat", addressOf("p1"), "client_gone"), 0)
		})
	}
}

// An answer of prefill's that breaks off names nothing that could be cleaned up, and is counted.
func TestAnswerCut(t *testing.T) {
	s := newStand(t, core.Options{})
	s.pool("chat", splitting(), "p1", "d1")
	q := s.newRequest("/v1/chat/completions", "r1", chatBody)
	q.goOn(q.pass())
	q.prefillLeg(engineAnswer{status: 200, body: prefilled(params(2)), piece: 20, cut: true})
	require.Eventually(t, func() bool {
		return s.count("tandem_handovers_orphaned_total", "chat", addressOf("p1"), "answer_cut") == 1
	}, 30*time.Second, time.Millisecond)
	s.log(q.entry(0, "downstream_remote_disconnect"))
	require.Zero(t, s.count("tandem_cleanup_decodes_total"))
	require.Zero(t, s.state.Bookings.Reservations())
}

// noClocks are engines whose side channels do not answer.
type noClocks struct{}

func (noClocks) Now(context.Context, string, string, int) (float64, bool) { return 0, false }

// KV that nobody will fetch takes room in P's memory until its lease ends, so that P is not given more than it can hold.
func TestWhatNobodyFetchesTakesRoom(t *testing.T) {
	const lease = 2 * time.Minute
	for name, c := range map[string]struct {
		clocks kvtransfer.Clocks
		end    func(s *stand, q *request)
		left   bool
	}{
		"D has answered": {end: func(s *stand, q *request) {
			q.follow()
			q.pass()
			s.log(q.entry(200, "via_upstream"))
		}},
		"D gets no parameters, for P's clock is not known": {noClocks{}, func(s *stand, q *request) {
			q.follow()
			q.pass()
			s.log(q.entry(200, "via_upstream"))
		}, true},
		"D died": {nil, func(s *stand, q *request) {
			q.follow()
			q.pass()
			require.Equal(s.t, 307, q.replan().Code)
			q.follow()
			q.pass()
			s.log(q.entry(503, ""))
		}, true},
		"the client left": {nil, func(s *stand, q *request) {
			s.server.reclaim.Orphaned(s.ticket(q.taken, "r1"), "r1", reclaim.ClientGone) // as the leg does when Envoy has let go of it
			s.log(q.entry(0, "downstream_remote_disconnect"))
		}, true},
		"the hand-over came too late": {nil, func(s *stand, q *request) {
			time.Sleep(time.Minute)
			q.follow()
			q.pass()
			s.log(q.entry(0, "downstream_remote_disconnect"))
		}, true},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newStand(t, core.Options{})
				dialect, err := kvtransfer.New(kvtransfer.Options{Name: "nixl", Lease: lease, Clocks: c.clocks})
				require.NoError(t, err)
				policy := splitting()
				policy.Dialect = dialect
				s.pool("chat", policy, "p1", "d1")
				p := s.state.Pool("chat").Endpoint(addressOf("p1"))
				q := s.newRequest("/v1/chat/completions", "r1", chatBody)
				q.goOn(q.pass())
				require.Equal(t, 307, q.prefillLeg(engineAnswer{status: 200, body: prefilled(params(2))}).status())
				c.end(s, q)
				synctest.Wait()
				require.Zero(t, s.state.Bookings.Reservations())
				require.Equal(t, c.left, p.Booked(time.Now()).Room.Held > 0)
				time.Sleep(lease)
				synctest.Wait()
				require.Zero(t, p.Booked(time.Now()).Room.Held)
			})
		})
	}
}
