package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"

	"tandem/e2e/process"
)

// stand is all running processes: engines, replicas of Tandem, one Envoy.
type stand struct {
	of testCase // what it was started for
	process.Group
	url              string
	configs          []string // of the replicas
	bootstrap        string   // of Envoy
	engines, tandems []*process.Process
	envoy, redis     *process.Process // redis is nil without one
}

// serves reports whether a case can run on this stand. Decode engines take their time for every token of a stream.
func (s *stand) serves(c testCase) bool {
	return s != nil && s.of.Endpoints == c.Endpoints && s.of.fleet() == c.fleet() && s.of.Stream == c.Stream
}

// startStand starts engines, replicas and Envoy.
func (o *options) startStand(ctx context.Context, c testCase) (s *stand, err error) {
	replicas := c.Replicas
	s = &stand{of: c}
	defer func() {
		if err != nil {
			s.stop()
			s = nil
		}
	}()
	if s.Dir, err = os.MkdirTemp("", "tandem-load-"); err != nil {
		return s, err
	}
	lines, err := s.startEngines(ctx, o)
	if err != nil {
		return s, err
	}
	p, err := process.FreePorts(2 + 3*replicas)
	if err != nil {
		return s, err
	}
	s.url = "http://" + p[0]
	key := filepath.Join(s.Dir, "ticket.key")
	if err := os.WriteFile(key, []byte(strings.Repeat("0123456789abcdef", 4)+"\n"), 0o600); err != nil {
		return s, err
	}
	config, shared := "", ""
	if c.Redis {
		redis, addr, err := s.StartRedis(ctx, "load")
		if err != nil {
			return s, err
		}
		s.redis, shared = redis, fmt.Sprintf("state: {redis: {url: %q}}\n", "redis://"+addr)
	}
	for i := range replicas {
		text, err := configuration(replicas, p[0], p[1], p[2:2+replicas], p[2+replicas:2+2*replicas], p[2+2*replicas+i],
			i, key, lines)
		if err != nil {
			return s, err
		}
		text = shared + text
		s.configs = append(s.configs, text)
		config = filepath.Join(s.Dir, fmt.Sprintf("tandem-%d.yaml", i))
		if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
			return s, err
		}
		t, err := s.Start(fmt.Sprintf("tandem-%d", i), nil, o.tandem, "serve", "-f", config, "-log", "warn")
		if err != nil {
			return s, err
		}
		s.tandems = append(s.tandems, t)
		if err := t.Wait(ctx, "http://"+p[2+2*replicas+i]+"/readyz"); err != nil {
			return s, err
		}
	}
	return s, s.startEnvoy(ctx, o, config, p[1])
}

// startEngines starts them, and returns their lines of the configuration.
func (s *stand) startEngines(ctx context.Context, o *options) (lines string, err error) {
	p, err := process.FreePorts(2 * s.of.Endpoints)
	if err != nil {
		return "", err
	}
	for i := range s.of.Endpoints {
		role, step := "prefill", "0s"
		if i >= s.of.Endpoints/2 {
			role = "decode"
			if s.of.Stream {
				step = "5ms"
			}
		}
		e, err := s.Start(fmt.Sprintf("engine-%d", i), nil, o.enginesim, "--listen", p[2*i], "--side-channel", p[2*i+1],
			"--role", role, "--model", "tiny", "--record=false", "--keep-alive", "1m", "--decode-step", step)
		if err != nil {
			return "", err
		}
		s.engines = append(s.engines, e)
		lines += fmt.Sprintf("  - {address: %q, role: %s}\n", p[2*i], role)
	}
	for i, e := range s.engines {
		if err := e.Wait(ctx, "http://"+p[2*i]+"/health"); err != nil {
			return "", err
		}
	}
	return lines, nil
}

// configuration returns the configuration of envoy-configs/, with addresses of this machine and other endpoints.
func configuration(replicas int, listen, envoyAdmin string, extProcs, replans []string, admin string, i int, key,
	endpoints string) (string, error) {
	file := "envoy-configs/two-hop/tandem.yaml"
	if replicas > 1 {
		file = "envoy-configs/replicas/tandem.yaml"
	}
	raw, err := os.ReadFile(file)
	if err != nil {
		return "", fmt.Errorf("reading the configuration (run this from the module's root): %w", err)
	}
	text := string(raw)
	for _, edit := range []struct{ pattern, now string }{
		{`(?m)^extProc:.*$`, "extProc: {listen: " + strconv.Quote(extProcs[i]) + "}"},
		{`(?m)^replan:.*$`, "replan: {listen: " + strconv.Quote(replans[i]) + "}"},
		{`(?m)^admin:.*$`, "admin: {listen: " + strconv.Quote(admin) + "}"},
		{`(?m)^tickets:.*$`, "tickets: {keyFile: " + strconv.Quote(key) + "}"},
		{`(?m)^envoy:.*\n(  .*\n)*`,
			fmt.Sprintf("envoy: {listen: %q, admin: %q, extProcs: [%s], replans: [%s]}\n", listen, envoyAdmin,
				quoted(extProcs), quoted(replans))},
		{`(?m)^  endpoints:\n(  - .*\n?)*`, "  split: always\n  endpoints:\n" + endpoints},
	} {
		text = regexp.MustCompile(edit.pattern).ReplaceAllLiteralString(text, edit.now)
	}
	return text, nil
}

func quoted(in []string) string {
	var out []string
	for _, s := range in {
		out = append(out, strconv.Quote(s))
	}
	return strings.Join(out, ", ")
}

func (s *stand) startEnvoy(ctx context.Context, o *options, config, admin string) error {
	bootstrap, err := exec.CommandContext(ctx, o.tandem, "envoy", "-f", config).Output()
	if err != nil {
		return fmt.Errorf("tandem envoy: %w", err)
	}
	file := filepath.Join(s.Dir, "envoy.yaml")
	s.bootstrap = string(bootstrap)
	if err := os.WriteFile(file, bootstrap, 0o600); err != nil {
		return err
	}
	s.envoy, err = s.Start("envoy", nil, o.envoy, "-c", file, "-l", "warning", "--use-dynamic-base-id", "--concurrency",
		strconv.Itoa(o.workers))
	if err != nil {
		return err
	}
	if err := s.envoy.Wait(ctx, "http://"+admin+"/ready"); err != nil {
		return err
	}
	return s.envoy.Wait(ctx, s.url+"/v1/models")
}

// stop ends everything and removes its files.
func (s *stand) stop() {
	if s == nil {
		return
	}
	s.Stop()
	_ = os.RemoveAll(s.Dir)
}

// usage is the resources that the processes have used: CPU time so far, resident memory now.
type usage struct {
	envoy, tandem, engines   time.Duration // tandem: all replicas and their Redis
	envoyMemory, tandemBytes int64
}

func (s *stand) usage() (u usage, err error) {
	add := func(to *time.Duration, p *process.Process) {
		d, cpuErr := p.CPU()
		*to += d
		err = errors.Join(err, cpuErr)
	}
	add(&u.envoy, s.envoy)
	u.envoyMemory = s.envoy.Resident()
	for _, t := range s.tandems {
		add(&u.tandem, t)
		u.tandemBytes += t.Resident()
	}
	add(&u.tandem, s.redis)
	for _, e := range s.engines {
		add(&u.engines, e)
	}
	return u, err
}

// lookEvery is the interval at which usage is recorded while a tool runs: tools take their time to begin and to end,
// aiperf minutes.
const lookEvery = 100 * time.Millisecond

// watch records the usage regularly, until end.
type watch struct {
	stop    chan struct{}
	done    chan struct{}
	samples []timedUsage
	err     error
}

type timedUsage struct {
	at time.Time
	usage
}

func (s *stand) watch() (*watch, error) {
	first, err := s.usage()
	w := &watch{stop: make(chan struct{}), done: make(chan struct{}), samples: []timedUsage{{time.Now(), first}}}
	if err != nil {
		return nil, err
	}
	go func() {
		defer close(w.done)
		tick := time.NewTicker(lookEvery)
		defer tick.Stop()
		for w.err == nil {
			select {
			case <-w.stop:
				return
			case <-tick.C:
			}
			var u usage
			if u, w.err = s.usage(); w.err == nil {
				w.samples = append(w.samples, timedUsage{time.Now(), u})
			}
		}
	}()
	return w, nil
}

func (w *watch) end() ([]timedUsage, error) {
	close(w.stop)
	<-w.done
	return w.samples, w.err
}

// between returns the last usage before from and the first one a moment after to.
func between(samples []timedUsage, from, to time.Time) (before, after usage) {
	before, after = samples[0].usage, samples[len(samples)-1].usage
	for _, s := range samples {
		if s.at.Before(from) {
			before = s.usage
		}
		if s.at.After(to.Add(lookEvery)) {
			return before, s.usage
		}
	}
	return before, after
}
