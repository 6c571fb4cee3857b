package kvstate

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tandem/kvstate/media"
)

// Nothing that is learned lasts for ever: who was slow once gets work again, though nothing new is seen of it until
// then. One test for each quantity; a pause of a KV pair that could not load is in package kvloads, of a full endpoint in
// backpressure_test.go, of a failed one in health checks.

// A decode engine that stood once, and is as fast as its peer, has its pace within two minutes of work that it does not
// get.
func TestAPaceComesBack(t *testing.T) {
	now := time.Unix(1e9, 0)
	s := New(Options{Now: func() time.Time { return now }})
	s.SetPool(PoolSpec{Name: "chat", Models: []string{"*"}}, decoders("a", "b"))
	p := s.Pool("chat")
	well, stood := &writer{slow: 1, running: 4}, &writer{slow: 1, running: 4}
	steps := func() (a, b float64) {
		var v View
		s.View(p, nil, &v)
		return v.Endpoints[0].Step, v.Endpoints[1].Step
	}
	for i := range 10 {
		now = now.Add(2 * time.Second)
		well.look(s, p.Endpoint("a"), now)
		if stood.slow = 1; i >= 5 { // a stall of some seconds
			stood.slow = 6
		}
		stood.look(s, p.Endpoint("b"), now)
	}
	a, b := steps()
	require.Greater(t, b, 1.25*a)
	for until := now.Add(2 * time.Minute); now.Before(until); { // b gets nothing
		now = now.Add(2 * time.Second)
		well.look(s, p.Endpoint("a"), now)
	}
	a, b = steps()
	require.InDelta(t, a, b, 1e-9, "it is chosen again")
	now = now.Add(2 * time.Second)
	stood.slow = 1
	stood.look(s, p.Endpoint("b"), now)
	a, b = steps()
	require.InDelta(t, a, b, 1e-9, "and it was no chance")
}

// An engine that is slow stays so: of the time it gets a small share of trials.
func TestASlowEngineGetsFewTrials(t *testing.T) {
	now := time.Unix(1e9, 0)
	s := New(Options{Now: func() time.Time { return now }})
	s.SetPool(PoolSpec{Name: "chat", Models: []string{"*"}}, decoders("a", "b"))
	p := s.Pool("chat")
	fast, slow := &writer{slow: 1, running: 4}, &writer{slow: 4, running: 4}
	trials, scrapes := 0, 0
	for until := now.Add(2 * time.Hour); now.Before(until); scrapes++ {
		now = now.Add(2 * time.Second)
		var v View
		s.View(p, nil, &v)
		fast.look(s, p.Endpoint("a"), now)
		if v.Endpoints[1].Step <= v.Endpoints[0].Step { // as cheap as the other one
			trials++
			slow.look(s, p.Endpoint("b"), now)
		}
	}
	t.Logf("%d of %d scrapes, %.1f %%", trials, scrapes, 100*float64(trials)/float64(scrapes))
	require.Positive(t, trials)
	require.Less(t, trials, scrapes/20)
}

// The same of prompts.
func TestASpeedComesBack(t *testing.T) {
	now := time.Unix(1e9, 0)
	s := New(Options{Now: func() time.Time { return now }})
	s.SetPool(PoolSpec{Name: "chat", Models: []string{"*"}}, pd(2, 0))
	p := s.Pool("chat")
	prefill := func(e *Endpoint, slow float64) {
		id := s.Bookings.Reserve(e, Booking{For: RolePrefill, PromptTokens: 1000, Uncached: 1000, Work: time.Second})
		now = now.Add(Seconds(slow))
		s.Bookings.Complete(id)
	}
	speeds := func() (a, b float64) {
		var v View
		s.View(p, nil, &v)
		return v.Endpoints[0].Speed, v.Endpoints[1].Speed
	}
	for range 20 {
		prefill(p.Endpoints()[0], 1)
		prefill(p.Endpoints()[1], 5)
	}
	a, b := speeds()
	require.Greater(t, b, 1.5*a)
	for range 240 {
		prefill(p.Endpoints()[0], 1)
	}
	a, b = speeds()
	require.InDelta(t, a, b, 1e-9)
}

// And of transfers: those of an endpoint, and those of a whole pool, which then splits nothing that could show otherwise.
func TestTransfersComeBack(t *testing.T) {
	m := newMover(t, decoders("a", "b")...)
	for range 60 {
		m.fetch("a", 20, 1000, TransferBandwidth)
		m.fetch("b", 20, 1000, TransferBandwidth/20)
	}
	moves, _ := m.view()
	require.Greater(t, moves[1], 2*moves[0])
	for range 100 { // 200 s
		m.fetch("a", 20, 1000, TransferBandwidth)
	}
	moves, _ = m.view()
	require.InDelta(t, moves[0], moves[1], 1e-9, "it is chosen again")

	all := newMover(t, decoders("a")...)
	for range 60 {
		all.fetch("a", 20, 1000, TransferBandwidth/20)
	}
	slow, _ := all.view()
	all.now = all.now.Add(8 * time.Minute)
	later, _ := all.view()
	require.Less(t, later[0]-1, (slow[0]-1)/3)
}

// Loads from CPU memory that were slow once are not avoided for ever.
func TestLoadsComeBack(t *testing.T) {
	at := time.Unix(1e9, 0)
	s := New(Options{Now: func() time.Time { return at }})
	s.SetPool(PoolSpec{Name: "p"}, []EndpointSpec{{Addr: "a", Role: RolePrefill}})
	p, h := s.Pool("p"), HostMemory{Bytes: 1 << 40}
	learned := func(after time.Duration, bytes int64, took time.Duration) float64 {
		at = at.Add(after)
		h.LoadedBytes, h.LoadTime = h.LoadedBytes+bytes, h.LoadTime+took
		g := UnknownSignals()
		g.Running, g.At, g.Host = 0, at, h
		s.Observe(p.Endpoint("a"), g)
		var v View
		s.View(p, nil, &v)
		return v.Load.LoadBandwidth
	}
	learned(time.Second, 1, time.Second)
	require.InDelta(t, 1e8, learned(time.Second, 10e9, 100*time.Second), 1e6, "it stood")
	require.InDelta(t, 1e8, learned(9*time.Minute, 0, 0), 1e6)
	require.Zero(t, learned(2*time.Minute, 0, 0), "forgotten")
	require.Greater(t, learned(time.Second, 10e9, time.Second), 5e8, "what is new counts for more")
}

// The time that a prefill may take is learned from those that ended in time, and from those that did not: a limit that is
// too short would cut every one off, and never learn it.
func TestATimeLimitComesBack(t *testing.T) {
	s := New(Options{})
	s.SetPool(PoolSpec{Name: "p"}, nil)
	p := s.Pool("p")
	for range 100 {
		p.ObservePrefill(1000, time.Second)
	}
	const perToken = 2 * time.Millisecond
	const needs = 6 * time.Second // for 1,000 tokens, from now on
	overdue := 0
	for ; p.PrefillTime(1000, perToken) < needs && overdue < 1000; overdue++ {
		p.ObservePrefill(1000, p.PrefillTime(1000, perToken))
	}
	require.Less(t, overdue, 50)
}

// How many tokens bytes of text and media have is learned from what P counts. Estimates that were so wrong that nothing is
// split any more come back while requests go elsewhere, and those of which P counts prompts do not change.
func TestSizesComeBack(t *testing.T) {
	now := time.Unix(1e9, 0)
	s := New(Options{Now: func() time.Time { return now }})
	s.SetPool(PoolSpec{Name: "p"}, decoders("a"))
	p, image := s.Pool("p"), media.Count{media.Image: 1}
	text, pictures := &PromptSize{Text: 64_000}, &PromptSize{Media: image}
	plan := func(count func()) {
		for range 6 * 60 { // an hour
			now = now.Add(10 * time.Second)
			var v View
			s.View(p, nil, &v)
			count()
		}
	}
	none := func() {}
	var v View
	s.View(p, nil, &v)
	for range 1000 { // as if each token had 16 bytes, an image 20 tokens; and one prompt of a token in each byte
		p.LearnPrompt("m", text, 4000)
		p.LearnPrompt("m", pictures, 20)
	}
	p.LearnPrompt("m", &PromptSize{Text: 1000}, 4000)
	s.View(p, nil, &v)
	require.InDelta(t, 4000, p.EstimateTokens("m", text), 100)
	require.Less(t, p.EstimateTokens("m", pictures), int64(50))
	require.Greater(t, v.Load.Densest, 3.)

	plan(func() { p.LearnPrompt("m", text, 4000) })
	require.InDelta(t, 4000, p.EstimateTokens("m", text), 100, "it is still counted")
	require.Greater(t, p.EstimateTokens("m", pictures), int64(700), "nobody counts them")
	plan(none)
	s.View(p, nil, &v)
	require.InDelta(t, 16_000, p.EstimateTokens("m", text), 1500, "as in the beginning")
	require.Greater(t, p.EstimateTokens("m", pictures), int64(1000))
	require.Less(t, v.Load.Densest, 1.)
	for range 10 {
		p.LearnPrompt("m", text, 8000)
	}
	require.InDelta(t, 8000, p.EstimateTokens("m", text), 500, "and it learns soon")

	p.LearnPrompt("m", pictures, 5000)
	now = now.Add(24 * time.Hour) // a pool without requests
	before := p.EstimateTokens("m", pictures)
	s.View(p, nil, &v)
	require.Equal(t, before, p.EstimateTokens("m", pictures))
}

// Lengths of answers are learned from all, wherever they went.
func TestLengthsComeBack(t *testing.T) {
	s := New(Options{})
	s.SetPool(PoolSpec{Name: "p"}, decoders("a"))
	p := s.Pool("p")
	for range 2000 {
		Answered(p.Endpoint("a"), "m", 10, 30_000, 0, time.Now())
	}
	for range 5000 {
		Answered(p.Endpoint("a"), "m", 10, 100, 0, time.Now())
	}
	require.Less(t, AnswerTokens(p, "m"), 3000.)
}

// An engine that began an answer anew is asked to continue others again, later or when it comes back.
func TestContinuingComesBack(t *testing.T) {
	now := time.Now()
	s := New(Options{})
	s.SetPool(PoolSpec{Name: "p"}, decoders("a"))
	e := s.Pool("p").Endpoint("a")
	require.True(t, e.Continues(now))
	require.True(t, e.DoesNotContinue(now))
	require.False(t, e.DoesNotContinue(now), "known")
	require.False(t, e.Continues(now))
	require.True(t, e.Continues(now.Add(ContinuesAgain+time.Second)))
	s.Health.MarkFailed(e)
	s.Health.MarkGood(e)
	require.True(t, e.Continues(now), "it may be another release")
}

// An engine whose core stands still is in the view as one that may go on, an endpoint that failed otherwise is not.
func TestStandingEndpointsMayGoOn(t *testing.T) {
	s := New(Options{})
	s.SetPool(PoolSpec{Name: "p"}, decoders("a", "b", "c"))
	p := s.Pool("p")
	s.Health.Mark(p.Endpoint("a"), true, CauseStill, "")
	s.Health.MarkFailed(p.Endpoint("b"))
	var v View
	s.View(p, nil, &v)
	require.True(t, v.Endpoints[0].Stands)
	require.False(t, v.Endpoints[0].Usable)
	require.False(t, v.Endpoints[1].Stands)
	require.False(t, v.Endpoints[2].Stands)
}
