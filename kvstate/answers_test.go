package kvstate

import (
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tandem/kvstate/lengths"
	"tandem/kvstate/speed"
)

// writer is a decode engine whose steps take slow times as long as modelled.
type writer struct {
	slow    float64
	running int64
	written AnswerCounters
}

// look makes an engine write for two seconds and report it.
func (w *writer) look(s *State, e *Endpoint, at time.Time) {
	const kvTokens, usage = 100_000, .5
	step := w.slow * (DecodeStep + DecodeAnswer*float64(w.running) + DecodeToken*kvTokens*usage)
	gaps := math.Floor(2/step) * float64(w.running)
	w.written.Gaps += int64(gaps)
	w.written.GapTime += Seconds(gaps * step)
	w.written.Answers += w.running
	w.written.Tokens += w.running * 500
	s.Observe(e, Signals{Running: w.running, Waiting: 0, KVUsage: usage, KVTokens: kvTokens, At: at, Answers: w.written})
}

// The pace of an engine that was started again is not that of the process before.
func TestARestartedEngineHasNoPaceOfItsOwn(t *testing.T) {
	now := time.Unix(1e9, 0)
	s := New(Options{Now: func() time.Time { return now }})
	s.SetPool(PoolSpec{Name: "chat", Models: []string{"*"}}, decoders("a", "b"))
	p := s.Pool("chat")
	engines := map[string]*writer{"a": {slow: 1, running: 4}, "b": {slow: 8, running: 4}}
	step := func(name string) float64 {
		var v View
		s.View(p, nil, &v)
		for _, c := range v.Endpoints {
			if c.Endpoint.Addr == name {
				return c.Step
			}
		}
		return 0
	}
	for range 10 {
		now = now.Add(2 * time.Second)
		for addr, w := range engines {
			w.look(s, p.Endpoint(addr), now)
		}
	}
	slow := step("b")
	require.Greater(t, slow, 4*step("a"))
	now = now.Add(2 * time.Second)
	s.Observe(p.Endpoint("b"), Signals{Running: 0, Waiting: 0, KVUsage: 0, KVTokens: 100_000, At: now})
	require.Less(t, step("b"), slow/2, "it has the fleet's")
}

// The first answers of an engine count, if it was scraped before; what it generated before its first scrape does not.
func TestFirstAnswersCount(t *testing.T) {
	now := time.Unix(1e9, 0)
	s := New(Options{Now: func() time.Time { return now }})
	s.SetPool(PoolSpec{Name: "chat", Models: []string{"*"}}, decoders("fresh", "old"))
	p := s.Pool("chat")
	report := func(addr string, answers int64) {
		now = now.Add(2 * time.Second)
		s.Observe(p.Endpoint(addr), Signals{Running: 0, Waiting: 0, KVUsage: 0, KVTokens: 1e6, At: now,
			Answers: AnswerCounters{Answers: answers, Tokens: 16 * answers}})
	}
	learned := func() float64 {
		var v View
		s.View(p, nil, &v)
		return v.Load.Answer
	}
	report("old", 1000)
	require.Zero(t, learned())
	report("fresh", 0)
	report("fresh", lengths.Needed)
	require.InDelta(t, 16, learned(), 1e-9)
}

// What Envoy says of each answer teaches as well as what an engine counts, and as soon: where both were to be had, the
// pace is right no later than one answer after the second scrape, and so is the length of answers. An engine that counts
// nothing is learned of nothing else.
func TestEnvoyTeachesWhatEnginesDoNotCount(t *testing.T) {
	const tokens, kv = 500, 50_000
	for _, slow := range []float64{.25, .5, 1, 2, 4} {
		for _, running := range []int64{1, 4, 12} {
			t.Run(fmt.Sprint(slow, " times, ", running, " answers"), func(t *testing.T) {
				step := slow * (DecodeStep + DecodeAnswer*float64(running) + DecodeToken*kv)
				answer := Seconds(tokens * step)
				learned := func(counts bool) (pace, length time.Duration) {
					began := time.Unix(1e9, 0)
					now := began
					s := New(Options{Now: func() time.Time { return now }})
					s.SetPool(PoolSpec{Name: "chat", Models: []string{"*"}}, decoders("d"))
					p := s.Pool("chat")
					d := p.Endpoint("d")
					for range running - 1 { // that run beside the one that ends
						s.Bookings.Reserve(d, Booking{For: RoleDecode, PromptTokens: kv / running})
					}
					w := &writer{slow: slow, running: running}
					scraped, ends := now, int64(0)
					for now.Sub(began) < time.Hour {
						var v View
						s.View(p, nil, &v)
						if pace == 0 && math.Abs(v.Endpoints[0].Step-slow) < .15*slow && d.state.steps.Load() != nil {
							pace = now.Sub(began)
						}
						if length == 0 && v.Load.Answer > 0 {
							require.InEpsilon(t, tokens, v.Load.Answer, .01)
							length = now.Sub(began)
						}
						if pace > 0 && length > 0 {
							break
						}
						if now = now.Add(100 * time.Millisecond); counts {
							if now.Sub(scraped) >= 2*time.Second {
								w.look(s, d, now)
								// of the answers that it writes at a time, one ends after another
								w.written.Answers = int64(now.Sub(began)) * running / int64(answer)
								w.written.Tokens, scraped = w.written.Answers*tokens, now
							}
							continue
						}
						for ; ends < int64(now.Sub(began))*running/int64(answer); ends++ {
							Answered(d, "m", kv/running, tokens, Seconds((tokens-1)*step), now)
						}
					}
					require.Equal(t, !counts, AnswerTokens(p, "m") > 0)
					require.Zero(t, AnswerTokens(p, "other"))
					return pace, length
				}
				countedPace, countedLength := learned(true)
				pace, length := learned(false)
				t.Logf("pace: counted %v, by Envoy %v; length: %v, %v", countedPace, pace, countedLength, length)
				require.Positive(t, pace)
				require.Positive(t, length)
				require.LessOrEqual(t, pace, countedPace+answer)
				require.LessOrEqual(t, length, countedLength+answer)
			})
		}
	}
}

// An engine's own counts are of all answers: what Envoy says of some of them does not count beside them, until nobody
// has heard of the engine for a while.
func TestAnEnginesOwnCountsComeFirst(t *testing.T) {
	now := time.Unix(1e9, 0)
	s := New(Options{Now: func() time.Time { return now }})
	s.SetPool(PoolSpec{Name: "chat", Models: []string{"*"}}, append(decoders("d"), EndpointSpec{Addr: "p", Role: RolePrefill}))
	p := s.Pool("chat")
	w := &writer{slow: 1, running: 4}
	for range 20 {
		now = now.Add(2 * time.Second)
		w.look(s, p.Endpoint("d"), now)
	}
	look := func() Candidate {
		var v View
		s.View(p, nil, &v)
		require.InEpsilon(t, 500, v.Load.Answer, .01)
		return v.Endpoints[0]
	}
	before := look().Step
	answered := func(n int) {
		for range n {
			Answered(p.Endpoint("d"), "m", 100, 500, time.Minute, now)
			Answered(p.Endpoint("p"), "m", 100, 1, 0, now)
			Answered(p.Endpoint("d"), "m", 100, 1<<40, time.Minute, now)
			Answered(p.Endpoint("d"), "m", 100, 0, time.Minute, now)
		}
	}
	answered(100)
	require.InDelta(t, before, look().Step, 0)
	require.InDelta(t, 500, AnswerTokens(p, "m"), 0)
	now = now.Add(signalsDead)
	answered(100)
	require.Greater(t, look().Step, 4*before, "a token in 120 ms")
}

// Reported times between two tokens are learned, whatever the initial assumption: within 15 % after a hundred answers
// each, and equal endpoints get equal values.
func TestDecodeSpeedIsLearned(t *testing.T) {
	for _, slow := range []float64{.25, .5, 1, 2, 4} {
		t.Run(fmt.Sprint(slow, " times"), func(t *testing.T) {
			now := time.Unix(1e9, 0)
			s := New(Options{Now: func() time.Time { return now }})
			s.SetPool(PoolSpec{Name: "chat", Models: []string{"*"}}, decoders("a", "b", "new"))
			p := s.Pool("chat")
			engines := map[string]*writer{"a": {slow: slow, running: 4}, "b": {slow: slow, running: 12}}
			for range 26 { // the first scrape has no predecessor
				now = now.Add(2 * time.Second)
				for addr, w := range engines {
					w.look(s, p.Endpoint(addr), now)
				}
			}
			var v View
			s.View(p, nil, &v)
			for _, c := range v.Endpoints {
				require.InEpsilon(t, slow, c.Step, .15, c.Endpoint.Addr)
			}
			require.InDelta(t, v.Endpoints[0].Step, v.Endpoints[1].Step, 1e-9, "equal engines")
			require.InEpsilon(t, 500, v.Load.Answer, .01)

			now = now.Add(speed.Kept + time.Second)
			s.View(p, nil, &v)
			require.InDelta(t, 1, v.Endpoints[0].Step, 1e-9, "what was seen is forgotten")
		})
	}
}

// A slower endpoint is distinguished from the others, and one scrape of an engine that stalled changes little.
func TestASlowDecoderDiffersFromItsPool(t *testing.T) {
	now := time.Unix(1e9, 0)
	s := New(Options{Now: func() time.Time { return now }})
	s.SetPool(PoolSpec{Name: "chat", Models: []string{"*"}}, decoders("a", "b", "slow"))
	p := s.Pool("chat")
	engines := map[string]*writer{"a": {slow: 1, running: 8}, "b": {slow: 1, running: 8}, "slow": {slow: 4, running: 8}}
	look := func() {
		now = now.Add(2 * time.Second)
		for addr, w := range engines {
			w.look(s, p.Endpoint(addr), now)
		}
	}
	for range 60 {
		look()
	}
	step := func(at int) float64 {
		var v View
		s.View(p, nil, &v)
		return v.Endpoints[at].Step
	}
	require.InEpsilon(t, 4, step(2), .15)
	require.Less(t, step(0), 2.0)
	before := step(0)
	engines["a"].written.GapTime += 8 * time.Minute
	look()
	require.InDelta(t, before, step(0), .4)
}

// Prompts that an endpoint computes while it decodes are not part of its decode steps.
func TestLocalPrefillDoesNotCountAsSlowDecode(t *testing.T) {
	now := time.Unix(1e9, 0)
	s := New(Options{Now: func() time.Time { return now }})
	s.SetPool(PoolSpec{Name: "chat", Models: []string{"*"}}, decoders("a"))
	p := s.Pool("chat")
	e, w := p.Endpoint("a"), &writer{slow: 2, running: 8} // half of its time goes into prompts
	for range 60 {
		now = now.Add(2 * time.Second)
		s.Bookings.Release(s.Bookings.Reserve(e, Booking{For: RoleBoth, Work: time.Second}))
		w.look(s, e, now)
	}
	var v View
	s.View(p, nil, &v)
	require.InDelta(t, 1, v.Endpoints[0].Step, .3)
}

// Nothing is learned from engines that restart or report too little, nor from those that only prefill.
func TestReportsThatAreNotLearned(t *testing.T) {
	now := time.Unix(1e9, 0)
	s := New(Options{Now: func() time.Time { return now }})
	s.SetPool(PoolSpec{Name: "chat", Models: []string{"*"}}, []EndpointSpec{{Addr: "d", Role: RoleDecode}, {Addr: "p", Role: RolePrefill}})
	p := s.Pool("chat")
	observe := func(addr string, w AnswerCounters) {
		now = now.Add(2 * time.Second)
		s.Observe(p.Endpoint(addr), Signals{Running: 1, At: now, Answers: w})
	}
	observe("d", AnswerCounters{Answers: 1000, Tokens: 1_000_000, Gaps: 1_000_000, GapTime: time.Hour})
	observe("d", AnswerCounters{Answers: 10, Tokens: 100, Gaps: 90, GapTime: time.Second}) // a new process
	observe("d", AnswerCounters{Answers: 29, Tokens: 200, Gaps: 90, GapTime: time.Second}) // too few answers, and no gap
	observe("p", AnswerCounters{Answers: 10, Tokens: 10, Gaps: 1, GapTime: time.Second})
	observe("p", AnswerCounters{Answers: 1000, Tokens: 1000, Gaps: 1001, GapTime: time.Hour})
	var v View
	s.View(p, nil, &v)
	require.Zero(t, v.Load.Answer)
	for _, c := range v.Endpoints {
		require.InDelta(t, 1, c.Step, 1e-9, c.Endpoint.Addr)
	}
}

// Requests and jobs are counted one after the other, here and at other replicas, so for a moment there are more jobs than
// requests; an answer that ends just then still counts.
func TestAnAnswerCountsWhileAJobHasNoRequest(t *testing.T) {
	for name, set := range map[string]func(e *Endpoint){
		"here": func(e *Endpoint) { e.state.queue.n.Store(1) },
		"elsewhere": func(e *Endpoint) {
			all := RemoteLoad{}
			all.Add(&Booked{Jobs: 1})
			e.SetRemoteLoad(all)
		},
		"many": func(e *Endpoint) { e.state.queue.n.Store(1 << 40) },
	} {
		t.Run(name, func(t *testing.T) {
			e := &Endpoint{EndpointSpec: EndpointSpec{Role: RoleBoth}, state: &endpointState{load: &workload{}}}
			set(e)
			Answered(e, "m", 10, 20, time.Second, time.Unix(1e9, 0))
			require.NotNil(t, e.state.steps.Load())
		})
	}
}
