package extproc

import (
	"context"
	"encoding/json"
	"slices"
	"strings"
	"testing"
	"time"

	filterv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/types/known/structpb"

	"tandem/extproc/envoywire/wiretest"
	"tandem/extproc/plan"
	"tandem/kvstate"
	"tandem/kvstate/inferencepolicy"
)

// Rows of the Endpoint Picker protocol (proposal 004 of the Inference Extension) are tests.

// Row: header and metadata. Row: responses in full duplex, by pieces, with and without trailers.
func TestPickerPicks(t *testing.T) {
	for _, trailers := range []bool{false, true} {
		s := pickerStand(t, plan.GatewayOptions{WatchBody: true}, "d1")
		g := s.ask(hello, nil, "x-prefiller-host-port", "6.6.6.6:1")
		require.Equal(t, addressOf("d1"), g.destination())
		require.Equal(t, hello, string(g.body))
		require.Subset(t, g.removed, []string{"x-prefiller-host-port", "x-encoder-hosts-ports", "x-kv-cache-source-host-port", "x-data-parallel-host-port"},
			"a client must not name hosts for a sidecar to fetch from")
		require.Equal(t, 1, s.state.Bookings.Reservations())
		long := strings.Repeat("x", 200_000)
		client, headers := g.answer(addressOf("d1"), 200, trailers, "data: 1\n\n", long, "data: [DONE]\n\n")
		require.Equal(t, "data: 1\n\n"+long+"data: [DONE]\n\n", client)
		require.Empty(t, headers)
		require.Eventually(t, func() bool { return s.state.Bookings.Reservations() == 0 }, 30*time.Second, time.Millisecond)
	}
}

// Row: a stream that begins with a response, which an earlier filter gave (401, 403, 429), passes untouched.
func TestPickerPassesOthersAnswers(t *testing.T) {
	for _, trailers := range []bool{false, true} {
		s := pickerStand(t, plan.GatewayOptions{}, "d1")
		stream, err := s.ext.Process(t.Context())
		require.NoError(t, err)
		g := &gateway{t: t, stream: stream, full: true}
		client, headers := g.answer("", 401, trailers, `{"error":`, `"who are you?"}`)
		require.Equal(t, `{"error":"who are you?"}`, client)
		require.Empty(t, headers)
		require.Zero(t, s.state.Bookings.Reservations())
	}
}

// An answer's headers that come twice end the stream, whether the request was seen or not: nothing panics, and what
// was reserved is released, once.
func TestPickerHeadersTwice(t *testing.T) {
	for _, asked := range []bool{false, true} {
		s := pickerStand(t, plan.GatewayOptions{WatchBody: true}, "d1")
		stream, err := s.ext.Process(t.Context())
		require.NoError(t, err)
		if asked {
			stream = s.ask(hello, nil).stream
		}
		for range 2 {
			require.NoError(t, stream.Send(&extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_ResponseHeaders{
				ResponseHeaders: &extprocv3.HttpHeaders{Headers: wiretest.HeaderMap(":status", "200")},
			}}))
		}
		for err = error(nil); err == nil; {
			var r *extprocv3.ProcessingResponse
			r, err = stream.Recv()
			require.Nil(t, r.GetImmediateResponse())
		}
		require.Zero(t, s.count("tandem_panics_total", "ext_proc endpoint-picker"))
		require.Eventually(t, func() bool { return s.state.Bookings.Reservations() == 0 }, 30*time.Second, time.Millisecond)
	}
}

// Row: a 5xx of the sidecar has the prefill endpoint checked that it was to ask; other answers do not.
func TestPickerChecksPrefill(t *testing.T) {
	for status, checked := range map[int]string{200: "", 404: "", 500: addressOf("p1"), 502: addressOf("p1")} {
		s := pickerStand(t, plan.GatewayOptions{WatchBody: true}, "p1", "d1")
		var asked []string
		s.server.Check = func(e *kvstate.Endpoint) { asked = append(asked, e.Addr) }
		g := s.ask(hello, nil)
		require.Equal(t, addressOf("p1"), g.set["x-prefiller-host-port"])
		g.answer(addressOf("d1"), status, false, "{}")
		require.Equal(t, checked, strings.Join(asked, " "), "%d", status)
	}
}

// Row: a request without body is answered in the header phase.
func TestPickerHeaderOnly(t *testing.T) {
	s := pickerStand(t, plan.GatewayOptions{WatchBody: true}, "d1", "p1")
	g := s.ask("", nil, ":method", "GET", ":path", "/v1/models")
	require.Equal(t, addressOf("d1"), g.destination())
	client, _ := g.answer(addressOf("d1"), 200, false, `{"data":[]}`)
	require.Equal(t, `{"data":[]}`, client)
}

// Row: a gateway that buffers bodies, and one that sends none, get the same.
func TestPickerBodyModes(t *testing.T) {
	for mode, tokens := range map[filterv3.ProcessingMode_BodySendMode]string{filterv3.ProcessingMode_BUFFERED: "with its body", filterv3.ProcessingMode_NONE: "without"} {
		t.Run(mode.String()+", "+tokens, func(t *testing.T) {
			s := pickerStand(t, plan.GatewayOptions{}, "d1")
			q := s.newRequest("/v1/chat/completions", "r-1", hello)
			q.mode = mode
			if mode == filterv3.ProcessingMode_NONE {
				q.bodyless = true
			}
			v := q.pass()
			require.Nil(t, v.immediate, "%v", v.immediate)
			require.Equal(t, addressOf("d1"), v.set["x-gateway-destination-endpoint"])
			require.True(t, v.clear)
		})
	}
}

// Row: the subset that the gateway allows, in both encodings; present and empty, or none of the pool: 503.
func TestPickerSubset(t *testing.T) {
	for name, c := range map[string]struct{ hint, want string }{
		"a list":             {`{"x-gateway-destination-endpoint-subset":["10.0.2.2:8000"]}`, "d2"},
		"a comma list":       {`{"x-gateway-destination-endpoint-subset":"10.0.2.9:8000, 10.0.2.3:8000"}`, "d3"},
		"a host":             {`{"x-gateway-destination-endpoint-subset":["10.0.2.1"]}`, "d1"},
		"empty":              {`{"x-gateway-destination-endpoint-subset":""}`, ""},
		"an empty list":      {`{"x-gateway-destination-endpoint-subset":[]}`, ""},
		"none that is there": {`{"x-gateway-destination-endpoint-subset":["10.9.9.9:8000"]}`, ""},
	} {
		t.Run(name, func(t *testing.T) {
			s := pickerStand(t, plan.GatewayOptions{}, "d1", "d2", "d3")
			g := s.ask(hello, map[string]*structpb.Struct{"envoy.lb.subset_hint": object(t, c.hint)})
			if c.want != "" {
				require.Equal(t, addressOf(c.want), g.destination())
				return
			}
			require.EqualValues(t, 503, g.refused.GetStatus().GetCode())
			require.Equal(t, "rejected-no-endpoints", header(g.refused, "x-llm-d-request-dropped-reason"))
			require.Zero(t, s.state.Bookings.Reservations())
		})
	}
}

// Row: no ready endpoint is a 503 and never no answer; a model that nobody serves is a 404, a body that is none a 400.
func TestPickerRefuses(t *testing.T) {
	s := pickerStand(t, plan.GatewayOptions{}, "p1")
	require.EqualValues(t, 503, s.ask(hello, nil).refused.GetStatus().GetCode())
	s.state.SetPool(kvstate.PoolSpec{Name: "chat", Models: []string{"other"}}, nil)
	require.EqualValues(t, 404, s.ask(hello, nil).refused.GetStatus().GetCode())
	require.EqualValues(t, 400, s.ask("{", nil).refused.GetStatus().GetCode())
	require.EqualValues(t, 404, s.ask("", nil, ":method", "GET", ":path", "/metrics").refused.GetStatus().GetCode())
}

// Row: a paused pool takes no new requests.
func TestPickerRefusesForAPausedPool(t *testing.T) {
	s := pickerStand(t, plan.GatewayOptions{}, "d1")
	require.NoError(t, s.state.PausePool("chat", true))
	refused := s.ask(hello, nil).refused
	require.EqualValues(t, 503, refused.GetStatus().GetCode())
	require.Contains(t, string(refused.GetBody()), "pool_paused")
	require.Equal(t, "5", header(refused, "retry-after"))
	stored := s.ask("", nil, ":method", "GET", ":path", "/v1/responses/resp_1")
	require.Equal(t, addressOf("d1"), stored.destination(), "what is stored may be read")
	require.NoError(t, s.state.PausePool("chat", false))
	require.Equal(t, addressOf("d1"), s.ask(hello, nil).destination())
}

// Row: the fallback list, and the endpoint that served, which moves the booking and tells of the one that failed.
func TestPickerFallbacks(t *testing.T) {
	s := pickerStand(t, plan.GatewayOptions{Fallbacks: 2, WatchBody: true}, "d1", "d2", "d3", "d4")
	g := s.ask(hello, nil)
	list := strings.Split(g.destination(), ",")
	require.Len(t, list, 3)
	slices.Sort(list)
	require.Len(t, slices.Compact(list), 3, "each once")
	first, second, _ := strings.Cut(g.destination(), ",")
	second, _, _ = strings.Cut(second, ",")
	pool := s.state.Pool("chat")
	requests, _ := pool.Endpoint(first).Load()
	require.EqualValues(t, 1, requests)
	g.answer(second, 200, false, "{}")
	require.True(t, pool.Endpoint(first).Failed(), "the gateway went down the list")
	require.Eventually(t, func() bool { return s.state.Bookings.Reservations() == 0 }, 30*time.Second, time.Millisecond)

	few := pickerStand(t, plan.GatewayOptions{Fallbacks: 5}, "d1", "d2")
	require.Len(t, strings.Split(few.ask(hello, nil).destination(), ","), 2, "no more than there are")
}

// Row: 429 for what may be shed when the pool is full, and for nothing else.
func TestPickerSheds(t *testing.T) {
	s := pickerStand(t, plan.GatewayOptions{ShedRequests: 2, WatchBody: true}, "d1")
	s.state.Policies.SetInferencePolicy("chat", &inferencepolicy.Policy{Objectives: map[string]int32{"batch": -1, "gold": 10}})
	for range 2 {
		require.Equal(t, addressOf("d1"), s.ask(hello, nil, "x-gateway-inference-objective", "batch").destination())
	}
	g := s.ask(hello, nil, "x-gateway-inference-objective", "batch")
	require.EqualValues(t, 429, g.refused.GetStatus().GetCode())
	require.Equal(t, "rejected-saturated", header(g.refused, "x-llm-d-request-dropped-reason"))
	require.Equal(t, "1", header(g.refused, "retry-after"))
	for _, objective := range []string{"gold", "unknown", ""} {
		require.Equal(t, addressOf("d1"), s.ask(hello, nil, "x-llm-d-inference-objective", objective).destination())
	}
}

// Row: a model is rewritten on the way there, and back in the answer, wherever the pieces are cut.
func TestPickerRewrites(t *testing.T) {
	s := pickerStand(t, plan.GatewayOptions{}, "d1")
	s.state.Policies.SetInferencePolicy("chat", &inferencepolicy.Policy{Rewrites: []inferencepolicy.Rewrite{
		{Targets: []inferencepolicy.Target{{Model: "any"}}},
		{Model: "m", Targets: []inferencepolicy.Target{{Model: "m-v2", Weight: 1}, {Model: "never", Weight: 0}}},
	}})
	g := s.ask(hello, nil)
	var sent struct {
		Model     string
		MaxTokens int `json:"max_tokens"`
	}
	require.NoError(t, json.Unmarshal(g.body, &sent))
	require.Equal(t, "m-v2", sent.Model)
	require.Equal(t, 5, sent.MaxTokens)
	client, _ := g.answer(addressOf("d1"), 200, false, `data: {"mod`, `el":"m-v`, `2","x":"m-v2"}`+"\n\n", `data: {"model": "m-v2"`, `}`)
	require.Equal(t, "data: {\"model\":\"m\",\"x\":\"m-v2\"}\n\ndata: {\"model\": \"m\"}", client)
}

// A rewrite (InferenceModelRewrite) may lead to a model that only some of the pool's endpoints serve: one of those is
// chosen, and all the fallbacks are. It does not matter who serves the model that the client has named.
func TestPickerRewritesToAModelOfSome(t *testing.T) {
	s := pickerStand(t, plan.GatewayOptions{Fallbacks: 3}, "d1", "d2", "d3")
	s.state.Policies.SetInferencePolicy("chat", &inferencepolicy.Policy{Rewrites: []inferencepolicy.Rewrite{
		{Model: "m", Targets: []inferencepolicy.Target{{Model: "sql", Weight: 1}}},
	}})
	for _, e := range s.state.Pool("chat").Endpoints() {
		list := []kvstate.Model{{ID: "m"}}
		if e.Addr == addressOf("d2") {
			list = []kvstate.Model{{ID: "sql"}}
		}
		s.state.SetModels(e, list)
	}
	for range 12 {
		require.Equal(t, addressOf("d2"), s.ask(hello, nil).destination())
	}
}

// Row: a 404 is the gateway's to retry; the endpoint is asked at once what it serves, even if it was asked a moment ago,
// so that the next request for the model goes where it is.
func TestPickerAsksAfterA404(t *testing.T) {
	s := pickerStand(t, plan.GatewayOptions{}, "d1", "d2")
	engines := serves{s.state, map[string]string{addressOf("d1"): "m", addressOf("d2"): "m"}, map[string]time.Time{}}
	s.server.passes.Models = engines
	engines.Ask(t.Context(), s.state.Pool("chat").Endpoints(), 0)
	engines.models[addressOf("d1")] = "other"
	for at := ""; at != addressOf("d1"); {
		g := s.ask(hello, nil)
		at = g.destination()
		status := 200
		if at == addressOf("d1") {
			status = 404
		}
		g.answer(at, status, false, "{}")
	}
	for range 12 {
		require.Equal(t, addressOf("d2"), s.ask(hello, nil).destination())
	}
}

// serves are the models that endpoints answer with when they are asked, and when they were.
type serves struct {
	state  *kvstate.State
	models map[string]string    // by address
	asked  map[string]time.Time // likewise
}

func (s serves) Ask(_ context.Context, endpoints []*kvstate.Endpoint, older time.Duration) {
	for _, e := range endpoints {
		if time.Since(s.asked[e.Addr]) >= older {
			s.state.SetModels(e, []kvstate.Model{{ID: s.models[e.Addr]}})
			s.asked[e.Addr] = time.Now()
		}
	}
}

// Row: an EPP that needs no more of the answer closes the stream once it has begun.
func TestPickerLetsGo(t *testing.T) {
	s := pickerStand(t, plan.GatewayOptions{WatchBody: false}, "d1")
	g := s.ask(hello, nil)
	client, _ := g.answer(addressOf("d1"), 200, false)
	require.Empty(t, client)
	require.Eventually(t, func() bool { return s.state.Bookings.Reservations() == 0 }, 30*time.Second, time.Millisecond)
}

// Row: what is booked is released when the client leaves, at whatever moment.
func TestPickerAbort(t *testing.T) {
	s := pickerStand(t, plan.GatewayOptions{WatchBody: true}, "d1")
	g := s.ask(hello, nil)
	require.Equal(t, 1, s.state.Bookings.Reservations())
	g.cancel()
	require.Eventually(t, func() bool { return s.state.Bookings.Reservations() == 0 }, 30*time.Second, time.Millisecond)
}

// Row: the conformance suite's headers, behind their flag alone.
func TestPickerConformance(t *testing.T) {
	s := pickerStand(t, plan.GatewayOptions{WatchBody: true, Conformance: true}, "d1", "d2")
	for range 5 {
		g := s.ask(hello, nil, "test-epp-endpoint-selection", "10.0.2.2")
		require.Equal(t, addressOf("d2"), g.destination())
		_, headers := g.answer(addressOf("d2"), 200, false, "{}")
		require.Equal(t, addressOf("d2"), headers["x-conformance-test-served-endpoint"])
	}
	plain := pickerStand(t, plan.GatewayOptions{}, "d1")
	require.Equal(t, addressOf("d1"), plain.ask(hello, nil, "test-epp-endpoint-selection", "10.0.2.2").destination())
}
