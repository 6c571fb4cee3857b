package scrape

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"tandem/kvstate"
)

// How often an endpoint is asked, how long it may take, and how many are asked at a time. Who has nothing to say is asked
// seldom.
const (
	askEvery   = 2 * time.Second
	askTimeout = 800 * time.Millisecond
	silentFor  = 15 * time.Second
	askAtOnce  = 16
	lookEvery  = 50 * time.Millisecond
	maxPage    = 8 << 20 // bytes of a page that are read
)

// paths are where engines keep their metrics: trtllm-serve has statistics in JSON at the first one.
func paths() [pathCount]string { return [pathCount]string{"/metrics", "/prometheus/metrics"} }

const pathCount = 2

// Scraper asks endpoints for their metrics.
type Scraper struct {
	state  *kvstate.State
	owns   func(*kvstate.Pool, *kvstate.Endpoint) bool
	log    *slog.Logger
	client map[string]*http.Client // by scheme
	pages  sync.Pool               // *bytes.Buffer

	answered, failed atomic.Int64

	mu      sync.Mutex
	targets map[*kvstate.Endpoint]*target
	free    chan struct{} // a token for each that may be asked
}

// target is what is known of asking an endpoint.
type target struct {
	due    time.Time
	busy   bool
	path   int // of paths
	misses int // in a row
	engine string
}

// New makes a scraper of those endpoints of a state that owns says are this replica's.
func New(state *kvstate.State, owns func(*kvstate.Pool, *kvstate.Endpoint) bool, log *slog.Logger) *Scraper {
	h2c := &http.Transport{Protocols: new(http.Protocols)}
	h2c.Protocols.SetUnencryptedHTTP2(true)
	client := func(t *http.Transport) *http.Client {
		t.MaxIdleConnsPerHost, t.IdleConnTimeout, t.DisableCompression = 1, 30*time.Second, true // to inflate costs more than to read
		return &http.Client{Transport: t, Timeout: askTimeout, CheckRedirect: stay}
	}
	return &Scraper{
		state: state, owns: owns, log: log,
		client: map[string]*http.Client{
			"http": client(&http.Transport{}),
			"h2c":  client(h2c),
			// Engines' certificates are their own; the request holds no secret.
			"https": client(&http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}), //nolint:gosec // see above
		},
		pages:   sync.Pool{New: func() any { return new(bytes.Buffer) }},
		targets: map[*kvstate.Endpoint]*target{}, free: make(chan struct{}, askAtOnce),
	}
}

// Counts are how many times endpoints were asked by this replica, and told their load or did not.
func (s *Scraper) Counts() (answered, failed int64) { return s.answered.Load(), s.failed.Load() }

func stay(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }

// Run asks until ctx ends.
func (s *Scraper) Run(ctx context.Context) {
	var asking sync.WaitGroup
	defer asking.Wait()
	look := time.NewTicker(lookEvery)
	defer look.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-look.C:
			s.round(ctx, now, &asking)
		}
	}
}

// round asks who is due, as far as there is room; the others are due in the next.
func (s *Scraper) round(ctx context.Context, now time.Time, asking *sync.WaitGroup) {
	seen := make(map[*kvstate.Endpoint]bool)
	for _, pool := range s.state.Pools() {
		for _, e := range pool.Endpoints() {
			if !s.owns(pool, e) {
				continue
			}
			seen[e] = true
			t := s.claim(e, now)
			if t == nil {
				continue
			}
			asking.Go(func() {
				defer func() { <-s.free }()
				s.ask(ctx, e, t)
			})
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for e := range s.targets {
		if !seen[e] {
			delete(s.targets, e)
		}
	}
}

// claim is the endpoint's target if it is to be asked now.
func (s *Scraper) claim(e *kvstate.Endpoint, now time.Time) *target {
	s.mu.Lock()
	defer s.mu.Unlock()
	t := s.targets[e]
	if t == nil {
		t = &target{due: now.Add(rand.N(askEvery))} // not all at once
		s.targets[e] = t
	}
	if t.busy || now.Before(t.due) {
		return nil
	}
	select {
	case s.free <- struct{}{}:
	default:
		return nil
	}
	t.busy = true
	return t
}

// ask asks one endpoint, and settles when it is asked again.
func (s *Scraper) ask(ctx context.Context, e *kvstate.Endpoint, t *target) {
	engine, err := s.scrape(ctx, e, t.path)
	if err == nil {
		s.answered.Add(1)
	} else {
		s.failed.Add(1)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	t.busy, t.due = false, time.Now().Add(askEvery)
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
			t.due = t.due.Add(silentFor)
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
	scheme, client := "http", s.client[e.Scheme]
	if e.Scheme == "https" {
		scheme = "https"
	}
	if client == nil {
		client = s.client["http"]
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, scheme+"://"+e.Addr+path, nil)
	if err != nil {
		return 0, fmt.Errorf("asking %s: %w", e.Addr, err)
	}
	resp, err := client.Do(req)
	if err != nil {
		return 0, fmt.Errorf("asking %s: %w", e.Addr, err)
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
