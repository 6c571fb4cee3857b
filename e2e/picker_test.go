package e2e

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// inferenceGateway is a real Envoy as a gateway of the Inference Extension configures it: ext_proc in full duplex both
// ways, over TLS that is not verified; the pods of the pool as a cluster, of which dynamic metadata picks one
// (override_host), and which reports the serving pod. It knows nothing of Tandem. A client may ask for a subset with
// x-subset, for the tests.
const inferenceGateway = `
admin: {address: {socket_address: {address: %[2]s, port_value: %[3]s}}}
static_resources:
  listeners:
  - name: http
    address: {socket_address: {address: %[4]s, port_value: %[5]s}}
    per_connection_buffer_limit_bytes: 33554432
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: http
          preserve_external_request_id: true
          use_remote_address: true
          route_config:
            virtual_hosts:
            - name: all
              domains: ["*"]
              routes: [{match: {prefix: "/"}, route: {cluster: pool, timeout: 0s}}]
          http_filters:
          - name: envoy.filters.http.header_to_metadata
            typed_config:
              "@type": type.googleapis.com/envoy.extensions.filters.http.header_to_metadata.v3.Config
              request_rules: [{header: x-subset, on_header_present: {metadata_namespace: envoy.lb.subset_hint, key: x-gateway-destination-endpoint-subset, type: STRING}}]
          - name: envoy.filters.http.ext_proc
            typed_config:
              "@type": type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExternalProcessor
              grpc_service: {envoy_grpc: {cluster_name: picker, authority: picker}}
              message_timeout: 1000s
              processing_mode: {request_header_mode: SEND, request_body_mode: FULL_DUPLEX_STREAMED, request_trailer_mode: SEND, response_header_mode: SEND, response_body_mode: FULL_DUPLEX_STREAMED, response_trailer_mode: SEND}
              metadata_options:
                forwarding_namespaces: {untyped: [envoy.lb, envoy.lb.subset_hint]}
                receiving_namespaces: {untyped: [envoy.lb]}
          - name: envoy.filters.http.router
            typed_config: {"@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router}
  clusters:
  - name: picker
    type: STATIC
    typed_extension_protocol_options: {envoy.extensions.upstreams.http.v3.HttpProtocolOptions: {"@type": type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions, explicit_http_config: {http2_protocol_options: {}}}}
    transport_socket: {name: envoy.transport_sockets.tls, typed_config: {"@type": type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext, common_tls_context: {alpn_protocols: [h2]}}}
    health_checks: [{timeout: 1s, interval: 1s, unhealthy_threshold: 2, healthy_threshold: 1, grpc_health_check: {service_name: envoy.service.ext_proc.v3.ExternalProcessor}}]
    load_assignment: {cluster_name: picker, endpoints: [{lb_endpoints: [%[1]s]}]}
  - name: pool
    type: STATIC
    load_balancing_policy:
      policies:
      - typed_extension_config:
          name: envoy.load_balancing_policies.override_host
          typed_config:
            "@type": type.googleapis.com/envoy.extensions.load_balancing_policies.override_host.v3.OverrideHost
            override_host_sources: [{metadata: {key: envoy.lb, path: [{key: x-gateway-destination-endpoint}]}}]
            selected_host_key: {key: envoy.lb, path: [{key: x-gateway-destination-endpoint-served}]}
            fallback_policy: {policies: [{typed_extension_config: {name: envoy.load_balancing_policies.round_robin, typed_config: {"@type": type.googleapis.com/envoy.extensions.load_balancing_policies.round_robin.v3.RoundRobin}}}]}
    load_assignment: {cluster_name: pool, endpoints: [{lb_endpoints: [%[6]s]}]}
`

// gatewayTo returns the bootstrap of such a gateway, with a pool of endpoints.
func gatewayTo(endpoints ...string) func(f *fleet) string {
	return func(f *fleet) string {
		config, err := os.ReadFile(f.config)
		require.NoError(f.t, err)
		picker := string(regexp.MustCompile(`extProc: \{listen: "([^"]+)"`).FindSubmatch(config)[1])
		if len(endpoints) == 0 {
			for _, e := range f.decodes {
				endpoints = append(endpoints, e.addr)
			}
		}
		listen, admin := strings.TrimPrefix(f.url, "http://"), strings.TrimPrefix(f.envoyURL, "http://")
		host := func(addr string) (string, string) { h, p, _ := net.SplitHostPort(addr); return h, p }
		adminHost, adminPort := host(admin)
		listenHost, listenPort := host(listen)
		return fmt.Sprintf(inferenceGateway, lbEndpoints(picker), adminHost, adminPort, listenHost, listenPort, lbEndpoints(endpoints...))
	}
}

func lbEndpoints(addrs ...string) string {
	var out []string
	for _, a := range addrs {
		h, p, _ := net.SplitHostPort(a)
		out = append(out, fmt.Sprintf("{endpoint: {address: {socket_address: {address: %s, port_value: %s}}}}", h, p))
	}
	return strings.Join(out, ", ")
}

func promptOf(n int) string {
	return `{"model":"tiny","messages":[{"role":"user","content":"` + strings.Repeat("word ", n/5) + `"}],"max_tokens":4}`
}

// Tandem as the endpoint picker of a gateway that makes one hop, calling prefill itself: every request is split
// between P and D, whatever its size, and the engines' ledgers balance.
func TestEndpointPicker(t *testing.T) {
	t.Parallel()
	f := start(t, options{
		prefills: 2, decodes: 2, extProcFields: ", protocol: endpointPicker", pool: "  handoff: direct\n", bootstrap: gatewayTo(),
	})
	for i, size := range []int{20, 40_000, 1_200_000} {
		id := fmt.Sprintf("picker-%d", i)
		a := f.post("/v1/chat/completions", promptOf(size), "x-request-id", id)
		require.Equal(t, 200, a.status, "%.300s", a.body)
		require.Len(t, f.requests(id, f.prefills...), 1)
		require.Len(t, f.requests(id, f.decodes...), 1)
	}
	streamed := f.post("/v1/chat/completions", `{"model":"tiny","messages":[{"role":"user","content":"Hi"}],"max_tokens":6,"stream":true}`)
	require.Equal(t, 200, streamed.status)
	require.GreaterOrEqual(t, len(streamed.events()), 6)

	for i, d := range f.decodes {
		for n := range 3 {
			id := fmt.Sprintf("subset-%d-%d", i, n)
			require.Equal(t, 200, f.post("/v1/chat/completions", promptOf(20), "x-subset", d.addr, "x-request-id", id).status)
			require.Len(t, f.requests(id, d), 1, "the gateway's subset is kept to")
		}
	}
	none := f.post("/v1/chat/completions", promptOf(20), "x-subset", "10.9.9.9:1")
	require.Equal(t, 503, none.status)
	require.Equal(t, 400, f.post("/v1/chat/completions", "{").status, "refused, and answered")
	require.Eventually(t, func() bool { return metric(t, f.admins[0], "tandem_reservations") == 0 }, patience, 20*time.Millisecond)
}

// A replica that a rollout ends keeps the streams of answers that it watches until these end: none is cut. The answer
// takes longer than streams of other protocols may; TANDEM_ANSWER=5m makes it longer.
func TestEndpointPickerRollout(t *testing.T) {
	t.Parallel()
	takes := 25 * time.Second
	if text := os.Getenv("TANDEM_ANSWER"); text != "" {
		var err error
		takes, err = time.ParseDuration(text)
		require.NoError(t, err)
	}
	f := start(t, options{
		extProcFields: ", protocol: endpointPicker", pool: "  handoff: direct\n", bootstrap: gatewayTo(), engineArgs: []string{"--decode-step", "250ms"},
	})
	tokens := int(takes / (250 * time.Millisecond))
	body := fmt.Sprintf(`{"model":"tiny","messages":[{"role":"user","content":"Hi"}],"max_tokens":%d,"ignore_eos":true,"stream":true}`, tokens)
	answer := send(t.Context(), f.url, "rollout", body)
	<-answer.events
	began := time.Now()
	require.NoError(t, f.tandems[0].cmd.Process.Signal(syscall.SIGTERM))
	<-answer.done
	require.NoError(t, answer.err)
	require.Equal(t, 200, answer.status)
	require.Contains(t, answer.body.String(), "[DONE]")
	require.Greater(t, time.Since(began), takes/2)
	<-f.tandems[0].exited
	t.Logf("the answer was whole after %v, and the replica ended after it", time.Since(began).Round(time.Second))
}

// routingSidecar stands in for llm-d's routing sidecar: it acts only on the header x-prefiller-host-port. It asks the
// prefill endpoint for one token, and its own engine with the parameters of that answer.
func routingSidecar(t *testing.T, engine string, prefills *atomic.Int64) string {
	proxy := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			return
		}
		if hosts := r.Header.Values("x-prefiller-host-port"); len(hosts) == 1 {
			prefills.Add(1)
			body, err = throughPrefill(hosts[0], r, body)
		} else if len(hosts) > 1 {
			err = fmt.Errorf("%d values of x-prefiller-host-port", len(hosts))
		}
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadGateway)
			return
		}
		forward(w, r, engine, body)
	}))
	t.Cleanup(proxy.Close)
	u, err := url.Parse(proxy.URL)
	require.NoError(t, err)
	return u.Host
}

// throughPrefill makes the prefill leg and returns the body of the decode leg.
func throughPrefill(prefill string, r *http.Request, body []byte) ([]byte, error) {
	var request map[string]any
	if err := json.Unmarshal(body, &request); err != nil {
		return nil, err
	}
	leg := map[string]any{}
	maps.Copy(leg, request)
	leg["max_tokens"], leg["stream"] = 1, false
	delete(leg, "stream_options")
	leg["kv_transfer_params"] = map[string]any{"do_remote_decode": true, "do_remote_prefill": false,
		"remote_engine_id": nil, "remote_block_ids": nil, "remote_host": nil, "remote_port": nil}
	text, err := json.Marshal(leg)
	if err != nil {
		return nil, err
	}
	resp, err := sendOn(r, prefill, text)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	var answer struct {
		Params json.RawMessage `json:"kv_transfer_params"`
	}
	if err := json.NewDecoder(resp.Body).Decode(&answer); err != nil || resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("prefill answered %d: %w", resp.StatusCode, err)
	}
	request["kv_transfer_params"] = answer.Params
	return json.Marshal(request)
}

func sendOn(r *http.Request, addr string, body []byte) (*http.Response, error) {
	out, err := http.NewRequestWithContext(r.Context(), r.Method, "http://"+addr+r.URL.RequestURI(), bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	out.Header.Set("Content-Type", "application/json")
	out.Header.Set("X-Request-Id", r.Header.Get("X-Request-Id"))
	return http.DefaultClient.Do(out)
}

func forward(w http.ResponseWriter, r *http.Request, addr string, body []byte) {
	resp, err := sendOn(r, addr, body)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadGateway)
		return
	}
	defer resp.Body.Close()
	w.Header().Set("Content-Type", resp.Header.Get("Content-Type"))
	w.WriteHeader(resp.StatusCode)
	_, _ = io.Copy(w, resp.Body)
}

// handoff: sidecar, behind such a gateway: Tandem in place of llm-d's endpoint picker.
func TestSidecarHandoff(t *testing.T) {
	t.Parallel()
	bin, err := binaries()
	require.NoError(t, err)
	p := ports(t, 2)
	startProcess(t, t.TempDir(), "decode", filepath.Join(bin, "enginesim"), "--listen", p[0], "--side-channel", p[1], "--role", "decode", "--model", "tiny")
	var prefills atomic.Int64
	sidecar := routingSidecar(t, p[0], &prefills)
	require.Eventually(t, func() bool {
		resp, err := http.Get("http://" + p[0] + "/health")
		if err == nil {
			resp.Body.Close()
		}
		return err == nil
	}, patience, 20*time.Millisecond)
	f := start(t, options{
		prefills: 1, extProcFields: ", protocol: endpointPicker", bootstrap: gatewayTo(sidecar),
		pools: "pools:\n- name: chat\n  kvTransfer: nixl\n  split: always\n  decodeAlone: fallback\n  handoff: sidecar\n  endpoints:\n  - {address: %P, role: prefill}\n  - {address: \"" + sidecar + "\", role: decode}\n",
	})
	for i := range 5 {
		id := fmt.Sprintf("sidecar-%d", i)
		a := f.post("/v1/chat/completions", promptOf(2000), "x-request-id", id, "x-prefiller-host-port", "127.0.0.1:1")
		require.Equal(t, 200, a.status, "%.300s", a.body)
		require.Len(t, f.requests(id, f.prefills...), 1)
	}
	require.EqualValues(t, 5, prefills.Load())
	require.Equal(t, 200, f.post("/v1/chat/completions", `{"model":"tiny","n":2,"max_tokens":2,"messages":[{"role":"user","content":"Hi"}]}`, "x-prefiller-host-port", "127.0.0.1:1").status)
	require.EqualValues(t, 5, prefills.Load(), "decoded alone: a client's own order is not passed on")
}
