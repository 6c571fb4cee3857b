package discovery

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"sync"
	"time"

	"tandem/kvstate"
	"tandem/kvstate/enginehttp"
)

// How often endpoints are asked, and how long they may take.
const (
	probeFailedEvery = 500 * time.Millisecond // GET /health of those that are left out; give or take a fifth
	askModelsEvery   = 10 * time.Second       // GET /v1/models until known ...
	knownModelsEvery = time.Minute            // ... and after
	probeTimeout     = time.Second
	maxModels        = 1 << 20 // bytes of an answer that are read
)

// Prober asks endpoints how they are. A failed endpoint comes back with the first good answer; a good one is not failed by
// a bad answer, since only requests that fail cost anything.
type Prober struct {
	state  *kvstate.State
	log    *slog.Logger
	client *enginehttp.Client

	mu    sync.Mutex
	asked map[*kvstate.Endpoint]time.Time // for models
	busy  map[*kvstate.Endpoint]bool      // likewise, now
}

// NewProber makes a prober of all endpoints of a state.
func NewProber(state *kvstate.State, log *slog.Logger) *Prober {
	return &Prober{
		state: state, log: log,
		client: enginehttp.New(probeTimeout, func(t *http.Transport) { t.IdleConnTimeout, t.DisableKeepAlives = time.Second, true }),
		asked:  map[*kvstate.Endpoint]time.Time{}, busy: map[*kvstate.Endpoint]bool{},
	}
}

// Run probes until ctx ends. One that hangs keeps no other from beginning: an endpoint that is left out is asked at least once a
// second, and since each has a second to be answered at most three are under way.
func (p *Prober) Run(ctx context.Context) {
	var probes sync.WaitGroup
	defer probes.Wait()
	for {
		pause := probeFailedEvery*4/5 + rand.N(probeFailedEvery*2/5) // replicas do not ask in step
		if !p.round(ctx, &probes) {
			pause += probeFailedEvery * 4 / 5 // in all, less than the second that one which fails now may have to wait
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(pause):
		}
	}
}

// round starts what is due, and reports whether any endpoint is left out.
func (p *Prober) round(ctx context.Context, probes *sync.WaitGroup) (failed bool) {
	now := time.Now()
	seen := map[*kvstate.Endpoint]bool{}
	for _, pool := range p.state.Pools() {
		for _, e := range pool.Endpoints() {
			seen[e] = true
			switch {
			case e.Failed():
				failed = true
				probes.Go(func() { p.probeHealth(ctx, e) })
			case p.modelsDue(e, now) && p.claim(e):
				probes.Go(func() {
					defer p.unclaim(e)
					p.askModels(ctx, e)
				})
			}
		}
	}
	p.forget(seen)
	return failed
}

func (p *Prober) claim(e *kvstate.Endpoint) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.busy[e] {
		return false
	}
	p.busy[e] = true
	return true
}

func (p *Prober) unclaim(e *kvstate.Endpoint) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.busy, e)
}

func (p *Prober) modelsDue(e *kvstate.Endpoint, now time.Time) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return now.After(p.asked[e])
}

// forget drops endpoints that are gone.
func (p *Prober) forget(seen map[*kvstate.Endpoint]bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for e := range p.asked {
		if !seen[e] {
			delete(p.asked, e)
		}
	}
}

// probeHealth asks whether an endpoint is back. vLLM answers 503 while its engine is dead (api_server.py); any answer
// below 500 is one of a living server, also of one that knows no /health.
func (p *Prober) probeHealth(ctx context.Context, e *kvstate.Endpoint) {
	status, _, err := p.get(ctx, e, "/health", maxModels)
	if err == nil && status < http.StatusInternalServerError && p.state.MarkGood(e) {
		p.log.Info("endpoint is back", "endpoint", e.Addr)
	}
}

func (p *Prober) askModels(ctx context.Context, e *kvstate.Endpoint) {
	next := askModelsEvery
	var list struct {
		Data []struct {
			ID string `json:"id"`
		} `json:"data"`
	}
	status, body, err := p.get(ctx, e, "/v1/models", maxModels)
	if err == nil && status != http.StatusOK {
		err = fmt.Errorf("asking %s for its models: status %d", e.Addr, status)
	}
	if err == nil {
		err = json.Unmarshal(body, &list)
	}
	if err != nil {
		p.log.Debug("models not told", "endpoint", e.Addr, "err", err)
	} else {
		var ids []string
		for _, m := range list.Data {
			if m.ID != "" {
				ids = append(ids, m.ID)
			}
		}
		p.state.SetModels(e, ids)
		next = knownModelsEvery
	}
	p.mu.Lock()
	p.asked[e] = time.Now().Add(next)
	p.mu.Unlock()
}

// get fetches a path; an answer of more than limit bytes is an error.
func (p *Prober) get(ctx context.Context, e *kvstate.Endpoint, path string, limit int64) (status int, body []byte, err error) {
	resp, err := p.client.Get(ctx, e, path) //nolint:bodyclose // ReadAll closes it
	if err != nil {
		return 0, nil, err
	}
	if body, err = enginehttp.ReadAll(resp, limit); err != nil {
		return 0, nil, fmt.Errorf("asking %s: %w", e.Addr, err)
	}
	return resp.StatusCode, body, nil
}
