// Package registrations is where engines register that have to be found by an address of their own: vLLM's P2pNcclConnector
// sends a message every 3 s, from a ZeroMQ DEALER socket to the proxy's ROUTER, which says what it is and where.
//
//	frames   identity, msgpack map
//	type "P" or "D", http_address "10.0.1.2:20001", zmq_address "10.0.1.2:21001"
//
// Nothing is ever sent back. Read from vllm/distributed/kv_transfer/kv_connector/v1/p2p/p2p_nccl_engine.py and
// examples/disaggregated/p2p_nccl_xpyd/disagg_proxy_p2p_nccl_xpyd.py of vLLM 0.22.1. Whoever reaches the socket can name
// any address, so it belongs on a network of the engines' own; what is taken in is bounded, and forgotten without beats.
package registrations

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/vmihailenco/msgpack/v5"

	"tandem/internal/zmtp"
)

// Beat is one engine's registration.
type Beat struct {
	Type string // P, D, or what the engine calls itself
	HTTP string // ip:port of its API, by which the configuration knows it
	ZMQ  netip.AddrPort
}

// Bounds of what is taken in.
const (
	maxBeatBytes = 4 << 10
	maxEngines   = 16 << 10
	goneAfter    = 10 * time.Second // three beats
	sweepEvery   = time.Second
)

// Listener is the socket and who has registered.
type Listener struct {
	came func(Beat)
	gone func(http string)
	log  *slog.Logger

	telling sync.Mutex // held while came is called

	mu   sync.Mutex
	last map[string]time.Time // by HTTP address
}

// New makes a listener. came is called for every beat, one at a time, gone once for an engine that has stopped; neither may block.
func New(came func(Beat), gone func(http string), log *slog.Logger) *Listener {
	return &Listener{came: came, gone: gone, log: log, last: map[string]time.Time{}}
}

// Run listens on ip:port until ctx ends. An error means that the address cannot be listened on.
func (l *Listener) Run(ctx context.Context, addr string) error {
	var listen net.ListenConfig
	socket, err := listen.Listen(ctx, "tcp", addr)
	if err != nil {
		return fmt.Errorf("listening for engines on %s: %w", addr, err)
	}
	var sweeping sync.WaitGroup
	defer sweeping.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	sweeping.Go(func() { l.sweepUntil(ctx) })
	server := zmtp.Server{Kind: zmtp.Router, Log: l.log, Handle: zmtp.Receive(func(frames [][]byte) { l.take(frames[len(frames)-1]) })}
	if err := server.Serve(ctx, socket); err != nil {
		return fmt.Errorf("receiving registrations: %w", err)
	}
	return nil
}

// take takes one message in. What is not understood is left out: other messages than beats may come.
func (l *Listener) take(frame []byte) {
	b, err := read(frame)
	if err != nil {
		l.log.Debug("not a registration", "err", err)
		return
	}
	l.mu.Lock()
	_, known := l.last[b.HTTP]
	full := !known && len(l.last) >= maxEngines
	if !full {
		l.last[b.HTTP] = time.Now()
	}
	l.mu.Unlock()
	switch {
	case full:
		l.log.Warn("too many engines register", "engines", maxEngines)
		return
	case !known:
		l.log.Info("engine registered", "type", b.Type, "http", b.HTTP, "zmq", b.ZMQ)
	}
	l.telling.Lock() // connections are read at the same time
	defer l.telling.Unlock()
	l.came(b)
}

var errBeat = errors.New("not a beat")

// read decodes a beat.
func read(frame []byte) (Beat, error) {
	if len(frame) > maxBeatBytes {
		return Beat{}, fmt.Errorf("%w: %d bytes", errBeat, len(frame))
	}
	var said struct {
		Type string `msgpack:"type"`
		HTTP string `msgpack:"http_address"`
		ZMQ  string `msgpack:"zmq_address"`
	}
	if err := msgpack.Unmarshal(frame, &said); err != nil {
		return Beat{}, fmt.Errorf("%w: %w", errBeat, err)
	}
	http, err := netip.ParseAddrPort(said.HTTP)
	if err != nil {
		return Beat{}, fmt.Errorf("%w: http_address: %w", errBeat, err)
	}
	zmq, err := netip.ParseAddrPort(said.ZMQ)
	if err != nil || zmq.Port() == 0 {
		return Beat{}, fmt.Errorf("%w: zmq_address %.60q is no ip:port", errBeat, said.ZMQ)
	}
	return Beat{Type: said.Type, HTTP: http.String(), ZMQ: zmq}, nil
}

func (l *Listener) sweepUntil(ctx context.Context) {
	tick := time.NewTicker(sweepEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-tick.C:
			for _, http := range l.silent(now) {
				l.log.Warn("engine has stopped registering", "http", http)
				l.gone(http)
			}
		}
	}
}

// silent are the engines without a beat for long; they are forgotten.
func (l *Listener) silent(now time.Time) (out []string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for http, last := range l.last {
		if now.Sub(last) > goneAfter {
			delete(l.last, http)
			out = append(out, http)
		}
	}
	return out
}
