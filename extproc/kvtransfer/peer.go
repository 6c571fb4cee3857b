package kvtransfer

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net/http"
	"slices"
	"sync"
	"time"

	"tandem/internal/guard"
	"tandem/kvstate"
)

// ErrUnknownPeer means that the legs cannot be planned because P's engine is not known yet: D's request has to name
// it, and only P knows that name.
var ErrUnknownPeer = errors.New("the prefill engine is not known yet")

// Peer is what is known about a prefill engine: for each data-parallel rank, how D finds it. The zero value: nothing.
// Immutable.
type Peer struct{ Ranks []Rank }

// Rank is one engine core.
type Rank struct {
	EngineID string // random, and new with every start; of TensorRT-LLM its info endpoint; "": unknown
	Host     string // of the side channel (NIXL push)
	Port     int    // of the side channel; of TensorRT-LLM the rank itself, -1 if the engine names none
	TP, PP   int
}

// with returns a copy of the peer with one rank replaced.
func (p Peer) with(i int, r Rank) Peer {
	ranks := make([]Rank, max(len(p.Ranks), i+1))
	copy(ranks, p.Ranks)
	ranks[i] = r
	return Peer{ranks}
}

// Peers caches what is known about prefill engines, by address. It is safe for concurrent use.
type Peers struct {
	PeerSource
	log *slog.Logger

	mu    sync.Mutex
	known map[string]learned
	asked map[string]*question
}

// learned is what is known about an endpoint. at is when each rank was learned, or the query for it began: an endpoint
// that was away since may be another engine.
type learned struct {
	Peer
	at []time.Time
}

// question is a running query; all requests that need its answer wait for the same one.
type question struct{ done chan struct{} }

// The timeout of a query to an engine, the time that a request waits for it, and the interval between queries: a
// restarted engine has another identity.
const (
	askTimeout   = 5 * time.Second
	askPatience  = time.Second
	askEvery     = 5 * time.Second
	maxPeerBytes = 1 << 20
)

// PeerSource is how Tandem learns about the engines of a dialect, besides from their answers.
type PeerSource struct {
	Ask func(ctx context.Context, e *kvstate.Endpoint) (Peer, error) // nil: no engine is asked
}

// NewPeers returns an empty cache for engines of this source, nil if the source is nil.
func (s *PeerSource) NewPeers(log *slog.Logger) *Peers {
	if s == nil {
		return nil
	}
	return &Peers{PeerSource: *s, log: log, known: map[string]learned{}, asked: map[string]*question{}}
}

// Lookup returns what is known about an endpoint. If it was never asked, Lookup asks it now and waits, but not long.
func (p *Peers) Lookup(ctx context.Context, e *kvstate.Endpoint) (Peer, bool) {
	p.mu.Lock()
	peer, ok := p.current(e)
	if ok || p.Ask == nil {
		p.mu.Unlock()
		return peer, ok
	}
	q := p.start(ctx, e)
	p.mu.Unlock()
	patience := time.NewTimer(askPatience)
	defer patience.Stop()
	select {
	case <-q.done:
	case <-patience.C:
	case <-ctx.Done():
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.current(e)
}

// current returns the ranks of an endpoint that were learned since it was last away, and zero for other ranks. false:
// none were. The lock is held.
func (p *Peers) current(e *kvstate.Endpoint) (Peer, bool) {
	l, ok := p.known[e.Addr]
	back := kvstate.Back(e)
	stale := func(at time.Time) bool { return !at.After(back) }
	if !ok || back.IsZero() || !slices.ContainsFunc(l.at, stale) {
		return l.Peer, ok
	}
	fresh, ok := Peer{make([]Rank, len(l.Ranks))}, false
	for i, r := range l.Ranks {
		if !stale(l.at[i]) {
			fresh.Ranks[i], ok = r, true
		}
	}
	return fresh, ok
}

// start asks an endpoint, unless a query is running. The lock is held. The query outlives the request that starts it,
// because others wait for it.
func (p *Peers) start(ctx context.Context, e *kvstate.Endpoint) *question {
	if q := p.asked[e.Addr]; q != nil {
		return q
	}
	q, began := &question{done: make(chan struct{})}, time.Now()
	p.asked[e.Addr] = q
	go func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), askTimeout)
		defer cancel()
		peer, err := guard.Try(ctx, "engine identity", func() (Peer, error) { return p.Ask(ctx, e) })
		p.mu.Lock()
		defer p.mu.Unlock()
		defer close(q.done)
		delete(p.asked, e.Addr)
		if err != nil {
			delete(p.known, e.Addr)
			p.log.Warn("a prefill engine does not say who it is", "endpoint", e.Addr, "err", err)
			return
		}
		p.known[e.Addr] = learned{peer, slices.Repeat([]time.Time{began}, len(peer.Ranks))}
	}()
	return q
}

// Learn stores what an endpoint's answer revealed about it; a zero Peer is ignored.
func (p *Peers) Learn(addr string, found Peer) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for i, r := range found.Ranks {
		if r == (Rank{}) {
			continue
		}
		known := p.known[addr]
		if i >= len(known.Ranks) || known.Ranks[i] != r {
			known.Peer = known.with(i, r)
			known.at = append(known.at, make([]time.Time, len(known.Ranks)-len(known.at))...)
			p.known[addr] = known
		}
		known.at[i] = time.Now()
	}
}

// Failed drops what is known about an endpoint that failed a request: it may come back as another engine.
func (p *Peers) Failed(addr string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.known, addr)
}

// Run asks the pool's prefill endpoints regularly until ctx ends, so that requests need not, and forgets those that
// have left.
func (p *Peers) Run(ctx context.Context, state *kvstate.State, pool string) {
	for {
		if now := state.Pool(pool); now != nil {
			p.round(ctx, now)
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(askEvery):
		}
	}
}

func (p *Peers) round(ctx context.Context, pool *kvstate.Pool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	maps.DeleteFunc(p.known, func(addr string, _ learned) bool { return pool.Endpoint(addr) == nil })
	for _, e := range pool.Endpoints() {
		if p.Ask != nil && e.Role&kvstate.RolePrefill != 0 && !e.Failed() {
			p.start(ctx, e)
		}
	}
}

// get fetches a small document.
func get(ctx context.Context, url string) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, fmt.Errorf("asking %s: %w", url, err)
	}
	resp, err := peerClient.Do(req)
	if err != nil {
		return nil, fmt.Errorf("asking %s: %w", url, err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxPeerBytes))
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("status %d", resp.StatusCode)
	}
	if err != nil {
		return nil, fmt.Errorf("what %s answers: %w", url, err)
	}
	return body, nil
}

// peerClient asks engines for their identity. It follows no redirect: an engine must not choose the host that Tandem
// asks.
var peerClient = &http.Client{
	Transport: &http.Transport{IdleConnTimeout: time.Second, DisableKeepAlives: true,
		MaxResponseHeaderBytes: 64 << 10},
	CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
}
