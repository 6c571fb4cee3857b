package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"
)

// purposes are what the CPU time of Tandem's replicas goes to. A sample belongs to the first purpose that has a
// function on its stack.
func purposes() []purpose {
	return []purpose{
		{"ext_proc", []string{"tandem/extproc.(*Server).process"}},
		{"access log", []string{"tandem/extproc.(*Server).readAccessLogs"}},
		{"tickets", []string{"tandem/kvstate/redisstore.(*Store).askAll"}},
		{"publish", []string{"tandem/kvstate/redisstore.(*Store).write", "tandem/kvstate/redisstore.(*Store).flush"}},
		{"apply", []string{"tandem/kvstate/redisstore.(*poolReplica).takeIn"}},
		{"read", []string{"tandem/kvstate/redisstore."}},
		{"scrapes", []string{"tandem/kvstate/scrape."}},
		{"admission queue", []string{"tandem/extproc/latebinding."}},
		{"gRPC reads", []string{"google.golang.org/grpc/internal/transport.(*http2Server).HandleStreams"}},
		{"gRPC writes", []string{"google.golang.org/grpc/internal/transport.(*loopyWriter).run"}},
		{"garbage collection", []string{"runtime.gcBgMarkWorker", "runtime.bgsweep", "runtime.bgscavenge"}},
		{"scheduler", []string{"runtime.schedule", "runtime.mstart1", "runtime.sysmon", "runtime.mcall",
			"runtime.goexit0"}},
		{other, []string{""}},
	}
}

const other = "other"

// purpose is a name and the beginnings of functions' names.
type purpose struct {
	name      string
	functions []string
}

// spentOn is CPU time by purpose, in ms.
type spentOn map[string]float64

func (s spentOn) rounded() spentOn {
	out := spentOn{}
	for p, ms := range s {
		out[p] = round3(ms)
	}
	return out
}

// fleetProfile profiles all replicas at once, without requests and under load.
func (l *lab) fleetProfile(ctx context.Context, o options, s *stack, b *body) (parts fleetParts, err error) {
	if err := pause(ctx, 2*settleTime); err != nil {
		return parts, err
	}
	seconds := fleetProfileTime.Seconds()
	if parts.idle, err = l.profileAll(ctx, o, s, "idle", seconds); err != nil {
		return parts, err
	}
	busy, cancel := context.WithCancel(ctx)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_, _ = l.load(busy, s, o.shapes[0], b, fleetClients, 1<<40)
	}()
	parts.request, err = l.profileAll(ctx, o, s, "loaded", o.rate*seconds)
	cancel()
	<-ended
	return parts, err
}

// A profile has 100 samples for each second of CPU time, and an idle process uses little.
const fleetProfileTime = 20 * time.Second

// profileAll profiles all replicas, and returns CPU time in n parts.
func (l *lab) profileAll(ctx context.Context, o options, s *stack, what string, n float64) (spentOn, error) {
	if err := os.MkdirAll(o.profiles, 0o755); err != nil {
		return nil, err
	}
	files := make([]string, len(s.admins))
	errs := make([]error, len(s.admins))
	var group sync.WaitGroup
	for i, admin := range s.admins {
		files[i] = filepath.Join(o.profiles, fmt.Sprintf("%s-%s-%d.pprof", s.name, what, i))
		group.Go(func() {
			url := fmt.Sprintf("%s/debug/pprof/profile?seconds=%d", admin, int(fleetProfileTime.Seconds()))
			errs[i] = fetch(ctx, url, files[i])
		})
	}
	group.Wait()
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	args := append([]string{"tool", "pprof", "-traces", "-unit", "ms"}, files...)
	text, err := exec.CommandContext(ctx, "go", args...).Output()
	if err != nil {
		return nil, fmt.Errorf("go tool pprof: %w", err)
	}
	out := readTraces(text)
	for p := range out {
		out[p] /= n
	}
	return out, nil
}

// readTraces reads the output of `go tool pprof -traces -unit ms`: a line of dashes, then a stack, its leaf first after
// the time.
func readTraces(text []byte) spentOn {
	out := spentOn{}
	var took float64
	var stack []string
	end := func() {
		if len(stack) > 0 {
			out[purposeOf(stack)] += took
		}
		took, stack = 0, nil
	}
	for line := range bytes.Lines(text) {
		f := strings.Fields(string(line))
		if strings.HasPrefix(string(line), "-----------+") {
			end()
			continue
		}
		if len(f) == 0 {
			continue
		}
		ms, err := strconv.ParseFloat(strings.TrimSuffix(f[0], "ms"), 64)
		if err == nil && len(f) > 1 && len(stack) == 0 {
			took, f = ms, f[1:]
		}
		if took > 0 {
			stack = append(stack, f[0])
		}
	}
	end()
	return out
}

func purposeOf(stack []string) string {
	for _, p := range purposes() {
		for _, f := range stack {
			for _, begin := range p.functions {
				if strings.HasPrefix(f, begin) {
					return p.name
				}
			}
		}
	}
	return other
}
