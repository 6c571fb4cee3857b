package extproc

import (
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	dto "github.com/prometheus/client_model/go"
	"github.com/stretchr/testify/require"

	"tandem/extproc/core"
	"tandem/kvstate"
)

// counts shows in a transcript what an operator would scrape: of counters and histograms what came since the last look, of gauges what they
// show if that is not 0 (of tandem_endpoint_up, if it is not 1). Labels stand without their names, in the order of these; of
// histograms there is how many and, as time stands still, the exact sum. ext_proc's own times have a test of their own.
func (p *player) counts() {
	families, err := p.s.registry.Gather()
	require.NoError(p.t, err)
	if p.counted == nil {
		p.counted = map[string][2]float64{}
	}
	for _, f := range families {
		if strings.HasPrefix(f.GetName(), "tandem_ext_proc_") {
			continue
		}
		for _, m := range f.GetMetric() {
			series := f.GetName() + p.labels(m)
			before := p.counted[series]
			switch f.GetType() {
			case dto.MetricType_GAUGE:
				if v := m.GetGauge().GetValue(); (f.GetName() == "tandem_endpoint_up") != (v != 0) {
					p.say("%s %v", series, v)
				}
			case dto.MetricType_COUNTER:
				now := m.GetCounter().GetValue()
				if p.counted[series] = [2]float64{now}; now != before[0] {
					p.say("%s %s", series, figure(now-before[0]))
				}
			case dto.MetricType_HISTOGRAM:
				n, sum := float64(m.GetHistogram().GetSampleCount()), m.GetHistogram().GetSampleSum()
				if p.counted[series] = [2]float64{n, sum}; n == before[0] {
					continue
				}
				if f.GetName() == "tandem_ticket_bytes" { // sealed at random: their size is, by some bytes
					p.say("%s %v of some bytes", series, n-before[0])
				} else {
					p.say("%s %v, in all %s", series, n-before[0], figure(sum-before[1]))
				}
			default:
				require.Fail(p.t, "a metric of another kind", "%v", f)
			}
		}
	}
}

// labelsOf are those of a series, endpoints by name.
func (p *player) labels(m *dto.Metric) string {
	var b strings.Builder
	for _, l := range m.GetLabel() {
		value := l.GetValue()
		if i := slices.IndexFunc(p.names, func(name string) bool { return addressOf(name) == value }); i >= 0 {
			value = p.names[i]
		}
		if value != "" {
			b.WriteString(" " + value)
		}
	}
	return b.String()
}

// figure is a number to the millionth.
func figure(v float64) string {
	return strings.TrimSuffix(strings.TrimRight(strconv.FormatFloat(v, 'f', 6, 64), "0"), ".")
}

// counted is what transcripts show with `counts`.
func (s *stand) counted(names ...string) string {
	p := &player{t: s.t, s: s, names: names}
	synctest.Wait()
	p.counts()
	return "\n" + p.out.String()
}

// Legs that run at once are two hops that are counted side by side: P's as its leg's filter sees it, D's as Envoy logs it.
func TestPairsAreCounted(t *testing.T) {
	for name, c := range map[string]struct {
		play func(s *stand)
		want string
	}{
		"both go well": {func(s *stand) {
			q, _ := pass1(s, "well")
			d, _ := q.decode(s)
			p := q.mirror(s)
			time.Sleep(100 * time.Millisecond)
			p.answer(200, goodPrefill)
			d.ended()
			q.firstByte = time.Since(q.started)
			time.Sleep(300 * time.Millisecond)
			s.log(q.entry(200, "via_upstream"))
		}, `
> tandem_decisions_total chat pair 1
> tandem_hop_duration_seconds p1 prefill chat ok 1, in all 0.1
> tandem_hop_duration_seconds d1 decode chat ok 1, in all 0.4
> tandem_hop_first_byte_seconds d1 decode chat 1, in all 0.1
> tandem_request_duration_seconds chat ok split 1, in all 0.4
> tandem_request_first_byte_seconds chat split 1, in all 0.1
`},
		"P fails": {func(s *stand) {
			q, _ := pass1(s, "fails")
			d, _ := q.decode(s)
			p := q.mirror(s)
			time.Sleep(100 * time.Millisecond)
			p.answer(500, "oops")
			d.redirected(q)
			q.pass()
			s.log(q.entry(503, "via_upstream"))
		}, `
> tandem_decisions_total chat pair 2
> tandem_hop_duration_seconds p1 prefill chat failed 1, in all 0.1
> tandem_hop_duration_seconds d1 decode chat failed 1, in all 0
> tandem_prefill_errors_total p1 chat 500 1
> tandem_replans_total prefill chat 1
> tandem_request_duration_seconds chat failed split 1, in all 0.1
`},
		"D fails": {func(s *stand) {
			q, _ := pass1(s, "decode")
			d, _ := q.decode(s)
			p := q.mirror(s)
			time.Sleep(100 * time.Millisecond)
			d.answer(500, "")
			d.redirected(q)
			p.receive()
			q.pass()
			s.log(q.entry(503, "via_upstream"))
		}, `
> tandem_decisions_total chat pair 2
> tandem_hop_duration_seconds p1 prefill chat client_gone 1, in all 0.6
> tandem_hop_duration_seconds d1 decode chat failed 2, in all 0.6
> tandem_replans_total decode chat 1
> tandem_request_duration_seconds chat failed split 1, in all 0.6
`},
		"D is full": {func(s *stand) {
			q, _ := pass1(s, "full")
			d, _ := q.decode(s)
			p := q.mirror(s)
			time.Sleep(100 * time.Millisecond)
			d.answer(503, "")
			d.redirected(q)
			p.receive()
			q.pass()
			s.log(q.entry(503, "via_upstream"))
		}, `
> tandem_decisions_total chat pair 1
> tandem_endpoint_full_total d1 chat 503 1
> tandem_hop_duration_seconds p1 prefill chat client_gone 1, in all 0.1
> tandem_hop_duration_seconds d1 decode chat failed 1, in all 0.1
> tandem_refusals_total endpoint_full 1
> tandem_replans_total decode chat 1
> tandem_request_duration_seconds chat failed split 1, in all 0.1
`},
		"P refuses": {func(s *stand) {
			q, _ := pass1(s, "refused")
			d, _ := q.decode(s)
			p := q.mirror(s)
			time.Sleep(100 * time.Millisecond)
			p.answer(400, "{}")
			d.receive()
			s.log(q.entry(400, "tandem_prefill_refused"))
		}, `
> tandem_decisions_total chat pair 1
> tandem_hop_duration_seconds p1 prefill chat refused 1, in all 0.1
> tandem_hop_duration_seconds d1 decode chat refused 1, in all 0.1
> tandem_prefill_errors_total p1 chat 400 1
> tandem_request_duration_seconds chat refused split 1, in all 0.1
`},
		"the client leaves": {func(s *stand) {
			q, _ := pass1(s, "leaves")
			d, _ := q.decode(s)
			p := q.mirror(s)
			time.Sleep(100 * time.Millisecond)
			d.cancel()
			p.receive()
			s.log(q.entry(0, "downstream_remote_disconnect"))
		}, `
> tandem_decisions_total chat pair 1
> tandem_hop_duration_seconds p1 prefill chat client_gone 1, in all 0.1
> tandem_hop_duration_seconds d1 decode chat client_gone 1, in all 0.1
> tandem_request_duration_seconds chat client_gone split 1, in all 0.1
`},
		"P's time is up": {func(s *stand) {
			q, _ := pass1(s, "time")
			d, _ := q.decode(s)
			p := q.mirror(s)
			d.redirected(q)
			p.receive()
			s.log(q.entry(0, "downstream_remote_disconnect"))
		}, `
> tandem_decisions_total chat pair 1
> tandem_endpoint_up p1 chat prefill 0
> tandem_hop_duration_seconds p1 prefill chat failed 1, in all 30
> tandem_prefill_errors_total p1 chat 504 1
> tandem_request_duration_seconds chat client_gone split 1, in all 30
`},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, []string{"p1", "d1"}, func(t *testing.T, s *stand) {
				c.play(s)
				require.Equal(t, c.want, s.counted("p1", "d1"))
			})
		})
	}
}

// A hand-over that nobody can fetch any more is counted by why, and by what came of having it fetched.
func TestStrandedHandOversAreCounted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStand(t, core.Options{})
		policy := splitting()
		policy.CleanupDecode = true
		s.pool("chat", policy, "p1", "d1")
		strand := func(id string) {
			q := s.newRequest("/v1/chat/completions", id, chatBody)
			q.pass()
			require.Equal(t, 307, q.prefillLeg(engineAnswer{status: 200, body: prefilled(params(2))}).status())
			q.follow()
			s.state.SetPool(s.state.Pool("chat").Spec, []kvstate.EndpointSpec{{Name: "p1", Addr: addressOf("p1"), Role: kvstate.RolePrefill}})
			s.log(q.entry(0, "downstream_remote_disconnect"))
			synctest.Wait()
		}
		strand("r1")
		require.InDelta(t, 1, s.count("tandem_cleanup_decodes_total", "chat", "no_endpoint"), 0)
		require.InDelta(t, 1, s.count("tandem_handovers_orphaned_total", "chat", addressOf("p1"), "client_gone"), 0)

		s.pool("chat", policy, "p1", "d1")
		q := s.newRequest("/v1/chat/completions", "r2", chatBody)
		q.pass()
		q.prefillLeg(engineAnswer{status: 200, body: prefilled(params(2))})
		q.follow()
		s.state.RetainPools(nil)
		require.NotZero(t, q.pass().status())
		require.InDelta(t, 1, s.count("tandem_handovers_orphaned_total", "chat", addressOf("p1"), "pool_gone"), 0)
		require.InDelta(t, 1, s.count("tandem_replans_total", "chat", "pool_gone"), 0)
		s.log(q.entry(503, ""))
		require.Zero(t, s.state.Bookings.Reservations())
	})
}

// Waiting for a client that takes its time to send, or for P, is no work of ours; each stream is counted by the filter that it came from.
func TestPhasesOfWorkAreTold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStand(t, core.Options{})
		s.pool("chat", splitting(), "p1", "d1")
		q := s.newRequest("/v1/chat/completions", "r1", chatBody)
		stream, rest := q.open(t.Context(), 0)
		synctest.Wait()
		time.Sleep(3 * time.Second)
		for _, m := range rest {
			require.NoError(t, stream.Send(m))
		}
		v := &verdict{set: map[string]string{}}
		v.takeStreamed(t, stream, true, false)
		require.NoError(t, stream.CloseSend())
		synctest.Wait()
		require.Equal(t, map[string]string{"main": "1, 3s"}, s.timed("tandem_ext_proc_duration_seconds"))
		for phase, took := range s.timed("tandem_ext_proc_phase_seconds") {
			if strings.HasPrefix(phase, "receive") {
				require.Regexp(t, ", 3s$", took)
			} else {
				require.Regexp(t, ", 0s$", took, phase)
			}
		}
		decisions := s.server.observer.Totals().Decisions
		require.Less(t, decisions.Quantile(.5), time.Millisecond)
		s.server.passes.Release(s.server.passes.Held("r1", 0))
	})
}
