package scrape

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net/http"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"tandem/internal/guard"
	"tandem/kvstate"
	"tandem/kvstate/enginehttp"
)

// The interval between scrapes of an endpoint, the timeout, and the number of concurrent scrapes. Endpoints that did
// not answer last time have slots of their own, as many, so that hanging engines never delay others. Endpoints without
// load metrics are scraped seldom.
//
// An engine at rest is asked in every second of its turns: it had nothing to do in several scrapes, and nothing is
// reserved there. Two of its scrapes are still close enough that its figures are trusted fully and that a standstill is
// detected as soon. When a request is reserved there, it is asked at the next look, so before its turn. Only load that
// did not come through Tandem, at an engine without any, is known up to 2 s later.
const (
	askEvery   = 2 * time.Second
	restAfter  = 3 // scrapes in a row without any work
	restTurns  = 2 // an engine at rest is asked in one of so many turns
	askTimeout = 800 * time.Millisecond
	silentFor  = 16 * time.Second
	askAtOnce  = 16
	maxPage    = 8 << 20 // bytes of a page that are read
)

// Time is counted in ticks, because waking up is half the cost of a scrape. Endpoints that are due in the same tick
// are scraped together, and new endpoints are spread over the ticks in groups of four: four are one group, a
// hundred are eight groups of a dozen, which is a millisecond or two of work at a time.
const (
	tick       = 250 * time.Millisecond
	byFours    = 4
	checkTicks = 4 // ticks between two checks for new or removed endpoints, if none is due
)

// paths returns the paths of engines' metrics: trtllm-serve has statistics in JSON at the first one.
func paths() [pathCount]string { return [pathCount]string{"/metrics", "/prometheus/metrics"} }

const pathCount = 2

// Scraper reads endpoints' metrics.
type Scraper struct {
	state  *kvstate.State
	owns   func(*kvstate.Pool, *kvstate.Endpoint) bool
	check  func(*kvstate.Endpoint)
	log    *slog.Logger
	client *enginehttp.Client
	pages  sync.Pool // *bytes.Buffer

	answered, failed atomic.Int64

	// one token for each running scrape; slowSlots: of endpoints that did not answer last time
	slots, slowSlots chan struct{}

	mu      sync.Mutex
	targets map[*kvstate.Endpoint]*target
	begun   time.Time
	rounds  int // so far
	spread  int // number of endpoints that were new, so far
}

// target is the schedule of an endpoint.
type target struct {
	due     int // tick
	round   int // in which the endpoint last existed
	busy    bool
	path    int   // of paths
	misses  int   // in a row
	nothing int   // scrapes in a row in which the engine had nothing to do
	phase   int   // which of the turns it is asked in when it rests
	passed  bool  // it rested in its last turn
	work    int64 // of its last scrape
	engine  string
	known   bool // another replica has scraped it
}

// New returns a scraper of those endpoints of a state for which owns is true. It calls check for those that refuse
// connections, so that the health of an endpoint without requests is known as well; check must not block.
func New(
	state *kvstate.State, owns func(*kvstate.Pool, *kvstate.Endpoint) bool, check func(*kvstate.Endpoint),
	log *slog.Logger,
) *Scraper {
	return &Scraper{
		state: state, owns: owns, check: check, log: log,
		client: enginehttp.New(askTimeout, func(t *http.Transport) {
			// inflating costs more than reading
			t.MaxIdleConnsPerHost, t.IdleConnTimeout, t.DisableCompression = 1, 30*time.Second, true
		}),
		pages:   sync.Pool{New: func() any { return new(bytes.Buffer) }},
		targets: map[*kvstate.Endpoint]*target{}, begun: time.Now(),
		slots: make(chan struct{}, askAtOnce), slowSlots: make(chan struct{}, askAtOnce),
	}
}

// Counts returns how many scrapes of this replica succeeded and failed.
func (s *Scraper) Counts() (answered, failed int64) { return s.answered.Load(), s.failed.Load() }

// Run scrapes until ctx ends. It wakes only when a scrape is due, since waking is the largest cost of an idle
// server.
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

// round starts the scrapes that are due at a tick, and returns the tick of the next call.
func (s *Scraper) round(ctx context.Context, now int, asking *sync.WaitGroup) (next int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.rounds++
	next = now + checkTicks
	for _, pool := range s.state.Pools() {
		for _, e := range pool.Endpoints() {
			if !s.owns(pool, e) {
				continue
			}
			t := s.target(e, now)
			if s.turn(e, t, now) {
				t.busy = true
				turn := s.slots
				if t.misses > 0 {
					turn = s.slowSlots
				}
				asking.Go(func() { s.wait(ctx, e, t, turn) })
			}
			if t.due > now { // else it is still being scraped
				next = min(next, t.due)
			}
		}
	}
	maps.DeleteFunc(s.targets, func(_ *kvstate.Endpoint, t *target) bool { return t.round != s.rounds })
	return next
}

// turn reports whether to ask an endpoint now, and schedules its next turn. The caller holds mu.
func (s *Scraper) turn(e *kvstate.Endpoint, t *target, now int) bool {
	if t.busy {
		return false
	}
	rests := t.nothing >= restAfter && !reserved(e)
	if t.due > now {
		woken := t.passed && !rests
		t.passed = t.passed && rests
		return woken
	}
	const every = int(askEvery / tick)
	// a late endpoint stays in its group, else one long pause would merge all groups
	t.due += ((now-t.due)/every + 1) * every
	t.passed = rests && (t.due/every+t.phase)%restTurns != 0
	return !t.passed
}

// reserved reports whether some replica has reserved a request at an endpoint.
func reserved(e *kvstate.Endpoint) bool {
	requests, _ := e.Load()
	return requests > 0 || e.RemoteLoad().Requests > 0
}

// hadNothing reports whether an engine had nothing to do when it was scraped: no request, no KV that it holds for
// others, and no work since the scrape before.
func (t *target) hadNothing(s *kvstate.Signals) bool {
	same := s.Work == t.work
	t.work = s.Work
	return same && s.Running == 0 && s.Waiting == 0 && s.KVUsage == 0
}

// target returns the endpoint's schedule. The caller holds mu.
func (s *Scraper) target(e *kvstate.Endpoint, now int) *target {
	t := s.targets[e]
	if t == nil {
		const every = int(askEvery / tick)
		group := s.spread / byFours // spread over time
		t = &target{due: now + group%every, phase: group / every, known: e.Signals() != nil}
		s.targets[e] = t
		s.spread++
	}
	t.round = s.rounds
	return t
}

// wait scrapes an endpoint when it has a slot.
func (s *Scraper) wait(ctx context.Context, e *kvstate.Endpoint, t *target, turn chan struct{}) {
	select {
	case turn <- struct{}{}:
		s.ask(ctx, e, t)
		<-turn
	case <-ctx.Done():
	}
}

// ask scrapes one endpoint, and schedules its next scrape.
func (s *Scraper) ask(ctx context.Context, e *kvstate.Endpoint, t *target) {
	var signals kvstate.Signals
	engine, err := guard.Try(ctx, "engine metrics", func() (string, error) {
		return s.scrape(ctx, e, t.path, &signals)
	})
	if err == nil {
		s.answered.Add(1)
	} else {
		s.failed.Add(1)
		if errors.Is(err, syscall.ECONNREFUSED) {
			s.check(e)
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	t.busy = false
	if err == nil {
		if t.nothing++; !t.hadNothing(&signals) {
			t.nothing = 0
		}
		if t.misses = 0; t.engine != engine {
			level := slog.LevelInfo
			if t.known && t.engine == "" { // nothing new, it is just scraped here from now on
				level = slog.LevelDebug
			}
			t.engine = engine
			s.log.Log(ctx, level, "engine detected", "endpoint", e.Addr, "engine", engine, "path", paths()[t.path])
		}
		return
	}
	s.log.Debug("no metrics", "endpoint", e.Addr, "err", err)
	t.misses++
	t.nothing = 0
	if errors.Is(err, errNoMetrics) {
		t.path = 1 - t.path
		if t.misses > pathCount {
			t.due += int(silentFor / tick)
		}
	}
}

// errNoMetrics means that a page has no engine's load: it may have another path.
var errNoMetrics = errors.New("no engine's metrics")

// scrape reads an endpoint's metrics into signals and the state.
func (s *Scraper) scrape(
	ctx context.Context, e *kvstate.Endpoint, path int, signals *kvstate.Signals,
) (engine string, err error) {
	page := s.pages.Get().(*bytes.Buffer)
	page.Reset()
	defer s.pages.Put(page)
	at := time.Now()
	status, err := s.get(ctx, e, paths()[path], page)
	if err != nil {
		return "", err
	}
	if status != http.StatusOK {
		return "", fmt.Errorf("%w at %s: status %d", errNoMetrics, paths()[path], status)
	}
	engine, read, ok := Read(page.Bytes(), e.RankName())
	if !ok {
		return "", fmt.Errorf("%w at %s", errNoMetrics, paths()[path])
	}
	read.At = at // its figures are at least that new
	s.state.Observe(e, read)
	*signals = read
	return engine, nil
}

func (s *Scraper) get(ctx context.Context, e *kvstate.Endpoint, path string,
	page *bytes.Buffer) (status int, err error) {
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
