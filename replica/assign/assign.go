// Package assign gives endpoints that may serve both legs their assigned roles while a server runs, and reports what
// the same rule (picker/roles) would choose for a pool with fixed roles.
//
// Every few seconds one replica decides: the living one that has run longest. It writes the words, with their reasons,
// into Redis; the others read them twice a second. When it dies, the next one goes on from the words that are there.
// While Redis does not answer, no replica decides, and each keeps the roles that it has. Without Redis there is one
// replica, and it decides.
//
// Arrows: it imports picker/roles for the rule, and kvstate for what it reads and sets.
package assign

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"maps"
	"math"
	"net/http"
	"slices"
	"sync"
	"time"

	"tandem/extproc/pass"
	"tandem/internal/guard"
	"tandem/kvstate"
	"tandem/kvstate/redisstore"
	"tandem/picker"
	"tandem/picker/roles"
)

// Pool is a pool as the rule sees it.
type Pool struct {
	Name   string
	Auto   bool // its endpoints of role both get words; else it only gets advice
	Whole  bool // it splits no request
	Policy picker.Policy
}

// PoolsOf returns the pools of the current settings.
func PoolsOf(settings func() pass.Settings) func() []Pool {
	return func() (out []Pool) {
		for name, p := range settings().Pools {
			out = append(out, Pool{
				Name: name, Auto: p.AutoRoles, Whole: p.NotSplit(math.MaxInt64) != "", Policy: p.Placement(),
			})
		}
		return out
	}
}

// Options of [New].
type Options struct {
	State *kvstate.State
	Pools func() []Pool     // as configured now
	Store *redisstore.Store // nil: this replica is the only one
	Now   func() time.Time  // default time.Now
	Log   *slog.Logger
}

// Assigner is the words of all pools.
type Assigner struct {
	o     Options
	redis redisstore.Access

	mu    sync.Mutex
	pools map[string]*advised
}

// advised is a pool's advice, and its words.
type advised struct {
	roles.Advisor
	now   roles.Advice // without words
	words map[string]roles.Word
}

const (
	look   = 500 * time.Millisecond // interval at which other replicas' words are read
	within = 300 * time.Millisecond // for one exchange with Redis
	ttl    = 24 * time.Hour         // of the words in Redis, after the last replica has ended
	// Bounds of what is read.
	maxText  = 1 << 20
	maxWords = 4096
)

// New returns the words of a server's pools. Nothing changes before [Assigner.Run].
func New(o Options) *Assigner {
	if o.Now == nil {
		o.Now = time.Now
	}
	a := &Assigner{o: o, pools: map[string]*advised{}}
	if o.Store != nil {
		a.redis = o.Store.Access()
	}
	return a
}

// Run decides, or follows who does, until ctx ends.
func (a *Assigner) Run(ctx context.Context) {
	guard.Keep(ctx, "roles", func() {
		tick := time.NewTicker(look)
		defer tick.Stop()
		var decided time.Time
		for {
			if err := a.step(ctx, &decided); err != nil && ctx.Err() == nil {
				a.o.Log.Debug("words are kept", "err", err)
			}
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
		}
	})
}

// step follows the words in Redis, and decides if it is time and this replica's turn.
func (a *Assigner) step(ctx context.Context, decided *time.Time) error {
	if a.o.Store != nil {
		if err := a.follow(ctx); err != nil {
			return err
		}
	}
	now := a.o.Now()
	if now.Sub(*decided) < kvstate.Seconds(roles.Every) {
		return nil
	}
	*decided = now
	return a.decide(ctx, now)
}

// leads reports whether this replica decides.
func (a *Assigner) leads() bool {
	if a.o.Store == nil {
		return true
	}
	living := a.redis.Living()
	return len(living) == 0 || living[0] >= a.redis.Replica
}

func (a *Assigner) key() string { return a.redis.Prefix + "words" }

// shared are the words of a pool as they are in Redis.
type shared struct {
	Pool  string                `json:"pool"`
	Words map[string]roles.Word `json:"words"`
}

// follow applies the words that are in Redis.
func (a *Assigner) follow(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	texts, err := a.redis.Client.HVals(ctx, a.key()).Result() // not HGETALL: the documented rights are without it
	if err != nil {
		return fmt.Errorf("reading words: %w", err)
	}
	for _, signed := range texts {
		var of shared
		text, ok := a.redis.Genuine(a.key(), signed)
		if !ok || len(text) > maxText || json.Unmarshal([]byte(text), &of) != nil || len(of.Words) > maxWords {
			continue
		}
		if p := a.o.State.Pool(of.Pool); p != nil && a.auto(of.Pool) {
			a.apply(p, of.Words)
		}
	}
	return nil
}

func (a *Assigner) auto(name string) bool {
	return slices.ContainsFunc(a.o.Pools(), func(p Pool) bool { return p.Name == name && p.Auto })
}

// apply sets words, and keeps their reasons.
func (a *Assigner) apply(p *kvstate.Pool, words map[string]roles.Word) {
	for addr, w := range words {
		role, err := kvstate.ParseRole(w.Word)
		if e := p.Endpoint(addr); e != nil && err == nil {
			a.o.State.SetWord(e, role)
		}
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.pool(p.Spec.Name).words = words
}

// pool returns a pool's entry. The caller holds a.mu.
func (a *Assigner) pool(name string) *advised {
	if a.pools[name] == nil {
		a.pools[name] = &advised{}
	}
	return a.pools[name]
}

// decide computes what every pool wants, and changes words if this replica leads.
func (a *Assigner) decide(ctx context.Context, now time.Time) error {
	all := a.o.Pools()
	a.mu.Lock()
	maps.DeleteFunc(a.pools, func(name string, _ *advised) bool {
		return !slices.ContainsFunc(all, func(p Pool) bool { return p.Name == name })
	})
	a.mu.Unlock()
	var view kvstate.View
	for i := range all {
		pool := a.o.State.Pool(all[i].Name)
		if pool == nil {
			continue
		}
		a.o.State.View(pool, nil, &view)
		f := roles.Of(&view, &all[i].Policy, pool.Backlog().Seconds())
		a.mu.Lock()
		at := a.pool(all[i].Name)
		at.now = at.Next(now, &f, all[i].Whole)
		a.mu.Unlock()
		if !all[i].Auto || !a.leads() {
			continue
		}
		if err := a.change(ctx, pool, &view, f.Changes(), now); err != nil {
			return err
		}
	}
	return nil
}

// change gives endpoints new words, here and in Redis.
func (a *Assigner) change(
	ctx context.Context, pool *kvstate.Pool, v *kvstate.View, changes []roles.Change, now time.Time,
) error {
	a.mu.Lock()
	words := map[string]roles.Word{}
	for i := range v.Endpoints { // those that left the pool are forgotten
		addr := v.Endpoints[i].Endpoint.Addr
		if w, known := a.pool(pool.Spec.Name).words[addr]; known {
			words[addr] = w
		}
	}
	a.mu.Unlock()
	for _, c := range changes {
		e := v.Endpoints[c.At].Endpoint
		why := c.Reason()
		words[e.Addr] = roles.Word{Word: c.Word.String(), Since: now, Why: why}
		a.o.Log.Info("endpoint has another role", "pool", pool.Spec.Name, "endpoint", e.DisplayName(),
			"role", c.Word.String(), "why", why)
	}
	if a.o.Store != nil && len(words) > 0 {
		text, err := json.Marshal(shared{pool.Spec.Name, words})
		if err != nil {
			return err
		}
		ctx, cancel := context.WithTimeout(ctx, within)
		defer cancel()
		pipe := a.redis.Client.Pipeline()
		pipe.HSet(ctx, a.key(), pool.Spec.Name, a.redis.Sign(a.key(), text))
		pipe.PExpire(ctx, a.key(), ttl)
		if _, err := pipe.Exec(ctx); err != nil { // then nothing changes here, either
			return fmt.Errorf("writing words: %w", err)
		}
	}
	a.apply(pool, words)
	return nil
}

// Advice returns what every pool wants, by name.
func (a *Assigner) Advice() map[string]roles.Advice {
	a.mu.Lock()
	defer a.mu.Unlock()
	out := make(map[string]roles.Advice, len(a.pools))
	for name, at := range a.pools {
		advice := at.now
		advice.Words = at.words // replaced as a whole
		out[name] = advice
	}
	return out
}

// ServeHTTP answers with [Assigner.Advice] as JSON.
func (a *Assigner) ServeHTTP(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	out := json.NewEncoder(w)
	out.SetIndent("", "  ")
	_ = out.Encode(a.Advice()) // the client has gone
}
