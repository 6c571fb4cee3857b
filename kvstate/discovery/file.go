package discovery

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"strings"
	"time"

	"sigs.k8s.io/yaml"

	"tandem/internal/periodic"
	"tandem/kvstate"
)

// fileCheckEvery is the interval at which the file is read. A ConfigMap's file is a symbolic link that is replaced,
// which file system watches often miss; reading a small file is cheap and misses nothing.
const fileCheckEvery = time.Second

// maxEndpointsFile bounds the size of the file, in bytes: some 40,000 endpoints.
const maxEndpointsFile = 4 << 20

// File is a pool whose endpoints are listed in a file, which is written by the program that starts the engines:
//
//	endpoints:
//	- {address: 10.0.1.1:8000, role: prefill, group: a}
//	- {address: 10.0.2.1:8000, role: decode, group: a, zone: eu-1a, loras: [sql], labels: [tier=gold]}
//	- {address: 10.0.2.2:8000, role: decode, group: a, dataParallelRanks: 8}
//
// Addresses are ip:port, [ip]:port or name:port; names are resolved regularly, as configured ones are. A file that
// cannot be read changes nothing.
type File struct {
	Static
	path     string
	scheme   string
	maxRanks int
	seen     []byte
	failing  bool
}

// NewFile returns the source of one pool, whose endpoints may have maxRanks ranks. It writes nothing until Resolve or
// Run.
func NewFile(state *kvstate.State, spec kvstate.PoolSpec, path, scheme string, maxRanks int, log *slog.Logger) *File {
	return &File{Static: *NewStatic(state, spec, nil, log), path: path, scheme: scheme, maxRanks: maxRanks}
}

// Resolve reads the file and resolves its names, once.
func (f *File) Resolve(ctx context.Context) {
	f.read()
	f.Static.Resolve(ctx)
}

// Run watches the file, and its names, until ctx ends.
func (f *File) Run(ctx context.Context) {
	resolved := time.Now()
	periodic.Run(ctx, fileCheckEvery, func(time.Time) {
		if f.read() || f.hasNames() && time.Since(resolved) >= resolveEvery {
			f.Static.Resolve(ctx)
			resolved = time.Now()
		}
	})
}

// read reads the file and reports whether it changed. An error is logged once.
func (f *File) read() bool {
	text, err := readAtMost(f.path, maxEndpointsFile)
	if err == nil && bytes.Equal(text, f.seen) {
		return false
	}
	var endpoints []kvstate.EndpointSpec
	if err == nil {
		endpoints, err = ParseEndpoints(text, f.scheme, f.maxRanks)
	}
	if err != nil {
		if !f.failing {
			f.log.Error("endpoints file not taken, going on with what is known", "pool", f.spec.Name, "file", f.path,
				"err", err)
		}
		f.failing = true
		return false
	}
	f.failing, f.seen, f.configured = false, text, endpoints
	return true
}

func readAtMost(path string, limit int64) ([]byte, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	text, err := io.ReadAll(io.LimitReader(file, limit+1))
	if err == nil && int64(len(text)) > limit {
		err = fmt.Errorf("more than %d bytes", limit)
	}
	return text, err
}

// ParseEndpoints parses an endpoints file strictly: an unknown member is an error. It requires at least one
// endpoint, because a file that is being rewritten may be empty for a moment. maxRanks is the largest number of
// data-parallel ranks behind an address; 0: the pool cannot name a rank.
func ParseEndpoints(text []byte, scheme string, maxRanks int) ([]kvstate.EndpointSpec, error) {
	var file struct {
		Endpoints []struct {
			Address string   `json:"address"`
			Role    string   `json:"role"`
			Group   string   `json:"group"`
			Zone    string   `json:"zone"`
			Node    string   `json:"node"`
			LoRAs   []string `json:"loras"`
			Labels  []string `json:"labels"`
			Ranks   int      `json:"dataParallelRanks"`
			KeyFile string   `json:"apiKeyFile"`
		} `json:"endpoints"`
	}
	if err := yaml.UnmarshalStrict(text, &file); err != nil {
		return nil, err
	}
	if len(file.Endpoints) == 0 {
		return nil, errors.New("it names no endpoints")
	}
	var out []kvstate.EndpointSpec
	for i, e := range file.Endpoints {
		if host, port, err := net.SplitHostPort(e.Address); err != nil || host == "" || port == "" {
			return nil, fmt.Errorf("endpoints[%d].address: %.100q is not ip:port, [ip]:port or name:port", i, e.Address)
		}
		role := kvstate.RoleBoth
		if e.Role != "" {
			var err error
			if role, err = kvstate.ParseRole(e.Role); err != nil {
				return nil, fmt.Errorf("endpoints[%d].role: %w", i, err)
			}
		}
		if e.Ranks < 0 || e.Ranks > maxRanks {
			return nil, fmt.Errorf("endpoints[%d].dataParallelRanks: %d is not between 0 and %d, the most that this "+
				"pool takes", i, e.Ranks, maxRanks)
		}
		out = append(out, kvstate.EndpointSpec{
			Name: e.Address, Scheme: scheme, Role: role, Group: e.Group, Zone: e.Zone, Node: e.Node,
			LoRAs: strings.Join(e.LoRAs, ","), Labels: strings.Join(e.Labels, ","), Ranks: e.Ranks,
			Access: kvstate.Access{KeyFile: e.KeyFile},
		})
	}
	return out, nil
}
