package extproc

import (
	"encoding/json"
	"errors"
	"io"
	"strings"
	"testing"
	"time"

	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/types/known/structpb"

	"tandem/extproc/core"
	"tandem/extproc/envoywire"
	"tandem/extproc/envoywire/wiretest"
	"tandem/extproc/kvtransfer"
	"tandem/extproc/names"
)

// These tests play the listener answer-leg: D's answer comes in pieces, and they collect what goes on.

// answered is what became of an answer.
type answered struct {
	dropped  []string
	body     string
	ended    bool // with the body
	trailers bool
	status   int    // of an answer in its place
	code     string // of its error
	final    bool   // and Envoy must not try again
}

// throughAnswerLeg sends an answer through the filter, with the ticket that its request bore, in pieces of n bytes.
func (s *stand) throughAnswerLeg(t *kvtransfer.Ticket, status, contentType, body string, n int, trailers bool) (got answered) {
	s.t.Helper()
	sealed, err := s.server.passes.Keys().Seal(nil, t, "r1")
	require.NoError(s.t, err)
	l := s.leg(names.RoleAnswerLeg)
	attributes, err := structpb.NewStruct(map[string]any{"request.headers['x-tandem-ticket']": string(sealed), "request.headers['x-request-id']": "r1"})
	require.NoError(s.t, err)
	send := func(m *extprocv3.ProcessingRequest) {
		if err := l.stream.Send(m); !errors.Is(err, io.EOF) { // it may have answered already
			require.NoError(s.t, err)
		}
	}
	send(&extprocv3.ProcessingRequest{
		Attributes: map[string]*structpb.Struct{"envoy.filters.http.ext_proc": attributes},
		Request: &extprocv3.ProcessingRequest_ResponseHeaders{ResponseHeaders: &extprocv3.HttpHeaders{
			Headers: wiretest.HeaderMap(":status", status, "content-type", contentType, "content-length", "1"),
		}},
	})
	for rest := body; ; {
		k := min(n, len(rest))
		end := k == len(rest)
		send(&extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_ResponseBody{ResponseBody: &extprocv3.HttpBody{Body: []byte(rest[:k]), EndOfStream: end && !trailers}}})
		if rest = rest[k:]; end {
			break
		}
	}
	if trailers {
		send(&extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_ResponseTrailers{ResponseTrailers: &extprocv3.HttpTrailers{}}})
	}
	for {
		r, err := l.stream.Recv()
		if errors.Is(err, io.EOF) {
			return got
		}
		require.NoError(s.t, err)
		switch {
		case r.GetImmediateResponse() != nil:
			i := r.GetImmediateResponse()
			got.status = int(i.GetStatus().GetCode())
			for _, h := range i.GetHeaders().GetSetHeaders() {
				got.final = got.final || h.GetHeader().GetKey() == names.HeaderFinal && string(h.GetHeader().GetRawValue()) == "true"
			}
			var e struct{ Error struct{ Code string } }
			require.NoError(s.t, json.Unmarshal(i.GetBody(), &e))
			got.code = e.Error.Code
			return got
		case r.GetResponseHeaders() != nil:
			got.dropped = r.GetResponseHeaders().GetResponse().GetHeaderMutation().GetRemoveHeaders()
		case r.GetResponseTrailers() != nil:
			got.trailers = true
			return got
		default:
			part := r.GetResponseBody().GetResponse().GetBodyMutation().GetStreamedResponse()
			require.NotNil(s.t, part, "%v", r)
			require.False(s.t, got.ended)
			require.LessOrEqual(s.t, len(part.GetBody()), envoywire.MaxPiece)
			got.body, got.ended = got.body+string(part.GetBody()), part.GetEndOfStream()
			if got.ended {
				return got
			}
		}
	}
}

const continuedChat = `{"chat":true,"id":"chatcmpl-1","created":1,"model":"m","text":" A","cached":3}`

func legTicket(params string) *kvtransfer.Ticket {
	return &kvtransfer.Ticket{Stage: kvtransfer.DecodeLeg, Expires: time.Now().Add(time.Minute), Pool: "chat", Params: []byte(params)}
}

func TestAnswerLeg(t *testing.T) {
	s := newStand(t, core.Options{})
	s.pool("chat", splitting(), "p1", "d1")
	chunk := func(text string) string {
		return `data: {"id":"cmpl-1","object":"text_completion","created":2,"model":"m","choices":[{"index":0,"text":"` + text + `","finish_reason":null}]}`
	}
	stream := chunk(" b") + "\r\n\r\n" + chunk(strings.Repeat("c", 100_000)) + "\n\ndata: [DONE]\n\n"
	whole := s.throughAnswerLeg(legTicket(continuedChat), "200", "text/event-stream; charset=utf-8", stream, len(stream), false)
	require.True(t, whole.ended)
	require.Equal(t, 5, strings.Count(whole.body, "data: "), "role, P's token, D's two, the end")
	require.Contains(t, whole.body, `"delta":{"content":" A"}`)
	require.True(t, strings.HasSuffix(whole.body, "data: [DONE]\n\n"))
	for _, n := range []int{1000, 4096, 70_000} {
		for _, trailers := range []bool{false, true} {
			got := s.throughAnswerLeg(legTicket(continuedChat), "200", "text/event-stream", stream, n, trailers)
			require.Equal(t, whole.body, got.body)
			require.Equal(t, trailers, got.trailers)
			require.Equal(t, !trailers, got.ended)
		}
	}
	small := chunk("x") + "\n\n"
	require.Equal(t, s.throughAnswerLeg(legTicket(continuedChat), "200", "text/event-stream", small, len(small), false).body,
		s.throughAnswerLeg(legTicket(continuedChat), "200", "text/event-stream", small, 1, true).body, "byte by byte")

	const completion = `{"id":"cmpl-1","object":"text_completion","created":2,"model":"m","choices":[{"index":0,"text":" b","finish_reason":"stop"}],"usage":{"prompt_tokens":4,"completion_tokens":1}}`
	got := s.throughAnswerLeg(legTicket(continuedChat), "200", "application/json", completion, 7, false)
	require.Equal(t, `{"id":"chatcmpl-1","object":"chat.completion","created":1,"model":"m","choices":[{"index":0,"message":{"role":"assistant","content":" A b"},"finish_reason":"stop"}],`+
		`"usage":{"prompt_tokens":3,"completion_tokens":2}}`, got.body)
	require.Equal(t, []string{"content-length"}, got.dropped)
	require.True(t, s.throughAnswerLeg(legTicket(continuedChat), "200", "application/json", completion, 7, true).trailers)

	const refusal = `{"error":{"message":"no"}}`
	got = s.throughAnswerLeg(legTicket(continuedChat), "400", "application/json", refusal, 5, false)
	require.Equal(t, refusal, got.body, "what D refuses is the client's")
	require.Empty(t, got.dropped)
	got = s.throughAnswerLeg(legTicket(continuedChat), "200", "application/json", refusal, 100, false)
	require.Equal(t, refusal, got.body, "no completion: it stays as it is")

	cached := &kvtransfer.Ticket{Stage: kvtransfer.DecodeLeg, Expires: time.Now().Add(time.Minute), Pool: "chat", Cached: 6}
	got = s.throughAnswerLeg(cached, "200", "application/json", `{"usage":{"prompt_tokens_details":{"cached_tokens":9}}}`, 9, false)
	require.Equal(t, `{"usage":{"prompt_tokens_details":{"cached_tokens":5}}}`, got.body)

	require.Equal(t, 500, s.throughAnswerLeg(&kvtransfer.Ticket{Stage: kvtransfer.DecodeLeg, Expires: time.Now().Add(time.Minute), Pool: "chat"}, "200", "application/json", "{}", 9, false).status)
	require.Equal(t, 500, s.throughAnswerLeg(&kvtransfer.Ticket{Stage: kvtransfer.HandOver, Expires: time.Now().Add(time.Minute), Pool: "chat", Cached: 6}, "200", "application/json", "{}", 9, false).status)
}

// What Tandem itself cannot do with an answer is not the fault of the endpoint that gave it: Envoy must not try
// another.
func TestAnswerLegBlamesNobody(t *testing.T) {
	cached := &kvtransfer.Ticket{Stage: kvtransfer.DecodeLeg, Expires: time.Now().Add(time.Minute), Pool: "chat", Cached: 6}
	for name, c := range map[string]struct {
		held   int
		answer int
		code   string
	}{
		"too long":  {answer: maxAnswer + 1, code: "answer_too_large"},
		"no memory": {held: 1 << 20, answer: 2 << 20, code: "server_busy"},
		"both":      {held: 1 << 20, answer: maxAnswer + 1, code: "server_busy"},
	} {
		s := newStand(t, core.Options{HeldBytes: c.held})
		s.pool("chat", splitting(), "p1", "d1")
		got := s.throughAnswerLeg(cached, "200", "application/json", strings.Repeat(" ", c.answer), 512<<10, false)
		require.Equal(t, 503, got.status, name)
		require.Equal(t, c.code, got.code, name)
		require.True(t, got.final, name)
	}
}
