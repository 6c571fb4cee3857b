package extproc

import (
	"bytes"
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tandem/extproc/core"
	"tandem/extproc/kvtransfer"
	"tandem/extproc/names"
	"tandem/extproc/pass"
	"tandem/extproc/plan"
	"tandem/kvstate"
	"tandem/kvstate/inferencepolicy"
)

// Hand-overs that Envoy does not make: by llm-d's routing sidecar, or by a call of the server itself.

// handoff: sidecar. D's sidecar gets P in one authoritative header, and the body stays the client's.
func TestSidecarIsToldOfPrefill(t *testing.T) {
	s := pickerStand(t, plan.GatewayOptions{}, "p1", "d1")
	g := s.ask(hello, nil, "x-prefiller-host-port", "6.6.6.6:1")
	require.Equal(t, addressOf("d1"), g.destination())
	require.Equal(t, addressOf("p1"), g.set["x-prefiller-host-port"])
	require.NotContains(t, g.removed, "x-prefiller-host-port")
	require.Equal(t, hello, string(g.body))
	two := s.ask(strings.Replace(hello, `"max_tokens"`, `"n":2,"max_tokens"`, 1), nil)
	require.Empty(t, two.set["x-prefiller-host-port"], "what cannot be split is decoded alone")
}

// And of encoders where the request has media, and of who holds most of the prompt's beginning where the dialect fetches it.
func TestSidecarIsToldOfEncodersAndSources(t *testing.T) {
	s := newStand(t, core.Options{Picker: &plan.GatewayOptions{}})
	policy := splitting()
	dialect, err := kvtransfer.New(kvtransfer.Options{Name: "offload"})
	require.NoError(t, err)
	policy.Handoff, policy.EncodeTimeout, policy.Dialect = plan.HandoffSidecar, time.Second, dialect
	s.pool("chat", policy, "p1", "p2", "d1", "e1", "e2")
	plain := s.ask(hello, nil, "x-encoder-hosts-ports", "6.6.6.6:1", "x-kv-cache-source-host-port", "6.6.6.6:1")
	require.Subset(t, plain.removed, []string{"x-encoder-hosts-ports", "x-kv-cache-source-host-port"})
	long := strings.Repeat("all is well. ", 1000)
	media := `{"model":"m","messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:,x"}},{"type":"text","text":"` + long + `"}]}],"max_tokens":5}`
	first := s.ask(media, nil)
	require.Equal(t, []string{addressOf("e1"), addressOf("e2")}, strings.Split(first.set["x-encoder-hosts-ports"], ","))
	held := first.set["x-prefiller-host-port"]
	s.state.Bookings.Reserve(s.state.Pool("chat").Endpoint(held), kvstate.Booking{For: kvstate.RolePrefill, PromptTokens: 1 << 20, Uncached: 1 << 20, Work: time.Minute})
	second := s.ask(media, nil)
	require.NotEqual(t, held, second.set["x-prefiller-host-port"])
	require.Equal(t, held, second.set["x-kv-cache-source-host-port"])
}

// prefiller stands in for a vLLM prefill engine: status, then body of each answer.
func prefiller(t *testing.T, serve http.HandlerFunc) *kvstate.EndpointSpec {
	server := httptest.NewServer(serve)
	t.Cleanup(server.Close)
	addr := server.Listener.Addr().String()
	return &kvstate.EndpointSpec{Name: addr, Addr: addr, Role: kvstate.RolePrefill}
}

const kvAnswer = `{"id":"x","choices":[],"usage":{"prompt_tokens":9},"kv_transfer_params":{"do_remote_prefill":true,"do_remote_decode":false,` +
	`"remote_block_ids":[1,2],"remote_engine_id":"e","remote_host":"10.0.1.1","remote_port":5600,"tp_size":1,"remote_request_id":"r"}}`

// handoff: direct. The server asks P itself; P's parameters go to D with the client's own body.
func TestDirectPrefill(t *testing.T) {
	directly := func(policy pass.Policy, p ...*kvstate.EndpointSpec) *stand {
		s := newStand(t, core.Options{Picker: &plan.GatewayOptions{WatchBody: true}})
		policy.Handoff = plan.HandoffDirect
		s.pool("chat", policy, "d1")
		eps := []kvstate.EndpointSpec{{Name: "d1", Addr: addressOf("d1"), Role: kvstate.RoleDecode}}
		for _, e := range p {
			eps = append(eps, *e)
		}
		s.state.SetPool(kvstate.PoolSpec{Name: "chat", Models: []string{"*"}}, eps)
		return s
	}
	good := func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		if !bytes.Contains(body, []byte(`"max_tokens":1}`)) || r.URL.Path != "/v1/chat/completions" || r.Header.Get("Authorization") != "Bearer k" {
			t.Errorf("prefill was asked %s %q %s", r.URL.Path, r.Header.Get("Authorization"), body)
		}
		_, _ = io.WriteString(w, kvAnswer)
	}
	t.Run("hands over", func(t *testing.T) {
		s := directly(splitting(), prefiller(t, good))
		g := s.ask(hello, nil, "authorization", "Bearer k")
		require.Equal(t, addressOf("d1"), g.destination())
		require.Empty(t, g.set["x-prefiller-host-port"])
		member, rest, ok := strings.Cut(string(g.body), `,"model"`)
		require.True(t, ok, string(g.body))
		require.Contains(t, member, `"remote_engine_id":"e"`)
		require.Equal(t, hello, `{"model"`+rest)
		require.Equal(t, 1, s.state.Bookings.Reservations(), "P's is released")
	})
	t.Run("learns from the answer", func(t *testing.T) {
		s := directly(splitting(), prefiller(t, func(w http.ResponseWriter, r *http.Request) {
			if r.Header.Get("endpoint-load-metrics-format") == "JSON" {
				w.Header().Set(names.HeaderLoad, `JSON {"named_metrics":{"kv_cache_usage_perc":0.5}}`)
			}
			const counts = `"prompt_tokens":9`
			_, _ = io.WriteString(w, strings.Replace(kvAnswer, counts, counts+`,"prompt_tokens_details":{"cached_tokens":4}`, 1))
		}))
		s.ask(hello, nil)
		var v kvstate.View
		s.state.View(s.state.Pool("chat"), nil, &v)
		require.True(t, slices.ContainsFunc(v.Endpoints, func(c kvstate.Candidate) bool {
			return c.Signals != nil && c.Signals.KVUsage == .5
		}), "its load")
		require.InDelta(t, 4, s.count("tandem_cached_tokens_compared_total", "chat", "measured"), 0, "what it had cached")
	})
	t.Run("an answer that is cut", func(t *testing.T) {
		var s *stand
		p := prefiller(t, func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Length", "1000")
			_, _ = io.WriteString(w, kvAnswer[:40])
		})
		s = directly(splitting(), p)
		require.Equal(t, hello, string(s.ask(hello, nil).body), "decode computes the prompt")
		require.InDelta(t, 1, s.count("tandem_handovers_orphaned_total", "chat", p.Addr, "answer_cut"), 0)
	})
	t.Run("another prefill, then decode alone", func(t *testing.T) {
		var asked atomic.Int32
		bad := func(w http.ResponseWriter, _ *http.Request) { asked.Add(1); w.WriteHeader(500) }
		s := directly(splitting(), prefiller(t, bad), prefiller(t, bad))
		g := s.ask(hello, nil)
		require.Equal(t, hello, string(g.body))
		require.EqualValues(t, 2, asked.Load())
		require.Equal(t, 1, s.state.Bookings.Reservations())
	})
	t.Run("fails where the pool says so", func(t *testing.T) {
		policy := splitting()
		policy.OnFailure = plan.Fail
		s := directly(policy, prefiller(t, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(500) }))
		require.EqualValues(t, 503, s.ask(hello, nil).refused.GetStatus().GetCode())
		require.Eventually(t, func() bool { return s.state.Bookings.Reservations() == 0 }, 30*time.Second, time.Millisecond)
	})
	refuses := func(status int) *kvstate.EndpointSpec {
		return prefiller(t, func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(status)
			_, _ = io.WriteString(w, "max_tokens\nis too large")
		})
	}
	t.Run("decode alone decides about what prefill has refused", func(t *testing.T) {
		s := directly(splitting(), refuses(400))
		require.Equal(t, hello, string(s.ask(hello, nil).body))
		require.Equal(t, 1, s.state.Bookings.Reservations())
	})
	t.Run("unless it must not", func(t *testing.T) {
		policy := splitting()
		policy.OnFailure = plan.Fail
		s := directly(policy, refuses(400))
		g := s.ask(hello, nil)
		require.EqualValues(t, 400, g.refused.GetStatus().GetCode())
		require.Contains(t, string(g.refused.GetBody()), "max_tokens is too large")
	})
	t.Run("another prefill may have the model", func(t *testing.T) {
		s := directly(splitting(), refuses(404), prefiller(t, good))
		g := s.ask(hello, nil, "authorization", "Bearer k")
		require.Contains(t, string(g.body), `"remote_engine_id":"e"`)
	})
	t.Run("a client that leaves ends the prefill", func(t *testing.T) {
		begun, ended := make(chan struct{}), make(chan struct{})
		s := directly(splitting(), prefiller(t, func(_ http.ResponseWriter, r *http.Request) {
			_, _ = io.Copy(io.Discard, r.Body)
			close(begun)
			<-r.Context().Done()
			close(ended)
		}))
		ctx, leave := context.WithCancel(t.Context())
		stream, err := s.ext.Process(ctx)
		require.NoError(t, err)
		q := s.newRequest("/v1/chat/completions", "r-2", hello)
		headers, body := q.messages()
		require.NoError(t, stream.Send(headers))
		require.NoError(t, stream.Send(body[0]))
		<-begun
		leave()
		<-ended
		require.Eventually(t, func() bool { return s.state.Bookings.Reservations() == 0 }, 30*time.Second, time.Millisecond)
	})
}

// Pools with another hand-over behind an Envoy of our own: one hop to D, which is planned again from the client's own body
// when it fails outright.
func TestHandoffsBehindOurEnvoy(t *testing.T) {
	t.Run("sidecar", func(t *testing.T) {
		s := newStand(t, core.Options{})
		policy := splitting()
		policy.Handoff = plan.HandoffSidecar
		s.pool("chat", policy, "p1", "d1", "d2")
		q := s.newRequest("/v1/chat/completions", "r-1", hello)
		v := q.pass()
		first := v.set[names.HeaderEndpoint]
		require.Equal(t, plan.LegDecode, v.set[names.HeaderLeg])
		require.Equal(t, addressOf("p1"), v.set["x-prefiller-host-port"])
		require.Equal(t, hello, string(v.body))
		require.Equal(t, 307, q.replan().Code)
		q.follow()
		v = q.pass()
		require.NotEqual(t, first, v.set[names.HeaderEndpoint], "another D")
		require.Equal(t, hello, string(v.body))
		s.log(q.entry(200, "via_upstream"))
		require.Eventually(t, func() bool { return s.state.Bookings.Reservations() == 0 }, 30*time.Second, time.Millisecond)
	})
	t.Run("direct", func(t *testing.T) {
		p := prefiller(t, func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, kvAnswer) })
		s := newStand(t, core.Options{})
		policy := splitting()
		policy.Handoff = plan.HandoffDirect
		s.pool("chat", policy)
		s.state.SetPool(kvstate.PoolSpec{Name: "chat", Models: []string{"*"}}, []kvstate.EndpointSpec{*p,
			{Name: "d1", Addr: addressOf("d1"), Role: kvstate.RoleDecode}, {Name: "d2", Addr: addressOf("d2"), Role: kvstate.RoleDecode}})
		q := s.newRequest("/v1/chat/completions", "r-1", hello)
		v := q.pass()
		require.Equal(t, plan.LegDecode, v.set[names.HeaderLeg])
		require.Empty(t, v.set["x-prefiller-host-port"])
		require.Contains(t, string(v.body), `"remote_engine_id":"e"`)
		require.Equal(t, 307, q.replan().Code)
		q.follow()
		v = q.pass()
		require.Equal(t, 1, strings.Count(string(v.body), "remote_engine_id"), "parameters of its own, those of the first try are spent")
		s.log(q.entry(200, "via_upstream"))
		require.Eventually(t, func() bool { return s.state.Bookings.Reservations() == 0 }, 30*time.Second, time.Millisecond)
	})
}

// A gateway's requests get the operator's priority, too, whoever asks P: on both legs, beside a model that is rewritten,
// and on other paths where engines read it. A body that engines would not look into stays as it is.
func TestGatewaysGetTheOperatorsPriority(t *testing.T) {
	for _, handoff := range []plan.Handoff{plan.HandoffSidecar, plan.HandoffDirect} {
		var asked atomic.Value
		p := prefiller(t, func(w http.ResponseWriter, r *http.Request) {
			body, _ := io.ReadAll(r.Body)
			asked.Store(body)
			_, _ = io.WriteString(w, kvAnswer)
		})
		s := newStand(t, core.Options{Picker: &plan.GatewayOptions{WatchBody: true}})
		policy := splitting()
		policy.Handoff, policy.Priorities = handoff, plan.SGLangPriority
		s.pool("chat", policy, "d1")
		s.state.SetPool(kvstate.PoolSpec{Name: "chat", Models: []string{"*"}}, []kvstate.EndpointSpec{*p, {Name: "d1", Addr: addressOf("d1"), Role: kvstate.RoleDecode}})
		s.state.Policies.SetInferencePolicy("chat", &inferencepolicy.Policy{Rewrites: []inferencepolicy.Rewrite{
			{Model: "gold", Targets: []inferencepolicy.Target{{Model: "tiny", Weight: 1}}},
		}})
		greedy := strings.Replace(hello, "{", `{"priority":1000000,`, 1)
		for _, body := range []string{hello, greedy, strings.Replace(greedy, `"m"`, `"gold"`, 1)} {
			got := membersOf(t, s.ask(body, nil).body)
			require.Equal(t, "0", string(got["priority"]), body)
			require.JSONEq(t, `[{"role":"user","content":"Hello, who are you?"}]`, string(got["messages"]))
			if handoff == plan.HandoffDirect {
				require.Equal(t, "0", string(membersOf(t, asked.Load().([]byte))["priority"]), body)
				require.NotNil(t, got["kv_transfer_params"])
			}
			if strings.Contains(body, "gold") {
				require.Equal(t, `"tiny"`, string(got["model"]))
			}
		}
		for path, want := range map[string]string{"/v1/embeddings": "0", "/tokenize": "0"} {
			got := s.ask(`{"model":"m","input":"a","priority":1000000}`, nil, ":path", path)
			require.Equal(t, want, string(membersOf(t, got.body)["priority"]), path)
		}
		const plain = `{"model":"m","prompt":"a"}`
		require.Equal(t, plain, string(s.ask(plain, nil, ":path", "/tokenize").body))
		require.Empty(t, s.ask("", nil, ":path", "/v1/models/m", ":method", "GET").body)
	}
}
