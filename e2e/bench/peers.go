package main

import (
	"bytes"
	"cmp"
	"context"
	"flag"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"text/template"

	"tandem/e2e/loopback"
	"tandem/e2e/process"
)

// A peer is another router over the same simulated engines:
//
//   - vllm-router (PyPI): `--vllm-pd-disaggregation --kv-connector nixl`, one hop after the other, as Tandem.
//   - smg (PyPI), the SGLang gateway, which was sglang-router until its 0.3.2: `--pd-disaggregation`, which sends both
//     hops at the same time, to engines that speak SGLang: both get one room, D looks P up at P's bootstrap port, and
//     P answers with one token.
//   - llm-d (built by e2e/bench/llm-d.sh): its endpoint picker behind Envoy's ext_proc, with the Envoy and the scorers
//     of its own documentation, and its routing sidecar before the decode engine, which makes both hops.
//   - Dynamo's selection service (PyPI, dynamo.go), which only chooses: the client makes both hops.
//
// The first two are a process between client and engines, without Envoy. Each runs a second time behind a plain Envoy
// with one route to it, for those who have an Envoy in front for TLS and limits. A peer serves one model, so there are
// two processes of each: for the engines that answer at once, and for the paced ones.
type peer struct {
	name, binary string
	front        bool // behind an Envoy
	connector    string
	policy       string
	args         []string
}

// peerFlags adds the flags with the peers' binaries, and returns a function for those that were given.
func peerFlags(f *flag.FlagSet) func() []peer {
	var vllm, smg, llmd, dynamo, policy string
	f.StringVar(&vllm, "vllm-router", "", "vllm-router `binary` (PyPI), to run beside in its P/D mode")
	f.StringVar(&smg, "smg", "", "smg `binary` (PyPI), likewise")
	f.StringVar(&llmd, "llm-d", "", "`directory` with llm-d's epp and pd-sidecar (e2e/bench/llm-d.sh), likewise; they "+
		"listen on all addresses")
	f.StringVar(&dynamo, "dynamo", "", "`python` with ai-dynamo (PyPI), for its selection service, which takes KV "+
		"events (dynamo.go); it listens on all addresses")
	f.StringVar(&policy, "peer-policy", "round_robin", "`policy` of vllm-router and smg, such as cache_aware")
	return func() []peer { return peersOf(vllm, smg, llmd, dynamo, policy) }
}

// peersOf returns the peers whose binaries were given; llmd is the directory of llm-d's, dynamo a python.
func peersOf(vllm, smg, llmd, dynamo, policy string) (out []peer) {
	add := func(p peer) {
		out = append(out, p)
		p.name, p.front = "envoy+"+p.name, true
		out = append(out, p)
	}
	if vllm != "" {
		add(peer{"vllm-router", vllm, false, "nixl", policy,
			[]string{"--vllm-pd-disaggregation", "--kv-connector", "nixl", "--log-level", "error"}})
	}
	if smg != "" {
		add(peer{"smg", smg, false, "sglang", policy,
			[]string{"launch", "--pd-disaggregation", "--log-level", "error"}})
	}
	if llmd != "" {
		out = append(out, peer{llmdName, llmd, true, "nixl", "", nil})
	}
	if dynamo != "" {
		out = append(out, peer{dynamoName, dynamo, false, "nixl", "", nil})
	}
	return out
}

const llmdName = "llm-d"

// frontListener is a port of the Envoy in front of a peer.
type frontListener struct{ Model, Port, Router, Picker string }

// startPeer starts the peer for both kinds of engines.
func (l *lab) startPeer(ctx context.Context, o options, p peer) error {
	if p.name == dynamoName {
		return l.startDynamo(ctx, o, p)
	}
	s := &stack{name: p.name, addrs: map[string]string{}}
	var fronts []frontListener
	for _, model := range o.models() {
		engines := l.pairs[model]
		if group := p.connector + "-" + model; p.connector != "nixl" {
			if l.others[group] == nil {
				var err error
				if l.others[group], err = l.startPairs(ctx, o, model, group, p.connector); err != nil {
					return err
				}
			}
			engines = l.others[group]
		}
		f := frontListener{Model: model}
		var err error
		if p.name == llmdName {
			f.Picker, err = l.startLLMD(ctx, o, s, p, model, engines)
		} else {
			f.Router, err = l.startRouter(ctx, s, p, model, engines)
		}
		if err != nil {
			return err
		}
		s.addrs[model] = f.Router
		fronts = append(fronts, f)
	}
	if p.front {
		if err := l.startFront(ctx, o, s, fronts); err != nil {
			return err
		}
	}
	l.stacks = append(l.stacks, s)
	return nil
}

// startRouter starts a router of PyPI and returns its address.
func (l *lab) startRouter(ctx context.Context, s *stack, p peer, model string, engines []pair) (string, error) {
	ports, err := process.FreePorts(2)
	if err != nil {
		return "", err
	}
	args := slices.Clone(p.args)
	for _, e := range engines {
		args = append(args, "--prefill", "http://"+e.prefill)
		if p.connector != "nixl" {
			args = append(args, port(e.bootstrap))
		}
		args = append(args, "--decode", "http://"+e.decode)
	}
	args = append(args, "--host", "127.0.0.1", "--port", port(ports[0]), "--policy", p.policy,
		"--prometheus-port", port(ports[1]))
	router, err := l.Start(p.name+"-"+model, nil, p.binary, args...)
	if err != nil {
		return "", err
	}
	s.routers = append(s.routers, router)
	return ports[0], router.Wait(ctx, "http://"+ports[0]+"/readiness") // /health says nothing of engines
}

// llmdConfig is llm-d's deploy/config/pd-epp-config.yaml with its file discovery, and both hops for every request. If
// engines publish KV events (Events is their port), it has the precise prefixes of epp-precise-prefix-cache-config.yaml
// in the place of those that it estimates, with the tokens from an engine's render path.
var llmdConfig = template.Must(template.New("llm-d").Parse(`apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- {name: file-discovery, type: file-discovery, parameters: {path: {{printf "%q" .Path}}}}
{{- if .Events}}
- {type: token-producer, parameters: {modelName: {{.Model}}, vllm: {url: "http://{{.Render}}"}}}
- {type: endpoint-notification-source}
- {type: metrics-data-source}
- {type: core-metrics-extractor}
- type: precise-prefix-cache-producer
  parameters:
    speculativeIndexing: true
    tokenProcessorConfig: {blockSizeTokens: 16}
    kvEventsConfig: {topicFilter: "kv@", discoverPods: true, podDiscoveryConfig: {socketPort: {{.Events}}}}
- {type: prefix-cache-scorer, parameters: {prefixMatchInfoProducerName: precise-prefix-cache-producer}}
{{- else}}
- {type: approx-prefix-cache-producer, parameters: {maxPrefixTokensToMatch: 16384, lruCapacityPerServer: 31250}}
- {type: prefix-cache-scorer}
{{- end}}
- {type: queue-scorer}
- {type: prefill-filter}
- {type: decode-filter}
- {type: max-score-picker}
- {type: always-disagg-pd-decider}
- {type: disagg-profile-handler, parameters: {deciders: {prefill: always-disagg-pd-decider}}}
schedulingProfiles:
- name: prefill
  plugins: [{pluginRef: prefill-filter}, {pluginRef: max-score-picker}, {pluginRef: prefix-cache-scorer, weight: 2},
    {pluginRef: queue-scorer, weight: 1}]
- name: decode
  plugins: [{pluginRef: decode-filter}, {pluginRef: max-score-picker}, {pluginRef: prefix-cache-scorer, weight: 2},
    {pluginRef: queue-scorer, weight: 1}]
dataLayer:
  discovery: {pluginRef: file-discovery}
{{- if .Events}}
  sources:
  - {pluginRef: metrics-data-source, extractors: [{pluginRef: core-metrics-extractor}]}
  - {pluginRef: endpoint-notification-source, extractors: [{pluginRef: precise-prefix-cache-producer}]}
{{- end}}
`))

// startSidecar starts llm-d's sidecar of a decode engine and returns its address.
func (l *lab) startSidecar(ctx context.Context, s *stack, p peer, model string, e pair) (string, error) {
	ports, err := process.FreePorts(1)
	if err != nil {
		return "", err
	}
	proxy, err := l.Start(p.name+"-sidecar-"+model, nil, filepath.Join(p.binary, "pd-sidecar"), "--secure-proxy=false",
		"--port", port(ports[0]), "--model-server-port", port(e.decode), "--zap-log-level", "error",
		"--zap-devel=false")
	if err != nil {
		return "", err
	}
	s.routers = append(s.routers, proxy)
	return ports[0], proxy.Wait(ctx, "http://"+ports[0]+"/health")
}

// startLLMD starts llm-d's endpoint picker and sidecars, and returns the picker's address. All listen on all addresses.
func (l *lab) startLLMD(ctx context.Context, o options, s *stack, p peer, model string,
	engines []pair) (string, error) {
	ports, err := process.FreePorts(3)
	if err != nil {
		return "", err
	}
	picker, health, metrics := ports[0], ports[1], ports[2]
	text := "endpoints:\n"
	for i, e := range engines {
		sidecar, err := l.startSidecar(ctx, s, p, model, e)
		if err != nil {
			return "", err
		}
		decodeHost := "127.0.0.1"
		if o.events { // sidecars listen on all addresses
			decodeHost = ownHost(2, i)
			listener, err := net.Listen("tcp", net.JoinHostPort(decodeHost, l.events)) // until this program ends
			if err != nil {
				return "", err
			}
			go loopback.Forward(listener, "127.0.0.1:"+e.decodeEvents)
		}
		text += fmt.Sprintf("- {name: prefill%d, address: %s, port: %q, labels: {llm-d.ai/role: prefill}}\n"+
			"- {name: decode%d, address: %s, port: %q, labels: {llm-d.ai/role: decode}}\n",
			i, host(e.prefill), port(e.prefill), i, decodeHost, port(sidecar))
	}
	config := filepath.Join(l.Dir, p.name+"-"+model+".yaml")
	endpoints := strings.TrimSuffix(config, ".yaml") + "-endpoints.yaml"
	if err := os.WriteFile(endpoints, []byte(text), 0o600); err != nil {
		return "", err
	}
	values := map[string]string{"Path": endpoints, "Model": model}
	if o.events {
		render, err := l.renderer(ctx, model)
		if err != nil {
			return "", err
		}
		values["Events"], values["Render"] = l.events, render
	}
	var settings bytes.Buffer
	if err := llmdConfig.Execute(&settings, values); err != nil {
		return "", err
	}
	if err := os.WriteFile(config, settings.Bytes(), 0o600); err != nil {
		return "", err
	}
	epp, err := l.Start(p.name+"-epp-"+model, nil, filepath.Join(p.binary, "epp"), "--config-file", config,
		"--pool-name", "bench", "--pool-namespace", "bench", "--grpc-port", port(picker), "--grpc-health-port",
		port(health), "--metrics-port", port(metrics), "--metrics-endpoint-auth=false", "--secure-serving=false",
		"--tracing=false", "--zap-log-level", "error", "--zap-devel=false")
	if err != nil {
		return "", err
	}
	s.routers = append(s.routers, epp)
	return picker, epp.Wait(ctx, "http://"+metrics+"/metrics")
}

// renderer starts an engine that only tells the tokens of prompts, as `vllm launch render` does, and returns its
// address. Its CPU counts for nobody.
func (l *lab) renderer(ctx context.Context, model string) (string, error) {
	ports, err := process.FreePorts(2)
	if err != nil {
		return "", err
	}
	e, err := l.Start("render-"+ports[0], nil, filepath.Join(l.bin, "enginesim"), "--listen", ports[0],
		"--side-channel", ports[1], "--role", "both", "--model", model, "--connector", "nixl", "--record=false",
		"--keep-alive", "1m")
	if err != nil {
		return "", err
	}
	return ports[0], e.Wait(ctx, "http://"+ports[0]+"/health")
}

// frontConfig is an Envoy with a listener for each model: with one route to the router, or with llm-d's ext_proc filter
// as in its docs/discovery.md.
var frontConfig = template.Must(template.New("front").Funcs(template.FuncMap{"port": port}).Parse(
	`admin: {address: {socket_address: {address: 127.0.0.1, port_value: {{port .Admin}}}}}
static_resources:
  listeners:
{{- range .Listeners}}
  - address: {socket_address: {address: 127.0.0.1, port_value: {{port .Port}}}}
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: front
          route_config:
            virtual_hosts:
            - name: all
              domains: ["*"]
              routes:
              - match: {prefix: "/"}
                route: {cluster: {{if .Router}}router-{{.Model}}{{else}}pod{{end}}, timeout: 0s}
          http_filters:
{{- if .Picker}}
          - name: envoy.filters.http.ext_proc
            typed_config:
              "@type": type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExternalProcessor
              grpc_service: {envoy_grpc: {cluster_name: picker-{{.Model}}}, timeout: 10s}
              processing_mode:
                request_header_mode: SEND
                response_header_mode: SEND
                request_body_mode: FULL_DUPLEX_STREAMED
                response_body_mode: FULL_DUPLEX_STREAMED
                request_trailer_mode: SEND
                response_trailer_mode: SEND
              message_timeout: 600s
{{- end}}
          - name: envoy.filters.http.router
            typed_config: {"@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router}
{{- end}}
  clusters:
  - name: pod
    type: ORIGINAL_DST
    lb_policy: CLUSTER_PROVIDED
    original_dst_lb_config: {use_http_header: true, http_header_name: x-gateway-destination-endpoint}
    circuit_breakers: &all {thresholds: [{max_connections: 100000, max_pending_requests: 100000, max_requests: 100000}]}
{{- range .Listeners}}
  - name: {{if .Router}}router{{else}}picker{{end}}-{{.Model}}
    type: STATIC
    circuit_breakers: *all
{{- if .Picker}}
    typed_extension_protocol_options:
      envoy.extensions.upstreams.http.v3.HttpProtocolOptions:
        "@type": type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions
        explicit_http_config: {http2_protocol_options: {}}
{{- end}}
    load_assignment:
      cluster_name: front
      endpoints:
      - lb_endpoints:
        - endpoint:
            address:
              socket_address: {address: 127.0.0.1, port_value: {{port (or .Router .Picker)}}}
{{- end}}
`))

// startFront starts the Envoy in front of a peer, and sends clients there.
func (l *lab) startFront(ctx context.Context, o options, s *stack, listeners []frontListener) (err error) {
	ports, err := process.FreePorts(1 + len(listeners))
	if err != nil {
		return err
	}
	for i := range listeners {
		listeners[i].Port = ports[1+i]
		s.addrs[listeners[i].Model] = ports[1+i]
	}
	var text bytes.Buffer
	if err := frontConfig.Execute(&text, map[string]any{"Admin": ports[0], "Listeners": listeners}); err != nil {
		return err
	}
	s.envoy, err = l.startEnvoy(ctx, o, s.name, text.Bytes(), ports[0])
	return err
}

// peerVersions returns pip's versions of the environments that the binaries are in, and llm-d's commit.
func (l *lab) peerVersions(ctx context.Context, peers []peer) (out string) {
	for _, p := range peers {
		switch {
		case p.name == llmdName:
			commit, _ := os.ReadFile(filepath.Join(p.binary, "commit"))
			out += fmt.Sprintf(", llm-d-router %.12s", commit)
		case !p.front:
			name := map[string]string{dynamoName: "ai-dynamo-runtime"}[p.name]
			name = cmp.Or(name, p.name)
			text, _ := exec.CommandContext(ctx, filepath.Join(filepath.Dir(p.binary), "python"), "-c",
				fmt.Sprintf("import importlib.metadata as m; print(m.version(%q))", name)).Output()
			out += ", " + name + " " + strings.TrimSpace(string(text))
		}
	}
	return out
}
