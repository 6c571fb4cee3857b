package extproc

import (
	"bytes"
	"context"
	"encoding/base64"
	"errors"
	"io"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	logdatav3 "github.com/envoyproxy/go-control-plane/envoy/data/accesslog/v3"
	filterv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	logv3 "github.com/envoyproxy/go-control-plane/envoy/service/accesslog/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/test/bufconn"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"tandem/extproc/core"
	"tandem/extproc/envoywire/wiretest"
	"tandem/extproc/kvtransfer"
	"tandem/extproc/names"
	"tandem/extproc/pass"
	"tandem/extproc/plan"
	"tandem/extproc/telemetry"
	"tandem/kvstate"
)

// This file plays Envoy: it speaks to the server over gRPC with the generated types, does what Envoy's filters do with
// the answers, and holds the answers to Envoy's rules.

// stand is a server and the connection to it.
type stand struct {
	t      *testing.T
	state  *kvstate.State
	core   *core.Core
	server *Server
	grpc   *grpc.Server
	dial   func() (client *grpc.ClientConn, sever func()) // a connection of its own
	conn   *grpc.ClientConn
	ext    extprocv3.ExternalProcessorClient
	logs   logv3.AccessLogServiceClient

	registry *prometheus.Registry
}

// newStand starts a server with the options, which need neither state nor keys. It ends with the test.
func newStand(t *testing.T, o core.Options) *stand {
	t.Helper()
	s := &stand{t: t, state: o.State}
	if s.state == nil {
		s.state = kvstate.New(kvstate.Options{})
		o.State = s.state
	}
	if o.Settings.Keys == nil {
		keys, err := kvtransfer.GenerateKeys()
		require.NoError(t, err)
		o.Settings.Keys = keys
	}
	if o.Log == nil {
		o.Log = slog.New(slog.NewTextHandler(t.Output(), nil))
	}
	s.registry = prometheus.NewRegistry()
	s.core = core.New(o, telemetry.NewMetrics(s.registry, s.state))
	s.server = New(s.core)
	s.grpc = grpc.NewServer(grpc.ForceServerCodecV2(Codec()), grpc.MaxRecvMsgSize(64<<20), grpc.MaxSendMsgSize(64<<20),
		grpc.InitialWindowSize(16<<20), grpc.InitialConnWindowSize(64<<20))
	s.server.Register(s.grpc)
	go s.core.Run(t.Context())
	go s.server.Run(t.Context())
	listener := bufconn.Listen(1 << 20)
	go func() { _ = s.grpc.Serve(Sources(listener)) }()
	t.Cleanup(s.grpc.Stop)

	s.dial = func() (client *grpc.ClientConn, sever func()) {
		var wire net.Conn
		conn, err := grpc.NewClient("passthrough:///tandem",
			grpc.WithContextDialer(func(ctx context.Context, _ string) (_ net.Conn, err error) {
				wire, err = listener.DialContext(ctx)
				return wire, err
			}),
			grpc.WithTransportCredentials(insecure.NewCredentials()),
			grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(64<<20), grpc.MaxCallSendMsgSize(64<<20)))
		require.NoError(t, err)
		t.Cleanup(func() { _ = conn.Close() })
		return conn, func() { _ = wire.Close() }
	}
	conn, _ := s.dial()
	s.conn = conn
	s.ext, s.logs = extprocv3.NewExternalProcessorClient(conn), logv3.NewAccessLogServiceClient(conn)
	return s
}

// policy puts a pool's policy in force.
func (s *stand) policy(name string, policy pass.Policy) {
	live := s.core.Settings()
	pools := map[string]pass.Policy{name: policy}
	for other, p := range live.Pools {
		if other != name {
			pools[other] = p
		}
	}
	s.core.Apply(pass.Settings{Keys: live.Keys, Pools: pools})
}

// pool adds a pool of NIXL endpoints, "p..." for prefill, "d..." for decode and "b..." for both: p1 is 10.0.1.1:8000.
func (s *stand) pool(name string, policy pass.Policy, endpoints ...string) {
	s.t.Helper()
	if policy.Dialect.Name == "" {
		dialect, err := kvtransfer.New(kvtransfer.Options{Name: "nixl"})
		require.NoError(s.t, err)
		policy.Dialect = dialect
	}
	var eps []kvstate.EndpointSpec
	for _, e := range endpoints {
		eps = append(eps, kvstate.EndpointSpec{Name: e, Addr: addressOf(e), Role: roleOf(e)})
	}
	s.policy(name, policy)
	s.state.SetPool(kvstate.PoolSpec{Name: name, Models: []string{"*"}}, eps)
}

// splitting is the policy that most tests want.
func splitting() pass.Policy {
	return pass.Policy{Policy: plan.Policy{Split: true, PrefillTimeout: 30 * time.Second}}.WithDefaults()
}

var rolesOf = map[byte]kvstate.Role{'p': kvstate.RolePrefill, 'd': kvstate.RoleDecode, 'b': kvstate.RoleBoth, 'e': kvstate.RoleEncode}

func roleOf(name string) kvstate.Role { return rolesOf[name[0]] }

// addressOf is where an endpoint of a test is: p1 10.0.1.1:8000, d2 10.0.2.2:8000, b3 10.0.3.3:8000.
func addressOf(name string) string {
	return "10.0." + strconv.Itoa(strings.IndexByte("pdbe", name[0])+1) + "." + name[1:] + ":8000"
}

// request is one client request as Envoy holds it between the passes.
type request struct {
	s        *stand
	started  time.Time
	headers  map[string]string // as the next filter sees them
	body     []byte
	bodyless bool // end of stream with the headers
	trailers bool

	undecided string // the ticket of a pass that may come to be decided nowhere
	mode      filterv3.ProcessingMode_BodySendMode
	piece     int  // bytes of a body message in duplex mode
	breaks    bool // the connection on which the leg's filter is asked, once it has answered

	first     []byte        // what the client sent
	firstByte time.Duration // after which the endpoint's answer began; 0: it did not
	taken     string        // the ticket that the last 307 carried
	carried   string        // prefill's answer that came with it, base64
}

// newRequest is a POST of a JSON body in duplex mode.
func (s *stand) newRequest(path, id, body string) *request {
	return &request{
		s: s, started: time.Now(), body: []byte(body), first: []byte(body), piece: 40_000,
		mode: filterv3.ProcessingMode_FULL_DUPLEX_STREAMED,
		headers: map[string]string{
			":method": "POST", ":path": path, ":authority": "api.example", ":scheme": "http",
			"content-type": "application/json", "content-length": strconv.Itoa(len(body)), "x-request-id": id,
		},
	}
}

// verdict is the server's answer about a request or a response.
type verdict struct {
	immediate *extprocv3.ImmediateResponse
	set       map[string]string
	removed   []string
	changed   bool  // the body
	pieces    []int // lengths of the body's parts in duplex mode
	body      []byte
	trailers  bool // answered
	clear     bool // the route is chosen again
}

// status is the code of an immediate response, 0 if the request goes on.
func (v *verdict) status() int {
	if v.immediate == nil {
		return 0
	}
	return int(v.immediate.GetStatus().GetCode())
}

func (v *verdict) take(m *extprocv3.HeaderMutation) {
	for _, h := range m.GetSetHeaders() {
		v.set[h.GetHeader().GetKey()] = string(h.GetHeader().GetRawValue())
	}
	v.removed = append(v.removed, m.GetRemoveHeaders()...)
}

// pass takes the request through the main listener's filter, and leaves it as it goes on from there.
func (q *request) pass() *verdict {
	t := q.s.t
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	stream, err := q.s.ext.Process(ctx)
	require.NoError(t, err)
	headers, body := q.messages()
	require.NoError(t, stream.Send(headers))
	v := &verdict{set: map[string]string{}, body: q.body}
	if !q.bodyless && q.mode == filterv3.ProcessingMode_BUFFERED {
		if q.buffered(stream, v); v.immediate == nil {
			require.NoError(t, stream.Send(body[0]))
			r, err := stream.Recv()
			require.NoError(t, err)
			v.takeBuffered(t, r)
		}
	} else {
		if !q.bodyless && q.mode == filterv3.ProcessingMode_FULL_DUPLEX_STREAMED {
			for _, m := range body {
				if stream.Send(m) != nil {
					break // the server may answer before it has all
				}
			}
		}
		v.takeStreamed(t, stream, !q.bodyless && q.mode == filterv3.ProcessingMode_FULL_DUPLEX_STREAMED, q.trailers)
	}
	if v.immediate == nil {
		require.NoError(t, stream.CloseSend())
		_, err = stream.Recv()
		require.ErrorIs(t, err, io.EOF, "the server says no more and lets go")
		q.goOn(v)
	}
	return v
}

// buffered receives the answer to the headers of a buffered request, which may end it but not decide anything.
func (q *request) buffered(stream extprocv3.ExternalProcessor_ProcessClient, v *verdict) {
	r, err := stream.Recv()
	require.NoError(q.s.t, err)
	if v.immediate = r.GetImmediateResponse(); v.immediate != nil {
		return
	}
	require.NotNil(q.s.t, r.GetRequestHeaders(), "%v", r)
	v.take(r.GetRequestHeaders().GetResponse().GetHeaderMutation())
	q.undecided = v.set[names.HeaderTicket]
	delete(v.set, names.HeaderTicket)
	delete(v.set, names.HeaderRequestID)
	require.Empty(q.s.t, v.set, "what is set now is not seen by the route that is chosen with the body's answer")
}

func (v *verdict) takeBuffered(t *testing.T, r *extprocv3.ProcessingResponse) {
	if v.immediate = r.GetImmediateResponse(); v.immediate != nil {
		return
	}
	common := r.GetRequestBody().GetResponse()
	require.NotNil(t, common, "%v", r)
	v.take(common.GetHeaderMutation())
	v.clear = common.GetClearRouteCache()
	if m := common.GetBodyMutation(); m != nil {
		v.changed, v.body = true, m.GetBody()
		require.Equal(t, strconv.Itoa(len(v.body)), v.set["content-length"], "Envoy refuses a body that does not fit its header")
	}
}

// takeStreamed receives answers to headers and, where there is one, to a body in duplex mode.
func (v *verdict) takeStreamed(t *testing.T, stream extprocv3.ExternalProcessor_ProcessClient, body, trailers bool) {
	for first, end := true, false; !end; first = false {
		r, err := stream.Recv()
		require.NoError(t, err)
		if v.immediate = r.GetImmediateResponse(); v.immediate != nil {
			return
		}
		if first {
			h := r.GetRequestHeaders()
			if h == nil {
				h = r.GetResponseHeaders()
			}
			require.NotNil(t, h, "the headers' answer goes first: %v", r)
			v.take(h.GetResponse().GetHeaderMutation())
			v.clear = h.GetResponse().GetClearRouteCache()
			v.body = nil
			end = !body
			continue
		}
		if r.GetRequestTrailers() != nil || r.GetResponseTrailers() != nil {
			require.True(t, trailers)
			v.trailers = true
			return
		}
		b := r.GetRequestBody()
		if b == nil {
			b = r.GetResponseBody()
		}
		part := b.GetResponse().GetBodyMutation().GetStreamedResponse()
		require.NotNil(t, part, "%v", r)
		require.LessOrEqual(t, len(part.GetBody()), 62_000)
		v.changed, v.body = true, append(v.body, part.GetBody()...)
		v.pieces = append(v.pieces, len(part.GetBody()))
		end = part.GetEndOfStream()
		require.False(t, end && trailers, "the end comes with the trailers")
	}
}

// messages are the request as ext_proc is sent it.
func (q *request) messages() (headers *extprocv3.ProcessingRequest, body []*extprocv3.ProcessingRequest) {
	var pairs []string
	for name, value := range q.headers {
		pairs = append(pairs, name, value)
	}
	headers = &extprocv3.ProcessingRequest{
		Request: &extprocv3.ProcessingRequest_RequestHeaders{RequestHeaders: &extprocv3.HttpHeaders{
			Headers: wiretest.HeaderMap(pairs...), EndOfStream: q.bodyless,
		}},
		ProtocolConfig: &extprocv3.ProtocolConfiguration{RequestBodyMode: q.mode},
	}
	if q.mode == filterv3.ProcessingMode_BUFFERED {
		return headers, []*extprocv3.ProcessingRequest{requestBody(q.body, !q.trailers)}
	}
	for rest := q.body; ; {
		n := min(len(rest), q.piece)
		last := n == len(rest)
		body = append(body, requestBody(rest[:n], last && !q.trailers))
		if rest = rest[n:]; last {
			break
		}
	}
	if q.trailers {
		body = append(body, &extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_RequestTrailers{
			RequestTrailers: &extprocv3.HttpTrailers{Trailers: wiretest.HeaderMap("x-sum", "1")},
		}})
	}
	return headers, body
}

func requestBody(b []byte, end bool) *extprocv3.ProcessingRequest {
	return &extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_RequestBody{
		RequestBody: &extprocv3.HttpBody{Body: b, EndOfStream: end},
	}}
}

// goOn applies the verdict to the request.
func (q *request) goOn(v *verdict) {
	for _, name := range v.removed {
		delete(q.headers, name)
	}
	maps.Copy(q.headers, v.set)
	q.body = v.body
}

// leave begins a pass, sends so many of its body messages, and then the client is gone.
func (q *request) leave(sent int, wait func()) {
	t := q.s.t
	ctx, cancel := context.WithCancel(t.Context())
	stream, err := q.s.ext.Process(ctx)
	require.NoError(t, err)
	headers, body := q.messages()
	require.NoError(t, stream.Send(headers))
	for _, m := range body[:min(sent, len(body))] {
		require.NoError(t, stream.Send(m))
	}
	wait()
	cancel()
	wait()
}

// engineAnswer is P's answer, or Envoy's in its place, on its way through the prefill leg's filter.
type engineAnswer struct {
	status   int
	body     []byte
	piece    int // of the body; 0: all in one
	bodyless bool
	trailers bool
	cut      bool // after the first piece

	retryAfter string
}

// details are Envoy's of the answer, which is its own if P was not reached.
func (a *engineAnswer) details() string {
	if bytes.HasPrefix(a.body, []byte("upstream connect error")) {
		return "upstream_reset_before_response_started{connection_failure}"
	}
	return "via_upstream"
}

// prefillLeg takes P's answer through the leg's filter.
func (q *request) prefillLeg(a engineAnswer) *verdict {
	t := q.s.t
	ctx, cancel := context.WithCancel(metadata.AppendToOutgoingContext(t.Context(), "x-tandem-role", "prefill-leg"))
	ext := q.s.ext
	if q.breaks {
		conn, sever := q.s.dial()
		defer sever()
		ext = extprocv3.NewExternalProcessorClient(conn)
		t.Cleanup(cancel) // not before the connection
	} else {
		defer cancel()
	}
	stream, err := ext.Process(ctx)
	require.NoError(t, err)
	require.NoError(t, stream.Send(&extprocv3.ProcessingRequest{
		Request: &extprocv3.ProcessingRequest_ResponseHeaders{ResponseHeaders: &extprocv3.HttpHeaders{
			Headers: wiretest.HeaderMap(":status", strconv.Itoa(a.status), "content-type", "application/json", "content-length", strconv.Itoa(len(a.body))), EndOfStream: a.bodyless,
		}},
		Attributes: wiretest.Attributes("request.headers['x-tandem-ticket']", q.headers[names.HeaderTicket], "request.headers['x-request-id']", q.headers[names.HeaderRequestID],
			"request.path", q.headers[":path"], "upstream.address", q.headers[names.HeaderEndpoint],
			"response.code_details", a.details(), "response.headers['retry-after']", a.retryAfter),
		ProtocolConfig: &extprocv3.ProtocolConfiguration{ResponseBodyMode: filterv3.ProcessingMode_FULL_DUPLEX_STREAMED},
	}))
	if a.piece == 0 {
		a.piece = max(len(a.body), 1)
	}
	for rest := a.body; !a.bodyless; {
		n := min(len(rest), a.piece)
		last := n == len(rest)
		if stream.Send(&extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_ResponseBody{
			ResponseBody: &extprocv3.HttpBody{Body: rest[:n], EndOfStream: last && !a.trailers},
		}}) != nil {
			break
		}
		if a.cut {
			require.Eventually(t, func() bool { return q.s.server.Memory.Load() > 0 }, 30*time.Second, time.Millisecond)
			return nil
		}
		if rest = rest[n:]; last {
			break
		}
	}
	if a.trailers {
		_ = stream.Send(&extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_ResponseTrailers{ResponseTrailers: &extprocv3.HttpTrailers{}}})
	}
	v := &verdict{set: map[string]string{}}
	v.takeStreamed(t, stream, !a.bodyless, a.trailers)
	if v.immediate == nil {
		require.NoError(t, stream.CloseSend())
		_, err = stream.Recv()
		require.ErrorIs(t, err, io.EOF)
	}
	q.taken = ""
	for _, h := range v.immediate.GetHeaders().GetSetHeaders() {
		if h.GetHeader().GetKey() == names.HeaderTicket {
			q.taken = string(h.GetHeader().GetRawValue())
		}
	}
	return v
}

// carry is P's answer on its way without the leg's filter: a redirect with pass 1's own ticket, and the answer as it is.
func (q *request) carry(body []byte) {
	require.NotEmpty(q.s.t, q.headers[names.HeaderCarry], "pass 1 did not say so")
	q.taken, q.carried = q.headers[names.HeaderTicket], base64.StdEncoding.EncodeToString(body)
}

// replan is the second try of a hop, at the replan port.
func (q *request) replan() *httptest.ResponseRecorder {
	r := httptest.NewRequest(q.headers[":method"], "http://"+q.headers[":authority"]+q.headers[":path"], strings.NewReader(string(q.body)))
	r.Header.Set("x-request-id", q.headers[names.HeaderRequestID])
	r.Header.Set(names.HeaderTicket, q.headers[names.HeaderTicket])
	w := httptest.NewRecorder()
	q.s.server.Replan().ServeHTTP(w, r)
	q.taken = w.Header().Get(names.HeaderTicket)
	return w
}

// follow is Envoy's internal redirect: the request begins anew with the headers it had, and the ticket of the 307. The
// pass that ended is logged with that ticket.
func (q *request) follow() {
	require.NotEmpty(q.s.t, q.taken, "there is no redirect to follow")
	q.headers[names.HeaderTicket], q.taken = q.taken, ""
	delete(q.headers, names.HeaderPrefilled) // a redirect copies what it has of these headers, and removes what it has not
	if q.carried != "" {
		q.headers[names.HeaderPrefilled], q.carried = q.carried, ""
	}
	delete(q.headers, names.HeaderLeg) // the routes' request_headers_to_remove
	q.headers["x-envoy-original-url"] = "http://" + q.headers[":authority"] + q.headers[":path"]
	q.s.log(q.entry(307, "internal_redirect"))
}

// entry is the request's access log entry as it stands.
func (q *request) entry(status int, details string) *logdatav3.HTTPAccessLogEntry {
	e := &logdatav3.HTTPAccessLogEntry{
		CommonProperties: &logdatav3.AccessLogCommon{StartTime: timestamppb.New(q.started), Duration: durationpb.New(time.Since(q.started))},
		Request:          &logdatav3.HTTPRequestProperties{RequestId: q.headers[names.HeaderRequestID]},
		Response:         &logdatav3.HTTPResponseProperties{ResponseCode: wrapperspb.UInt32(uint32(status)), ResponseCodeDetails: details, ResponseBodyBytes: 4000},
	}
	if ticket := q.headers[names.HeaderTicket]; ticket != "" {
		e.Request.RequestHeaders = map[string]string{names.HeaderTicket: ticket}
	}
	if q.firstByte > 0 {
		e.CommonProperties.TimeToFirstUpstreamRxByte = durationpb.New(q.firstByte)
	}
	if status == 0 {
		e.CommonProperties.ResponseFlags = &logdatav3.ResponseFlags{DownstreamConnectionTermination: true}
	}
	return e
}

// log sends access log entries and waits until they are read.
func (s *stand) log(entries ...*logdatav3.HTTPAccessLogEntry) {
	s.t.Helper()
	s.logAs("tandem", entries...)
}

// logAs is log, of another log than the main listener's.
func (s *stand) logAs(name string, entries ...*logdatav3.HTTPAccessLogEntry) {
	s.t.Helper()
	stream, err := s.logs.StreamAccessLogs(s.t.Context())
	require.NoError(s.t, err)
	require.NoError(s.t, stream.Send(&logv3.StreamAccessLogsMessage{Identifier: &logv3.StreamAccessLogsMessage_Identifier{LogName: name}, LogEntries: &logv3.StreamAccessLogsMessage_HttpLogs{
		HttpLogs: &logv3.StreamAccessLogsMessage_HTTPAccessLogEntries{LogEntry: entries},
	}}))
	_, err = stream.CloseAndRecv()
	require.True(s.t, err == nil || errors.Is(err, io.EOF) || strings.Contains(err.Error(), "no response message"), "%v", err) // nor does Envoy want one
}

// ticket opens what a header holds.
func (s *stand) ticket(sealed, requestID string) *kvtransfer.Ticket {
	s.t.Helper()
	t, err := s.server.passes.Keys().Open(sealed, requestID, time.Now())
	require.NoError(s.t, err)
	return t
}

// params are KV parameters as vLLM 0.32.0 answers them, with so many block ids.
func params(blocks int) string {
	ids := make([]string, blocks)
	for i := range ids {
		ids[i] = strconv.Itoa(i*7919%65536 + 1)
	}
	return `{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[` + strings.Join(ids, ",") +
		`]],"remote_engine_id":"8b28755b","remote_request_id":"chatcmpl-1","remote_host":"10.0.1.1","remote_port":5600,"tp_size":1}`
}

// randomParams have block ids that nothing packs: random ones, from a fixed seed.
func randomParams(blocks int) string {
	r := rand.New(rand.NewPCG(1, 2))
	ids := make([]string, blocks)
	for i := range ids {
		ids[i] = strconv.Itoa(r.IntN(65536))
	}
	return strings.Replace(params(0), "[[]]", "[["+strings.Join(ids, ",")+"]]", 1)
}

// prefilled is P's good answer.
func prefilled(kv string) []byte {
	return []byte(`{"id":"chatcmpl-1","choices":[{"index":0,"message":{"content":" a"},"finish_reason":"length"}],"usage":{"prompt_tokens":12,"prompt_tokens_details":{"cached_tokens":4}},"kv_transfer_params":` + kv + `}`)
}

// sortedSets are the headers of a verdict in order.
func (v *verdict) sortedSets() []string {
	var names []string
	for name := range v.set {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}
