//go:build cgo

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"runtime"
	"strings"
	"sync"

	"tandem/carrier/filter"
	"tandem/internal/version"
	"tandem/replica"
)

// builtAs is set by the linker, as that of cmd/tandem.
var builtAs string

// replicas are those that run, by their configuration files. Envoy makes a configuration of the filter for each
// listener that has it, and again when a listener changes; they share the replica.
var replicas = struct {
	sync.Mutex
	running map[string]*running
}{running: map[string]*running{}}

// running is a replica, with as many users as there are configurations of the filter.
type running struct {
	replica  *replica.Inside
	requests *filter.Shared
	stop     context.CancelFunc
	users    int
}

// configured is one configuration of the filter.
type configured struct {
	file     string
	requests *filter.Shared
	route    *filter.Route // nil: routes are Tandem's own
	calls    *calls
}

// settings are what the bootstrap says of the filter: the configuration's file, and the lowest level that is logged.
type settings struct{ File, Log string }

// open returns a configuration of the filter. The first of a file starts its replica.
func open(text []byte) (*configured, error) {
	var set settings
	if err := json.Unmarshal(text, &set); err != nil || set.File == "" {
		return nil, fmt.Errorf("filter_config %q is not {file: /path/to/tandem.yaml}", text)
	}
	replicas.Lock()
	defer replicas.Unlock()
	r := replicas.running[set.File]
	if r == nil {
		var err error
		if r, err = start(&set); err != nil {
			return nil, err
		}
		replicas.running[set.File] = r
	}
	r.users++
	return &configured{file: set.File, requests: r.requests, calls: newCalls()}, nil
}

// moreProcessors gives Go as many processors more as the machine has: so many workers has Envoy by default. A worker
// keeps the one with which it called Go until the monitor thread, which naps (hooks.c), takes it away: goroutines must
// not wait for that. GOMAXPROCS still rules.
var moreProcessors = sync.OnceFunc(func() {
	if os.Getenv("GOMAXPROCS") == "" {
		runtime.GOMAXPROCS(runtime.GOMAXPROCS(0) + runtime.NumCPU())
	}
})

// tuneGC lasts as long as Envoy does: whatever replica comes first, all share the heap.
var tuneGC = sync.OnceFunc(func() { go replica.TuneGC(context.Background()) })

func start(set *settings) (*running, error) {
	tuneGC()
	moreProcessors()
	level := slog.LevelInfo
	if set.Log != "" {
		if err := level.UnmarshalText([]byte(set.Log)); err != nil {
			return nil, fmt.Errorf("log: %w", err)
		}
	}
	log := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: level}))
	inside, err := replica.StartInside(set.File, replica.Settings{
		Release: version.Text(builtAs), HotRestart: restartsHot(os.Args),
	}, log)
	if err != nil {
		return nil, err
	}
	requests := filter.New(inside.Core)
	ctx, stop := context.WithCancel(context.Background())
	go requests.Run(ctx)
	return &running{inside, requests, stop, 0}, nil
}

// restartsHot reports whether Envoy's command line has the number of a hot restart: there is a process before this one.
func restartsHot(args []string) bool {
	for i, a := range args {
		name, epoch, found := strings.Cut(a, "=")
		if !found && i+1 < len(args) {
			epoch = args[i+1]
		}
		if name == "--restart-epoch" && epoch != "0" {
			return true
		}
	}
	return false
}

// close ends the use of a replica, which stops with its last one.
func (c *configured) close() {
	replicas.Lock()
	defer replicas.Unlock()
	r := replicas.running[c.file]
	if r.users--; r.users == 0 {
		delete(replicas.running, c.file)
		r.stop()
		r.replica.Stop()
	}
}

// complain says on stderr why a configuration is refused: Envoy says only that it is.
func complain(err error) { fmt.Fprintln(os.Stderr, "tandem:", err) }
