package scrape

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"tandem/internal/guard"
	"tandem/kvstate"
	"tandem/kvstate/enginehttp"
)

// How often an endpoint is asked, how long it may take, and how many are asked at a time; besides, as many of those that did not
// tell when they were asked last, so that no number of engines that hang keeps others from being heard. Who has nothing to say is
// asked seldom.
const (
	askEvery   = 2 * time.Second
	askTimeout = 800 * time.Millisecond
	silentFor  = 16 * time.Second
	askAtOnce  = 16
	maxPage    = 8 << 20 // bytes of a page that are read
)

// Time is counted in ticks here, since half of what it costs to ask somebody is to be woken for it. Those who are due in the
// same tick are asked together, and new endpoints are dealt out to the ticks by fours: four are one group, a hundred are eight groups of
// a dozen, which is a millisecond or two of work at a time.
const (
	tick       = 250 * time.Millisecond
	byFours    = 4
	lookSeldom = 4 // ticks between two looks for endpoints that have come or gone, where nobody is due
)

// paths are where engines keep their metrics: trtllm-serve has statistics in JSON at the first one.
func paths() [pathCount]string { return [pathCount]string{"/metrics", "/prometheus/metrics"} }

const pathCount = 2

// Scraper asks endpoints for their metrics.
type Scraper struct {
	state  *kvstate.State
	owns   func(*kvstate.Pool, *kvstate.Endpoint) bool
	log    *slog.Logger
	client *enginehttp.Client
	pages  sync.Pool // *bytes.Buffer

	answered, failed atomic.Int64

	free, aside chan struct{} // a token for each that is being asked; aside: of those that told nothing last

	mu      sync.Mutex
	targets map[*kvstate.Endpoint]*target
	begun   time.Time
	rounds  int // so far
	dealt   int // endpoints that were new, so far
}

// target is what is known of asking an endpoint.
type target struct {
	due    int // tick
	round  int // in which it was an endpoint still
	busy   bool
	path   int // of paths
	misses int // in a row
	engine string
}

// New makes a scraper of those endpoints of a state that owns says are this replica's.
func New(state *kvstate.State, owns func(*kvstate.Pool, *kvstate.Endpoint) bool, log *slog.Logger) *Scraper {
	return &Scraper{
		state: state, owns: owns, log: log,
		client: enginehttp.New(askTimeout, func(t *http.Transport) {
			t.MaxIdleConnsPerHost, t.IdleConnTimeout, t.DisableCompression = 1, 30*time.Second, true // to inflate costs more than to read
		}),
		pages:   sync.Pool{New: func() any { return new(bytes.Buffer) }},
		targets: map[*kvstate.Endpoint]*target{}, begun: time.Now(),
		free: make(chan struct{}, askAtOnce), aside: make(chan struct{}, askAtOnce),
	}
}

// Counts are how many times endpoints were asked by this replica, and told their load or did not.
func (s *Scraper) Counts() (answered, failed int64) { return s.answered.Load(), s.failed.Load() }

// Run asks until ctx ends. It wakes when somebody is due, since to wake is what an idle server costs most.
func (s *Scraper) Run(ctx context.Context) {
	var asking sync.WaitGroup
	defer asking.Wait()
	look := time.NewTimer(0)
	defer look.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-look.C:
			next := s.round(ctx, int(now.Sub(s.begun)/tick), &asking)
			look.Reset(time.Until(s.begun.Add(time.Duration(next) * tick)))
		}
	}
}

// round asks who is due at a tick, and says in which it wants to be called again.
func (s *Scraper) round(ctx context.Context, now int, asking *sync.WaitGroup) (next int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.rounds++
	next = now + lookSeldom
	for _, pool := range s.state.Pools() {
		for _, e := range pool.Endpoints() {
			if !s.owns(pool, e) {
				continue
			}
			t := s.target(e, now)
			if t.due <= now && !t.busy {
				const every = int(askEvery / tick)
				t.due += ((now-t.due)/every + 1) * every // who was late stays in its group, else one long pause would make all groups one
				t.busy = true
				turn := s.free
				if t.misses > 0 {
					turn = s.aside
				}
				asking.Go(func() { s.wait(ctx, e, t, turn) })
			}
			if t.due > now { // else it is being asked still
				next = min(next, t.due)
			}
		}
	}
	for e, t := range s.targets {
		if t.round != s.rounds {
			delete(s.targets, e)
		}
	}
	return next
}

// target is the endpoint's, called with mu held.
func (s *Scraper) target(e *kvstate.Endpoint, now int) *target {
	t := s.targets[e]
	if t == nil {
		t = &target{due: now + s.dealt/byFours%int(askEvery/tick)} // not all at once
		s.targets[e] = t
		s.dealt++
	}
	t.round = s.rounds
	return t
}

// wait asks an endpoint when it is its turn.
func (s *Scraper) wait(ctx context.Context, e *kvstate.Endpoint, t *target, turn chan struct{}) {
	select {
	case turn <- struct{}{}:
		s.ask(ctx, e, t)
		<-turn
	case <-ctx.Done():
	}
}

// ask asks one endpoint, and settles when it is asked again.
func (s *Scraper) ask(ctx context.Context, e *kvstate.Endpoint, t *target) {
	engine, err := guard.Try(ctx, "engine metrics", func() (string, error) { return s.scrape(ctx, e, t.path) })
	if err == nil {
		s.answered.Add(1)
	} else {
		s.failed.Add(1)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	t.busy = false
	if err == nil {
		if t.misses = 0; t.engine != engine {
			t.engine = engine
			s.log.Info("engine detected", "endpoint", e.Addr, "engine", engine, "path", paths()[t.path])
		}
		return
	}
	s.log.Debug("no metrics", "endpoint", e.Addr, "err", err)
	t.misses++
	if errors.Is(err, errNotHere) {
		t.path = 1 - t.path
		if t.misses > pathCount {
			t.due += int(silentFor / tick)
		}
	}
}

// errNotHere says that a page is none that an engine's load can be read from: perhaps it is elsewhere.
var errNotHere = errors.New("no engine's metrics")

// scrape reads an endpoint's metrics into the state.
func (s *Scraper) scrape(ctx context.Context, e *kvstate.Endpoint, path int) (engine string, err error) {
	page := s.pages.Get().(*bytes.Buffer)
	page.Reset()
	defer s.pages.Put(page)
	at := time.Now()
	status, err := s.get(ctx, e, paths()[path], page)
	if err != nil {
		return "", err
	}
	if status != http.StatusOK {
		return "", fmt.Errorf("%w at %s: status %d", errNotHere, paths()[path], status)
	}
	engine, signals, ok := Read(page.Bytes())
	if !ok {
		return "", fmt.Errorf("%w at %s", errNotHere, paths()[path])
	}
	signals.At = at // what it says is at least that new
	s.state.Observe(e, signals)
	return engine, nil
}

func (s *Scraper) get(ctx context.Context, e *kvstate.Endpoint, path string, page *bytes.Buffer) (status int, err error) {
	resp, err := s.client.Get(ctx, e, path)
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	if n := resp.ContentLength; n > 0 && n < maxPage {
		page.Grow(int(n) + bytes.MinRead)
	}
	if _, err = page.ReadFrom(io.LimitReader(resp.Body, maxPage)); err != nil {
		return 0, fmt.Errorf("reading what %s answered: %w", e.Addr, err)
	}
	return resp.StatusCode, nil
}
