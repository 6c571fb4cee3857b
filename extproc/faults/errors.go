package faults

import (
	"sync"
	"time"
)

// repeated counts the errors of endpoints in a row, each of another request. The zero value is ready to use.
type repeated struct {
	mu     sync.Mutex
	counts map[string]*count // by address
}

type count struct {
	requests int
	last     string // id of the last request
	at       time.Time
}

const (
	inARow     = 3                // an endpoint that answers so many requests in a row with an error has failed
	rowTime    = 10 * time.Second // after which an error is forgotten
	maxCounted = 4096             // endpoints
)

// again counts an error. It reports whether the endpoint has failed.
func (r *repeated) again(addr, requestID string) bool {
	now := time.Now()
	r.mu.Lock()
	defer r.mu.Unlock()
	c := r.counts[addr]
	if c == nil || now.Sub(c.at) > rowTime {
		if r.counts == nil || len(r.counts) >= maxCounted {
			r.counts = map[string]*count{}
		}
		c = &count{}
		r.counts[addr] = c
	}
	if c.last != requestID {
		c.requests++
	}
	if c.last, c.at = requestID, now; c.requests < inARow {
		return false
	}
	delete(r.counts, addr)
	return true
}

// clear forgets the errors of endpoints that have served a request.
func (r *repeated) clear(addrs ...string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, addr := range addrs {
		delete(r.counts, addr)
	}
}
