package discovery

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"maps"
	"net/http"
	"strings"
	"sync"
	"time"

	"tandem/internal/guard"
	"tandem/kvstate"
	"tandem/kvstate/enginehttp"
)

// askAgainEvery is the interval at which an engine that did not answer is asked again.
const askAgainEvery = 10 * time.Second

// maxAsked bounds the engines that are asked at the same time: a cluster may show a thousand at once.
const maxAsked = 32

// Facts are properties that the engines of discovered pods report and the cluster's labels do not contain: vLLM's
// /version, and SGLang's /server_info (0.5.23) with version, disaggregation_mode and disaggregation_bootstrap_port.
// Each engine is asked until it has answered once: the engine in a pod does not change.
type Facts struct {
	client      *enginehttp.Client
	keyFile     string // has the key that engines want; "": none
	sameRelease bool   // engines of different releases do not accept each other's KV, so they are not paired
	log         *slog.Logger
	places      chan struct{}

	mu      sync.Mutex
	engines map[string]*fact // by pod and address
	changed chan<- struct{}  // notified when something is new
}

// fact is what one engine reports.
type fact struct {
	asked     bool // it was asked, with or without an answer
	answered  bool
	wanted    bool         // it is still among the endpoints
	release   string       // "": not reported
	role      kvstate.Role // 0: not reported
	bootstrap uint16       // 0: not reported
}

// NewFacts returns Facts without answers. keyFile is the pool's. sameRelease means that engines of different releases
// must not be paired.
func NewFacts(sameRelease bool, keyFile string, log *slog.Logger) *Facts {
	client := enginehttp.New(modelsTimeout, func(t *http.Transport) { t.DisableKeepAlives = true })
	return &Facts{
		client: client, sameRelease: sameRelease, keyFile: keyFile, log: log,
		places: make(chan struct{}, maxAsked), engines: map[string]*fact{},
	}
}

// fill adds the known facts to endpoints, and starts to ask unknown ones; learnt is notified when there is more. Role
// 0 means a pod without a role label: it gets the role that its engine reports, else otherwise, and is left out until
// the engine was asked. Engines that are not among specs are forgotten. nil Facts know nothing. out has an endpoint for
// each data-parallel rank.
func (f *Facts) fill(ctx context.Context, specs []kvstate.EndpointSpec, otherwise kvstate.Role,
	learnt chan<- struct{}) (out []kvstate.EndpointSpec) {
	nothing := &fact{asked: true}
	if f != nil {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.changed = learnt
		for _, known := range f.engines {
			known.wanted = false
		}
	}
	for _, e := range specs {
		known := nothing
		if f != nil {
			known = f.of(ctx, e)
			if f.sameRelease {
				e.Engine = known.release
			}
		}
		if e.Role == 0 && known.asked {
			e.Role = cmp.Or(known.role, otherwise)
		}
		e.Transfer.Release, e.Transfer.BootstrapPort = known.release, known.bootstrap
		if e.Role != 0 {
			out = append(out, e.ByRank()...)
		}
	}
	if f != nil {
		maps.DeleteFunc(f.engines, func(_ string, known *fact) bool { return !known.wanted })
	}
	return out
}

// of returns the facts about an engine, and starts to ask a new one.
func (f *Facts) of(ctx context.Context, e kvstate.EndpointSpec) *fact {
	key := e.Name + " " + e.Addr
	known := f.engines[key]
	if known == nil {
		known, e.KeyFile = &fact{}, f.keyFile
		f.engines[key] = known
		go f.ask(ctx, known, &kvstate.Endpoint{EndpointSpec: e})
	}
	known.wanted = true
	return known
}

// ask asks one engine until it answers, or until it is not wanted any more.
func (f *Facts) ask(ctx context.Context, known *fact, e *kvstate.Endpoint) {
	for {
		select {
		case f.places <- struct{}{}:
		case <-ctx.Done():
			f.retry(known)
			return
		}
		reported, err := guard.Try(ctx, "engine facts", func() (fact, error) { return f.question(ctx, e) })
		<-f.places
		if !f.note(ctx, known, reported, err) {
			return
		}
		f.log.Debug("an engine does not say what it is", "endpoint", e.Addr, "err", err)
		select {
		case <-time.After(askAgainEvery):
		case <-ctx.Done():
			f.retry(known)
			return
		}
	}
}

// note records an answer and reports whether to ask again.
func (f *Facts) note(ctx context.Context, known *fact, reported fact, err error) bool {
	if ctx.Err() != nil {
		f.retry(known)
		return false
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	news := !known.asked
	known.asked = true
	if err == nil {
		known.answered, known.release, known.role, known.bootstrap = true, reported.release, reported.role,
			reported.bootstrap
		news = true
	}
	if news {
		f.notify()
	}
	return err != nil && known.wanted
}

// notify makes the current watch process its endpoints again. The caller holds the lock.
func (f *Facts) notify() {
	select {
	case f.changed <- struct{}{}:
	default: // it was notified already
	}
}

// retry lets the next watch ask an engine again that had not answered when its watch ended.
func (f *Facts) retry(known *fact) {
	f.mu.Lock()
	defer f.mu.Unlock()
	maps.DeleteFunc(f.engines, func(_ string, other *fact) bool { return other == known && !known.answered })
	f.notify()
}

// question asks once. An engine that has neither path reports nothing, which is an answer.
func (f *Facts) question(ctx context.Context, e *kvstate.Endpoint) (reported fact, err error) {
	var info struct {
		Version   string `json:"version"`
		Mode      string `json:"disaggregation_mode"`
		Bootstrap uint16 `json:"disaggregation_bootstrap_port"`
	}
	for _, path := range []string{"/version", "/server_info"} {
		resp, err := f.client.Get(ctx, e, path) //nolint:bodyclose // ReadAll does
		if err != nil {
			return fact{}, err
		}
		body, err := enginehttp.ReadAll(resp, maxModels)
		switch {
		case err != nil:
			return fact{}, fmt.Errorf("asking %s for %s: %w", e.Addr, path, err)
		case resp.StatusCode >= http.StatusInternalServerError:
			return fact{}, fmt.Errorf("asking %s for %s: status %d", e.Addr, path, resp.StatusCode)
		case resp.StatusCode != http.StatusOK:
			continue
		}
		if err := json.Unmarshal(body, &info); err != nil {
			return fact{}, fmt.Errorf("asking %s for %s: %w", e.Addr, path, err)
		}
		break
	}
	// builds of one release for different CUDA versions are alike
	reported.release, _, _ = strings.Cut(info.Version, "+")
	reported.bootstrap = info.Bootstrap
	switch info.Mode {
	case "prefill":
		reported.role = kvstate.RolePrefill
	case "decode":
		reported.role = kvstate.RoleDecode
	case "null":
		reported.role = kvstate.RoleBoth
	}
	return reported, nil
}
