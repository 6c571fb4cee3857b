package extproc

import (
	"bytes"
	"sync"
	"time"

	"tandem/extproc/kvtransfer"
)

// handed is one hand-over of a pool that cleans up (strandedBlocks: cleanupDecode), kept here under its name from P's answer
// until the request is over: by then its ticket is spent and its parameters are with Envoy, and only the access log says whether they
// ever went to a decode endpoint.
type handed struct {
	pool, model     string
	prefill, decode string // addresses; decode is the one that was chosen last
	params          []byte // nil: there was no room
	expires         time.Time
	unreached       bool // decode was tried, and there was no connection

	// Which of this server's doings put it here. Every replica sees every access log entry, and one only may act on it: the one that read
	// P's answer as long as Envoy has not taken pass 2's decision in, from then on the one that decided.
	read, decided bool
}

// handedOut is what is kept, bounded in number and bytes.
type handedOut struct {
	mu    sync.Mutex
	bytes int
	kept  map[[16]byte]*handed

	sweeping bool // a timer runs
}

const (
	maxHanded      = 1 << 16
	maxHandedBytes = 64 << 20
	sweepHanded    = time.Second
)

// keep notes that a hand-over with these parameters is about to leave this server: with P's answer read, or in pass 2 (decided).
func (s *Server) keep(t *kvtransfer.Ticket, params []byte, decode string, decided bool) {
	if policy, _ := s.policy(t.Pool); !policy.CleanupDecode || policy.Dialect == nil || params == nil {
		return
	}
	o := &s.handed
	o.mu.Lock()
	defer o.mu.Unlock()
	h := o.kept[t.ID]
	if h == nil {
		if len(o.kept) >= maxHanded {
			return
		}
		h = &handed{pool: t.Pool, model: t.Model, prefill: t.Prefill, expires: t.Expires}
		if o.bytes+len(params) <= maxHandedBytes {
			h.params = bytes.Clone(params)
			o.bytes += len(params)
		}
		if o.kept == nil {
			o.kept = map[[16]byte]*handed{}
		}
		if o.kept[t.ID] = h; len(o.kept) == 1 && !o.sweeping {
			o.sweeping = true
			time.AfterFunc(sweepHanded, o.sweep)
		}
	}
	h.decode, h.read, h.decided = decode, h.read || !decided, h.decided || decided
}

// take gives out what is kept under a name, and forgets it.
func (o *handedOut) take(id [16]byte) *handed {
	o.mu.Lock()
	defer o.mu.Unlock()
	h := o.kept[id]
	if h != nil {
		delete(o.kept, id)
		o.bytes -= len(h.params)
	}
	return h
}

// sweep forgets what is too old to be of use: whoever has not asked a decode endpoint by now must not any more. It comes back as long as
// something is kept.
func (o *handedOut) sweep() {
	now := time.Now()
	o.mu.Lock()
	defer o.mu.Unlock()
	for id, h := range o.kept {
		if now.After(h.expires) {
			delete(o.kept, id)
			o.bytes -= len(h.params)
		}
	}
	if o.sweeping = len(o.kept) > 0; o.sweeping {
		time.AfterFunc(sweepHanded, o.sweep)
	}
}

// handOverEnded is told of the end of every request, by its access log entry, and cleans up where the hand-over it had came to no decode
// endpoint. t is the ticket that the request ended with.
func (s *Server) handOverEnded(t *kvtransfer.Ticket, e *logEntry) {
	h := s.handed.take(t.ID)
	if h == nil {
		return
	}
	unused := false
	switch t.Stage {
	case kvtransfer.PrefillLeg: // P's answer was read, and what was made of it Envoy did not take in
		unused = h.read
	case kvtransfer.HandOver: // pass 2 did not decide, or Envoy did not take it in
		unused = h.read && !e.asked()
	case kvtransfer.DecodeLeg:
		unused = h.decided && !e.asked()
		h.unreached = e.tries > 0
	}
	if !unused {
		return
	}
	why := strandedNoDecode
	if e.clientGone {
		why = strandedClientGone
	}
	s.metrics.stranded.WithLabelValues(h.pool, h.prefill, why).Inc()
	s.cleanUpLater(t.ID, string(e.requestID), h)
}

// decodeUnreached is told of a try that never got a connection, by its access log entry. If it was the decode leg's, the request
// goes on without the parameters, which are as good as ever: those are cleaned up.
func (s *Server) decodeUnreached(e *logEntry) {
	t, _ := s.keys().Open(string(e.ticket), string(e.requestID), time.Now())
	if t == nil || t.Stage != kvtransfer.DecodeLeg || !e.pod || e.began || e.sent > 0 {
		return
	}
	if h := s.handed.take(t.ID); h != nil && h.decided {
		h.unreached = true
		s.cleanUpLater(t.ID, string(e.requestID), h)
	}
}
