package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
	"unsafe"
)

// Names of the two pairs of engines, which are names of models too.
const (
	instant = "instant" // answers at once
	paced   = "paced"   // a token each tokenTime

	tokenTime = "5ms" // a fast engine's, and long enough that each token travels by itself

	floorName = "floor"
)

// pair is a prefill and a decode engine.
type pair struct{ prefill, decode string }

// variant is a Tandem as it is to be run.
type variant struct {
	name, bodyMode string
	binary         string // "": the one built
	env            []string
}

// stack is one thing measured: an Envoy and, unless it is the floor, a Tandem.
type stack struct {
	name          string
	addr          string            // where clients connect
	addrs         map[string]string // the same by model, of a peer
	routers       []*process        // of a peer
	admin         string            // Tandem's
	envoy, tandem *process
	pairs         map[string]pair
}

// lab is everything that runs.
type lab struct {
	log       io.Writer
	dir       string
	envoyPath string
	processes []*process
	pairs     map[string]pair
	stacks    []*stack // the floor first
}

// process is a child. It ends with the lab, and if this program is killed, with that.
type process struct {
	cmd   *exec.Cmd
	log   string
	ended chan struct{}
}

// start builds the binaries and starts engines, floor and variants.
func (l *lab) start(ctx context.Context, o options) (err error) {
	if l.dir, err = os.MkdirTemp("", "tandem-bench-"); err != nil {
		return err
	}
	if l.envoyPath, err = findEnvoy(o.envoy); err != nil {
		return err
	}
	bin, err := l.build(ctx, o.bin)
	if err != nil {
		return err
	}
	l.pairs = map[string]pair{}
	for _, name := range []string{instant, paced} {
		if l.pairs[name], err = l.startPair(ctx, bin, name, name, "nixl"); err != nil {
			return err
		}
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
		if err := l.startPeer(ctx, bin, p); err != nil {
			return fmt.Errorf("starting %s: %w", p.name, err)
		}
	}
	return nil
}

func findEnvoy(given string) (string, error) {
	for _, c := range []string{given, os.Getenv("ENVOY"), "envoy", ".tools/bin/envoy"} {
		if c == "" {
			continue
		}
		if path, err := exec.LookPath(c); err == nil {
			return filepath.Abs(path)
		}
	}
	return "", errors.New("no Envoy found: run scripts/tools.sh, put envoy on PATH, or set ENVOY")
}

// build makes tandem and enginesim, without race detector, unless a directory has them.
func (l *lab) build(ctx context.Context, bin string) (string, error) {
	if bin != "" {
		return bin, nil
	}
	bin = filepath.Join(l.dir, "bin")
	cmd := exec.CommandContext(ctx, "go", "build", "-trimpath", "-o", bin+"/", "./cmd/tandem", "./cmd/enginesim")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("building (run this from the module's root): %w\n%s", err, out)
	}
	return bin, nil
}

// startPair starts a prefill and a decode engine of a model.
func (l *lab) startPair(ctx context.Context, bin, model, name, connector string) (p pair, err error) {
	ports, err := freePorts(4)
	if err != nil {
		return p, err
	}
	p = pair{ports[0], ports[1]}
	for i, role := range []string{"prefill", "decode"} {
		args := []string{"--listen", ports[i], "--side-channel", ports[i+2], "--role", role, "--model", model, "--connector", connector, "--record=false", "--keep-alive", "1m"}
		if model == paced && role == "decode" {
			args = append(args, "--decode-step", tokenTime)
		}
		e, err := l.run(name+"-"+model+"-"+role, nil, filepath.Join(bin, "enginesim"), args...)
		if err != nil {
			return p, err
		}
		if err := l.wait(ctx, e, "http://"+ports[i]+"/health"); err != nil {
			return p, err
		}
	}
	return p, nil
}

// floorConfig is an Envoy that does nothing but forward to the address in a header.
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
          route_config: {virtual_hosts: [{name: all, domains: ["*"], routes: [{match: {prefix: "/"}, route: {cluster: pod, timeout: 0s}}]}]}
          http_filters: [{name: envoy.filters.http.router, typed_config: {"@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router}}]
  clusters:
  - name: pod
    type: ORIGINAL_DST
    lb_policy: CLUSTER_PROVIDED
    connect_timeout: 1s
    original_dst_lb_config: {use_http_header: true, http_header_name: x-gateway-destination-endpoint}
    circuit_breakers: {thresholds: [{max_connections: 100000, max_pending_requests: 100000, max_requests: 100000}]}
`

func (l *lab) startFloor(ctx context.Context, o options) error {
	ports, err := freePorts(2)
	if err != nil {
		return err
	}
	s := &stack{name: floorName, addr: ports[0], pairs: l.pairs}
	s.envoy, err = l.startEnvoy(ctx, o, floorName, fmt.Appendf(nil, floorConfig, port(ports[1]), port(ports[0])), ports[1])
	l.stacks = append(l.stacks, s)
	return err
}

func (l *lab) startTandem(ctx context.Context, o options, v variant) error {
	ports, err := freePorts(5)
	if err != nil {
		return err
	}
	var config strings.Builder
	fmt.Fprintf(&config, "extProc: {listen: %q}\nreplan: {listen: %q}\nadmin: {listen: %q}\nenvoy: {listen: %q, admin: %q, bodyMode: %s}\npools:\n",
		ports[2], ports[3], ports[4], ports[0], ports[1], v.bodyMode)
	for name, p := range l.pairs {
		fmt.Fprintf(&config, "- name: %s\n  models: [%s]\n  kvTransfer: nixl\n  split: always\n  endpoints: [{address: %q, role: prefill}, {address: %q, role: decode}]\n",
			name, name, p.prefill, p.decode)
	}
	file := filepath.Join(l.dir, v.name+".yaml")
	if err := os.WriteFile(file, []byte(config.String()), 0o600); err != nil {
		return err
	}
	s := &stack{name: v.name, addr: ports[0], admin: "http://" + ports[4], pairs: l.pairs}
	if s.tandem, err = l.run(v.name+"-tandem", v.env, v.binary, "serve", "-f", file); err != nil {
		return err
	}
	if err := l.wait(ctx, s.tandem, s.admin+"/readyz"); err != nil {
		return err
	}
	bootstrap, err := exec.CommandContext(ctx, v.binary, "envoy", "-f", file).Output()
	if err != nil {
		return fmt.Errorf("tandem envoy: %w", err)
	}
	if s.envoy, err = l.startEnvoy(ctx, o, v.name, bootstrap, ports[1]); err != nil {
		return err
	}
	l.stacks = append(l.stacks, s)
	return l.wait(ctx, s.envoy, "http://"+s.addr+"/v1/models")
}

func (l *lab) startEnvoy(ctx context.Context, o options, name string, bootstrap []byte, admin string) (*process, error) {
	file := filepath.Join(l.dir, name+"-envoy.yaml")
	if err := os.WriteFile(file, bootstrap, 0o600); err != nil {
		return nil, err
	}
	p, err := l.run(name+"-envoy", nil, l.envoyPath, "-c", file, "-l", "warning", "--use-dynamic-base-id", "--concurrency", strconv.Itoa(o.workers))
	if err != nil {
		return nil, err
	}
	return p, l.wait(ctx, p, "http://"+admin+"/ready")
}

// run starts a program.
func (l *lab) run(name string, env []string, path string, args ...string) (*process, error) {
	p := &process{cmd: exec.Command(path, args...), log: filepath.Join(l.dir, name+".log"), ended: make(chan struct{})}
	log, err := os.Create(p.log)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	p.cmd.Env = append(os.Environ(), env...)
	p.cmd.Stdout, p.cmd.Stderr = log, log
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
	if err := p.cmd.Start(); err != nil {
		return nil, fmt.Errorf("starting %s: %w", name, err)
	}
	l.processes = append(l.processes, p)
	go func() { _ = p.cmd.Wait(); close(p.ended) }()
	return p, nil
}

// wait waits until url answers 200.
func (l *lab) wait(ctx context.Context, p *process, url string) error {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	for {
		if get(ctx, url) == nil {
			return nil
		}
		select {
		case <-p.ended:
			text, _ := os.ReadFile(p.log)
			return fmt.Errorf("%s ended: %.2000s", p.cmd.Path, text)
		case <-ctx.Done():
			return fmt.Errorf("%s does not answer: %w", url, ctx.Err())
		case <-time.After(10 * time.Millisecond):
		}
	}
}

func get(ctx context.Context, url string) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if _, _ = io.Copy(io.Discard, resp.Body); resp.StatusCode != http.StatusOK {
		return errors.New(resp.Status)
	}
	return nil
}

// stop ends everything, in the order opposite to its start, and removes what it wrote.
func (l *lab) stop() {
	for _, p := range slices.Backward(l.processes) {
		_ = p.cmd.Process.Signal(syscall.SIGTERM)
		select {
		case <-p.ended:
		case <-time.After(2 * time.Second):
			_ = p.cmd.Process.Kill()
			<-p.ended
		}
	}
	if l.dir != "" {
		_ = os.RemoveAll(l.dir)
	}
}

// versions says which Envoy it is: `envoy --version` ends in "version: COMMIT/1.40.0/Clean/RELEASE/BoringSSL".
func (l *lab) versions(ctx context.Context) string {
	out, _ := exec.CommandContext(ctx, l.envoyPath, "--version").Output()
	_, version, _ := strings.Cut(string(out), "version: ")
	if parts := strings.Split(version, "/"); len(parts) > 1 {
		return "Envoy " + parts[1]
	}
	return "Envoy of unknown version"
}

// freePorts are addresses on 127.0.0.1 that nobody listens on now.
func freePorts(n int) (out []string, err error) {
	for range n {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return nil, fmt.Errorf("looking for free ports: %w", err)
		}
		defer l.Close()
		out = append(out, l.Addr().String())
	}
	return out, nil
}

func port(addr string) string { return addr[strings.LastIndexByte(addr, ':')+1:] }

// cpu is the CPU time that the process has used, user and system, all threads, ended ones included: its CPU-time clock
// (clock_getcpuclockid(3)), which counts nanoseconds where /proc/PID/stat counts ticks of 10 ms.
func (p *process) cpu() (time.Duration, error) {
	if p == nil {
		return 0, nil
	}
	const processClock, scheduler = 0, 2 // of the clock id: all threads; user and system
	clock := int32(^p.cmd.Process.Pid<<3 | processClock | scheduler)
	var t syscall.Timespec
	if _, _, errno := syscall.Syscall(syscall.SYS_CLOCK_GETTIME, uintptr(clock), uintptr(unsafe.Pointer(&t)), 0); errno != 0 {
		return 0, fmt.Errorf("reading the CPU clock of %s: %w", p.cmd.Path, errno)
	}
	return time.Duration(t.Nano()), nil
}

// cpuOf is the CPU time of several processes.
func cpuOf(processes ...*process) (sum time.Duration, err error) {
	for _, p := range processes {
		used, err := p.cpu()
		if err != nil {
			return 0, err
		}
		sum += used
	}
	return sum, nil
}

// address is where clients of a model connect.
func (s *stack) address(model string) string {
	if a := s.addrs[model]; a != "" {
		return a
	}
	return s.addr
}

// peakMemory is the most memory that the process has had resident, in bytes; 0 if the kernel does not say.
func (p *process) peakMemory() int64 {
	text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.cmd.Process.Pid))
	for line := range strings.Lines(string(text)) {
		if fields := strings.Fields(line); len(fields) == 3 && fields[0] == "VmHWM:" {
			kb, _ := strconv.ParseInt(fields[1], 10, 64)
			return kb << 10
		}
	}
	return 0
}
