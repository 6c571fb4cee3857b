package discovery

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"sync"
	"syscall"
	"time"

	"tandem/internal/guard"
	"tandem/kvstate"
	"tandem/kvstate/enginehttp"
)

// How often endpoints are asked, and their timeout.
const (
	probeFailedEvery = 500 * time.Millisecond // GET /health of failed endpoints; ± a fifth
	askModelsEvery   = 10 * time.Second       // GET /v1/models until known ...
	knownModelsEvery = time.Minute            // ... and after
	probeTimeout     = time.Second
	checkBusyEvery   = 2 * time.Second // GET /health of endpoints with requests
	maxMissed        = 3               // consecutive checks that an endpoint may leave unanswered
	maxModels        = 1 << 20         // bytes of an answer that are read
)

// Prober checks endpoints. A failed endpoint recovers with its first good answer. A good one is checked while it
// has requests: a stopped engine does not fail its requests, but holds them. It is marked as failed if it refuses,
// reports that it is unhealthy, or leaves several checks unanswered, since an engine may stall for a second.
type Prober struct {
	state  *kvstate.State
	log    *slog.Logger
	client *enginehttp.Client

	mu     sync.Mutex
	asked  map[*kvstate.Endpoint]time.Time // for models
	busy   map[*kvstate.Endpoint]bool      // being asked for models
	check  map[*kvstate.Endpoint]bool      // being checked
	health map[*kvstate.Endpoint]time.Time // when an endpoint with requests is checked again

	checks chan *kvstate.Endpoint
}

// NewProber returns a prober of all endpoints of a state.
func NewProber(state *kvstate.State, log *slog.Logger) *Prober {
	return &Prober{
		state: state, log: log,
		client: enginehttp.New(probeTimeout, func(t *http.Transport) { t.IdleConnTimeout, t.DisableKeepAlives = time.Second, true }),
		asked:  map[*kvstate.Endpoint]time.Time{}, busy: map[*kvstate.Endpoint]bool{},
		check: map[*kvstate.Endpoint]bool{}, health: map[*kvstate.Endpoint]time.Time{}, checks: make(chan *kvstate.Endpoint, maxChecks),
	}
}

// Run probes until ctx ends. A hanging endpoint does not delay others: a failed endpoint is asked at least once a
// second, and each probe has a timeout of a second, so at most three are in progress.
func (p *Prober) Run(ctx context.Context) {
	var probes sync.WaitGroup
	defer probes.Wait()
	for {
		pause := probeFailedEvery*4/5 + rand.N(probeFailedEvery*2/5) // replicas do not ask in step
		if !p.round(ctx, &probes) {
			// in all, less than the second that an endpoint failing now may have to wait
			pause += probeFailedEvery * 4 / 5
		}
		if !p.wait(ctx, pause, &probes) {
			return
		}
	}
}

// wait starts requested checks until a pause is over; false when ctx has ended.
func (p *Prober) wait(ctx context.Context, pause time.Duration, probes *sync.WaitGroup) bool {
	over := time.NewTimer(pause)
	defer over.Stop()
	for {
		select {
		case <-ctx.Done():
			return false
		case <-over.C:
			return true
		case e := <-p.checks:
			probes.Go(func() {
				defer guard.Recover(ctx, "probes")
				p.checkHealth(ctx, e)
			})
		}
	}
}

// maxChecks is how many checks may wait to begin; further ones are dropped.
const maxChecks = 256

// Check checks an endpoint now, and marks it as failed if it does not answer or is unhealthy. It does not wait.
func (p *Prober) Check(e *kvstate.Endpoint) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.check[e] || e.Failed() {
		return
	}
	select {
	case p.checks <- e:
		p.check[e] = true
	default:
	}
}

func (p *Prober) checkHealth(ctx context.Context, e *kvstate.Endpoint) {
	status, _, err := p.get(ctx, e, "/health")
	p.mu.Lock()
	delete(p.check, e)
	p.mu.Unlock()
	if (err != nil || status >= http.StatusInternalServerError) && ctx.Err() == nil && p.state.MarkUnhealthy(e) {
		p.log.Debug("health check failed", "endpoint", e.Addr, "status", status, "err", err)
	}
}

// round starts the probes that are due, and reports whether any endpoint has failed.
func (p *Prober) round(ctx context.Context, probes *sync.WaitGroup) (failed bool) {
	now := time.Now()
	seen := map[*kvstate.Endpoint]bool{}
	for _, pool := range p.state.Pools() {
		for _, e := range pool.Endpoints() {
			seen[e] = true
			switch {
			case e.Failed():
				failed = true
				probes.Go(func() {
					defer guard.Recover(ctx, "probes")
					p.probeHealth(ctx, e)
				})
			case p.healthDue(e, now):
				probes.Go(func() {
					defer guard.Recover(ctx, "probes")
					p.checkBusy(ctx, e)
				})
			}
			switch {
			case e.Failed():
			case p.modelsDue(e, now) && p.claim(e):
				probes.Go(func() {
					defer p.unclaim(e)
					defer guard.Recover(ctx, "probes")
					p.askModels(ctx, e)
				})
			}
		}
	}
	p.forget(seen)
	return failed
}

// healthDue reports whether an endpoint has requests and must be checked, and schedules the next check.
func (p *Prober) healthDue(e *kvstate.Endpoint, now time.Time) bool {
	if requests, _ := e.Load(); requests == 0 {
		return false
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if now.Before(p.health[e]) {
		return false
	}
	p.health[e] = now.Add(checkBusyEvery + maxMissed*probeTimeout) // earlier if the endpoint answers
	return true
}

// checkBusy checks an endpoint with requests.
func (p *Prober) checkBusy(ctx context.Context, e *kvstate.Endpoint) {
	for missed := 1; !e.Failed() && ctx.Err() == nil; missed++ {
		status, _, err := p.get(ctx, e, "/health")
		switch {
		case ctx.Err() != nil:
		case err == nil && status < http.StatusInternalServerError:
			p.mu.Lock()
			p.health[e] = time.Now().Add(checkBusyEvery)
			p.mu.Unlock()
			return
		case err == nil || errors.Is(err, syscall.ECONNREFUSED):
			p.state.MarkUnhealthy(e)
		case missed == maxMissed:
			p.state.MarkUnresponsive(e)
		}
	}
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
	for e := range p.health {
		if !seen[e] {
			delete(p.health, e)
		}
	}
}

// probeHealth checks whether an endpoint has recovered. vLLM answers 503 while its engine is dead (api_server.py);
// any answer below 500 comes from a live server, even if it has no /health.
func (p *Prober) probeHealth(ctx context.Context, e *kvstate.Endpoint) {
	status, _, err := p.get(ctx, e, "/health")
	if err == nil && status < http.StatusInternalServerError {
		p.state.MarkHealthy(e)
	}
}

func (p *Prober) askModels(ctx context.Context, e *kvstate.Endpoint) {
	next := askModelsEvery
	var list struct {
		Data []struct {
			ID string `json:"id"`
		} `json:"data"`
	}
	status, body, err := p.get(ctx, e, "/v1/models")
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

// get fetches a path; an answer of more than maxModels bytes is an error.
func (p *Prober) get(ctx context.Context, e *kvstate.Endpoint, path string) (status int, body []byte, err error) {
	resp, err := p.client.Get(ctx, e, path) //nolint:bodyclose // ReadAll closes it
	if err != nil {
		return 0, nil, err
	}
	if body, err = enginehttp.ReadAll(resp, maxModels); err != nil {
		return 0, nil, fmt.Errorf("asking %s: %w", e.Addr, err)
	}
	return resp.StatusCode, body, nil
}
