package extproc

import (
	"context"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	filterv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	logv3 "github.com/envoyproxy/go-control-plane/envoy/service/accesslog/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/status"

	"tandem/extproc/core"
	"tandem/extproc/envoywire"
	"tandem/extproc/names"
	"tandem/extproc/openai"
	"tandem/extproc/plan"
)

const chatBody = `{"model":"m","messages":[{"role":"user","content":"hi"}]}`

// open begins a pass by hand: the headers and so many of the body's messages.
func (q *request) open(ctx context.Context, sent int) (extprocv3.ExternalProcessor_ProcessClient, []*extprocv3.ProcessingRequest) {
	stream, err := q.s.ext.Process(ctx)
	require.NoError(q.s.t, err)
	headers, body := q.messages()
	require.NoError(q.s.t, stream.Send(headers))
	for _, m := range body[:sent] {
		require.NoError(q.s.t, stream.Send(m))
	}
	return stream, body[sent:]
}

func TestABodyThatDoesNotArriveIsA408(t *testing.T) {
	for _, mode := range []filterv3.ProcessingMode_BodySendMode{filterv3.ProcessingMode_FULL_DUPLEX_STREAMED, filterv3.ProcessingMode_BUFFERED} {
		t.Run(mode.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newStand(t, core.Options{BodyTimeout: time.Minute})
				s.pool("chat", splitting(), "p1", "d1")
				q := s.newRequest("/v1/chat/completions", "r1", chatBody)
				q.mode, q.piece = mode, 10
				ctx, cancel := context.WithCancel(t.Context())
				began, sent := time.Now(), 2
				if mode == filterv3.ProcessingMode_BUFFERED {
					sent = 0
				}
				stream, _ := q.open(ctx, sent)
				r, err := stream.Recv()
				if mode == filterv3.ProcessingMode_BUFFERED {
					require.NotNil(t, r.GetRequestHeaders())
					r, err = stream.Recv()
				}
				require.NoError(t, err)
				require.EqualValues(t, 408, r.GetImmediateResponse().GetStatus().GetCode(), "%v", r)
				require.Contains(t, string(r.GetImmediateResponse().GetBody()), `"code":"body_timeout"`)
				require.Equal(t, time.Minute, time.Since(began))
				cancel() // as Envoy does with an immediate response in hand
				synctest.Wait()
				require.Zero(t, s.server.Memory.Load())
				require.Zero(t, s.state.Bookings.Reservations())
			})
		})
	}
}

// TestABodyThatArrivesAtItsDeadline has the handler and the deadline at work at the same moment: one answer comes of it.
func TestABodyThatArrivesAtItsDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStand(t, core.Options{BodyTimeout: time.Second})
		s.pool("chat", splitting(), "p1", "d1")
		for i := range 100 {
			q := s.newRequest("/v1/chat/completions", "r"+strconv.Itoa(i), chatBody)
			ctx, cancel := context.WithCancel(t.Context())
			stream, rest := q.open(ctx, 0)
			synctest.Wait()
			time.Sleep(time.Second)
			for _, m := range rest {
				_ = stream.Send(m)
			}
			r, err := stream.Recv()
			require.NoError(t, err)
			if late := r.GetImmediateResponse(); late != nil {
				require.EqualValues(t, 408, late.GetStatus().GetCode())
				synctest.Wait()
				require.Zero(t, s.state.Bookings.Reservations(), "what the handler booked in vain")
			} else {
				require.NotNil(t, r.GetRequestHeaders())
				_, err = stream.Recv()
				require.NoError(t, err)
				s.server.passes.Release(s.server.passes.Held(q.headers["x-request-id"], 0))
			}
			cancel()
			synctest.Wait()
		}
		require.Zero(t, s.state.Bookings.Reservations())
	})
}

func TestBodiesOfAllStreamsShareABudget(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStand(t, core.Options{HeldBytes: 50_000})
		s.pool("chat", splitting(), "p1", "d1")
		body := strings.Replace(chatBody, "hi", filler(30_000), 1)
		first := s.newRequest("/v1/chat/completions", "r1", body)
		first.piece = 29_000
		ctx, cancel := context.WithCancel(t.Context())
		_, _ = first.open(ctx, 1)
		synctest.Wait()
		require.Equal(t, int64(29_000), s.server.Memory.Load())

		second := s.newRequest("/v1/chat/completions", "r2", body)
		v := second.pass()
		require.Equal(t, 503, v.status())
		require.Contains(t, string(v.immediate.GetBody()), "server_busy")
		require.Equal(t, "retry-after", v.immediate.GetHeaders().GetSetHeaders()[1].GetHeader().GetKey())

		cancel()
		synctest.Wait()
		require.Zero(t, s.server.Memory.Load())
		require.Zero(t, s.newRequest("/v1/chat/completions", "r3", body).pass().status(), "there is room again")
	})
}

// TestABodyWithoutEndIsRefusedAtItsLimit: the client sends on and on, and is refused at once.
func TestABodyWithoutEndIsRefusedAtItsLimit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStand(t, core.Options{SplitBodyBytes: 1000, MaxBodyBytes: 1000})
		s.pool("chat", splitting(), "p1", "d1")
		q := s.newRequest("/v1/chat/completions", "r1", chatBody)
		q.trailers = true // so that no message of the body is its last
		q.body = make([]byte, 2000)
		began := time.Now()
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		stream, _ := q.open(ctx, 1)
		r, err := stream.Recv()
		require.NoError(t, err)
		require.EqualValues(t, 413, r.GetImmediateResponse().GetStatus().GetCode(), "%v", r)
		require.Zero(t, time.Since(began))
	})
}

// TestStreamsThatMakeNoSense end with an answer and an error in the log; they must not end the server.
func TestStreamsThatMakeNoSense(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStand(t, core.Options{})
		s.pool("chat", splitting(), "p1", "d1")
		for name, first := range map[string]*extprocv3.ProcessingRequest{
			"a body first":      requestBody([]byte("x"), true),
			"an answer first":   {Request: &extprocv3.ProcessingRequest_ResponseHeaders{ResponseHeaders: &extprocv3.HttpHeaders{}}},
			"an empty message":  {},
			"headers of no one": {Request: &extprocv3.ProcessingRequest_RequestHeaders{RequestHeaders: &extprocv3.HttpHeaders{EndOfStream: true}}},
		} {
			stream, err := s.ext.Process(t.Context())
			require.NoError(t, err, name)
			require.NoError(t, stream.Send(first), name)
			_, err = stream.Recv()
			require.NoError(t, err, name)
			_, err = stream.Recv()
			require.Error(t, err, "%s: one answer", name)
		}
		s.server.passes.Release(s.server.passes.Held("", 0))
	})
}

// TestDrainLetsAccessLogStreamsGo: they have no end of their own, and a graceful stop waits for every stream.
func TestDrainLetsAccessLogStreamsGo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStand(t, core.Options{})
		s.pool("chat", splitting(), "p1", "d1")
		logs, err := s.logs.StreamAccessLogs(t.Context())
		require.NoError(t, err)
		require.NoError(t, logs.Send(&logv3.StreamAccessLogsMessage{}))
		q := s.newRequest("/v1/chat/completions", "r1", chatBody)
		stream, rest := q.open(t.Context(), 0)
		synctest.Wait()

		stopped := make(chan struct{})
		s.core.Drain()
		go func() { s.grpc.GracefulStop(); close(stopped) }()
		synctest.Wait()
		select {
		case <-stopped:
			require.Fail(t, "a request is still under way")
		default:
		}
		require.NoError(t, stream.Send(rest[0]), "requests under way are answered")
		r, err := stream.Recv()
		require.NoError(t, err)
		require.NotNil(t, r.GetRequestHeaders())
		_, err = stream.Recv()
		require.NoError(t, err)
		<-stopped
		_, err = s.ext.Process(t.Context())
		if err == nil {
			_, err = logs.CloseAndRecv()
		}
		require.NotEqual(t, codes.OK, status.Code(err))
	})
}

// TestManyRequestsAtOnceLeaveNothing sends requests with all kinds of ends at the same time.
func TestManyRequestsAtOnceLeaveNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStand(t, core.Options{})
		s.pool("chat", splitting(), "p1", "p2", "d1", "d2", "b1")
		var all sync.WaitGroup
		for i := range 150 {
			all.Go(func() {
				r := rand.New(rand.NewPCG(7, uint64(i)))
				q := s.newRequest("/v1/chat/completions", "r"+strconv.Itoa(i), strings.Replace(chatBody, "hi", filler(r.IntN(40_000)), 1))
				q.piece = 1000 + r.IntN(60_000)
				if r.IntN(2) == 0 {
					q.mode = filterv3.ProcessingMode_BUFFERED
				}
				s.log(q.entry(q.live(r)))
			})
		}
		all.Wait()
		synctest.Wait() // streams whose clients have left end by themselves
		require.Zero(t, s.state.Bookings.Reservations())
		require.Zero(t, s.server.Memory.Load())
	})
}

// live takes a request through its passes, with luck and without, and returns how it ended. A client's body must come
// out of every pass but a prefill's as it went in.
func (q *request) live(r *rand.Rand) (int, string) {
	for {
		if q.taken != "" {
			q.follow()
		}
		if r.IntN(12) == 0 {
			q.leave(r.IntN(3), func() {})
			time.Sleep(50 * time.Millisecond) // Envoy's buffer_flush_interval: the entry comes after the end of the stream
			return 0, "downstream_remote_disconnect"
		}
		v := q.pass()
		if v.status() != 0 {
			return v.status(), "tandem"
		}
		leg := v.set[names.HeaderLeg]
		if leg != plan.LegPrefill {
			body := string(q.body)
			if i := strings.Index(body, `"model"`); i > 1 {
				body = "{" + body[i:]
			}
			require.Equal(q.s.t, string(q.first), body)
		}
		switch {
		case leg == plan.LegPass, leg == plan.LegDecode && r.IntN(4) > 0:
			return 200, "via_upstream"
		case leg == plan.LegDecode || r.IntN(5) == 0:
			if w := q.replan(); w.Code != 307 {
				return w.Code, "via_upstream"
			}
		default:
			a := []engineAnswer{{status: 200, body: prefilled(params(1 + r.IntN(100)))}, {status: 200, body: prefilled("null")}, {status: 429}, {status: 503, body: []byte("x")}, {status: 200, body: []byte("{")}}
			q.prefillLeg(a[r.IntN(len(a))])
		}
	}
}

// TestReplanReadsTheBodyFirst: Envoy follows a redirect only once the request was sent in full.
func TestReplanReadsTheBodyFirst(t *testing.T) {
	s := newStand(t, core.Options{})
	s.pool("chat", splitting(), "p1", "d1")
	q := s.newRequest("/v1/chat/completions", "r1", chatBody)
	q.pass()
	port := httptest.NewServer(s.server.Replan())
	defer port.Close()
	body := strings.NewReader(strings.Repeat("x", 3<<20))
	r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, port.URL+"/v1/chat/completions?a=b", body)
	require.NoError(t, err)
	r.Header.Set("x-request-id", "r1")
	r.Header.Set(names.HeaderTicket, q.headers[names.HeaderTicket])
	w, err := http.DefaultTransport.RoundTrip(r)
	require.NoError(t, err)
	defer func() { _ = w.Body.Close() }()
	require.Equal(t, 307, w.StatusCode)
	require.Equal(t, "http://tandem/v1/chat/completions", w.Header.Get("location"), "the ticket has the rest")
	require.Zero(t, body.Len())
	s.log(q.entry(502, ""))
	require.Zero(t, s.state.Bookings.Reservations())
}

// TestPiecesAreTheEditedBody holds cutting against applying the edits, whatever the edits.
func TestPiecesAreTheEditedBody(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 1))
	for range 500 {
		body := []byte(filler(r.IntN(200_000)))
		var edits openai.Edits
		for at := 0; at < len(body) && r.IntN(4) > 0; {
			start := at + r.IntN(len(body)-at)
			end := start + r.IntN(min(len(body)-start, 1000)+1)
			edits = append(edits, openai.Edit{Start: start, End: end, New: []byte(filler(r.IntN(3000)))})
			at = end + 1
		}
		want := edits.Apply(nil, body)

		var b envoywire.Body
		b.Grow(len(body))
		b.Data = append(b.Data, body...)
		var p envoywire.Pieces
		p.Cut(&b, edits)
		require.Equal(t, len(want), p.Total)
		shared := b.Share()
		require.Equal(t, string(want), string(p.Whole(shared).Materialize()))
		var got []byte
		ends := 0
		require.NoError(t, p.Each(shared, func(parts mem.BufferSlice, last bool) error {
			require.LessOrEqual(t, parts.Len(), envoywire.MaxPiece)
			require.Zero(t, ends, "the last is the last")
			got = append(got, parts.Materialize()...)
			parts.Free()
			if last {
				ends++
			}
			return nil
		}))
		shared.Free()
		require.Equal(t, string(want), string(got))
		require.Equal(t, 1, ends)
	}
}
