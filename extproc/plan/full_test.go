package plan

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tandem/extproc/kvtransfer"
	"tandem/extproc/openai"
	"tandem/kvstate"
	"tandem/picker"
)

// If nobody can serve a request because endpoints are full, the client gets the status of the one that is free first, with
// its Retry-After, in words that name it. No request is blamed for it.
func TestFullEndpointsAnswer(t *testing.T) {
	const d1 = "decode d1 answers 503, tried again in "
	for name, tt := range map[string]struct {
		full   map[string]int // status by endpoint; they ask for 2 s, d2 for 5
		refuse func(p *Policy, pool *kvstate.Pool) error
		status int
		after  time.Duration
		code   string
		says   string
	}{
		"no decode endpoint": {
			full: map[string]int{"d1": 503, "d2": 503}, status: 503, code: "endpoint_full", after: 3 * time.Second, says: d1,
			refuse: func(p *Policy, pool *kvstate.Pool) error { return p.NoEndpoint(pool, picker.ErrFull) },
		},
		"429 is 429": {
			full: map[string]int{"d1": 429, "d2": 503}, status: 429, code: "endpoint_full", after: 3 * time.Second,
			says:   "decode d1 answers 429, tried again in ",
			refuse: func(p *Policy, pool *kvstate.Pool) error { return p.NoEndpoint(pool, picker.ErrFull) },
		},
		"the prefill endpoint": {
			full: map[string]int{"p1": 503, "d2": 503}, status: 503, code: "endpoint_full", after: 3 * time.Second,
			says:   "prefill p1 answers 503, tried again in ",
			refuse: func(p *Policy, pool *kvstate.Pool) error { return p.RefuseAlone(pool, &Attempt{}, "no_prefill") },
		},
		"a prefill that must not fail": {
			full: map[string]int{"p1": 503}, status: 503, code: "endpoint_full", after: 3 * time.Second,
			says: "prefill p1 answers 503, tried again in ",
			refuse: func(p *Policy, pool *kvstate.Pool) error {
				p.OnFailure = Fail
				return (&Attempt{}).Failed(p, pool, &kvtransfer.Ticket{Split: true, Cause: kvtransfer.CausePrefill})
			},
		},
		"no pair": {
			full: map[string]int{"d1": 503, "d2": 503}, status: 503, code: "endpoint_full", after: 3 * time.Second, says: d1,
			refuse: func(p *Policy, pool *kvstate.Pool) error { return p.RefusePair(pool, &Attempt{Why: "cheaper"}, limits) },
		},
		"attempts spent": {
			full: map[string]int{"d1": 503, "d2": 503}, status: 503, code: "endpoint_full", after: 3 * time.Second, says: d1,
			refuse: func(p *Policy, pool *kvstate.Pool) error {
				return p.RefusePair(pool, &Attempt{Alone: true, Why: "attempts_spent"}, limits)
			},
		},
		"a pair that failed": {
			status: 503, code: "no_endpoint", after: time.Second, says: "no pair of endpoints can take this request now",
			refuse: func(p *Policy, pool *kvstate.Pool) error { return p.RefusePair(pool, &Attempt{Why: "cheaper"}, limits) },
		},
		"the request's own": {
			full: map[string]int{"d1": 503, "d2": 503}, status: 400, code: "not_over_two_engines", says: "several_choices",
			refuse: func(p *Policy, pool *kvstate.Pool) error {
				return p.RefusePair(pool, &Attempt{Alone: true, Why: "several_choices"}, limits)
			},
		},
		"free again": {
			status: 503, code: "no_endpoint", after: time.Second, says: "no decode endpoint of pool chat can take this request now",
			refuse: func(p *Policy, pool *kvstate.Pool) error { return p.NoEndpoint(pool, picker.ErrFull) },
		},
	} {
		t.Run(name, func(t *testing.T) {
			state := kvstate.New(kvstate.Options{})
			state.SetPool(kvstate.PoolSpec{Name: "chat", Models: []string{"*"}}, []kvstate.EndpointSpec{
				{Name: "p1", Addr: "p1:1", Role: kvstate.RolePrefill},
				{Name: "d1", Addr: "d1:1", Role: kvstate.RoleDecode}, {Name: "d2", Addr: "d2:1", Role: kvstate.RoleDecode},
			})
			pool := state.Pool("chat")
			for name, status := range tt.full {
				after := 2500 * time.Millisecond
				if name == "d2" {
					after = 5 * time.Second
				}
				state.Health.MarkFull(pool.Endpoint(name+":1"), status, after)
			}
			p := splitting("nixl")
			p.Alone = AloneNever
			var e *openai.Error
			require.ErrorAs(t, tt.refuse(&p, pool), &e)
			require.Equal(t, tt.status, e.Status)
			require.Equal(t, tt.code, e.Code)
			require.Contains(t, e.Message, tt.says)
			require.Equal(t, tt.after, e.RetryAfter)
		})
	}
}

// A pair that failed a request: its P is not chosen as D either, if another P computes the prompt, and the other way
// round its D is excluded.
func TestPairFailed(t *testing.T) {
	a := Next(&kvtransfer.Ticket{Cause: kvtransfer.CauseDecode, Loads: true, Prefill: "b1", Decode: "b2", Excluded: []string{"b2"}})
	require.Equal(t, []string{"b2", "b1"}, a.avoided("b3"))
	require.Equal(t, []string{"b2"}, a.avoided("b1"), "it is P again")
	require.Equal(t, []string{"b2"}, a.Excluded)

	pair := picker.Choice{Prefill: 1, Decode: 2}
	r, v := asked(t, Attempt{PairFailed: [2]string{"p1:1", "d2:1"}, Excluded: []string{"d2:1"}}, hello)
	p := splitting("nixl")
	d, err := First(r, v, pair, &p)
	require.NoError(t, err)
	require.Equal(t, []string{"d2:1", "p1:1"}, d.Ticket.Excluded)
}

// All that choose endpoints ask for the same, in every pass.
func TestAsk(t *testing.T) {
	a := Attempt{PairFailed: [2]string{"p1", "d1"}, Excluded: []string{"d1", "d2", "d2"}}
	r, _ := asked(t, a, `{"model":"m","messages":[]}`)
	p := splitting("sglang")
	q := r.Ask(&p, 9, true)
	require.Equal(t, picker.Faults{
		Excluded: a.Excluded, Final: []string{"d2", "d2"}, FailedPair: a.PairFailed, Trial: true, MustPair: true,
	}, q.Faults)
	q = r.Ask(&p, 9, false)
	require.False(t, q.MustPair, "it is not split")
	streamed, _ := asked(t, Attempt{}, `{"model":"m","stream":true,"messages":[]}`)
	p = splitting("nixl")
	q = streamed.Ask(&p, 9, true)
	require.Equal(t, picker.Faults{}, q.Faults, "a stream cannot be repaired: it is no trial")
}
