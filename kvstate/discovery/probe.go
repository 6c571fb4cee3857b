package discovery

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net"
	"net/http"
	"sync"
	"syscall"
	"time"

	"tandem/internal/guard"
	"tandem/kvstate"
	"tandem/kvstate/enginefacts"
	"tandem/kvstate/enginehttp"
)

// How often endpoints are asked, and their timeout.
const (
	probeFailedEvery = 500 * time.Millisecond // GET /health of failed endpoints; ± a fifth
	checkBusyEvery   = 2 * time.Second        // GET /health of endpoints with requests
	askModelsEvery   = 10 * time.Second       // GET /v1/models until known ...
	knownModelsEvery = time.Minute            // ... and after
	// What an engine is, until it answers; at once if the endpoint waits for it.
	askReportEvery   = 10 * time.Second
	knownReportEvery = 5 * time.Minute // ... and after: a restart is noticed otherwise
	modelsTimeout    = time.Second
	connectTimeout   = time.Second
	maxModels        = 1 << 20 // bytes of an answer that are read

	// healthTimeout is how long an endpoint may take to answer GET /health. SGLang's answer takes a second, and longer
	// while a step runs: it is sent when the scheduler has done something (0.5.23, http_server.py, health_generate).
	healthTimeout = 5 * time.Second
)

// Prober checks endpoints. A failed endpoint recovers with its first good answer. A good one is checked while it
// has requests: a stopped engine does not fail its requests, but holds them. It is marked as failed if it refuses
// connections, reports that it is unhealthy, or does not answer in time.
type Prober struct {
	state  *kvstate.State
	log    *slog.Logger
	client *enginehttp.Client

	mu       sync.Mutex
	due      map[*kvstate.Endpoint]time.Time     // when an endpoint is asked for its models again
	asked    map[*kvstate.Endpoint]time.Time     // when it was asked last
	asking   map[*kvstate.Endpoint]chan struct{} // being asked: closed when it has answered
	reported map[*kvstate.Endpoint]time.Time     // when it is asked again what it is
	telling  map[*kvstate.Endpoint]bool          // being asked that
	refused  map[*kvstate.Endpoint]bool          // they wanted a key for their models
	checking map[*kvstate.Endpoint]bool
	next     map[*kvstate.Endpoint]time.Time // when an endpoint with requests is checked again

	checks chan *kvstate.Endpoint
}

// NewProber returns a prober of all endpoints of a state.
func NewProber(state *kvstate.State, log *slog.Logger) *Prober {
	dialer := &net.Dialer{Timeout: connectTimeout}
	return &Prober{
		state: state, log: log,
		client: enginehttp.New(0, func(t *http.Transport) {
			t.DialContext, t.DisableKeepAlives = dialer.DialContext, true
		}),
		due: map[*kvstate.Endpoint]time.Time{}, asked: map[*kvstate.Endpoint]time.Time{},
		asking:   map[*kvstate.Endpoint]chan struct{}{},
		reported: map[*kvstate.Endpoint]time.Time{}, telling: map[*kvstate.Endpoint]bool{},
		refused:  map[*kvstate.Endpoint]bool{},
		checking: map[*kvstate.Endpoint]bool{}, next: map[*kvstate.Endpoint]time.Time{},
		checks: make(chan *kvstate.Endpoint, maxChecks),
	}
}

// Run probes until ctx ends. A hanging endpoint does not delay others, and has one check at a time.
func (p *Prober) Run(ctx context.Context) {
	var probes sync.WaitGroup
	defer probes.Wait()
	for {
		pause := probeFailedEvery*4/5 + rand.N(probeFailedEvery*2/5) // replicas do not ask in step
		if !p.round(ctx, &probes) {
			// for all of them, less than the second that an endpoint which fails now may have to wait
			pause += probeFailedEvery * 4 / 5
		}
		if !p.wait(ctx, pause, &probes) {
			return
		}
	}
}

// wait starts the checks that [Prober.Check] requests, until the pause is over or ctx ends; then it returns false.
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
			p.start(ctx, p.checking, e, probes, p.checkHealth)
		}
	}
}

// maxChecks is how many checks may wait to begin; further ones are dropped.
const maxChecks = 256

// Check checks an endpoint now, and marks it as failed if it does not answer or is unhealthy. It does not wait.
func (p *Prober) Check(e *kvstate.Endpoint) {
	if e.Failed() {
		return
	}
	select {
	case p.checks <- e:
	default:
	}
}

// start starts a probe of an endpoint, unless one of its kind is in progress there.
func (p *Prober) start(
	ctx context.Context, inProgress map[*kvstate.Endpoint]bool, e *kvstate.Endpoint, probes *sync.WaitGroup,
	probe func(context.Context, *kvstate.Endpoint),
) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if inProgress[e] {
		return
	}
	inProgress[e] = true
	probes.Go(func() {
		defer func() {
			p.mu.Lock()
			defer p.mu.Unlock()
			delete(inProgress, e)
		}()
		defer guard.Recover(ctx, "probes")
		probe(ctx, e)
	})
}

// checkHealth asks an endpoint until it answers or the time is over, and marks it accordingly. vLLM answers 503 while
// its engine is dead (api_server.py); any answer below 500 comes from a live server, even if it has no /health.
func (p *Prober) checkHealth(ctx context.Context, e *kvstate.Endpoint) {
	asking, stop := context.WithTimeout(ctx, healthTimeout)
	defer stop()
	defer func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.next[e] = time.Now().Add(checkBusyEvery)
	}()
	recovers := e.Failed() // an answer to a check that began before the failure proves nothing
	for {
		status, _, err := p.client.GetAll(asking, e, "/health", maxModels)
		if errors.Is(err, syscall.ECONNREFUSED) {
			p.state.Health.Gone(e)
		}
		switch {
		case ctx.Err() != nil:
			return
		case err == nil && status < http.StatusInternalServerError:
			if recovers {
				p.welcome(ctx, e)
			}
			return
		case e.Failed(): // asked again in the next round
			return
		case err == nil || errors.Is(err, syscall.ECONNREFUSED):
			p.markFailed(e, false, status, err)
			return
		case asking.Err() != nil:
			p.markFailed(e, true, status, err)
			return
		}
		select { // a broken connection may be an accident
		case <-asking.Done():
		case <-time.After(probeFailedEvery):
		}
	}
}

// welcome marks an endpoint that is back, after its engine has said what it is now: it may have been started with other
// settings, and while that is not known no request is split with it.
func (p *Prober) welcome(ctx context.Context, e *kvstate.Endpoint) {
	if !e.Reports() {
		p.state.Health.MarkHealthy(e)
		return
	}
	asking, stop := context.WithTimeout(ctx, kvstate.ReportWait)
	info := enginefacts.Read(asking, p.client, e, nil)
	if asking.Err() != nil { // its report is incomplete: it is asked again, later
		p.mu.Lock()
		delete(p.reported, e)
		p.mu.Unlock()
	}
	stop()
	p.state.Health.MarkHealthy(e)
	if info.Answered {
		p.state.SetReport(e, info.Report, true)
	}
}

func (p *Prober) markFailed(e *kvstate.Endpoint, hung bool, status int, err error) {
	why := fmt.Sprintf("GET /health: status %d", status)
	if err != nil {
		why = "GET /health: " + err.Error()
	}
	p.state.Health.Mark(e, hung, kvstate.CauseCheck, why)
}

// round starts the probes that are due, and reports whether any endpoint has failed.
func (p *Prober) round(ctx context.Context, probes *sync.WaitGroup) (failed bool) {
	now := time.Now()
	seen := map[*kvstate.Endpoint]bool{}
	for _, pool := range p.state.Pools() {
		for _, e := range pool.Endpoints() {
			seen[e] = true
			if e.Failed() {
				failed = true
				p.start(ctx, p.checking, e, probes, p.checkHealth)
				continue
			}
			if p.checkDue(e, now) {
				p.start(ctx, p.checking, e, probes, p.checkHealth)
			}
			if p.modelsDue(e, now) {
				p.ask(ctx, e, 0, probes.Go)
			}
			if pool.Spec.Facts != 0 && p.reportDue(e, now) {
				p.start(ctx, p.telling, e, probes, p.askReport)
			}
		}
	}
	p.forget(seen)
	return failed
}

// checkDue reports whether an endpoint has requests and must be checked.
func (p *Prober) checkDue(e *kvstate.Endpoint, now time.Time) bool {
	if requests, _ := e.Load(); requests == 0 {
		return false
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	return !now.Before(p.next[e])
}

func (p *Prober) modelsDue(e *kvstate.Endpoint, now time.Time) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return now.After(p.due[e])
}

// Ask asks for the models of endpoints whose list is older than a time, and waits for the answers until ctx ends.
func (p *Prober) Ask(ctx context.Context, endpoints []*kvstate.Endpoint, older time.Duration) {
	var all []<-chan struct{}
	for _, e := range endpoints {
		if !e.Failed() {
			// others may wait for the same answer, so it does not end with this request
			all = append(all, p.ask(context.WithoutCancel(ctx), e, older, func(do func()) { go do() }))
		}
	}
	for _, answered := range all {
		select {
		case <-answered:
		case <-ctx.Done():
			return
		}
	}
}

// ask asks an endpoint for its models, once at a time. The returned channel is closed when it has answered, or if it
// was asked less than a time ago.
func (p *Prober) ask(
	ctx context.Context, e *kvstate.Endpoint, older time.Duration, run func(func()),
) <-chan struct{} {
	p.mu.Lock()
	defer p.mu.Unlock()
	if answered := p.asking[e]; answered != nil {
		return answered
	}
	answered := make(chan struct{})
	now := time.Now()
	if at, ok := p.asked[e]; ok && now.Sub(at) < older {
		close(answered)
		return answered
	}
	p.asking[e], p.asked[e] = answered, now
	run(func() {
		defer func() {
			p.mu.Lock()
			defer p.mu.Unlock()
			delete(p.asking, e)
			close(answered)
		}()
		defer guard.Recover(ctx, "probes")
		p.askModels(ctx, e)
	})
	return answered
}

func (p *Prober) reportDue(e *kvstate.Endpoint, now time.Time) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.state.AwaitsReport(e) || now.After(p.reported[e])
}

// askReport asks an engine what it is. The state gets what it says at once before the slow answer is there.
func (p *Prober) askReport(ctx context.Context, e *kvstate.Endpoint) {
	info := enginefacts.Read(ctx, p.client, e, func(i *enginefacts.Info) {
		if i.Answered {
			p.state.SetReport(e, i.Report, false)
		}
	})
	next := askReportEvery
	if info.Answered {
		next = knownReportEvery
		p.state.SetReport(e, info.Report, true)
	} else {
		p.Check(e)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.reported[e] = time.Now().Add(next)
}

// forget drops endpoints that are gone.
func (p *Prober) forget(seen map[*kvstate.Endpoint]bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, times := range []map[*kvstate.Endpoint]time.Time{p.due, p.asked, p.next, p.reported} {
		maps.DeleteFunc(times, func(e *kvstate.Endpoint, _ time.Time) bool { return !seen[e] })
	}
	maps.DeleteFunc(p.refused, func(e *kvstate.Endpoint, _ bool) bool { return !seen[e] })
}

func (p *Prober) askModels(ctx context.Context, e *kvstate.Endpoint) {
	next := askModelsEvery
	var list struct {
		Data []struct {
			ID     string `json:"id"`
			Root   string `json:"root"`
			Parent string `json:"parent"`
			Owner  string `json:"owned_by"`
			Length int64  `json:"max_model_len"`
		} `json:"data"`
	}
	ctx, stop := context.WithTimeout(ctx, modelsTimeout)
	defer stop()
	status, body, err := p.client.GetAll(ctx, e, "/v1/models", maxModels)
	if err == nil && status != http.StatusOK {
		err = fmt.Errorf("asking %s for its models: status %d", e.Addr, status)
	}
	if err == nil {
		err = json.Unmarshal(body, &list)
	}
	if err != nil {
		p.log.Debug("models not told", "endpoint", e.Addr, "err", err)
	} else {
		var models []kvstate.Model
		for _, m := range list.Data[:min(len(list.Data), maxListed)] {
			if m.ID != "" && len(m.ID)+len(m.Root)+len(m.Parent)+len(m.Owner) <= maxListed {
				models = append(models, kvstate.Model{ID: m.ID, Root: m.Root, Parent: m.Parent, Owner: m.Owner,
					MaxLength: max(m.Length, 0)})
			}
		}
		p.state.SetModels(e, models)
		next = knownModelsEvery
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.due[e] = time.Now().Add(next)
	refused := status == http.StatusUnauthorized || status == http.StatusForbidden
	if refused && !p.refused[e] {
		p.log.Warn("an engine does not list its models without the right key: set apiKeyFile of its pool",
			"endpoint", e.Addr, "status", status, "key_file", e.KeyFile)
	}
	if p.refused[e] = refused; !refused {
		delete(p.refused, e)
	}
}

// maxListed bounds the models of an endpoint, and the bytes of what it reports of one.
const maxListed = 4096
