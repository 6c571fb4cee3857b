package picker

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"tandem/kvstate"
)

// A model that all endpoints report is not selective; one that some of them lack is.
func TestChoosy(t *testing.T) {
	s := kvstate.New(kvstate.Options{})
	s.SetPool(kvstate.PoolSpec{Name: "chat", Models: []string{"*"}}, []kvstate.EndpointSpec{
		{Addr: "p", Role: kvstate.RolePrefill}, {Addr: "d1", Role: kvstate.RoleDecode}, {Addr: "d2", Role: kvstate.RoleDecode},
	})
	p := s.Pool("chat")
	pick := func() Choice {
		var v kvstate.View
		s.View(p, nil, &v)
		k := Picker{Policy: DefaultPolicy()}
		c, err := k.Pick(&Request{PromptTokens: 1000, Model: "tiny", Split: true}, &v)
		require.NoError(t, err)
		return c
	}
	c := pick()
	require.False(t, c.Selective || c.Named, "nobody was asked yet")
	for _, e := range p.Endpoints() {
		s.SetModels(e, []kvstate.Model{{ID: "tiny"}})
		c = pick()
		require.False(t, c.Selective, e.Addr)
		require.True(t, c.Named, "of one that comes it is not known")
	}
	s.SetModels(p.Endpoint("d2"), []kvstate.Model{{ID: "other"}})
	require.True(t, pick().Selective)
}

// An adapter has moved: what the endpoint that had it reported does not keep the request from the one that has it now.
func TestWhatAnswersOtherwiseDoesNotCount(t *testing.T) {
	s := kvstate.New(kvstate.Options{})
	s.SetPool(kvstate.PoolSpec{Name: "chat", Models: []string{"*"}}, []kvstate.EndpointSpec{
		{Addr: "d1", Role: kvstate.RoleDecode}, {Addr: "d2", Role: kvstate.RoleDecode},
	})
	p := s.Pool("chat")
	s.SetModels(p.Endpoint("d1"), []kvstate.Model{{ID: "tiny"}, {ID: "sql"}})
	s.SetModels(p.Endpoint("d2"), []kvstate.Model{{ID: "tiny"}})
	for lacks, want := range map[bool]string{false: "d1", true: "d2"} { // d1 has failed, or has answered 404
		var v kvstate.View
		s.View(p, nil, &v)
		k := Picker{Policy: DefaultPolicy()}
		c, err := k.Pick(&Request{PromptTokens: 1000, Model: "sql", Faults: Faults{Excluded: []string{"d1"}, LacksModel: lacks}}, &v)
		require.NoError(t, err)
		require.Equal(t, want, v.Endpoints[c.Decode].Endpoint.Addr)
	}
}

// An explanation tells a prompt that is too long for decode alone from one that comes to busy endpoints.
func TestExplainTooLong(t *testing.T) {
	s := kvstate.New(kvstate.Options{})
	s.SetPool(kvstate.PoolSpec{Name: "chat"}, []kvstate.EndpointSpec{
		{Addr: "d", Role: kvstate.RoleDecode}, {Addr: "p", Role: kvstate.RolePrefill}})
	p := s.Pool("chat")
	explain := func(tokens int64) Weighed {
		var v kvstate.View
		s.View(p, nil, &v)
		k := Picker{Policy: DefaultPolicy()}
		return k.Explain(&Request{PromptTokens: tokens, Split: true}, &v).Candidates[0]
	}
	for usage, want := range map[float64]struct{ busy, tooLong bool }{0: {true, true}, .9: {true, false}} {
		s.Observe(p.Endpoint("d"), kvstate.Signals{Waiting: 0, KVUsage: usage, KVTokens: 120_000, At: time.Now()})
		d := explain(100_000)
		require.Equal(t, want.busy, d.Busy, usage)
		require.Equal(t, want.tooLong, d.TooLong, usage)
		require.EqualValues(t, 120_000, d.KVTokens)
		require.False(t, explain(100).TooLong, usage)
	}
}

// An explanation tells which usable endpoints have failed or are stale.
func TestExplainState(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := kvstate.New(kvstate.Options{})
		s.SetPool(kvstate.PoolSpec{Name: "chat"}, []kvstate.EndpointSpec{
			{Addr: "d1", Role: kvstate.RoleDecode}, {Addr: "d2", Role: kvstate.RoleDecode},
			{Addr: "p1", Role: kvstate.RolePrefill}, {Addr: "p2", Role: kvstate.RolePrefill},
		})
		p := s.Pool("chat")
		s.Observe(p.Endpoint("p1"), kvstate.Signals{Running: 1, KVTokens: -1, At: time.Now()})
		time.Sleep(6 * time.Second)
		s.Observe(p.Endpoint("p2"), kvstate.Signals{Running: 1, KVTokens: -1, At: time.Now()})
		s.Health.MarkFailed(p.Endpoint("d1"))
		explain := func() map[string][2]string {
			var v kvstate.View
			s.View(p, nil, &v)
			k, out := Picker{Policy: DefaultPolicy()}, map[string][2]string{}
			for _, c := range k.Explain(&Request{PromptTokens: 1000, Split: true}, &v).Candidates {
				out[c.Endpoint] = [2]string{c.Out, c.State}
			}
			return out
		}
		want := map[string][2]string{"d1": {"failed", ""}, "d2": {}, "p1": {"", "stale"}, "p2": {}}
		require.Equal(t, want, explain())
		s.Health.MarkFailed(p.Endpoint("d2"))
		want["d1"], want["d2"] = [2]string{"", "failed"}, [2]string{"", "failed"}
		require.Equal(t, want, explain(), "all decode endpoints failed")
	})
}
