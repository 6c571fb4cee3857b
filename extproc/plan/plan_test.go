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

var limits = Limits{SplitBodyBytes: 1000, MaxRedirects: 8}

func scanned(t *testing.T, api openai.API, body string) *openai.Request {
	t.Helper()
	r := &openai.Request{}
	require.NoError(t, r.Scan(api, []byte(body), openai.Limits{}))
	return r
}

func splitting(dialect string) Policy {
	return Policy{Dialect: kvtransfer.Named(dialect), Split: true}.WithDefaults()
}

// Why a request is not split, and the error for a body that is too long for the pool.
func TestMaySplit(t *testing.T) {
	const chat = `{"model":"m","messages":[]}`
	for name, tt := range map[string]struct {
		policy func(p *Policy)
		a      Attempt
		api    openai.API
		body   string
		bytes  int
		want   string
	}{
		"split":                  {},
		"no dialect":             {policy: func(p *Policy) { p.Dialect = kvtransfer.Dialect{} }, want: "no_kv_transfer"},
		"never":                  {policy: func(p *Policy) { p.Split = false }, want: "policy"},
		"long":                   {bytes: 1001, want: "body_too_long"},
		"alone already":          {a: Attempt{Alone: true, Why: "prefill_failed"}, want: "prefill_failed"},
		"decode stood still":     {a: Attempt{Outdated: true}, want: "standstill"},
		"it must not be alone":   {policy: func(p *Policy) { p.Alone = AloneNever }, a: Attempt{Outdated: true}},
		"one redirect is left":   {a: Attempt{Redirects: 6}, want: "redirects_spent"},
		"three prefills":         {a: Attempt{Prefills: 3}, want: "attempts_spent"},
		"a minute":               {a: Attempt{Prefills: 1, Started: time.Now().Add(-2 * time.Minute)}, want: "time_spent"},
		"a minute, first":        {a: Attempt{Started: time.Now().Add(-2 * time.Minute)}},
		"another API":            {policy: func(p *Policy) { p.Dialect = kvtransfer.Named("trtllm") }, api: openai.Responses, body: `{"model":"m","input":"a"}`, want: "api_not_spoken"},
		"the engine has the KV":  {api: openai.Responses, body: `{"model":"m","input":"a","store":true}`, want: "stored_response"},
		"several things at once": {policy: func(p *Policy) { p.Split = false }, bytes: 1001, want: "policy"},
	} {
		p := splitting("nixl")
		if tt.policy != nil {
			tt.policy(&p)
		}
		if tt.api == openai.PassThrough {
			tt.api, tt.body = openai.Chat, chat
		}
		if tt.a.Started.IsZero() {
			tt.a.Started = time.Now()
		}
		require.NoError(t, p.MaySplit(&tt.a, scanned(t, tt.api, tt.body), tt.bytes, limits), name)
		require.Equal(t, tt.want, tt.a.Why, name)
		require.Equal(t, tt.want != "", tt.a.Alone, name)
	}
	p := splitting("nixl")
	p.RefuseLong = true
	require.Error(t, p.MaySplit(&Attempt{}, scanned(t, openai.Chat, chat), 1001, limits))
}

func TestMayPair(t *testing.T) {
	for want, tt := range map[string]struct {
		a     Attempt
		split bool
		body  string
		bytes int
	}{
		"":                {split: true, body: `{"model":"m","messages":[]}`},
		"policy":          {body: `{"model":"m","messages":[]}`},
		"body_too_long":   {split: true, body: `{"model":"m","messages":[]}`, bytes: 1001},
		"redirects_spent": {split: true, body: `{"model":"m","messages":[]}`, a: Attempt{Redirects: 7}},
		"attempts_spent":  {split: true, body: `{"model":"m","messages":[]}`, a: Attempt{Prefills: 3}},
		"several_choices": {split: true, body: `{"model":"m","messages":[],"n":2}`},
		"as_before":       {split: true, body: `{"model":"m","messages":[],"n":2}`, a: Attempt{Alone: true, Why: "as_before"}},
	} {
		p := splitting("sglang")
		p.Split = tt.split
		require.NoError(t, p.MayPair(&tt.a, scanned(t, openai.Chat, tt.body), tt.bytes, limits))
		require.Equal(t, want, tt.a.Why)
	}
	state := kvstate.New(kvstate.Options{})
	state.SetPool(kvstate.PoolSpec{Name: "chat"}, nil)
	pool := state.Pool("chat")
	for why, status := range map[string]int{"body_too_long": 413, "prefill_failed": 503, "no_prefill": 503, "several_choices": 400} {
		var e *openai.Error
		require.ErrorAs(t, (&Policy{}).RefusePair(pool, &Attempt{Why: why}, limits), &e)
		require.Equal(t, status, e.Status, why)
	}
}

// A ticket that says what failed makes the next attempt, and the pool's onPrefillFailure decides about it.
func TestNextAttempt(t *testing.T) {
	failed := &kvtransfer.Ticket{Split: true, Cause: kvtransfer.CausePrefill, Redirects: 2, Prefills: 1, Excluded: []string{"p1"}, Prefill: "p1", Decode: "d1"}
	a := Next(failed)
	require.Equal(t, Attempt{Redirects: 2, Prefills: 1, Excluded: []string{"p1"}}, a)
	require.NoError(t, a.Failed(&Policy{}, nil, failed))
	require.False(t, a.Alone)
	require.NoError(t, a.Failed(&Policy{OnFailure: DecodeAlone}, nil, failed))
	require.Equal(t, "prefill_failed", a.Why)
	require.ErrorContains(t, a.Failed(&Policy{OnFailure: Fail}, nil, failed), "prefill of this request failed")

	decode := &kvtransfer.Ticket{Split: true, Cause: kvtransfer.CauseDecode, Loads: true, Prefill: "p1", Decode: "d1"}
	a = Next(decode)
	require.True(t, a.DecodeFailed)
	require.Equal(t, [2]string{"p1", "d1"}, a.PairFailed)
	require.NoError(t, a.Failed(&Policy{OnFailure: Fail}, nil, decode), "its prefill worked")

	stood := &kvtransfer.Ticket{Split: true, Cause: kvtransfer.CauseOutdated, Prefill: "p1", Decode: "d1"}
	a = Next(stood)
	require.Equal(t, Attempt{DecodeFailed: true, Outdated: true}, a)
	require.NoError(t, a.Failed(&Policy{OnFailure: Fail}, nil, stood), "its prefill worked")
}

func TestExhausted(t *testing.T) {
	p := Policy{}.WithDefaults()
	now := time.Now()
	require.NoError(t, (&Attempt{Started: now, Excluded: []string{"d1"}}).Exhausted(&p, "d2"))
	require.NoError(t, (&Attempt{Started: now, Excluded: []string{"d1", "d2"}}).Exhausted(&p, "d1"), "a second time")
	require.Error(t, (&Attempt{Started: now, Excluded: []string{"d1", "d2", "d1"}}).Exhausted(&p, "d2"), "not another one a second time")
	require.Error(t, (&Attempt{Started: now.Add(-time.Hour), DecodeFailed: true}).Exhausted(&p, "d1"))
	require.NoError(t, (&Attempt{Started: now.Add(-time.Hour)}).Exhausted(&p, "d1"), "decode was not tried yet")
	require.Equal(t, []string{"d1", "d1"}, (&Attempt{Excluded: []string{"d1", "d2", "d1"}}).Retries())
}

func TestRefuseAlone(t *testing.T) {
	state := kvstate.New(kvstate.Options{})
	state.SetPool(kvstate.PoolSpec{Name: "chat", Models: []string{"*"}}, []kvstate.EndpointSpec{{Name: "d1", Addr: "10.0.0.1:1", Role: kvstate.RoleDecode}})
	pool := state.Pool("chat")
	for _, tt := range []struct {
		policy Policy
		why    string
		code   string // "": it is decoded alone
	}{
		{Policy{}, "no_prefill", ""},
		{Policy{OnFailure: Fail}, "no_prefill", "no_prefill"},
		{Policy{Alone: AloneNever}, "prefill_failed", "prefill_failed"},
		{Policy{Alone: AloneNever}, "api_not_spoken", ""},
		{Policy{Alone: AloneNever}, "cheaper", "no_prefill"}, // the pool has none
		{Policy{Alone: AloneNever, Place: picker.Policy{Model: picker.DefaultPolicy().Model, Split: picker.SplitAuto}}, "cheaper", ""},
	} {
		err := tt.policy.RefuseAlone(pool, &Attempt{}, tt.why)
		if tt.code == "" {
			require.NoError(t, err, tt.why)
			continue
		}
		var e *openai.Error
		require.ErrorAs(t, err, &e)
		require.Equal(t, tt.code, e.Code)
	}
	refusal := func() string { return (&Policy{}).NoEndpoint(pool, picker.ErrNoEndpoint).Error() }
	require.Contains(t, refusal(), "no decode endpoint of pool chat can take this request now, of 1 in its endpoints")
	_, err := state.SetOverride("chat", "d1", func(o *kvstate.Override) { o.Paused = true })
	require.NoError(t, err)
	require.Contains(t, refusal(), "no decode endpoint of pool chat takes requests: the only one of its endpoints is paused or drained by the operator")
	require.ErrorContains(t, (&Policy{}).RefusePair(pool, &Attempt{Why: "no_prefill"}, limits), "no decode endpoint of pool chat takes requests")
}

func TestTimes(t *testing.T) {
	p := Policy{StreamStart: time.Minute, PrefillTimeout: time.Second, EncodeTimeout: 2 * time.Second}
	require.Equal(t, 61*time.Second, p.AnswerStart(true, time.Second))
	require.Zero(t, p.AnswerStart(false, time.Second), "no headers until it is complete")
	limit := func(stage kvtransfer.Stage, stream bool) time.Duration {
		return p.LegLimit(&kvtransfer.Ticket{Stage: stage, Stream: stream})
	}
	require.Equal(t, time.Minute, limit(kvtransfer.DecodeLeg, true))
	require.Zero(t, limit(kvtransfer.DecodeLeg, false))
	p.WholeAnswer = 30 * time.Second
	require.Equal(t, 31*time.Second, p.AnswerStart(false, time.Second))
	require.Equal(t, 30*time.Second, limit(kvtransfer.DecodeLeg, false))
	require.Equal(t, 2*time.Second, limit(kvtransfer.EncodeLeg, false))
	require.Equal(t, time.Second, limit(kvtransfer.PrefillLeg, false))
}

// The client's error says in a sentence why no endpoint takes requests.
func TestOutOfWork(t *testing.T) {
	state := kvstate.New(kvstate.Options{})
	specs := []kvstate.EndpointSpec{{Addr: "d1:1", Role: kvstate.RoleDecode}, {Addr: "d2:1", Role: kvstate.RoleDecode}, {Addr: "d3:1", Role: kvstate.RoleDecode}}
	state.SetPool(kvstate.PoolSpec{Name: "chat", Models: []string{"*"}}, specs)
	pool := state.Pool("chat")
	for _, e := range specs {
		_, err := state.SetOverride("chat", e.Addr, func(o *kvstate.Override) { o.Paused = true })
		require.NoError(t, err)
	}
	refusal := func() string { return (&Policy{}).NoEndpoint(pool, picker.ErrNoEndpoint).Error() }
	require.Contains(t, refusal(), "takes requests: all 3 of its endpoints are paused or drained by the operator")
	state.Health.MarkFailed(pool.Endpoints()[0])
	require.Contains(t, refusal(), "takes requests: of the 3 of its endpoints, 2 are paused or drained by the operator, 1 has failed")
}

// Who decides about a request that prefill has refused: what P was sent differs from the client's body.
func TestDecodeDecides(t *testing.T) {
	for status, want := range map[int][2]bool{ // of any request, and of one whose answer is to have a form
		400: {true, true}, 422: {true, true}, 501: {true, true}, 500: {false, true},
		401: {false, false}, 403: {false, false}, 404: {false, false}, 413: {false, false}, 429: {false, false},
		502: {false, false}, 503: {false, false},
	} {
		p := Policy{}
		require.Equal(t, want, [2]bool{p.DecodeDecides(status, false), p.DecodeDecides(status, true)}, status)
		for _, p := range []Policy{{Alone: AloneNever}, {OnFailure: Fail}} {
			require.False(t, p.DecodeDecides(status, true), "who must not decode alone leaves P's refusal to the client")
		}
	}
	refused := &kvtransfer.Ticket{Split: true, Cause: kvtransfer.CauseRefused, Prefill: "p1", Decode: "d1"}
	a := Next(refused)
	require.NoError(t, a.Failed(&Policy{}, nil, refused))
	require.Equal(t, Attempt{Alone: true, Why: "prefill_refused"}, a, "nobody is excluded")
}

// A 404 is final when those that are left have given it.
func TestUnserved(t *testing.T) {
	d1, d2 := &kvstate.Endpoint{EndpointSpec: kvstate.EndpointSpec{Addr: "d1"}}, &kvstate.Endpoint{EndpointSpec: kvstate.EndpointSpec{Addr: "d2"}}
	a := Next(&kvtransfer.Ticket{Cause: kvtransfer.CauseModel, Excluded: []string{"d1"}})
	require.NoError(t, a.Unserved(&Policy{}, d2, "m"))
	require.False(t, a.Last, "d2 may have it")
	require.NoError(t, a.Unserved(&Policy{}, d1, "m"))
	require.True(t, a.Last && a.Alone, "d1 says it in its own words")
	a = Next(&kvtransfer.Ticket{Cause: kvtransfer.CauseModel, Excluded: []string{"d1"}})
	require.ErrorContains(t, a.Unserved(&Policy{Alone: AloneNever}, d1, "m"), "404 model_not_found")
	a = Next(&kvtransfer.Ticket{Cause: kvtransfer.CauseDecode, Excluded: []string{"d1"}})
	require.NoError(t, a.Unserved(&Policy{}, d1, "m"))
	require.False(t, a.Last, "it was no 404")
}
