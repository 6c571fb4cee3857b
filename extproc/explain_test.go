package extproc

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/structpb"

	"tandem/extproc/core"
	"tandem/extproc/kvtransfer"
	"tandem/extproc/names"
	"tandem/extproc/pass"
	"tandem/extproc/plan"
	"tandem/extproc/telemetry"
	"tandem/kvstate"
	"tandem/picker"
)

// What the server would decide can be asked without a request, and books nothing.
func TestExplain(t *testing.T) {
	state := kvstate.New(kvstate.Options{})
	state.SetPool(kvstate.PoolSpec{Name: "chat", Models: []string{"*"}}, []kvstate.EndpointSpec{
		{Name: "p1", Addr: "10.0.1.1:8000", Role: kvstate.RolePrefill},
		{Name: "p2", Addr: "10.0.1.2:8000", Role: kvstate.RolePrefill},
		{Name: "d1", Addr: "10.0.2.1:8000", Role: kvstate.RoleDecode},
	})
	state.Health.MarkFailed(state.Pool("chat").Endpoint("10.0.1.2:8000"))
	var log bytes.Buffer
	s := core.New(core.Options{State: state, Settings: pass.Settings{Pools: map[string]pass.Policy{"chat": {Policy: plan.Policy{Split: true}}}}, Log: slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug}))}, nil)

	e, err := s.Explain("", 4000)
	require.NoError(t, err)
	require.Empty(t, e.Prefill, "a pool without a dialect splits nothing")
	require.Equal(t, "10.0.2.1:8000", e.Decode)
	require.Len(t, e.Candidates, 3)
	require.Equal(t, "failed", e.Candidates[1].Out)
	require.InDelta(t, .266, e.Candidates[0].Prefill.Work, .01)
	require.Zero(t, state.Bookings.Reservations())
	require.Equal(t, "no_kv_transfer", e.NotSplit)
	require.False(t, e.Paused)
	require.NoError(t, state.PausePool("chat", true))
	e, err = s.Explain("", 4000)
	require.NoError(t, err)
	require.True(t, e.Paused)
	_, err = s.Explain("other", 1)
	require.EqualError(t, err, `there is no pool "other"; there are: chat`)
}

// Of a request that decode alone served because that was cheaper, the prices of both ways are kept.
func TestBothWaysAreKept(t *testing.T) {
	s := newStand(t, core.Options{})
	policy := splitting()
	policy.Place = picker.DefaultPolicy()
	s.pool("chat", policy, "p1", "d1")
	s.newRequest("/v1/chat/completions", "r-1", `{"model":"m","messages":[{"role":"user","content":"Hi"}]}`).pass()
	trace := s.core.Recent(1)[0]
	require.Equal(t, []string{"decode_alone", "cheaper"}, []string{trace.Route, trace.Reason})
	require.Len(t, trace.Weighed, 2)
	require.NotEmpty(t, trace.Weighed[0].Prefill, "what a pair would have cost")
	require.NotEmpty(t, trace.Weighed[1].Decode)
	require.NotEmpty(t, trace.Weighed[1].Alone)

	s.newRequest("/v1/chat/completions", "r-2", `{"model":"m","max_tokens":1,"messages":[{"role":"user","content":"Hi"}]}`).pass()
	answer := func(parts []telemetry.Part) float64 {
		at := slices.IndexFunc(parts, func(p telemetry.Part) bool { return p.Name == "answer" })
		require.GreaterOrEqual(t, at, 0, parts)
		return parts[at].Value
	}
	bounded := s.core.Recent(1)[0]
	require.Less(t, answer(bounded.Weighed[1].Decode), answer(trace.Weighed[1].Decode)/100, "max_tokens bounds the answer")

	long := `{"model":"m","messages":[{"role":"user","content":"` + strings.Repeat("Hi ", 500) + `"}]}`
	for _, id := range []string{"r-3", "r-4"} {
		s.newRequest("/v1/chat/completions", id, long).pass()
	}
	again := s.core.Recent(1)[0]
	require.GreaterOrEqual(t, again.PromptBlocks, 2)
	require.True(t, slices.ContainsFunc(again.Weighed, func(w telemetry.Weighed) bool {
		return w.Hit == again.PromptBlocks
	}), "one endpoint holds the whole prompt: %+v", again)
}

// An explanation says why nothing of a length is split, and is a refusal where the requests would get one.
func TestExplainNotSplit(t *testing.T) {
	dialect := kvtransfer.Named
	prefill := kvstate.EndpointSpec{Name: "p1", Addr: "10.0.1.1:8000", Role: kvstate.RolePrefill, Group: "a"}
	decode := kvstate.EndpointSpec{Name: "d1", Addr: "10.0.2.1:8000", Role: kvstate.RoleDecode, Group: "a"}
	elsewhere := decode
	elsewhere.Group = "b"
	auto, always := picker.DefaultPolicy(), picker.DefaultPolicy()
	auto.MinPrefillTokens, always.Split = 5000, picker.SplitAlways
	for name, tt := range map[string]struct {
		policy    plan.Policy
		endpoints []kvstate.EndpointSpec
		notSplit  string
		refused   string
		split     bool
	}{
		"never":           {policy: plan.Policy{Dialect: dialect("nixl")}, notSplit: "policy"},
		"short":           {policy: plan.Policy{Dialect: dialect("nixl"), Split: true, Place: auto}, notSplit: "min_prefill_tokens"},
		"always":          {policy: plan.Policy{Dialect: dialect("nixl"), Split: true, Place: always}, split: true},
		"both legs":       {policy: plan.Policy{Dialect: dialect("sglang"), Split: true}, split: true},
		"no prefill":      {policy: plan.Policy{Dialect: dialect("nixl"), Split: true}, endpoints: []kvstate.EndpointSpec{decode}, notSplit: "no_prefill"},
		"another group":   {policy: plan.Policy{Dialect: dialect("nixl"), Split: true}, endpoints: []kvstate.EndpointSpec{prefill, elsewhere}, notSplit: "no_prefill"},
		"refused":         {policy: plan.Policy{Dialect: dialect("nixl"), Split: true, Place: always, Alone: plan.AloneNever}, endpoints: []kvstate.EndpointSpec{decode}, notSplit: "no_prefill", refused: "has no prefill endpoint"},
		"never one alone": {policy: plan.Policy{Dialect: dialect("sglang"), Split: true}, endpoints: []kvstate.EndpointSpec{decode}, notSplit: "no_prefill", refused: "has no prefill endpoint: there is none in its endpoints, and the dialect's"},
	} {
		t.Run(name, func(t *testing.T) {
			state := kvstate.New(kvstate.Options{})
			if tt.endpoints == nil {
				tt.endpoints = []kvstate.EndpointSpec{prefill, decode}
			}
			state.SetPool(kvstate.PoolSpec{Name: "chat", Models: []string{"*"}}, tt.endpoints)
			s := core.New(core.Options{State: state, Settings: pass.Settings{Pools: map[string]pass.Policy{"chat": {Policy: tt.policy}}}}, nil)
			e, err := s.Explain("chat", 4000)
			require.NoError(t, err)
			require.Equal(t, tt.notSplit, e.NotSplit)
			require.Equal(t, tt.split, e.Prefill != "")
			require.Contains(t, e.Refused, tt.refused)
			require.Equal(t, tt.refused != "", e.Decode == "", e.Refused)
		})
	}
}

// While nobody knows who the prefill engine is, an explanation says that requests are not split, and why.
func TestExplainAnUnknownPeer(t *testing.T) {
	s := newStand(t, core.Options{})
	policy := splitting()
	var err error
	policy.Dialect, err = kvtransfer.New(kvtransfer.Options{Name: "mooncake"})
	require.NoError(t, err)
	source := kvtransfer.PeerSource{Ask: func(context.Context, *kvstate.Endpoint) (kvtransfer.Peer, error) {
		return kvtransfer.Peer{}, errors.New("connection refused")
	}}
	policy.Peers = source.NewPeers(slog.New(slog.DiscardHandler))
	s.pool("chat", policy, "p1", "d1")
	e, err := s.core.Explain("chat", 4000)
	require.NoError(t, err)
	require.Equal(t, []string{"unknown_peer", "", addressOf("d1")}, []string{e.NotSplit, e.Prefill, e.Decode})
	require.Empty(t, e.Refused)

	policy.Peers = nil
	s.pool("chat", policy, "p1", "d1")
	e, err = s.core.Explain("chat", 4000)
	require.NoError(t, err)
	require.Equal(t, []string{"", addressOf("p1"), addressOf("d1")}, []string{e.NotSplit, e.Prefill, e.Decode})
}

// An operator who shows the token gets the decision in a header; nobody else does, and the token goes no further.
func TestExplanationForAnOperator(t *testing.T) {
	s := newStand(t, core.Options{Operator: func(token []byte) bool { return string(token) == "secret" }})
	s.pool("chat", splitting(), "p1", "p2", "d1")
	for token, shown := range map[string]bool{"secret": true, "guess": false, "": false} {
		q := s.newRequest("/v1/chat/completions", "r1", chatBody)
		if token != "" {
			q.headers[names.HeaderExplain] = token
		}
		require.Zero(t, q.pass().status())
		require.NotContains(t, q.headers, names.HeaderExplain)
		text, ok := q.headers[names.HeaderExplanation]
		require.Equal(t, shown, ok)
		if shown {
			var e struct {
				Pool, Prefill, Decode string
				Candidates            []picker.Weighed
			}
			require.NoError(t, json.Unmarshal([]byte(text), &e))
			require.Equal(t, "chat", e.Pool)
			require.Equal(t, addressOf("d1"), e.Decode)
			require.Len(t, e.Candidates, 3)
			require.Positive(t, e.Candidates[0].Prefill.Work)
		}
		s.server.passes.Release(s.server.passes.Held("r1", 0))
	}

	both := splitting()
	var err error
	both.Dialect, err = kvtransfer.New(kvtransfer.Options{Name: "sglang"})
	require.NoError(t, err)
	s.pool("chat", both, "p1", "d1")
	q := s.newRequest("/v1/chat/completions", "r2", chatBody)
	q.headers[names.HeaderExplain] = "secret"
	require.Zero(t, q.pass().status())
	require.Contains(t, q.headers[names.HeaderExplanation], addressOf("p1"), "both legs at once")
}

// Decisions in dynamic metadata, as Envoy reads them.
func TestDecisionMetadata(t *testing.T) {
	x := handler{s: &Server{Options: core.Options{DecisionMetadata: true}}}
	var got structpb.Struct
	require.NoError(t, proto.Unmarshal(x.decision(&pass.Pass{
		Req: plan.Request{Foreseen: plan.Foreseen{Price: .25}},
		Planned: telemetry.Planned{
			Pool: "chat", Route: "split", Prefill: "10.0.1.1:8000", Decode: "10.0.2.1:8000", PromptTokens: 4000,
			Queued: telemetry.Queued{Waited: 1500 * time.Millisecond},
		},
	}), &got))
	require.Equal(t, map[string]any{"tandem": map[string]any{
		"pool": "chat", "route": "split", "prefill": "10.0.1.1:8000", "decode": "10.0.2.1:8000", "prompt_tokens": 4000., "price": .25, "waited": 1.5,
	}}, got.AsMap())

	s := newStand(t, core.Options{DecisionMetadata: true, Picker: &plan.GatewayOptions{}})
	policy := splitting()
	policy.Handoff = plan.HandoffSidecar
	s.pool("chat", policy, "p1", "d1")
	g := s.ask(hello, nil)
	require.Equal(t, addressOf("d1"), g.destination(), "beside the protocol's own")
	require.Equal(t, addressOf("p1"), g.metadata.GetFields()["tandem"].GetStructValue().GetFields()["prefill"].GetStringValue())
}
