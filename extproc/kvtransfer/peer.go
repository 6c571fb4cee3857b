package kvtransfer

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"sync"
	"time"

	"tandem/internal/guard"
	"tandem/kvstate"
)

// ErrUnknownPeer means that the legs cannot be planned because P's engine is not known yet: D is told by which name to
// find it, and only P can say that.
var ErrUnknownPeer = errors.New("the prefill engine is not known yet")

// Peer is what was learnt of a prefill engine: by data-parallel rank, how D finds it. The zero value: nothing. Immutable.
type Peer struct{ Ranks []Rank }

// Rank is one engine core.
type Rank struct {
	EngineID string // random, and new with every start; of TensorRT-LLM its info endpoint; "": not known
	Host     string // of the side channel (NIXL push)
	Port     int    // likewise; of TensorRT-LLM the rank itself, -1 where it says none
	TP, PP   int
}

// with is the peer with one rank known anew.
func (p Peer) with(i int, r Rank) Peer {
	ranks := make([]Rank, max(len(p.Ranks), i+1))
	copy(ranks, p.Ranks)
	ranks[i] = r
	return Peer{ranks}
}

// Peers remembers what was learnt of prefill engines, by address. It is safe for concurrent use.
type Peers struct {
	PeerSource
	log *slog.Logger

	mu    sync.Mutex
	known map[string]Peer
	asked map[string]*question
}

// question is one that is under way; whoever needs its answer waits for the same one.
type question struct{ done chan struct{} }

// How long an engine may take to say who it is, how long a request waits for that, and how often engines are asked again:
// one that was started anew is another engine.
const (
	askTimeout   = 5 * time.Second
	askPatience  = time.Second
	askEvery     = 5 * time.Second
	maxPeerBytes = 1 << 20
)

// PeerSource is how the engines of a dialect become known, beside by their answers.
type PeerSource struct {
	Ask       func(ctx context.Context, e *kvstate.Endpoint) (Peer, error) // nil: nobody is asked
	Registers bool                                                         // engines announce themselves, and are gone when they stop
}

// NewPeers returns an empty memory for engines that become known like this, nil where they need not.
func (s *PeerSource) NewPeers(log *slog.Logger) *Peers {
	if s == nil {
		return nil
	}
	return &Peers{PeerSource: *s, log: log, known: map[string]Peer{}, asked: map[string]*question{}}
}

// Lookup is what is known of an endpoint. One that nobody has asked yet is asked now, and waited for, but not long.
func (p *Peers) Lookup(ctx context.Context, e *kvstate.Endpoint) (Peer, bool) {
	p.mu.Lock()
	peer, ok := p.known[e.Addr]
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
	peer, ok = p.known[e.Addr]
	return peer, ok
}

// Known is what is known of an endpoint, without asking it.
func (p *Peers) Known(addr string) Peer {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.known[addr]
}

// start asks an endpoint, unless that is under way. The lock is held. The request that asks may end before the answer is
// there, which others wait for.
func (p *Peers) start(ctx context.Context, e *kvstate.Endpoint) *question {
	if q := p.asked[e.Addr]; q != nil {
		return q
	}
	q := &question{done: make(chan struct{})}
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
		p.known[e.Addr] = peer
	}()
	return q
}

// Learn takes in what an endpoint said of itself; a zero Peer says nothing.
func (p *Peers) Learn(addr string, said Peer) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for i, r := range said.Ranks {
		if known := p.known[addr]; r != (Rank{}) && (i >= len(known.Ranks) || known.Ranks[i] != r) {
			p.known[addr] = known.with(i, r)
		}
	}
}

// Failed drops what is known of an endpoint that failed a request: it may come back as another engine.
func (p *Peers) Failed(addr string) {
	if !p.Registers {
		p.Forget(addr)
	}
}

// Forget drops what is known of an endpoint.
func (p *Peers) Forget(addr string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.known, addr)
}

// Run asks the pool's prefill endpoints again and again until ctx ends, so that requests need not, and forgets those that
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
	for addr := range p.known {
		if pool.Endpoint(addr) == nil {
			delete(p.known, addr)
		}
	}
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

// peerClient asks engines who they are. It follows no redirect: an engine has no say in whom Tandem asks.
var peerClient = &http.Client{
	Transport:     &http.Transport{IdleConnTimeout: time.Second, DisableKeepAlives: true, MaxResponseHeaderBytes: 64 << 10},
	CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
}
