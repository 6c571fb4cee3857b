package replica

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"syscall"
	"time"
)

// Listen opens a port. If Envoy restarts hot and the process before this one has it, it is opened when that has ended.
func (s Settings) Listen(ctx context.Context, address string) (net.Listener, error) {
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", address)
	switch {
	case s.HotRestart && errors.Is(err, syscall.EADDRINUSE):
		p := &laterPort{address: address}
		p.waits, p.close = context.WithCancel(ctx)
		return p, nil
	case errors.Is(err, syscall.EADDRINUSE):
		return nil, fmt.Errorf("another program has %s: end it, or set another address (%w)", address, err)
	case err != nil:
		return nil, fmt.Errorf("listening on %s: %w", address, err)
	}
	return l, nil
}

// laterPort is a port that another process has. The first Accept waits until that ends.
type laterPort struct {
	address string
	waits   context.Context //nolint:containedctx // until Close
	close   context.CancelFunc

	mu   sync.Mutex
	open net.Listener // nil: not yet
}

// Accept implements [net.Listener].
func (p *laterPort) Accept() (net.Conn, error) {
	l, err := p.listener()
	if err != nil {
		return nil, err
	}
	return l.Accept()
}

func (p *laterPort) listener() (net.Listener, error) {
	tick := time.NewTicker(200 * time.Millisecond)
	defer tick.Stop()
	for {
		l, err := p.try()
		if l != nil || !errors.Is(err, syscall.EADDRINUSE) {
			return l, err
		}
		select {
		case <-p.waits.Done():
			return nil, net.ErrClosed
		case <-tick.C:
		}
	}
}

func (p *laterPort) try() (net.Listener, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.open != nil:
		return p.open, nil
	case p.waits.Err() != nil:
		return nil, net.ErrClosed
	}
	l, err := new(net.ListenConfig).Listen(p.waits, "tcp", p.address)
	if err != nil {
		return nil, fmt.Errorf("listening on %s: %w", p.address, err)
	}
	p.open = l
	return l, nil
}

// Close implements [net.Listener].
func (p *laterPort) Close() error {
	p.close()
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.open == nil {
		return nil
	}
	return p.open.Close()
}

// Addr implements [net.Listener].
func (p *laterPort) Addr() net.Addr { return &net.TCPAddr{} }
