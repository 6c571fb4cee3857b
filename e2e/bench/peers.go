package main

import (
	"context"
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"

	"tandem/e2e/process"
)

// A peer is another router in its P/D mode, over the same simulated engines. It has neither Envoy nor a ticket: its
// process is everything between client and engines, so its CPU is in the router's column.
//
//   - vllm-router (PyPI): `--vllm-pd-disaggregation --kv-connector nixl`, one hop after the other, as Tandem.
//   - sglang-router (PyPI): `--pd-disaggregation`, which sends both hops at the same time, to engines that speak
//     SGLang: both get one room, D looks P up at P's bootstrap port, and P answers with one token.
//
// A peer serves one model, so there are two processes of each: for the engines that answer at once, and for the paced
// ones.
type peer struct {
	name, binary string
	connector    string
	args         []string
}

// peersOf returns the peers whose binaries were given.
func peersOf(vllm, sglang string) (out []peer) {
	if vllm != "" {
		out = append(out, peer{"vllm-router", vllm, "nixl",
			[]string{"--vllm-pd-disaggregation", "--kv-connector", "nixl", "--log-level", "error"}})
	}
	if sglang != "" {
		out = append(out, peer{"sglang-router", sglang, "sglang",
			[]string{"launch", "--pd-disaggregation", "--log-level", "error"}})
	}
	return out
}

// startPeer starts the peer for both kinds of engines.
func (l *lab) startPeer(ctx context.Context, bin string, p peer) error {
	s := &stack{name: p.name, addrs: map[string]string{}}
	for _, model := range []string{instant, paced} {
		engines := l.pairs[model]
		if p.connector != "nixl" {
			var err error
			if engines, err = l.startPair(ctx, bin, model, p.name+"-"+model, p.connector); err != nil {
				return err
			}
		}
		ports, err := process.FreePorts(2)
		if err != nil {
			return err
		}
		prefill := []string{"--prefill", "http://" + engines.prefill}
		if p.connector != "nixl" {
			prefill = append(prefill, port(engines.bootstrap))
		}
		args := append(append([]string{}, p.args...), prefill...)
		args = append(args, "--decode", "http://"+engines.decode, "--host", "127.0.0.1", "--port", port(ports[0]),
			"--policy", "round_robin", "--prometheus-port", port(ports[1]))
		router, err := l.Start(p.name+"-"+model, nil, p.binary, args...)
		if err != nil {
			return err
		}
		if err := router.Wait(ctx, "http://"+ports[0]+"/health"); err != nil {
			return err
		}
		s.addrs[model] = ports[0]
		s.routers = append(s.routers, router)
	}
	l.stacks = append(l.stacks, s)
	return nil
}

// peerVersions returns pip's versions of the environments that the binaries are in.
func (l *lab) peerVersions(ctx context.Context, peers []peer) (out string) {
	for _, p := range peers {
		text, _ := exec.CommandContext(ctx, filepath.Join(filepath.Dir(p.binary), "python"), "-c",
			fmt.Sprintf("import importlib.metadata as m; print(m.version(%q))", p.name)).Output()
		out += ", " + p.name + " " + strings.TrimSpace(string(text))
	}
	return out
}
