// Package core makes what serves requests, by whichever way they come: the passes, what learns from the ends of
// requests, and what reclaims KV that was not fetched. Package extproc serves it over gRPC to an Envoy beside it, and
// package carrier/filter to an Envoy that has loaded it; neither makes anything that the other needs.
package core

import (
	"cmp"
	"context"
	"log/slog"
	"sync"
	"time"

	"go.opentelemetry.io/otel/trace"

	"tandem/extproc/faults"
	"tandem/extproc/journey"
	"tandem/extproc/latebinding"
	"tandem/extproc/pass"
	"tandem/extproc/plan"
	"tandem/extproc/reclaim"
	"tandem/extproc/recorder"
	"tandem/extproc/telemetry"
	"tandem/extproc/usage"
	"tandem/internal/guard"
	"tandem/internal/memory"
	"tandem/kvstate"
)

// Options are the options of a Core, and of the transport that serves it. Zero durations and sizes mean the defaults
// named.
type Options struct {
	State    *kvstate.State
	Log      *slog.Logger
	Tracer   trace.Tracer  // nil: no traces
	Settings pass.Settings // initial settings; every pool of State needs a policy

	Tokenizer pass.Tokenizer // for pools whose policy has a token source; may be nil

	SplitBodyBytes int            // larger bodies are never split, because Envoy could not replay them; default 16 MiB
	MaxBodyBytes   int            // larger bodies are refused with 413; default 4 x SplitBodyBytes
	HeldBytes      int            // of all bodies in memory; more is refused with 503; default 1 GiB
	Memory         *memory.Budget // the same, shared with other users of memory; nil: one of HeldBytes
	BodyTimeout    time.Duration  // how long receiving a request's body may take; default 5 m
	TicketTTL      time.Duration  // lifetime of a leg's ticket; default 10 m
	// lifetime of KV parameters after P's answer, a third of their lease at most; default 20 s
	HandOverTTL  time.Duration
	MaxRedirects int // Envoy's max_internal_redirects; the server plans for fewer; default 8

	DecisionMetadata bool                    // also write decisions into dynamic metadata
	Operator         func(token []byte) bool // reports whether a token may ask for decisions in a header; nil: none may

	// checks an endpoint's health soon, and marks it as failed if the check fails; nil: it is marked at once
	Check  func(*kvstate.Endpoint)
	Models pass.ModelAsker // nil: engines are not asked for the models of requests

	PathPrefixes []string // that gateways in front add to paths

	Recorder *recorder.Recorder // nil: requests are not recorded

	Inside bool                 // requests come from the Envoy that has this program loaded
	Picker *plan.GatewayOptions // not nil: serve the Endpoint Picker protocol instead of the main role
}

func withDefaults(o Options) Options {
	o.SplitBodyBytes = cmp.Or(o.SplitBodyBytes, 16<<20)
	o.MaxBodyBytes = cmp.Or(o.MaxBodyBytes, 4*o.SplitBodyBytes)
	o.HeldBytes = cmp.Or(o.HeldBytes, 1<<30)
	if o.Memory == nil {
		o.Memory = memory.New(int64(o.HeldBytes))
	}
	o.BodyTimeout = cmp.Or(o.BodyTimeout, 5*time.Minute)
	o.TicketTTL = cmp.Or(o.TicketTTL, 10*time.Minute)
	o.HandOverTTL = cmp.Or(o.HandOverTTL, 20*time.Second)
	o.MaxRedirects = cmp.Or(o.MaxRedirects, 8)
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	return o
}

// Core is what serves requests. It is safe for concurrent use.
type Core struct {
	Options  // with defaults, and without the initial settings
	Passes   *pass.Shared
	Observer *telemetry.Observer
	Guard    *guard.Guard
	Faults   *faults.Faults
	Journeys *journey.Shared
	Reclaim  *reclaim.Reclaimer
	Started  time.Time
	Draining chan struct{} // closed by Drain
}

// New returns a Core over the options' state. It starts no goroutines.
func New(o Options, m *telemetry.Metrics) *Core {
	o = withDefaults(o)
	c := &Core{
		Options: o, Observer: telemetry.NewObserver(m, o.Log), Guard: guard.New(o.Log, m.Panicked), Started: time.Now(),
		Draining: make(chan struct{}),
	}
	c.Observer.Recorder = o.Recorder
	c.Faults = &faults.Faults{State: o.State, Observer: c.Observer, Log: o.Log, Check: o.Check}
	c.Reclaim = reclaim.New(reclaim.Options{
		State: o.State, Log: o.Log, Observer: c.Observer, TTL: o.HandOverTTL,
		Policy: func(pool string) reclaim.Policy {
			policy, _ := c.Passes.Policy(pool)
			return reclaim.Policy{Cleanup: policy.CleanupDecode, Dialect: policy.Dialect, Place: policy.Placement()}
		},
	})
	c.Passes = pass.New(pass.Options{
		State: o.State, Log: o.Log, Guard: c.Guard, Observer: c.Observer, Faults: c.Faults, Reclaim: c.Reclaim,
		Waiting: latebinding.Options{
			State: o.State, Guard: c.Guard, Observer: c.Observer, Started: c.Started, Draining: c.Draining,
			ShortOfMemory: c.shortOfMemory,
		},
		Models: o.Models, Tokenizer: o.Tokenizer, Operator: o.Operator, HandOverTTL: o.HandOverTTL,
		Inside: o.Inside, Gateway: o.Picker,
		Limits: plan.Limits{SplitBodyBytes: o.SplitBodyBytes, MaxRedirects: o.MaxRedirects, TicketTTL: o.TicketTTL,
			Models: m != nil && m.Usage != nil},
	})
	c.Journeys = &journey.Shared{Passes: c.Passes, Tracer: o.Tracer}
	c.connect(m)
	c.Apply(o.Settings)
	c.Options.Settings = pass.Settings{} // the initial settings must not be read later
	return c
}

// connect sets the functions by which the state reports what it learns, and usage asks about pools.
func (c *Core) connect(m *telemetry.Metrics) {
	if c.State != nil {
		c.State.OnExpired(func(e *kvstate.Endpoint, n int64) {
			c.Observer.Expired(e.Addr, n)
			c.Log.Warn("an engine freed KV that no other had fetched in time", "endpoint", e.Addr, "requests", n)
		})
		c.State.KVLoads.OnTransferFailed(func(p *kvstate.Pool, prefill, decode string) {
			c.Faults.LoadFailed(p, prefill, decode, faults.SeenCount)
		})
	}
	if m == nil || m.Usage == nil {
		return
	}
	if c.State != nil {
		m.Usage.Serves = func(pool, model string) bool {
			p := c.State.Pool(pool)
			return p != nil && p.Serves(model)
		}
	}
	m.Usage.Promised = func(pool string) usage.Promise {
		policy, _ := c.Passes.Policy(pool)
		promise := policy.Placement().Promise
		return usage.Promise{FirstToken: kvstate.Seconds(promise.TTFT), PerToken: kvstate.Seconds(promise.TPOT)}
	}
}

// Run does the periodic work until ctx ends: it removes expired reservations, tickets and hand-overs, and reclaims
// orphaned ones.
func (c *Core) Run(ctx context.Context) {
	var workers sync.WaitGroup
	defer workers.Wait()
	workers.Go(func() { c.Reclaim.Run(ctx) })
	workers.Go(func() { c.Recorder.Run(ctx) })
	workers.Go(func() { c.Observer.PruneSeries(ctx, c.State) })
	c.State.Run(ctx)
}

// Drain ends the waiting of requests that never end by themselves. Call it once, before a graceful stop.
func (c *Core) Drain() { close(c.Draining) }

// Recent returns the traces of the latest requests, newest first, at most n.
func (c *Core) Recent(n int) []telemetry.Trace { return c.Observer.Latest(n) }

// Apply replaces the settings, for requests in progress as well.
func (c *Core) Apply(s pass.Settings) { c.Passes.Apply(s) }

// Settings returns the current settings. Do not modify.
func (c *Core) Settings() pass.Settings { return c.Passes.Settings() }

// Queued returns how many requests for a pool wait at this replica.
func (c *Core) Queued(pool string) latebinding.Status { return c.Passes.Queued(pool) }

// Explain returns where a request would be placed in a pool now, if that many tokens of its prompt are not cached.
func (c *Core) Explain(pool string, promptTokens int64) (pass.Explanation, error) {
	return c.Passes.Explain(pool, promptTokens)
}

// shortOfMemory reports whether too much of the memory for bodies is in use for a request to wait with its body.
func (c *Core) shortOfMemory() bool { return c.Memory.Load() > c.Memory.Limit()/4*3 }
