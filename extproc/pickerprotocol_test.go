package extproc

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	filterv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/structpb"

	"tandem/kvstate"
)

// This file plays a gateway of the Inference Extension: it knows the Endpoint Picker protocol and nothing of Tandem. Rows of
// the protocol (proposal 004) are tests.

// gateway is one request through such a gateway.
type gateway struct {
	t        *testing.T
	stream   extprocv3.ExternalProcessor_ProcessClient
	cancel   context.CancelFunc
	set      map[string]string
	removed  []string
	metadata *structpb.Struct
	body     []byte // as it goes to the endpoint
	refused  *extprocv3.ImmediateResponse
}

const hello = `{"model":"m","messages":[{"role":"user","content":"Hello, who are you?"}],"max_tokens":5}`

// pickerStand is a server that speaks the protocol, with one pool.
func pickerStand(t *testing.T, o PickerOptions, endpoints ...string) *stand {
	s := newStand(t, Options{Picker: &o})
	policy := splitting()
	policy.Handoff = HandoffSidecar
	s.pool("chat", policy, endpoints...)
	return s
}

// ask sends a request; no body means that its headers end it. metadata is filter_metadata by namespace.
func (s *stand) ask(body string, metadata map[string]*structpb.Struct, headers ...string) *gateway {
	t := s.t
	ctx, cancel := context.WithCancel(t.Context())
	t.Cleanup(cancel)
	stream, err := s.ext.Process(ctx)
	require.NoError(t, err)
	g := &gateway{t: t, stream: stream, cancel: cancel, set: map[string]string{}}
	pairs := append(headers, "content-type", "application/json", "x-request-id", "r-1", ":method", "POST", ":path", "/v1/chat/completions") // the first of a name counts
	require.NoError(t, stream.Send(&extprocv3.ProcessingRequest{
		Request: &extprocv3.ProcessingRequest_RequestHeaders{RequestHeaders: &extprocv3.HttpHeaders{
			Headers: headerMap(pairs...), EndOfStream: body == "",
		}},
		MetadataContext: &corev3.Metadata{FilterMetadata: metadata},
		ProtocolConfig: &extprocv3.ProtocolConfiguration{
			RequestBodyMode: filterv3.ProcessingMode_FULL_DUPLEX_STREAMED, ResponseBodyMode: filterv3.ProcessingMode_FULL_DUPLEX_STREAMED,
		},
	}))
	if body != "" {
		half := len(body) / 2
		require.NoError(t, stream.Send(requestBody([]byte(body[:half]), false)))
		require.NoError(t, stream.Send(requestBody([]byte(body[half:]), true)))
	}
	g.takeRequest(body != "")
	return g
}

// takeRequest reads the answer to the request, in the order that the protocol asks for.
func (g *gateway) takeRequest(body bool) {
	r, err := g.stream.Recv()
	require.NoError(g.t, err)
	if g.refused = r.GetImmediateResponse(); g.refused != nil {
		return
	}
	common := r.GetRequestHeaders().GetResponse()
	require.NotNil(g.t, common, "headers are answered first: %v", r)
	require.True(g.t, common.GetClearRouteCache())
	for _, h := range common.GetHeaderMutation().GetSetHeaders() {
		g.set[h.GetHeader().GetKey()] = string(h.GetHeader().GetRawValue())
	}
	g.removed = common.GetHeaderMutation().GetRemoveHeaders()
	g.metadata = r.GetDynamicMetadata()
	for end := !body; !end; {
		r, err := g.stream.Recv()
		require.NoError(g.t, err)
		part := r.GetRequestBody().GetResponse().GetBodyMutation().GetStreamedResponse()
		require.NotNil(g.t, part, "only StreamedResponse answers a body in FULL_DUPLEX_STREAMED mode: %v", r)
		require.LessOrEqual(g.t, len(part.GetBody()), 62_000)
		g.body = append(g.body, part.GetBody()...)
		end = part.GetEndOfStream()
	}
}

// destination is where the request goes, which header and metadata have to agree on.
func (g *gateway) destination() string {
	require.Nil(g.t, g.refused, "%v", g.refused)
	inMetadata := g.metadata.GetFields()["envoy.lb"].GetStructValue().GetFields()["x-gateway-destination-endpoint"].GetStringValue()
	require.Equal(g.t, g.set["x-gateway-destination-endpoint"], inMetadata, "header and metadata must be equal")
	require.NotEmpty(g.t, inMetadata)
	return inMetadata
}

// answer passes an answer through the server, as endpoint served gave it, and gives what the client gets.
func (g *gateway) answer(served string, status int, trailers bool, pieces ...string) (client string, headers map[string]string) {
	metadata := &corev3.Metadata{}
	if served != "" {
		metadata.FilterMetadata = map[string]*structpb.Struct{"envoy.lb": object(g.t, `{"x-gateway-destination-endpoint-served":"`+served+`"}`)}
	}
	require.NoError(g.t, g.stream.Send(&extprocv3.ProcessingRequest{
		Request: &extprocv3.ProcessingRequest_ResponseHeaders{ResponseHeaders: &extprocv3.HttpHeaders{
			Headers: headerMap(":status", strconv.Itoa(status)), EndOfStream: len(pieces) == 0 && !trailers,
		}},
		MetadataContext: metadata,
	}))
	r, err := g.stream.Recv()
	require.NoError(g.t, err)
	require.NotNil(g.t, r.GetResponseHeaders(), "%v", r)
	headers = map[string]string{}
	for _, h := range r.GetResponseHeaders().GetResponse().GetHeaderMutation().GetSetHeaders() {
		headers[h.GetHeader().GetKey()] = string(h.GetHeader().GetRawValue())
	}
	go func() {
		for i, p := range pieces {
			_ = g.stream.Send(&extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_ResponseBody{
				ResponseBody: &extprocv3.HttpBody{Body: []byte(p), EndOfStream: i == len(pieces)-1 && !trailers},
			}})
		}
		if trailers {
			_ = g.stream.Send(&extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_ResponseTrailers{
				ResponseTrailers: &extprocv3.HttpTrailers{Trailers: headerMap("x-sum", "1")},
			}})
		}
	}()
	for {
		r, err := g.stream.Recv()
		if err != nil {
			require.ErrorIs(g.t, err, io.EOF)
			return client, headers
		}
		if r.GetResponseTrailers() != nil {
			require.True(g.t, trailers)
			continue
		}
		part := r.GetResponseBody().GetResponse().GetBodyMutation().GetStreamedResponse()
		require.NotNil(g.t, part, "%v", r)
		client += string(part.GetBody())
	}
}

func object(t *testing.T, text string) *structpb.Struct {
	s := &structpb.Struct{}
	require.NoError(t, s.UnmarshalJSON([]byte(text)))
	return s
}

// Row: header and metadata. Row: responses in full duplex, by pieces, with and without trailers.
func TestPickerPicks(t *testing.T) {
	for _, trailers := range []bool{false, true} {
		s := pickerStand(t, PickerOptions{WatchBody: true}, "d1")
		g := s.ask(hello, nil, "x-prefiller-host-port", "6.6.6.6:1")
		require.Equal(t, addressOf("d1"), g.destination())
		require.Equal(t, hello, string(g.body))
		require.Subset(t, g.removed, []string{"x-prefiller-host-port", "x-encoder-hosts-ports", "x-kv-cache-source-host-port", "x-data-parallel-host-port"},
			"a client must not name hosts for a sidecar to fetch from")
		require.Equal(t, 1, s.state.Reservations())
		long := strings.Repeat("x", 200_000)
		client, headers := g.answer(addressOf("d1"), 200, trailers, "data: 1\n\n", long, "data: [DONE]\n\n")
		require.Equal(t, "data: 1\n\n"+long+"data: [DONE]\n\n", client)
		require.Empty(t, headers)
		require.Eventually(t, func() bool { return s.state.Reservations() == 0 }, time.Second, time.Millisecond)
	}
}

// Row: a request without body is answered in the header phase.
func TestPickerHeaderOnly(t *testing.T) {
	s := pickerStand(t, PickerOptions{WatchBody: true}, "d1", "p1")
	g := s.ask("", nil, ":method", "GET", ":path", "/v1/models")
	require.Equal(t, addressOf("d1"), g.destination())
	client, _ := g.answer(addressOf("d1"), 200, false, `{"data":[]}`)
	require.Equal(t, `{"data":[]}`, client)
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
			s := pickerStand(t, PickerOptions{}, "d1", "d2", "d3")
			g := s.ask(hello, map[string]*structpb.Struct{"envoy.lb.subset_hint": object(t, c.hint)})
			if c.want != "" {
				require.Equal(t, addressOf(c.want), g.destination())
				return
			}
			require.EqualValues(t, 503, g.refused.GetStatus().GetCode())
			require.Equal(t, "rejected-no-endpoints", header(g.refused, "x-llm-d-request-dropped-reason"))
			require.Zero(t, s.state.Reservations())
		})
	}
}

func header(i *extprocv3.ImmediateResponse, name string) string {
	for _, h := range i.GetHeaders().GetSetHeaders() {
		if h.GetHeader().GetKey() == name {
			return string(h.GetHeader().GetRawValue())
		}
	}
	return ""
}

// Row: no ready endpoint is a 503 and never no answer; a model that nobody serves is a 404, a body that is none a 400.
func TestPickerRefuses(t *testing.T) {
	s := pickerStand(t, PickerOptions{}, "p1")
	require.EqualValues(t, 503, s.ask(hello, nil).refused.GetStatus().GetCode())
	s.state.SetPool(kvstate.PoolSpec{Name: "chat", Models: []string{"other"}}, nil)
	require.EqualValues(t, 404, s.ask(hello, nil).refused.GetStatus().GetCode())
	require.EqualValues(t, 400, s.ask("{", nil).refused.GetStatus().GetCode())
	require.EqualValues(t, 404, s.ask("", nil, ":method", "GET", ":path", "/metrics").refused.GetStatus().GetCode())
}

// Row: the fallback list, and the endpoint that served, which moves the booking and tells of the one that failed.
func TestPickerFallbacks(t *testing.T) {
	s := pickerStand(t, PickerOptions{Fallbacks: 2, WatchBody: true}, "d1", "d2", "d3", "d4")
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
	require.Eventually(t, func() bool { return s.state.Reservations() == 0 }, time.Second, time.Millisecond)

	few := pickerStand(t, PickerOptions{Fallbacks: 5}, "d1", "d2")
	require.Len(t, strings.Split(few.ask(hello, nil).destination(), ","), 2, "no more than there are")
}

// Row: 429 for what may be shed when the pool is full, and for nothing else.
func TestPickerSheds(t *testing.T) {
	s := pickerStand(t, PickerOptions{ShedRequests: 2, WatchBody: true}, "d1")
	s.state.SetIntents("chat", &kvstate.Intents{Objectives: map[string]int32{"batch": -1, "gold": 10}})
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
	s := pickerStand(t, PickerOptions{}, "d1")
	s.state.SetIntents("chat", &kvstate.Intents{Rewrites: []kvstate.Rewrite{
		{Targets: []kvstate.RewriteTarget{{Model: "any"}}},
		{Model: "m", Targets: []kvstate.RewriteTarget{{Model: "m-v2", Weight: 1}, {Model: "never", Weight: 0}}},
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

// Row: an EPP that needs no more of the answer closes the stream once it has begun.
func TestPickerLetsGo(t *testing.T) {
	s := pickerStand(t, PickerOptions{WatchBody: false}, "d1")
	g := s.ask(hello, nil)
	client, _ := g.answer(addressOf("d1"), 200, false)
	require.Empty(t, client)
	require.Eventually(t, func() bool { return s.state.Reservations() == 0 }, time.Second, time.Millisecond)
}

// Row: what is booked is released when the client leaves, at whatever moment.
func TestPickerAbort(t *testing.T) {
	s := pickerStand(t, PickerOptions{WatchBody: true}, "d1")
	g := s.ask(hello, nil)
	require.Equal(t, 1, s.state.Reservations())
	g.cancel()
	require.Eventually(t, func() bool { return s.state.Reservations() == 0 }, time.Second, time.Millisecond)
}

// Row: the conformance suite's headers, behind their flag alone.
func TestPickerConformance(t *testing.T) {
	s := pickerStand(t, PickerOptions{WatchBody: true, Conformance: true}, "d1", "d2")
	for range 5 {
		g := s.ask(hello, nil, "test-epp-endpoint-selection", "10.0.2.2")
		require.Equal(t, addressOf("d2"), g.destination())
		_, headers := g.answer(addressOf("d2"), 200, false, "{}")
		require.Equal(t, addressOf("d2"), headers["x-conformance-test-served-endpoint"])
	}
	plain := pickerStand(t, PickerOptions{}, "d1")
	require.Equal(t, addressOf("d1"), plain.ask(hello, nil, "test-epp-endpoint-selection", "10.0.2.2").destination())
}

// handoff: sidecar. D's sidecar is told of P in one authoritative value, and the body stays the client's.
func TestSidecarIsToldOfPrefill(t *testing.T) {
	s := pickerStand(t, PickerOptions{}, "p1", "d1")
	g := s.ask(hello, nil, "x-prefiller-host-port", "6.6.6.6:1")
	require.Equal(t, addressOf("d1"), g.destination())
	require.Equal(t, addressOf("p1"), g.set["x-prefiller-host-port"])
	require.NotContains(t, g.removed, "x-prefiller-host-port")
	require.Equal(t, hello, string(g.body))
	two := s.ask(strings.Replace(hello, `"max_tokens"`, `"n":2,"max_tokens"`, 1), nil)
	require.Empty(t, two.set["x-prefiller-host-port"], "what cannot be split is decoded alone")
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
	directly := func(policy Policy, p ...*kvstate.EndpointSpec) *stand {
		s := newStand(t, Options{Picker: &PickerOptions{WatchBody: true}})
		policy.Handoff = HandoffDirect
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
		require.Equal(t, 1, s.state.Reservations(), "P's is released")
	})
	t.Run("another prefill, then decode alone", func(t *testing.T) {
		var asked atomic.Int32
		bad := func(w http.ResponseWriter, _ *http.Request) { asked.Add(1); w.WriteHeader(500) }
		s := directly(splitting(), prefiller(t, bad), prefiller(t, bad))
		g := s.ask(hello, nil)
		require.Equal(t, hello, string(g.body))
		require.EqualValues(t, 2, asked.Load())
		require.Equal(t, 1, s.state.Reservations())
	})
	t.Run("fails where the pool says so", func(t *testing.T) {
		policy := splitting()
		policy.OnFailure = Fail
		s := directly(policy, prefiller(t, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(500) }))
		require.EqualValues(t, 503, s.ask(hello, nil).refused.GetStatus().GetCode())
		require.Eventually(t, func() bool { return s.state.Reservations() == 0 }, time.Second, time.Millisecond)
	})
	t.Run("the client's fault is the client's answer", func(t *testing.T) {
		s := directly(splitting(), prefiller(t, func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(400)
			_, _ = io.WriteString(w, "max_tokens\nis too large")
		}))
		g := s.ask(hello, nil)
		require.EqualValues(t, 400, g.refused.GetStatus().GetCode())
		require.Contains(t, string(g.refused.GetBody()), "max_tokens is too large")
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
		require.Eventually(t, func() bool { return s.state.Reservations() == 0 }, time.Second, time.Millisecond)
	})
	t.Run("bounded", func(t *testing.T) {
		s := directly(splitting(), prefiller(t, good))
		for range maxDirectCalls {
			s.server.direct.places <- struct{}{}
		}
		require.Equal(t, hello, string(s.ask(hello, nil).body))
	})
}

// FuzzReplacer: whatever the cuts, the answer is as if it had come in one piece.
func FuzzReplacer(f *testing.F) {
	f.Add([]byte(`{"model":"b","x":{"model": "b"}}`), uint8(3), uint8(7))
	f.Add([]byte(`"model":"model":"b""model": "model":"b"`), uint8(1), uint8(2))
	f.Fuzz(func(t *testing.T, text []byte, a, b uint8) {
		i, j := int(a)%(len(text)+1), int(b)%(len(text)+1)
		i, j = min(i, j), max(i, j)
		r := newReplacer("b", "longer")
		var got []byte
		for n, piece := range [][]byte{text[:i], text[i:j], text[j:]} {
			got = r.append(got, bytes.Clone(piece), n == 2)
		}
		want := bytes.ReplaceAll(text, []byte(`"model":"b"`), []byte(`"model":"longer"`))
		want = bytes.ReplaceAll(want, []byte(`"model": "b"`), []byte(`"model": "longer"`))
		require.Equal(t, string(want), string(got))
	})
}

// FuzzMetadata: hints of any shape are read, or refused, as the generated code reads them.
func FuzzMetadata(f *testing.F) {
	f.Add(`{"x-gateway-destination-endpoint-subset":["a:1","b:2"]}`)
	f.Add(`{"x-gateway-destination-endpoint-subset":"a:1,b:2","other":{"deep":[1,null,true]}}`)
	f.Fuzz(func(t *testing.T, text string) {
		s := &structpb.Struct{}
		if s.UnmarshalJSON([]byte(text)) != nil {
			return
		}
		var want []string
		switch v := s.GetFields()[keySubset].GetKind().(type) {
		case *structpb.Value_StringValue:
			want = addresses(nil, v.StringValue)
		case *structpb.Value_ListValue:
			for _, item := range v.ListValue.GetValues() {
				want = addresses(want, item.GetStringValue())
			}
		}
		got := unmarshalled(t, &extprocv3.ProcessingRequest{MetadataContext: &corev3.Metadata{
			FilterMetadata: map[string]*structpb.Struct{namespaceSubset: s, "other": s},
		}})
		require.Equal(t, want, got.hints.subset)
		_, has := s.GetFields()[keySubset]
		require.Equal(t, has, got.hints.hasSubset)
	})
}

// unmarshalled is a message as the server reads it, in pieces.
func unmarshalled(t *testing.T, r *extprocv3.ProcessingRequest) *message {
	wire, err := proto.Marshal(r)
	require.NoError(t, err)
	var m message
	require.NoError(t, m.unmarshal(split(wire, rand.New(rand.NewPCG(1, 2)))))
	return &m
}

// Pools with another hand-over behind an Envoy of our own: one hop to D, which is planned again from the client's own body
// when it fails outright.
func TestHandoffsBehindOurEnvoy(t *testing.T) {
	t.Run("sidecar", func(t *testing.T) {
		s := newStand(t, Options{})
		policy := splitting()
		policy.Handoff = HandoffSidecar
		s.pool("chat", policy, "p1", "d1", "d2")
		q := s.newRequest("/v1/chat/completions", "r-1", hello)
		v := q.pass()
		first := v.set[headerEndpoint]
		require.Equal(t, legDecode, v.set[headerLeg])
		require.Equal(t, addressOf("p1"), v.set[headerPrefiller])
		require.Equal(t, hello, string(v.body))
		require.Equal(t, 307, q.replan().Code)
		q.follow()
		v = q.pass()
		require.NotEqual(t, first, v.set[headerEndpoint], "another D")
		require.Equal(t, hello, string(v.body))
		s.log(q.entry(200, "via_upstream"))
		require.Eventually(t, func() bool { return s.state.Reservations() == 0 }, time.Second, time.Millisecond)
	})
	t.Run("direct", func(t *testing.T) {
		p := prefiller(t, func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, kvAnswer) })
		s := newStand(t, Options{})
		policy := splitting()
		policy.Handoff = HandoffDirect
		s.pool("chat", policy)
		s.state.SetPool(kvstate.PoolSpec{Name: "chat", Models: []string{"*"}}, []kvstate.EndpointSpec{*p,
			{Name: "d1", Addr: addressOf("d1"), Role: kvstate.RoleDecode}, {Name: "d2", Addr: addressOf("d2"), Role: kvstate.RoleDecode}})
		q := s.newRequest("/v1/chat/completions", "r-1", hello)
		v := q.pass()
		require.Equal(t, legDecode, v.set[headerLeg])
		require.Empty(t, v.set[headerPrefiller])
		require.Contains(t, string(v.body), `"remote_engine_id":"e"`)
		require.Equal(t, 307, q.replan().Code)
		q.follow()
		v = q.pass()
		require.Equal(t, 1, strings.Count(string(v.body), "remote_engine_id"), "parameters of its own, those of the first try are spent")
		s.log(q.entry(200, "via_upstream"))
		require.Eventually(t, func() bool { return s.state.Reservations() == 0 }, time.Second, time.Millisecond)
	})
}
