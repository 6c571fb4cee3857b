// Package process starts the programs of a measurement (engines, Envoy, Tandem, peers) and reports their resource
// usage. A child ends with the program that started it, even if that is killed: the kernel signals it
// (PR_SET_PDEATHSIG). The kernel watches the thread that started the child, so a main that starts children keeps its
// thread (runtime.LockOSThread). Linux only.
package process

import (
	"context"
	"errors"
	"fmt"
	"io"
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

	"tandem/e2e/loopback"
)

const (
	startTime = time.Minute     // in which a started program must answer
	stopTime  = 2 * time.Second // after which a program that was asked to end is killed
)

// Process is a child.
type Process struct {
	cmd   *exec.Cmd
	log   string
	ended chan struct{}
}

// Group are the children of one measurement, in the order of their start.
type Group struct {
	Dir       string // directory of their logs, NAME.log
	processes []*Process
}

// Start starts a program with additional environment variables, as NAME=VALUE.
func (g *Group) Start(name string, env []string, path string, args ...string) (*Process, error) {
	p := &Process{cmd: exec.Command(path, args...), log: filepath.Join(g.Dir, name+".log"), ended: make(chan struct{})}
	log, err := os.Create(p.log)
	if err != nil {
		return nil, fmt.Errorf("starting %s: %w", name, err)
	}
	defer log.Close()
	p.cmd.Env = append(os.Environ(), env...)
	p.cmd.Stdout, p.cmd.Stderr = log, log
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
	if err := p.cmd.Start(); err != nil {
		return nil, fmt.Errorf("starting %s: %w", name, err)
	}
	g.processes = append(g.processes, p)
	go func() { _ = p.cmd.Wait(); close(p.ended) }()
	return p, nil
}

// Stop ends all of them, in the reverse order of their start.
func (g *Group) Stop() {
	for _, p := range slices.Backward(g.processes) {
		_ = p.cmd.Process.Signal(syscall.SIGTERM)
		select {
		case <-p.ended:
		case <-time.After(stopTime):
			_ = p.cmd.Process.Kill()
			<-p.ended
		}
	}
}

// Wait waits until url answers 200. If the program has ended instead, the error contains its output.
func (p *Process) Wait(ctx context.Context, url string) error {
	ctx, cancel := context.WithTimeout(ctx, startTime)
	defer cancel()
	for {
		_, err := Get(ctx, url)
		if err == nil {
			return nil
		}
		select {
		case <-p.ended:
			return fmt.Errorf("%s ended: %.2000s", p.cmd.Path, p.output())
		case <-ctx.Done():
			return fmt.Errorf("%s does not answer: %w", url, err)
		case <-time.After(10 * time.Millisecond):
		}
	}
}

func (p *Process) output() []byte {
	text, _ := os.ReadFile(p.log)
	return text
}

// Get returns what url answers with 200; anything else is an error.
func Get(ctx context.Context, url string) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = errors.New(resp.Status)
	}
	return body, err
}

// CPU returns the CPU time that the process has used, user and system, all threads, ended ones included: its CPU-time
// clock (clock_getcpuclockid(3)), which counts nanoseconds where /proc/PID/stat counts ticks of 10 ms. It is 0 for
// nil, a process that was never started.
func (p *Process) CPU() (time.Duration, error) {
	if p == nil {
		return 0, nil
	}
	const processClock, scheduler = 0, 2 // of the clock id: all threads; user and system
	clock := int32(^p.cmd.Process.Pid<<3 | processClock | scheduler)
	var t syscall.Timespec
	if _, _, errno := syscall.Syscall(syscall.SYS_CLOCK_GETTIME, uintptr(clock), uintptr(unsafe.Pointer(&t)),
		0); errno != 0 {
		return 0, fmt.Errorf("reading the CPU clock of %s: %w: %.500s", p.cmd.Path, errno, p.output())
	}
	return time.Duration(t.Nano()), nil
}

// OwnCPU returns the CPU time that this program has used.
func OwnCPU() time.Duration {
	var u syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &u)
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// Wakeups returns how often threads of the process that still run went to sleep and woke up (voluntary context
// switches).
func (p *Process) Wakeups() (n int64) {
	tasks, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/status", p.cmd.Process.Pid))
	for _, file := range tasks {
		text, _ := os.ReadFile(file)
		_, rest, _ := strings.Cut(string(text), "\nvoluntary_ctxt_switches:")
		line, _, _ := strings.Cut(rest, "\n")
		v, _ := strconv.ParseInt(strings.TrimSpace(line), 10, 64)
		n += v
	}
	return n
}

// Peak returns the peak resident memory of the process, in bytes; 0 if it is unknown, and for nil.
func (p *Process) Peak() int64 {
	if p == nil {
		return 0
	}
	return p.memory("VmHWM:")
}

// Resident returns the resident memory of the process, in bytes; 0 for nil.
func (p *Process) Resident() int64 {
	if p == nil {
		return 0
	}
	return p.memory("VmRSS:")
}

// memory returns the value of a line of /proc/PID/status (proc_pid_status(5)), in bytes.
func (p *Process) memory(name string) int64 {
	text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.cmd.Process.Pid))
	for line := range strings.Lines(string(text)) {
		if fields := strings.Fields(line); len(fields) == 3 && fields[0] == name {
			kb, _ := strconv.ParseInt(fields[1], 10, 64)
			return kb << 10
		}
	}
	return 0
}

// FreePorts returns n free addresses on 127.0.0.1 for this process's children until it ends.
func FreePorts(n int) ([]string, error) {
	addrs, letGo, err := loopback.Take(n)
	if err != nil {
		return nil, err
	}
	go func() { // keeps the listeners that hold the ports reachable: Go closes unreachable ones
		defer letGo()
		select {}
	}()
	return addrs, nil
}
