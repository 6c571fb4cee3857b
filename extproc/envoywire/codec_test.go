package envoywire

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"tandem/extproc/envoywire/wiretest"
	"tandem/extproc/names"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	logdatav3 "github.com/envoyproxy/go-control-plane/envoy/data/accesslog/v3"
	filterv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	logv3 "github.com/envoyproxy/go-control-plane/envoy/service/accesslog/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

// split cuts b into buffers at random places, like gRPC for a message of several frames.
func split(b []byte, r *rand.Rand) mem.BufferSlice {
	var out mem.BufferSlice
	for len(b) > 0 {
		n := 1 + r.IntN(len(b))
		out = append(out, mem.SliceBuffer(b[:n]))
		b = b[n:]
	}
	return out
}

func TestMessageReadsRequestHeaders(t *testing.T) {
	wire := wiretest.Marshal(t, &extprocv3.ProcessingRequest{
		Request: &extprocv3.ProcessingRequest_RequestHeaders{RequestHeaders: &extprocv3.HttpHeaders{
			Headers: wiretest.HeaderMap(":method", "POST", ":path", "/v1/completions?x=1", "x-unread", strings.Repeat("z", 300),
				"content-type", "application/json", "x-request-id", "abc", names.HeaderTicket, "T"),
			EndOfStream: true,
		}},
		ProtocolConfig: &extprocv3.ProtocolConfiguration{RequestBodyMode: filterv3.ProcessingMode_FULL_DUPLEX_STREAMED},
	})
	var m Message
	require.NoError(t, m.Unmarshal(split(wire, rand.New(rand.NewPCG(1, 2)))))
	require.Equal(t, PhaseRequestHeaders, m.Phase)
	require.True(t, m.EndOfStream)
	require.Equal(t, ModeFullDuplex, m.Mode.Request)
	require.Equal(t, "POST", string(m.Headers.Method))
	require.Equal(t, "/v1/completions?x=1", string(m.Headers.Path))
	require.Equal(t, "application/json", string(m.Headers.ContentType))
	require.Equal(t, "abc", string(m.Headers.RequestID))
	require.Equal(t, "T", string(m.Headers.Ticket))
	require.Nil(t, m.Headers.Upgrade)
}

func TestMessageReadsAttributesOfThePrefillLeg(t *testing.T) {
	wire := wiretest.Marshal(t, &extprocv3.ProcessingRequest{
		Request:    &extprocv3.ProcessingRequest_ResponseHeaders{ResponseHeaders: &extprocv3.HttpHeaders{Headers: wiretest.HeaderMap(":status", "200")}},
		Attributes: wiretest.Attributes("request.headers['x-tandem-ticket']", "T1", "request.path", "/p", "request.headers['x-request-id']", "id", "upstream.address", "1.2.3.4:5"),
	})
	var m Message
	require.NoError(t, m.Unmarshal(split(wire, rand.New(rand.NewPCG(1, 2)))))
	require.Equal(t, PhaseResponseHeaders, m.Phase)
	require.Equal(t, "200", string(m.Headers.Status))
	require.Equal(t, "T1 id /p", fmt.Sprintf("%s %s %s", m.Attributes.Ticket, m.Attributes.RequestID, m.Attributes.Path))
}

func TestMessageGathersABodyAcrossMessagesUpToItsLimit(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	body := bytes.Repeat([]byte("0123456789"), 20_000)
	var got Body
	m := Message{Body: &got, BodyLimit: len(body)}
	for rest := body; ; {
		n := min(len(rest), 1+r.IntN(70_000))
		wire := wiretest.Marshal(t, &extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_RequestBody{
			RequestBody: &extprocv3.HttpBody{Body: rest[:n], EndOfStream: n == len(rest)}}})
		require.NoError(t, m.Unmarshal(split(wire, r)))
		if rest = rest[n:]; m.EndOfStream {
			break
		}
	}
	require.True(t, bytes.Equal(body, got.Bytes()))
	require.False(t, m.Over)

	wire := wiretest.Marshal(t, &extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_RequestBody{RequestBody: &extprocv3.HttpBody{Body: []byte("x")}}})
	require.NoError(t, m.Unmarshal(split(wire, r)))
	require.True(t, m.Over, "one byte more than the limit")
	require.Equal(t, len(body), got.Len())
}

// FuzzMessage compares the reader with the generated types: messages that they refuse may be read here (unread fields
// are not validated), but those that both accept must mean the same, and nothing may panic.
func FuzzMessage(f *testing.F) {
	f.Add([]byte{}, uint64(1))
	f.Add(wiretest.Marshal(f, &extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_RequestBody{RequestBody: &extprocv3.HttpBody{Body: []byte("abc"), EndOfStream: true}}}), uint64(2))
	f.Add(wiretest.Marshal(f, &extprocv3.ProcessingRequest{
		Request:    &extprocv3.ProcessingRequest_ResponseHeaders{ResponseHeaders: &extprocv3.HttpHeaders{Headers: wiretest.HeaderMap(":status", "200", "a", "b")}},
		Attributes: wiretest.Attributes("request.path", "/p"),
	}), uint64(3))
	f.Fuzz(func(t *testing.T, wire []byte, seed uint64) {
		var body Body
		m := Message{Body: &body, BodyLimit: 1 << 20}
		err := m.Unmarshal(split(wire, rand.New(rand.NewPCG(seed, 0))))
		var want extprocv3.ProcessingRequest
		if proto.Unmarshal(wire, &want) != nil || err != nil {
			return
		}
		if b := want.GetRequestBody(); b != nil && m.Phase == PhaseRequestBody && len(wire) < 200 && oneRequest(wire) {
			require.Equal(t, string(b.Body), string(body.Bytes()))
		}
		if h := want.GetRequestHeaders(); h != nil && oneRequest(wire) {
			for _, v := range h.GetHeaders().GetHeaders() {
				if v.Key == ":path" && len(v.RawValue) > 0 && len(v.Value) == 0 {
					require.NotNil(t, m.Headers.Path)
				}
			}
		}
	})
}

// oneRequest reports whether the message has exactly one member of the oneof and one body field in it: protobuf's
// rules for merging repeated ones do not apply here.
func oneRequest(wire []byte) bool {
	c := newCursor(mem.BufferSlice{mem.SliceBuffer(wire)})
	oneof, bodies := 0, 0
	for number, kind := c.field(c.end); number != 0; number, kind = c.field(c.end) {
		if number == 4 && kind == wireBytes {
			end := c.length(c.end)
			for n, k := c.field(end); n != 0; n, k = c.field(end) {
				if n == 1 {
					bodies++
				}
				c.skip(k, end)
			}
			oneof++
			continue
		}
		if number >= 2 && number <= 7 {
			oneof++
		}
		c.skip(kind, c.end)
	}
	return oneof == 1 && bodies <= 1
}

// decodeReply reads a reply with the generated types.
func decodeReply(t *testing.T, r *Reply) *extprocv3.ProcessingResponse {
	t.Helper()
	var got extprocv3.ProcessingResponse
	require.NoError(t, proto.Unmarshal(r.Marshal().Materialize(), &got))
	return &got
}

func TestReplyIsWhatTheGeneratedTypesRead(t *testing.T) {
	var edits HeaderEdits
	edits.Set("x-a", []byte("1"))
	edits.Set("x-long", bytes.Repeat([]byte("v"), 40_000))
	edits.Remove("x-b")
	mutation := &extprocv3.HeaderMutation{
		SetHeaders: []*corev3.HeaderValueOption{
			{Header: &corev3.HeaderValue{Key: "x-a", RawValue: []byte("1")}, AppendAction: corev3.HeaderValueOption_OVERWRITE_IF_EXISTS_OR_ADD},
			{Header: &corev3.HeaderValue{Key: "x-long", RawValue: bytes.Repeat([]byte("v"), 40_000)}, AppendAction: corev3.HeaderValueOption_OVERWRITE_IF_EXISTS_OR_ADD},
		},
		RemoveHeaders: []string{"x-b"},
	}
	parts := func() mem.BufferSlice { return mem.BufferSlice{mem.SliceBuffer("ab"), mem.SliceBuffer("cd")} }

	for _, tt := range []struct {
		name string
		in   Reply
		want *extprocv3.ProcessingResponse
	}{
		{"headers with edits", Reply{Phase: PhaseRequestHeaders, Headers: &edits, ClearRoute: true},
			&extprocv3.ProcessingResponse{Response: &extprocv3.ProcessingResponse_RequestHeaders{RequestHeaders: &extprocv3.HeadersResponse{
				Response: &extprocv3.CommonResponse{HeaderMutation: mutation, ClearRouteCache: true}}}}},
		{"headers as they are", Reply{Phase: PhaseResponseHeaders},
			&extprocv3.ProcessingResponse{Response: &extprocv3.ProcessingResponse_ResponseHeaders{ResponseHeaders: &extprocv3.HeadersResponse{Response: &extprocv3.CommonResponse{}}}}},
		{"a buffered body replaced", Reply{Phase: PhaseRequestBody, Headers: &edits, Kind: ReplaceBody, Parts: parts()},
			&extprocv3.ProcessingResponse{Response: &extprocv3.ProcessingResponse_RequestBody{RequestBody: &extprocv3.BodyResponse{
				Response: &extprocv3.CommonResponse{HeaderMutation: mutation, BodyMutation: &extprocv3.BodyMutation{Mutation: &extprocv3.BodyMutation_Body{Body: []byte("abcd")}}}}}}},
		{"a piece of a streamed body", Reply{Phase: PhaseRequestBody, Kind: StreamBody, Parts: parts()}, streamed("abcd", false)},
		{"the last piece", Reply{Phase: PhaseRequestBody, Kind: StreamBody, Parts: parts(), End: true}, streamed("abcd", true)},
		{"the end alone", Reply{Phase: PhaseRequestBody, Kind: StreamBody, End: true}, streamed("", true)},
		{"trailers", Reply{Phase: PhaseRequestTrailers},
			&extprocv3.ProcessingResponse{Response: &extprocv3.ProcessingResponse_RequestTrailers{RequestTrailers: &extprocv3.TrailersResponse{}}}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got := decodeReply(t, &tt.in)
			require.True(t, proto.Equal(tt.want, got), "want %v\n got %v", tt.want, got)
		})
	}
}

func streamed(body string, end bool) *extprocv3.ProcessingResponse {
	var b []byte
	if body != "" {
		b = []byte(body)
	}
	return &extprocv3.ProcessingResponse{Response: &extprocv3.ProcessingResponse_RequestBody{RequestBody: &extprocv3.BodyResponse{
		Response: &extprocv3.CommonResponse{BodyMutation: &extprocv3.BodyMutation{Mutation: &extprocv3.BodyMutation_StreamedResponse{
			StreamedResponse: &extprocv3.StreamedBodyResponse{Body: b, EndOfStream: end}}}}}}}
}

func TestImmediateReplyIsWhatTheGeneratedTypesRead(t *testing.T) {
	i := &Immediate{Status: 404, Body: []byte(`{"error":{}}`), Details: "tandem_x"}
	i.Headers.Set("content-type", []byte("application/json"))
	got := decodeReply(t, &Reply{Immediate: i}).GetImmediateResponse()
	require.EqualValues(t, 404, got.GetStatus().GetCode())
	require.Equal(t, `{"error":{}}`, string(got.GetBody()))
	require.Equal(t, "tandem_x", got.GetDetails())
	require.Equal(t, "content-type", got.GetHeaders().GetSetHeaders()[0].GetHeader().GetKey())
}

func TestLogBatchReadsEntries(t *testing.T) {
	wire := wiretest.Marshal(t, &logv3.StreamAccessLogsMessage{
		Identifier: &logv3.StreamAccessLogsMessage_Identifier{LogName: "tandem"},
		LogEntries: &logv3.StreamAccessLogsMessage_HttpLogs{HttpLogs: &logv3.StreamAccessLogsMessage_HTTPAccessLogEntries{
			LogEntry: []*logdatav3.HTTPAccessLogEntry{
				{
					CommonProperties: &logdatav3.AccessLogCommon{
						Duration:                  durationpb.New(1500 * time.Millisecond),
						TimeToFirstUpstreamRxByte: durationpb.New(20 * time.Millisecond),
						ResponseFlags:             &logdatav3.ResponseFlags{DownstreamConnectionTermination: true},
						CustomTags:                map[string]string{"other": "x", names.TagUnfollowed: "redirect"},
						UpstreamWireBytesSent:     1 << 40,
					},
					Request: &logdatav3.HTTPRequestProperties{RequestId: "id", RequestHeaders: map[string]string{"x-other": "1", names.HeaderTicket: "T"}, UpstreamHeaderBytesSent: 300},
					Response: &logdatav3.HTTPResponseProperties{ResponseCode: wrapperspb.UInt32(307), ResponseBodyBytes: 128,
						ResponseCodeDetails: "internal_redirect"},
				},
				{Request: &logdatav3.HTTPRequestProperties{RequestId: "id2"}},
			},
		}},
	})
	var b LogBatch
	require.NoError(t, b.Unmarshal(split(wire, rand.New(rand.NewPCG(5, 6)))))
	require.Len(t, b.Entries, 2)
	e := b.Entries[0]
	require.Equal(t, "id", string(e.Ended.RequestID))
	require.Equal(t, "T", string(e.Ticket))
	require.Equal(t, "internal_redirect", string(e.Ended.Details))
	require.Equal(t, 307, e.Ended.Status)
	require.EqualValues(t, 128, e.Ended.Body)
	require.Equal(t, 1500*time.Millisecond, e.Ended.Duration)
	require.Equal(t, 20*time.Millisecond, e.Ended.FirstByte)
	require.True(t, e.Ended.ClientGone)
	require.Equal(t, "redirect", string(e.Ended.Unfollowed))
	require.Equal(t, []uint64{1 << 40, 300}, []uint64{e.Ended.Sent, e.Ended.SentHeaders})
	require.Equal(t, "id2", string(b.Entries[1].Ended.RequestID))
	require.Empty(t, b.Entries[1].Ticket)
	require.Empty(t, b.Entries[1].Ended.Unfollowed)
}

func FuzzLogBatch(f *testing.F) {
	f.Add([]byte{}, uint64(1))
	f.Fuzz(func(_ *testing.T, wire []byte, seed uint64) {
		var b LogBatch
		_ = b.Unmarshal(split(wire, rand.New(rand.NewPCG(seed, 0))))
	})
}
