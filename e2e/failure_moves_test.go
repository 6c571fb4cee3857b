package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/stretchr/testify/require"
)

// The commands of a script while a request is in flight: see TestFailures.

// hold sends requests until one of them is with the first replica, which is paused: in pass 1 (before), or with P's
// answer (between). The scripts' prefill endpoints are slow, so there is time to pause it.
func (s *stage) hold(args []string) {
	pause, resume := signal(syscall.SIGSTOP), signal(syscall.SIGCONT)
	for range 20 {
		if args[0] == "before" {
			pause(s, []string{"tandem"})
			s.ask(nil)
		} else {
			s.ask(nil)
			s.at([]string{"prefill"})
			pause(s, []string{"tandem"})
			s.ended([]string{"prefill"})
		}
		select {
		case <-s.play.answer.done:
		case <-time.After(300 * time.Millisecond): // the other replica would have answered, and Envoy has not given this one up yet
			return
		}
		resume(s, []string{"tandem"})
		s.quiet()
	}
	require.Fail(s.t, "no request came to the first replica")
}

func (s *stage) at(args []string) {
	require.Eventually(s.t, func() bool {
		return slices.ContainsFunc(s.legs(), func(l leg) bool { return l.Leg == args[0] && l.Outcome == "running" })
	}, patience, time.Millisecond, "no %s leg runs", args[0])
}

func (s *stage) ended(args []string) {
	soon(s.t, "a "+args[0]+" leg ends", func() bool {
		return slices.ContainsFunc(s.legs(), func(l leg) bool { return l.Leg == args[0] && l.Outcome != "running" })
	})
}

func (s *stage) fetched([]string) {
	soon(s.t, "decode fetches", func() bool {
		return slices.ContainsFunc(s.f.prefills, func(e *engine) bool {
			return s.handOvers(e)["fetched"] > s.play.before.given[e.process]["fetched"]
		})
	})
}

func (s *stage) events(args []string) {
	n, err := strconv.Atoi(args[0])
	require.NoError(s.t, err)
	for range n {
		select {
		case <-s.play.answer.events:
		case <-time.After(patience):
			require.Fail(s.t, "the stream stands still")
		}
	}
}

func (s *stage) leave([]string) { s.play.leave() }

func (s *stage) wait(args []string) {
	d, err := time.ParseDuration(args[0])
	require.NoError(s.t, err)
	time.Sleep(d)
}

// excluded waits until Tandem has excluded the engine that has that leg.
func (s *stage) excluded(args []string) {
	e := s.gone[args[0]]
	require.NotNil(s.t, e, "%s was not stopped", args[0])
	soon(s.t, args[0]+" is excluded", func() bool { return s.out(e.addr) })
}

func (s *stage) process(name string) *process {
	switch name {
	case "tandem":
		return s.f.tandems[0]
	case "tandem2":
		return s.f.tandems[1]
	case "envoy":
		return s.f.envoy
	case "prefill", "decode":
		for _, l := range s.legs() {
			if l.Leg == name || name == "decode" && l.Leg == "plain" {
				s.gone[name] = l.on
			}
		}
		return s.gone[name].process
	}
	return s.engine(name).process
}

func signal(sig syscall.Signal) func(*stage, []string) {
	return func(s *stage, args []string) {
		p := s.process(args[0])
		require.NoError(s.t, p.cmd.Process.Signal(sig))
		s.stopped[p] = sig == syscall.SIGSTOP
		if sig == syscall.SIGSTOP { // its threads stop one by one
			require.Eventually(s.t, func() bool {
				stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p.cmd.Process.Pid))
				return err != nil || strings.Contains(string(stat), ") T ")
			}, patience, time.Millisecond)
			time.Sleep(10 * time.Millisecond)
		}
		if sig == syscall.SIGKILL || sig == syscall.SIGTERM {
			began := time.Now()
			<-p.exited
			s.t.Logf("%s: %v after %v", args[0], sig, time.Since(began).Round(time.Millisecond))
		}
	}
}

func (s *stage) start(args []string) {
	switch name := args[0]; name {
	case "tandem", "tandem2":
		i := len(name) - len("tandem") // 0 or 1
		s.f.startTandem(i, filepath.Join(s.f.dir, fmt.Sprintf("tandem-%d.yaml", i)), s.f.admins[i])
	case "prefill", "decode":
		s.f.restart(s.gone[name])
	case "envoy":
		client.CloseIdleConnections()
		bin, err := binaries()
		require.NoError(s.t, err)
		// cleanups run in reverse order: this Envoy ends before the fleet's own cleanup, which would take it for dead
		s.t.Cleanup(func() { s.f.envoy = &process{exited: make(chan struct{})} })
		s.f.startEnvoy(bin, tool(s.t, "ENVOY", "envoy", ".tools/bin/envoy"), s.o)
		s.t.Cleanup(func() { require.True(s.t, s.f.envoy.running(), "Envoy has died") })
	default:
		s.f.restart(s.engine(name))
	}
}
