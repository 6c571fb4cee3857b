package extproc

import (
	"context"
	"io"
	"strconv"
	"testing"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	filterv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/types/known/structpb"

	"tandem/extproc/core"
	"tandem/extproc/envoywire/wiretest"
	"tandem/extproc/plan"
)

// This file plays a gateway of the Inference Extension: it knows the Endpoint Picker protocol and nothing of Tandem.

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
	full     bool // the stream begins with the answer: it says how bodies come
}

const hello = `{"model":"m","messages":[{"role":"user","content":"Hello, who are you?"}],"max_tokens":5}`

// pickerStand is a server that speaks the protocol, with one pool.
func pickerStand(t *testing.T, o plan.GatewayOptions, endpoints ...string) *stand {
	s := newStand(t, core.Options{Picker: &o})
	policy := splitting()
	policy.Handoff = plan.HandoffSidecar
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
			Headers: wiretest.HeaderMap(pairs...), EndOfStream: body == "",
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
	var protocol *extprocv3.ProtocolConfiguration
	if g.full {
		protocol = &extprocv3.ProtocolConfiguration{ResponseBodyMode: filterv3.ProcessingMode_FULL_DUPLEX_STREAMED}
	}
	require.NoError(g.t, g.stream.Send(&extprocv3.ProcessingRequest{
		ProtocolConfig: protocol,
		Request: &extprocv3.ProcessingRequest_ResponseHeaders{ResponseHeaders: &extprocv3.HttpHeaders{
			Headers: wiretest.HeaderMap(":status", strconv.Itoa(status)), EndOfStream: len(pieces) == 0 && !trailers,
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
				ResponseTrailers: &extprocv3.HttpTrailers{Trailers: wiretest.HeaderMap("x-sum", "1")},
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

func header(i *extprocv3.ImmediateResponse, name string) string {
	for _, h := range i.GetHeaders().GetSetHeaders() {
		if h.GetHeader().GetKey() == name {
			return string(h.GetHeader().GetRawValue())
		}
	}
	return ""
}
