package extproc

import (
	"bytes"
	"sync"
	"time"

	"tandem/extproc/envoywire"
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

	// The prefill leg's pass was over before P's answer was noted here, or before it was sure that no other replica has read it (sure), and
	// why nobody follows it. "": it is not over.
	over string
	sure bool

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

// cleansUp reports whether a pool's stranded hand-overs are fetched.
func (s *Server) cleansUp(pool string) bool {
	policy, _ := s.policy(pool)
	return policy.cleansUp()
}

func (p *Policy) cleansUp() bool { return p.CleanupDecode && p.Dialect.Prefill != nil }

// keep notes that a hand-over with these parameters, of a pool that cleans up, is about to leave this server: with P's answer read, or in
// pass 2 (decided). If the request is over already, it is cleaned up.
func (s *Server) keep(t *kvtransfer.Ticket, requestID string, params []byte, decode string, decided bool) {
	if params != nil {
		s.over(t.ID, requestID, s.handed.keep(t, params, decode, decided, s.State.Shared()))
	}
}

// over cleans up what belongs to a request that was over before; nil: it was not.
func (s *Server) over(id [16]byte, requestID string, h *handed) {
	if h != nil {
		s.strandedHanded(id, requestID, h, h.over)
	}
}

// sure notes that no other replica has read the answer that a hand-over is from. It gives back, and forgets, what belongs to a request
// that is over.
func (o *handedOut) sure(id [16]byte) *handed {
	o.mu.Lock()
	defer o.mu.Unlock()
	h := o.kept[id]
	if h == nil {
		return nil
	}
	if h.sure = true; h.over == "" {
		return nil
	}
	o.forget(id, h)
	return h
}

// keep gives back, and forgets, what belongs to a request that is over.
func (o *handedOut) keep(t *kvtransfer.Ticket, params []byte, decode string, decided, sure bool) (over *handed) {
	o.mu.Lock()
	defer o.mu.Unlock()
	h := o.kept[t.ID]
	if h == nil {
		h = &handed{}
		if !o.put(t.ID, h) {
			return nil
		}
	}
	if h.pool == "" {
		h.pool, h.model, h.prefill, h.expires = t.Pool, t.Model, t.Prefill, t.Expires
		if o.bytes+len(params) <= maxHandedBytes {
			h.params = bytes.Clone(params)
			o.bytes += len(params)
		}
	}
	h.decode, h.read, h.decided, h.sure = decode, h.read || !decided, h.decided || decided, h.sure || sure
	if h.over != "" && h.sure {
		o.forget(t.ID, h)
		return h
	}
	return nil
}

// put is false where there is no room. Locked by the caller.
func (o *handedOut) put(id [16]byte, h *handed) bool {
	if len(o.kept) >= maxHanded {
		return false
	}
	if o.kept == nil {
		o.kept = map[[16]byte]*handed{}
	}
	o.kept[id] = h
	if !o.sweeping {
		o.sweeping = true
		time.AfterFunc(sweepHanded, o.sweep)
	}
	return true
}

// forget is locked by the caller.
func (o *handedOut) forget(id [16]byte, h *handed) {
	delete(o.kept, id)
	o.bytes -= len(h.params)
}

// takeOver is take, at the end of the prefill leg's pass, of which nothing was followed. Access log entries come by a stream of
// their own: where P's answer is not noted yet, or not for sure, that its request is over is kept for whoever comes with that.
func (o *handedOut) takeOver(id [16]byte, why string, expires time.Time) *handed {
	o.mu.Lock()
	defer o.mu.Unlock()
	h := o.kept[id]
	switch {
	case h == nil && len(o.kept) < maxHanded/2: // of what may never come not too many
		o.put(id, &handed{over: why, expires: expires})
	case h != nil && h.over == "" && h.sure:
		o.forget(id, h)
		return h
	case h != nil:
		h.over = why
	}
	return nil
}

// take gives out what is kept under a name, and forgets it.
func (o *handedOut) take(id [16]byte) *handed {
	o.mu.Lock()
	defer o.mu.Unlock()
	h := o.kept[id]
	if h == nil || h.over != "" {
		return nil
	}
	o.forget(id, h)
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
			o.forget(id, h)
		}
	}
	if o.sweeping = len(o.kept) > 0; o.sweeping {
		time.AfterFunc(sweepHanded, o.sweep)
	}
}

// handOverEnded is told of the end of every request, by its access log entry, and cleans up where the hand-over it had came to no decode
// endpoint. t is the ticket that the request ended with.
func (s *Server) handOverEnded(t *kvtransfer.Ticket, e *envoywire.LogEntry) {
	id, why := string(e.RequestID), strandedNoDecode
	if e.ClientGone {
		why = strandedClientGone
	}
	var h *handed
	unused := false
	switch t.Stage {
	case kvtransfer.PrefillLeg: // what was made of P's answer Envoy did not take in
		h = s.takeUnfollowed(t, why)
		unused = h != nil && h.read
	case kvtransfer.HandOver: // pass 2 did not decide, or Envoy did not take it in
		h = s.handed.take(t.ID)
		unused = h != nil && h.read && !e.Asked() && h.expires.UnixMilli() == t.Expires.UnixMilli() // this server's, where another read P's answer too
	case kvtransfer.DecodeLeg:
		h = s.handed.take(t.ID)
		unused = h != nil && h.decided && !e.Asked() && s.bookedHere(t, reservedAs(e)) // likewise: the decision that Envoy took in
		if unused {
			h.unreached = e.Tries > 0
		}
	}
	if unused {
		s.strandedHanded(t.ID, id, h, why)
	}
}

// takeUnfollowed takes what was read of a prefill leg whose pass is over and was not followed by another. Where the connection to
// a replica breaks Envoy asks another, so two may have read the same answer, and nothing in the entry tells them apart. Redis does; where
// there is none, only a replica acts whose stream Envoy ended, and no broken connection: Envoy has asked nobody after it.
func (s *Server) takeUnfollowed(t *kvtransfer.Ticket, why string) *handed {
	if !s.cleansUp(t.Pool) {
		return nil
	}
	return s.handed.takeOver(t.ID, why, time.Now().Add(s.HandOverTTL))
}

// decodeUnreached is told of a try that never got a connection, by its access log entry. If it was the decode leg's, the request
// goes on without the parameters, which are as good as ever: those are cleaned up.
func (s *Server) decodeUnreached(e *envoywire.LogEntry) {
	id := string(e.RequestID)
	t, _ := s.keys().Open(string(e.Ticket), id, time.Now())
	if t == nil || t.Stage != kvtransfer.DecodeLeg || !e.Pod || e.Began || e.Sent > 0 {
		return
	}
	if h := s.handed.take(t.ID); h != nil && h.decided && s.bookedHere(t, reservedAs(e)) {
		h.unreached = true
		s.cleanUpLater(t.ID, id, h)
	}
}
