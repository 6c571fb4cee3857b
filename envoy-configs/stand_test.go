package envoyconfigs

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	pb "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	typev3 "github.com/envoyproxy/go-control-plane/envoy/type/v3"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"

	"tandem/e2e/loopback"
	configv1 "tandem/protos/config/v1"
	"tandem/replica/config"
)

// The stand: a real Envoy with what Bootstrap renders, two engines that record what they are sent, and, in place of Tandem,
// a router without judgement: it follows the query of the request.
//
//	(none)    prefill, redirect, decode
//	pass      one hop
//	dead      the first endpoint named is not there
//	gone      one hop, to an endpoint that is not there
//	undecided headers are answered, but name no route
//	immediate the answer is what follows, status 503
//	broken    the stream fails
//	circle    every prefill answer is a redirect to another prefill
//	early     P fails before it has read the body
//	...+late  the last piece of each body is held back for a while, or until nobody waits for it
type stand struct {
	pb.UnimplementedExternalProcessorServer
	URL             string
	client          *http.Client
	prefill, decode *httptest.Server

	mu    sync.Mutex
	seen  []seen
	calls []call
}

// seen is what the router was shown at the beginning of a pass.
type seen struct {
	Headers map[string]string
	Mode    string
	Body    int // bytes; -1: none was asked for
	Pieces  int
}

// call is a request that an engine got.
type call struct {
	Engine string
	Header http.Header
	Path   string
	Body   string
}

func newStand(t *testing.T, text string, options ...grpc.ServerOption) *stand {
	t.Helper()
	return newStandOf(t, text, Bootstrap, options...)
}

// newStandOf starts Envoy with another bootstrap of the configuration.
func newStandOf(
	t *testing.T, text string, bootstrapOf func(*configv1.Config) ([]byte, error), options ...grpc.ServerOption,
) *stand {
	t.Helper()
	s := &stand{client: &http.Client{
		Timeout:       time.Minute,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}}
	s.prefill, s.decode = s.engine(t, "P"), s.engine(t, "D")
	replan := httptest.NewServer(http.HandlerFunc(s.replan))
	t.Cleanup(replan.Close)
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	server := grpc.NewServer(append(options, grpc.MaxRecvMsgSize(64<<20))...)
	pb.RegisterExternalProcessorServer(server, s)
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(server.Stop)

	free := loopback.Addresses(t, 2)
	address, admin := free[0], free[1]
	text = strings.NewReplacer("$LISTEN", address, "$ADMIN", admin, "$EXTPROC", listener.Addr().String(),
		"$REPLAN", replan.Listener.Addr().String()).Replace(text)
	c, _, err := config.Parse([]byte(text))
	require.NoError(t, err)
	bootstrap, err := bootstrapOf(c)
	require.NoError(t, err)
	startEnvoy(t, bootstrap, admin)
	s.URL = "http://" + address
	return s
}

// startEnvoy runs the real Envoy until the test ends, and shows its log if that failed.
func startEnvoy(t *testing.T, bootstrap []byte, admin string) {
	envoy := findEnvoy(t)
	dir := t.TempDir()
	file := filepath.Join(dir, "envoy.yaml")
	require.NoError(t, os.WriteFile(file, bootstrap, 0o600))
	log, err := os.Create(filepath.Join(dir, "log"))
	require.NoError(t, err)
	cmd := exec.Command(envoy, "-c", file, "-l", "warning", "--disable-hot-restart", "--concurrency", "1")
	cmd.Stdout, cmd.Stderr = log, log
	require.NoError(t, cmd.Start())
	t.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		err := cmd.Wait()
		if t.Failed() || err != nil {
			text, _ := os.ReadFile(log.Name())
			t.Errorf("envoy: %v\n%s", err, text)
		}
	})
	require.Eventually(t, func() bool {
		r, err := http.Get("http://" + admin + "/ready")
		if err != nil {
			return false
		}
		defer r.Body.Close()
		return r.StatusCode == 200
	}, time.Minute, 50*time.Millisecond)
}

func (s *stand) engine(t *testing.T, name string) *httptest.Server {
	e := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if name == "P" && strings.HasPrefix(r.URL.RawQuery, "early") {
			w.Header().Set("connection", "close") // or net/http reads on before it answers
			w.WriteHeader(http.StatusInternalServerError)
			return
		}
		body, _ := io.ReadAll(r.Body)
		s.mu.Lock()
		s.calls = append(s.calls, call{name, r.Header, r.URL.Path, string(body)})
		s.mu.Unlock()
		w.Header().Set("x-tandem-ticket", "an engine's own")
		w.Header().Set("x-tandem-internal", "an engine's own")
		w.Header().Set("x-gateway-destination-endpoint", "10.0.0.7:8000")
		for _, name := range []string{"upstream-service-time", "ratelimited", "attempt-count", "decorator-operation", "anything"} {
			w.Header().Set("x-envoy-"+name, "1")
		}
		fmt.Fprintf(w, `{"engine":%q}`, name)
	}))
	t.Cleanup(e.Close)
	return e
}

// replan is what stands in for Tandem's replan port.
func (s *stand) replan(w http.ResponseWriter, r *http.Request) {
	_, _ = io.Copy(io.Discard, r.Body)
	w.Header().Set("location", "http://"+r.Host+r.URL.RequestURI())
	w.Header().Set("x-tandem-ticket", "replanned after "+r.Header.Get("x-tandem-ticket"))
	w.WriteHeader(http.StatusTemporaryRedirect)
}

// take forgets what was recorded and returns it.
func (s *stand) take() ([]seen, []call) {
	s.mu.Lock()
	defer s.mu.Unlock()
	a, b := s.seen, s.calls
	s.seen, s.calls = nil, nil
	return a, b
}

func (s *stand) Process(stream pb.ExternalProcessor_ProcessServer) error {
	md, _ := metadata.FromIncomingContext(stream.Context())
	if len(md.Get("x-tandem-role")) > 0 {
		return s.leg(stream)
	}
	m, err := stream.Recv()
	if err != nil {
		return nil
	}
	h := plain(m.GetRequestHeaders().GetHeaders())
	pass := seen{Headers: h, Mode: m.GetProtocolConfig().GetRequestBodyMode().String(), Body: -1}
	_, query, _ := strings.Cut(h[":path"], "?")
	query, late := strings.CutSuffix(query, "+late")
	switch {
	case query == "broken":
		return errors.New("broken")
	case strings.HasPrefix(query, "immediate="):
		body, _ := url.QueryUnescape(strings.TrimPrefix(query, "immediate="))
		return s.immediate(stream, body)
	case m.GetRequestHeaders().EndOfStream || pass.Mode == "NONE":
		s.note(pass)
		return stream.Send(headersReply(route(s, h, query)))
	}
	if pass.Mode == "BUFFERED" {
		if err := stream.Send(headersReply(nil)); err != nil {
			return err
		}
	}
	body, pieces, err := receiveBody(stream)
	if err != nil {
		return err
	}
	pass.Body, pass.Pieces = len(body), pieces
	s.note(pass)
	return answerBody(stream, pass.Mode, body, route(s, h, query), late)
}

func (s *stand) note(p seen) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.seen = append(s.seen, p)
}

func receiveBody(stream pb.ExternalProcessor_ProcessServer) (body []byte, pieces int, err error) {
	for {
		m, err := stream.Recv()
		if err != nil {
			return nil, 0, err
		}
		b := m.GetRequestBody()
		body = append(body, b.GetBody()...)
		pieces++
		if b.GetEndOfStream() {
			return body, pieces, nil
		}
	}
}

// answerBody sends a body on with a space in front of it.
func answerBody(stream pb.ExternalProcessor_ProcessServer, mode string, body []byte, headers *pb.HeaderMutation, late bool) error {
	body = append([]byte(" "), body...)
	if mode == "BUFFERED" {
		headers.SetHeaders = append(headers.SetHeaders, header("content-length", fmt.Sprint(len(body))))
		return stream.Send(&pb.ProcessingResponse{Response: &pb.ProcessingResponse_RequestBody{RequestBody: &pb.BodyResponse{Response: &pb.CommonResponse{
			ClearRouteCache: true, HeaderMutation: headers, BodyMutation: &pb.BodyMutation{Mutation: &pb.BodyMutation_Body{Body: body}}}}}})
	}
	if err := stream.Send(headersReply(headers)); err != nil {
		return err
	}
	for len(body) > 0 {
		n := min(62000, len(body))
		if late && n == len(body) {
			select {
			case <-time.After(300 * time.Millisecond):
			case <-stream.Context().Done(): // the client has an answer
			}
		}
		err := stream.Send(&pb.ProcessingResponse{Response: &pb.ProcessingResponse_RequestBody{RequestBody: &pb.BodyResponse{Response: &pb.CommonResponse{
			BodyMutation: &pb.BodyMutation{Mutation: &pb.BodyMutation_StreamedResponse{StreamedResponse: &pb.StreamedBodyResponse{Body: body[:n], EndOfStream: n == len(body)}}}}}}})
		if err != nil {
			return err
		}
		body = body[n:]
	}
	return nil
}

// route decides: prefill, or decode once there is a ticket of a redirect.
func route(s *stand, h map[string]string, query string) *pb.HeaderMutation {
	if query == "undecided" {
		return nil
	}
	set := map[string]string{"x-tandem-leg": "prefill", "x-tandem-ticket": "out", "x-gateway-destination-endpoint": s.prefill.Listener.Addr().String()}
	switch {
	case query == "gone":
		set["x-tandem-leg"], set["x-gateway-destination-endpoint"] = "pass", "127.0.0.1:1"
	case query == "pass" || h[":method"] == http.MethodGet:
		set["x-tandem-leg"] = "pass"
	case h["x-tandem-ticket"] != "" && query != "circle":
		set["x-tandem-leg"], set["x-gateway-destination-endpoint"] = "decode", s.decode.Listener.Addr().String()
	}
	if query == "dead" && !strings.HasPrefix(h["x-tandem-ticket"], "replanned") {
		set["x-gateway-destination-endpoint"] = "127.0.0.1:1"
	}
	return mutation(set)
}

func (s *stand) immediate(stream pb.ExternalProcessor_ProcessServer, body string) error {
	return stream.Send(&pb.ProcessingResponse{Response: &pb.ProcessingResponse_ImmediateResponse{ImmediateResponse: &pb.ImmediateResponse{
		Status: &typev3.HttpStatus{Code: typev3.StatusCode_ServiceUnavailable}, Body: []byte(body), Details: "tandem_test",
		Headers: mutation(map[string]string{"content-type": "application/json", "retry-after": "7"})}}})
}

// leg is the prefill leg's role: any answer of P becomes a redirect.
func (s *stand) leg(stream pb.ExternalProcessor_ProcessServer) error {
	m, err := stream.Recv()
	if err != nil {
		return nil
	}
	values := map[string]string{}
	for _, a := range m.GetAttributes() {
		for k, v := range a.GetFields() {
			values[k] = v.GetStringValue()
		}
	}
	for ended := m.GetResponseHeaders().GetEndOfStream(); !ended; {
		b, err := stream.Recv()
		if err != nil {
			return err
		}
		ended = b.GetResponseBody().GetEndOfStream()
	}
	headers := mutation(map[string]string{":status": "307", "location": "http://tandem" + values["request.path"],
		"x-tandem-ticket": "back " + values["request.headers['x-tandem-ticket']"] + " " + values["request.headers['x-request-id']"] + strings.Repeat("x", 40<<10)})
	headers.RemoveHeaders = []string{"content-length"}
	reply := &pb.ProcessingResponse{Response: &pb.ProcessingResponse_ResponseHeaders{ResponseHeaders: &pb.HeadersResponse{Response: &pb.CommonResponse{HeaderMutation: headers}}}}
	if err := stream.Send(reply); err != nil || m.GetResponseHeaders().GetEndOfStream() {
		return err
	}
	return stream.Send(&pb.ProcessingResponse{Response: &pb.ProcessingResponse_ResponseBody{ResponseBody: &pb.BodyResponse{Response: &pb.CommonResponse{
		BodyMutation: &pb.BodyMutation{Mutation: &pb.BodyMutation_StreamedResponse{StreamedResponse: &pb.StreamedBodyResponse{EndOfStream: true}}}}}}})
}

func headersReply(h *pb.HeaderMutation) *pb.ProcessingResponse {
	return &pb.ProcessingResponse{Response: &pb.ProcessingResponse_RequestHeaders{RequestHeaders: &pb.HeadersResponse{Response: &pb.CommonResponse{ClearRouteCache: h != nil, HeaderMutation: h}}}}
}

func mutation(set map[string]string) *pb.HeaderMutation {
	m := &pb.HeaderMutation{}
	for _, k := range slices.Sorted(maps.Keys(set)) {
		m.SetHeaders = append(m.SetHeaders, header(k, set[k]))
	}
	return m
}

func header(k, v string) *corev3.HeaderValueOption {
	return &corev3.HeaderValueOption{Header: &corev3.HeaderValue{Key: k, RawValue: []byte(v)}, AppendAction: corev3.HeaderValueOption_OVERWRITE_IF_EXISTS_OR_ADD}
}

func plain(h *corev3.HeaderMap) map[string]string {
	out := map[string]string{}
	for _, x := range h.GetHeaders() {
		out[x.GetKey()] = string(x.GetRawValue())
	}
	return out
}
