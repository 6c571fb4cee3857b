package engine

import "sync"

// Core is the loop that takes an engine's steps. While it stands still, nothing is admitted, computed, fetched or
// freed, no count changes and no heartbeat goes out; what has its own thread or process goes on: the HTTP server with
// /health, /metrics and a stream's first headers, and the side channel, from which other engines read. Real engines
// stand for seconds in a long compile, a stalled collective, a paused VM.
type Core struct {
	mu      sync.Mutex
	resumed chan struct{} // closed when the core runs again; nil: it runs
}

// Stop makes the core stand still, until Resume.
func (c *Core) Stop() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.resumed == nil {
		c.resumed = make(chan struct{})
	}
}

// Resume makes it go on.
func (c *Core) Resume() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.resumed != nil {
		close(c.resumed)
		c.resumed = nil
	}
}

// Stands reports whether the core stands still.
func (c *Core) Stands() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.resumed != nil
}

// Step waits for the next step: not at all, unless the core stands still. Not even a client that leaves ends the wait,
// because its engine learns of that in a step.
func (c *Core) Step() {
	for {
		c.mu.Lock()
		resumed := c.resumed
		c.mu.Unlock()
		if resumed == nil {
			return
		}
		<-resumed
	}
}
