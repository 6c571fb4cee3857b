package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"tandem/e2e/bench/ledger"
	"tandem/e2e/process"
)

// Names of the two pairs of engines, which are names of models too.
const (
	instant = "instant" // answers at once
	paced   = "paced"   // a token each -token-time

	floorName = "floor"
)

// pair is a prefill and a decode engine. bootstrap is the prefill engine's bootstrap server, for SGLang. The last two
// are the ports of their KV events, if they publish them. Prefill engines that do have hosts of their own, and one and
// the same port for events: llm-d knows one port for all.
type pair struct{ prefill, decode, bootstrap, prefillEvents, decodeEvents string }

// variant is a configuration of Tandem to measure.
type variant struct {
	name, bodyMode string
	binary         string // "": the one built
	binding        string // of its pools; "": late
	redis          bool   // Tandem shares its state through a Redis
	usage          bool   // Envoy counts the tokens of answers
	record         bool   // requests are recorded for tandem replay
	replicas       int    // 0: one
	insured        bool   // inside: streams outlive their engines
	inside         string // the folder of libtandem.so, which Envoy loads; "": Envoy asks a server
	env            []string
}

// stack is a measured system: an Envoy and, unless it is the floor, a Tandem.
type stack struct {
	name          string
	addr          string             // where clients connect
	addrs         map[string]string  // the same by model, of a peer
	routers       []*process.Process // of a peer; Tandem's Redis
	redis         string             // address
	admins        []string           // of all replicas
	admin         string             // Tandem's, the first replica's
	envoyAdmin    string
	selector      string             // of Dynamo
	renderers     map[string]string  // of Dynamo, by model
	envoy, tandem *process.Process   // the first replica
	tandems       []*process.Process // all replicas
	pairs         map[string][]pair
}

// lab is all running processes.
type lab struct {
	log io.Writer
	process.Group
	envoyPath  string
	bin        string
	tokenTime  time.Duration      // of paced engines
	rate       float64            // requests per second of all clients; 0: as fast as possible
	pin        bool               // every process has one processor
	pairs      map[string][]pair  // of the models that the shapes ask for
	others     map[string][]pair  // those of peers with another connector, by model and connector
	events     string             // the port of prefill engines' KV events
	simulators []*process.Process // of the engines
	engines    []ledger.Engine    // those of a group together
	stacks     []*stack           // the floor first
}

// start builds the binaries and starts engines, floor and variants.
func (l *lab) start(ctx context.Context, o options) (err error) {
	if l.Dir, err = os.MkdirTemp("", "tandem-bench-"); err != nil {
		return err
	}
	if l.envoyPath = process.Program(o.envoy, os.Getenv("ENVOY"), "envoy", ".tools/bin/envoy"); l.envoyPath == "" {
		return errors.New("no Envoy found: run scripts/tools.sh, put envoy on PATH, or set ENVOY")
	}
	bin, err := l.build(ctx, o.bin)
	if err != nil {
		return err
	}
	l.pairs, l.others = map[string][]pair{}, map[string][]pair{}
	l.bin = bin
	for _, name := range o.models() {
		if l.pairs[name], err = l.startPairs(ctx, o, name, "nixl-"+name, "nixl"); err != nil {
			return err
		}
	}
	if len(o.mode.fleet) > 0 {
		return nil
	}
	if err := l.startFloor(ctx, o); err != nil {
		return fmt.Errorf("starting the floor: %w", err)
	}
	for _, v := range o.variants {
		if v.binary == "" {
			v.binary = filepath.Join(bin, "tandem")
		}
		if err := l.startTandem(ctx, o, v); err != nil {
			return fmt.Errorf("starting %s: %w", v.name, err)
		}
	}
	for _, p := range o.peers {
		if err := l.startPeer(ctx, o, p); err != nil {
			return fmt.Errorf("starting %s: %w", p.name, err)
		}
	}
	return nil
}

// build builds tandem and enginesim, without race detector, unless a directory has them.
func (l *lab) build(ctx context.Context, bin string) (string, error) {
	if bin != "" {
		return bin, nil
	}
	bin = filepath.Join(l.Dir, "bin")
	cmd := exec.CommandContext(ctx, "go", "build", "-trimpath", "-o", bin+"/", "./cmd/tandem", "./cmd/enginesim")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("building (run this from the module's root): %w\n%s", err, out)
	}
	return bin, nil
}

// models are the models that the shapes ask for.
func (o *options) models() (out []string) {
	for _, model := range []string{instant, paced} {
		if slices.ContainsFunc(append(o.shapes, o.beside), func(s shape) bool { return s.model == model }) {
			out = append(out, model)
		}
	}
	return out
}

// startPairs starts half as many pairs of engines of a model as there shall be endpoints.
func (l *lab) startPairs(ctx context.Context, o options, model, name, connector string) (out []pair, err error) {
	if len(o.mode.capacity) > 0 {
		return l.startMany(ctx, o.endpoints/2, model)
	}
	for range o.endpoints / 2 {
		p, err := l.startPair(ctx, o.events, model, name, connector)
		if err != nil {
			return nil, err
		}
		out = append(out, p)
	}
	return out, nil
}

// startPair starts a prefill and a decode engine of a model.
func (l *lab) startPair(ctx context.Context, events bool, model, name, connector string) (p pair, err error) {
	ports, err := process.FreePorts(7)
	if err != nil {
		return p, err
	}
	p = pair{ports[0], ports[1], ports[4], port(ports[5]), port(ports[6])}
	if events && connector == "nixl" {
		l.events = cmp.Or(l.events, p.prefillEvents)
		p.prefillEvents = l.events
		p.prefill = net.JoinHostPort(ownHost(1, len(l.engines)), port(p.prefill))
		ports[0], ports[5] = p.prefill, l.events
	}
	for i, role := range []string{"prefill", "decode"} {
		args := []string{"--listen", ports[i], "--side-channel", ports[i+2], "--role", role, "--model", model,
			"--connector", connector, "--bootstrap", p.bootstrap, "--record=false", "--keep-alive", "1m"}
		if model == paced && role == "decode" {
			args = append(args, "--decode-step", l.tokenTime.String())
		}
		if events {
			// a cache of a million tokens, as on large GPUs: prompts evict each other, and events report that
			args = append(args, "--kv-events", "tcp://*:"+port(ports[i+5]), "--kv-events-topic", "kv@bench@"+model,
				"--kv-events-buffer", "16", "--blocks", strconv.Itoa(1<<16))
		}
		e, err := l.Start(name+"-"+role, nil, filepath.Join(l.bin, "enginesim"), args...)
		if err != nil {
			return p, err
		}
		if err := e.Wait(ctx, "http://"+ports[i]+"/health"); err != nil {
			return p, err
		}
		l.simulators = append(l.simulators, e)
		l.engines = append(l.engines, ledger.Engine{Group: name, Addr: ports[i]})
	}
	return p, nil
}

// startMany starts n pairs of a model in two processes, one for each role: every engine has a host of its own.
func (l *lab) startMany(ctx context.Context, n int, model string) ([]pair, error) {
	ports, err := process.FreePorts(2)
	if err != nil {
		return nil, err
	}
	pairs, first := make([]pair, n), len(l.engines)
	for i, role := range []string{"prefill", "decode"} {
		at := func(addr string, n int) string { return net.JoinHostPort(ownHost(7+i, first+n), port(addr)) }
		args := []string{"--hosts", strconv.Itoa(n), "--listen", at(ports[0], 0), "--side-channel", at(ports[1], 0),
			"--role", role, "--model", model, "--record=false", "--keep-alive", "10m", "--blocks", "16384"}
		if model == paced && role == "decode" {
			args = append(args, "--decode-step", l.tokenTime.String())
		}
		e, err := l.Start(model+"-"+role, nil, filepath.Join(l.bin, "enginesim"), args...)
		if err != nil {
			return nil, err
		}
		l.simulators = append(l.simulators, e)
		for k := range pairs {
			addr := at(ports[0], k)
			if err := e.Wait(ctx, "http://"+addr+"/health"); err != nil {
				return nil, err
			}
			*[]*string{&pairs[k].prefill, &pairs[k].decode}[i] = addr
			l.engines = append(l.engines, ledger.Engine{Group: model, Addr: addr})
		}
	}
	return pairs, nil
}

// floorConfig is an Envoy that only forwards to the address in a header.
const floorConfig = `admin: {address: {socket_address: {address: 127.0.0.1, port_value: %s}}}
static_resources:
  listeners:
  - address: {socket_address: {address: 127.0.0.1, port_value: %s}}
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: floor
          route_config:
            virtual_hosts:
            - {name: all, domains: ["*"], routes: [{match: {prefix: "/"}, route: {cluster: pod, timeout: 0s}}]}
          http_filters:
          - name: envoy.filters.http.router
            typed_config: {"@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router}
  clusters:
  - name: pod
    type: ORIGINAL_DST
    lb_policy: CLUSTER_PROVIDED
    connect_timeout: 1s
    original_dst_lb_config: {use_http_header: true, http_header_name: x-gateway-destination-endpoint}
    circuit_breakers: {thresholds: [{max_connections: 100000, max_pending_requests: 100000, max_requests: 100000}]}
`

func (l *lab) startFloor(ctx context.Context, o options) error {
	ports, err := process.FreePorts(2)
	if err != nil {
		return err
	}
	s := &stack{name: floorName, addr: ports[0], pairs: l.pairs}
	s.envoy, err = l.startEnvoy(ctx, o, floorName, fmt.Appendf(nil, floorConfig, port(ports[1]), port(ports[0])),
		ports[1])
	l.stacks = append(l.stacks, s)
	return err
}

// poolsOf writes the pools of a stack, a pool for each model.
func (l *lab) poolsOf(o options, v variant) *strings.Builder {
	config := &strings.Builder{}
	config.WriteString("pools:\n")
	for _, model := range o.models() {
		fmt.Fprintf(config, "- name: %s\n  models: [%s]\n  kvTransfer: nixl\n  split: always\n  binding: %s\n",
			model, model, cmp.Or(v.binding, "late"))
		if o.events {
			config.WriteString("  kvEvents: {}\n")
		}
		if v.insured {
			config.WriteString("  engine: vllm\n  continueStreams: {}\n")
		}
		config.WriteString("  endpoints:\n")
		for _, p := range l.pairs[model] {
			for _, e := range []struct{ role, addr, events string }{
				{"prefill", p.prefill, p.prefillEvents}, {"decode", p.decode, p.decodeEvents},
			} {
				fmt.Fprintf(config, "  - {address: %q, role: %s", e.addr, e.role)
				if o.events {
					config.WriteString(", kvEventsPort: " + e.events)
				}
				config.WriteString("}\n")
			}
		}
	}
	return config
}

func (l *lab) startTandem(ctx context.Context, o options, v variant) error {
	ports, err := process.FreePorts(2)
	if err != nil {
		return err
	}
	replicas, err := replicaPorts(max(v.replicas, 1))
	if err != nil {
		return err
	}
	config := l.poolsOf(o, v)
	s := &stack{name: v.name, addr: ports[0], envoyAdmin: ports[1], pairs: l.pairs}
	if v.redis {
		redis, addr, err := l.StartRedis(ctx, v.name)
		if err != nil {
			return err
		}
		s.routers, s.redis = append(s.routers, redis), addr
		fmt.Fprintf(config, "state: {redis: {url: %q}}\n", "redis://"+addr)
	}
	if v.usage {
		config.WriteString("usage: {}\n")
	}
	if v.record {
		fmt.Fprintf(config, "record: {folder: %q}\n", filepath.Join(l.Dir, v.name, "recordings"))
	}
	var extProcs, replans []string
	for _, r := range replicas {
		extProcs, replans = append(extProcs, strconv.Quote(r.extProc)), append(replans, strconv.Quote(r.replan))
	}
	run := "" // older builds, which are compared, do not know the field
	if v.inside != "" {
		run = "run: inside, "
	}
	fmt.Fprintf(config, "envoy: {%slisten: %q, admin: %q, bodyMode: %s, extProcs: [%s], replans: [%s]}\n", run,
		ports[0], ports[1], v.bodyMode, strings.Join(extProcs, ", "), strings.Join(replans, ", "))
	file := ""
	for i, r := range replicas {
		name := v.name
		if i > 0 {
			name += strconv.Itoa(i)
		}
		own := fmt.Sprintf("extProc: {listen: %q}\nreplan: {listen: %q}\nadmin: {listen: %q}\n", r.extProc, r.replan,
			r.admin) + config.String()
		file = filepath.Join(l.Dir, name+".yaml")
		if err := os.WriteFile(file, []byte(own), 0o600); err != nil {
			return err
		}
		s.admins = append(s.admins, "http://"+r.admin)
		if v.inside != "" {
			continue
		}
		t, err := l.startOn(1, name+"-tandem", v.env, v.binary, "serve", "-f", file)
		if err != nil {
			return err
		}
		s.tandems = append(s.tandems, t)
		if err := t.Wait(ctx, "http://"+r.admin+"/readyz"); err != nil {
			return err
		}
	}
	s.admin = s.admins[0]
	if len(s.tandems) > 0 {
		s.tandem = s.tandems[0]
	}
	bootstrap, err := exec.CommandContext(ctx, v.binary, "envoy", "-f", file).Output()
	if err != nil {
		return fmt.Errorf("tandem envoy: %w", err)
	}
	if s.envoy, err = l.startEnvoy(ctx, o, v.name, bootstrap, ports[1],
		"ENVOY_DYNAMIC_MODULES_SEARCH_PATH="+v.inside); err != nil {
		return err
	}
	l.stacks = append(l.stacks, s)
	return s.envoy.Wait(ctx, "http://"+s.addr+"/v1/models")
}

func (l *lab) startEnvoy(ctx context.Context, o options, name string, bootstrap []byte,
	admin string, env ...string) (*process.Process, error) {
	file := filepath.Join(l.Dir, name+"-envoy.yaml")
	if err := os.WriteFile(file, bootstrap, 0o600); err != nil {
		return nil, err
	}
	p, err := l.startOn(0, name+"-envoy", env, l.envoyPath, "-c", file, "-l", "warning", "--use-dynamic-base-id",
		"--concurrency", strconv.Itoa(o.workers))
	if err != nil {
		return nil, err
	}
	return p, p.Wait(ctx, "http://"+admin+"/ready")
}

// startOn starts a program, on one processor if processes are pinned. Go then gives it one thread to run on, as on a
// machine with one core.
func (l *lab) startOn(processor int, name string, env []string, path string, args ...string) (*process.Process, error) {
	if l.pin {
		path, args = "taskset", append([]string{"--cpu-list", strconv.Itoa(processor), path}, args...)
	}
	return l.Start(name, env, path, args...)
}

// stop ends everything, and removes its files.
func (l *lab) stop() {
	l.Stop()
	if l.Dir != "" {
		_ = os.RemoveAll(l.Dir)
	}
}

// ownHost is a loopback address for the nth process of a kind.
func ownHost(kind, n int) string { return fmt.Sprintf("127.%d.%d.%d", kind, n>>8, n&0xff) }

func host(addr string) string { return addr[:strings.LastIndexByte(addr, ':')] }

func port(addr string) string { return addr[strings.LastIndexByte(addr, ':')+1:] }

// cpuOf returns the CPU time of several processes.
func cpuOf(processes ...*process.Process) (sum time.Duration, err error) {
	for _, p := range processes {
		used, err := p.CPU()
		if err != nil {
			return 0, err
		}
		sum += used
	}
	return sum, nil
}

// address returns the address for clients of a model.
func (s *stack) address(model string) string {
	if a := s.addrs[model]; a != "" {
		return a
	}
	return s.addr
}
