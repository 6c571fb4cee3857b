// Package registrations receives the registrations of engines that must be found by an address of their own: vLLM's
// P2pNcclConnector sends a message every 3 s, from a ZeroMQ DEALER socket to the proxy's ROUTER, with its role and
// addresses.
//
//	frames   identity, msgpack map
//	type "P" or "D", http_address "10.0.1.2:20001", zmq_address "10.0.1.2:21001"
//
// Nothing is sent back. Read from vllm/distributed/kv_transfer/kv_connector/v1/p2p/p2p_nccl_engine.py and
// examples/disaggregated/p2p_nccl_xpyd/disagg_proxy_p2p_nccl_xpyd.py of vLLM 0.22.1. Whoever reaches the socket can
// register any address, so it belongs on a network of the engines' own. Registrations are bounded, and expire if
// they are not repeated.
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

	"tandem/internal/periodic"
	"tandem/internal/zmtp"
)

// Registration is one engine's message.
type Registration struct {
	Type string // P, D, or another name of the engine's
	HTTP string // ip:port of its API, which the configuration names
	ZMQ  netip.AddrPort
}

// Bounds of what is stored.
const (
	maxBytes    = 4 << 10
	maxEngines  = 16 << 10
	expireAfter = 10 * time.Second // three messages
	sweepEvery  = time.Second
)

// Listener is the socket and the registered engines.
type Listener struct {
	registered func(Registration)
	expired    func(http string)
	log        *slog.Logger

	calling sync.Mutex // held while registered is called

	mu   sync.Mutex
	last map[string]time.Time // by HTTP address
}

// New returns a listener. It calls registered for every message, one at a time, and expired once for an engine
// whose messages have stopped; neither may block.
func New(onRegistered func(Registration), onExpired func(http string), log *slog.Logger) *Listener {
	return &Listener{registered: onRegistered, expired: onExpired, log: log, last: map[string]time.Time{}}
}

// Run receives messages at a port until ctx ends, and closes it.
func (l *Listener) Run(ctx context.Context, socket net.Listener) error {
	var sweeping sync.WaitGroup
	defer sweeping.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	sweeping.Go(func() { l.sweepUntil(ctx) })
	server := zmtp.Server{Kind: zmtp.Router, Log: l.log,
		Handle: zmtp.Receive(func(frames [][]byte) { l.take(frames[len(frames)-1]) })}
	if err := server.Serve(ctx, socket); err != nil {
		return fmt.Errorf("receiving registrations: %w", err)
	}
	return nil
}

// take handles one message. Unknown messages are ignored.
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
	l.calling.Lock() // connections are read concurrently
	defer l.calling.Unlock()
	l.registered(b)
}

var errMessage = errors.New("not a beat")

// read decodes a registration.
func read(frame []byte) (Registration, error) {
	if len(frame) > maxBytes {
		return Registration{}, fmt.Errorf("%w: %d bytes", errMessage, len(frame))
	}
	var fields struct {
		Type string `msgpack:"type"`
		HTTP string `msgpack:"http_address"`
		ZMQ  string `msgpack:"zmq_address"`
	}
	if err := msgpack.Unmarshal(frame, &fields); err != nil {
		return Registration{}, fmt.Errorf("%w: %w", errMessage, err)
	}
	http, err := netip.ParseAddrPort(fields.HTTP)
	if err != nil {
		return Registration{}, fmt.Errorf("%w: http_address: %w", errMessage, err)
	}
	zmq, err := netip.ParseAddrPort(fields.ZMQ)
	if err != nil || zmq.Port() == 0 {
		return Registration{}, fmt.Errorf("%w: zmq_address %.60q is no ip:port", errMessage, fields.ZMQ)
	}
	return Registration{Type: fields.Type, HTTP: http.String(), ZMQ: zmq}, nil
}

func (l *Listener) sweepUntil(ctx context.Context) {
	periodic.Run(ctx, sweepEvery, func(now time.Time) {
		for _, http := range l.expire(now) {
			l.log.Warn("engine has stopped registering", "http", http)
			l.expired(http)
		}
	})
}

// expire removes and returns the engines without recent messages.
func (l *Listener) expire(now time.Time) (out []string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for http, last := range l.last {
		if now.Sub(last) > expireAfter {
			delete(l.last, http)
			out = append(out, http)
		}
	}
	return out
}
