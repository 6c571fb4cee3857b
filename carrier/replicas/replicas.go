// Package replicas keeps the replicas of an Envoy that has loaded Tandem: one for each name or configuration file that
// configurations of the filter name, which share it. It knows no C; package carrier is the library that Envoy loads.
//
// A filter whose routes are Tandem's own (the printed bootstrap) is refused if its configuration is not valid: Envoy
// keeps the listener that it has. On another's route, such as Envoy Gateway's, that would cost all routes of the
// listener, so there the requests of the route are refused, with the reason, until the configuration is valid.
package replicas

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"tandem/carrier/filter"
	"tandem/extproc/openai"
	configv1 "tandem/protos/config/v1"
	"tandem/replica"
	"tandem/replica/config"
)

// All are the replicas of a process. It is safe for concurrent use.
type All struct {
	set      replica.Settings
	operator Operator
	invalid  error // of the operator's file
	admin    *admin

	mu      sync.Mutex
	running map[string]*running // by their key
	opened  int                 // filters' configurations so far
	open    map[int]*Configured // of others' routes
}

// New returns the replicas of a process: none.
func New(set replica.Settings, operatorFile string) *All {
	a := &All{set: set, running: map[string]*running{}, open: map[int]*Configured{}}
	a.operator, a.invalid = ReadOperator(operatorFile)
	a.admin = &admin{all: a, log: logTo(slog.LevelInfo)}
	return a
}

// running is a replica, with as many users as there are configurations of the filter.
type running struct {
	key      string
	file     string // "": the configuration stands in a policy
	shared   bool   // it is at the operator's port of the process
	text     atomic.Pointer[[]byte]
	replica  *replica.Inside
	requests *filter.Shared
	stop     context.CancelFunc
	users    int
}

// Configured is one configuration of the filter: Envoy makes one for each listener that has it, and again when a
// listener changes.
type Configured struct {
	all   *All
	id    int
	set   config.Module
	route *filter.Route // nil: routes are Tandem's own

	uses     *running // nil: it has none. Guarded by all.mu
	requests atomic.Pointer[filter.Shared]
	// why requests are refused or, if they are served, why a change of the configuration has no effect; nil: it is in
	// force
	refused atomic.Pointer[string]
	stop    chan struct{} // closed by Close
}

// NewFilter returns the filter of a request.
func (c *Configured) NewFilter(e filter.Envoy) *filter.Filter {
	return c.requests.Load().NewFilter(e, c.route)
}

// Open returns a configuration of the filter. The first of a name starts its replica. An error is only for filters
// whose routes are Tandem's own.
func (a *All) Open(text []byte) (*Configured, error) {
	set, err := config.ReadModule(text)
	c := &Configured{all: a, set: set, route: routeOf(&set), stop: make(chan struct{})}
	if err == nil {
		err = c.start()
	}
	if err != nil && c.route == nil {
		return nil, err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.opened++; c.route != nil {
		c.id = a.opened
		a.open[c.id] = c
		a.admin.serve()
	}
	if err != nil {
		c.refuse(err)
	}
	return c, nil
}

// refuse has requests refused, unless the previous configuration stays in force. A file may be mended while Envoy runs.
func (c *Configured) refuse(err error) {
	why := err.Error()
	c.refused.Store(&why)
	log := logTo(slog.LevelInfo)
	if c.requests.Load() == nil {
		log.Error("requests of a route are refused: its configuration is not valid",
			"replica", keyOf(&c.set), "err", why)
		c.requests.Store(filter.Refused(openai.Unavailable("configuration_not_valid",
			"the configuration of this route is not valid: "+why, 0)))
	} else {
		log.Error("a policy is not valid, and the configuration before stays in force",
			"replica", keyOf(&c.set), "err", why)
	}
	if c.set.File != "" {
		go c.retry()
	}
}

// retryEvery is how often a file that was not valid is read again.
const retryEvery = 2 * time.Second

func (c *Configured) retry() {
	tick := time.NewTicker(retryEvery)
	defer tick.Stop()
	for {
		select {
		case <-c.stop:
			return
		case <-tick.C:
		}
		if c.start() == nil {
			c.refused.Store(nil)
			return
		}
	}
}

// start has the configuration use its replica, which it starts if there is none.
func (c *Configured) start() error {
	a := c.all
	if c.route != nil {
		if a.invalid != nil {
			return a.invalid
		}
		if c.set.File != "" {
			if err := a.operator.mayRead(c.set.File); err != nil {
				return err
			}
		}
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	select {
	case <-c.stop:
		return errors.New("closed")
	default:
	}
	r, err := a.replicaOf(c)
	if r != nil {
		r.users++
		c.uses = r
		c.requests.Store(r.requests)
	}
	return err
}

// replicaOf returns the running replica of a configuration, after it has put the configuration in force there, or a
// new one. With an error it is the one that runs without it; nil: none does.
func (a *All) replicaOf(c *Configured) (*running, error) {
	key := keyOf(&c.set)
	old := a.running[key]
	if old != nil && old.file != c.set.File {
		return nil, fmt.Errorf("name: %s is the name of another configuration in this Envoy, which is not of %s: take "+
			"another name, or replace the Envoy", key, cmp.Or(c.set.File, "a policy"))
	}
	if old != nil && (c.set.Tandem == nil || string(*old.text.Load()) == string(c.set.Tandem)) {
		return old, nil
	}
	if old == nil {
		return a.startOne(c, key)
	}
	next, _, err := config.ParsePolicy(c.set.Tandem, a.operator.Engines)
	if err != nil {
		return old, err
	}
	if old.replica.Takes(next) {
		before := old.text.Swap((*[]byte)(&c.set.Tandem))
		if err := old.replica.Reload(); err != nil {
			old.text.Store(before)
			return old, err
		}
		return old, nil
	}
	fresh, err := a.startOne(c, key) // the previous one ends with its last request
	if err != nil {
		return old, err
	}
	return fresh, nil
}

func (a *All) startOne(c *Configured, key string) (*running, error) {
	tuneGC()
	moreProcessors()
	level := slog.LevelInfo
	if c.set.Log != "" {
		if err := level.UnmarshalText([]byte(c.set.Log)); err != nil {
			return nil, fmt.Errorf("log: %w", err)
		}
	}
	r := &running{key: key, file: c.set.File, shared: c.route != nil}
	r.text.Store((*[]byte)(&c.set.Tandem))
	set, log := a.set, logTo(level)
	from := replica.FileSource(c.set.File)
	switch {
	case c.set.Tandem != nil:
		from = replica.Source{Name: key, Load: func() (*configv1.Config, []string, error) {
			return config.ParsePolicy(*r.text.Load(), a.operator.Engines)
		}}
		set.Engines = a.allows(log)
	case r.shared:
		from.Load = func() (*configv1.Config, []string, error) { return config.LoadRouted(c.set.File) }
	}
	if set.NoAdmin = r.shared; r.shared {
		log = log.With("replica", key)
	}
	var err error
	if r.replica, err = replica.StartInside(from, set, log); err != nil {
		return nil, err
	}
	r.requests = filter.New(r.replica.Core)
	var ctx context.Context
	ctx, r.stop = context.WithCancel(context.Background())
	go r.requests.Run(ctx)
	a.running[key] = r
	return r, nil
}

// Close ends the use of a replica, which stops with its last one.
func (c *Configured) Close() {
	a := c.all
	a.mu.Lock()
	defer a.mu.Unlock()
	close(c.stop)
	delete(a.open, c.id)
	r := c.uses
	if r == nil {
		return
	}
	if r.users--; r.users == 0 {
		if a.running[r.key] == r {
			delete(a.running, r.key)
		}
		r.stop()
		r.replica.Stop()
	}
}

// moreProcessors gives Go one more processor for each of the machine's, because Envoy has that many workers by default.
// A worker keeps the one with which it called Go until the monitor thread, which naps (hooks.c), takes it away:
// goroutines must not wait for that. GOMAXPROCS still rules.
var moreProcessors = sync.OnceFunc(func() {
	if os.Getenv("GOMAXPROCS") == "" {
		runtime.GOMAXPROCS(runtime.GOMAXPROCS(0) + runtime.NumCPU())
	}
})

// tuneGC is done once for the process: all replicas share the heap.
var tuneGC = sync.OnceFunc(func() { go replica.TuneGC(context.Background()) })

// logTo returns a log to Envoy's stderr.
func logTo(level slog.Level) *slog.Logger {
	return slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: level}))
}
