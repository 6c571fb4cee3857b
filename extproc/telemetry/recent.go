package telemetry

import (
	"sync"
	"sync/atomic"
	"time"
)

// Trace is the history of one request, collected over its passes.
type Trace struct {
	RequestID string `json:"request_id"`
	Pool      string `json:"pool"`
	// of the last pass: split, decode_alone, pass_through, stored_response
	Route        string        `json:"route"`
	Reason       string        `json:"reason,omitempty"` // why a request that could be split was not
	Prefill      string        `json:"prefill,omitempty"`
	Decode       string        `json:"decode"`
	PromptTokens int64         `json:"prompt_tokens"` // as P counted them, else an estimate
	CachedTokens int64         `json:"cached_tokens"` // of those, found in P's prefix cache; -1: unknown
	Replans      int           `json:"replans"`
	PrefillTime  time.Duration `json:"prefill_ns"` // of the pass that ended with P's answer
	DecodeTime   time.Duration `json:"decode_ns"`  // of the last pass
	Foreseen
	// from the start to the first byte of the answer's headers; some engines send them before the first token
	FirstByte time.Duration `json:"first_byte_ns,omitempty"`
	Status    int           `json:"status"`              // that the client got; 0: not known yet
	Waited    time.Duration `json:"waited_ns,omitempty"` // for its endpoints, in pass 1
	// the prefill endpoint that was too busy when it arrived
	WaitedFor    string    `json:"waited_for,omitempty"`
	Behind       int       `json:"behind,omitempty"`        // requests that were waiting before it in this replica
	BehindRemote int       `json:"behind_remote,omitempty"` // and in others
	Started      time.Time `json:"started"`
	Weighed      []Weighed `json:"weighed,omitempty"` // of the last pass; kept for a few requests per second
}

// Recent keeps the traces of the latest requests, for operators. It is bounded and drops the oldest first.
type Recent struct {
	mu   sync.Mutex
	ring []Trace
	next int
	at   map[string]int // by request id

	weighed atomic.Int64 // when prices were last recorded, Unix nanoseconds
}

const recentTraces = 256

// NewRecent returns an empty list.
func NewRecent() *Recent {
	return &Recent{ring: make([]Trace, 0, recentTraces), at: make(map[string]int, recentTraces)}
}

// Planned records a pass: a new request replaces the oldest one.
func (r *Recent) Planned(p *Planned) {
	r.mu.Lock()
	defer r.mu.Unlock()
	i, ok := r.at[p.RequestID]
	if !ok {
		t := Trace{RequestID: p.RequestID, Started: time.Now(), CachedTokens: -1}
		if len(r.ring) < recentTraces {
			i = len(r.ring)
			r.ring = append(r.ring, t)
		} else {
			i, r.next = r.next, (r.next+1)%recentTraces
			delete(r.at, r.ring[i].RequestID)
			r.ring[i] = t
		}
		r.at[p.RequestID] = i
	} else if r.ring[i].Status == 0 {
		r.ring[i].Replans++
	}
	t := &r.ring[i]
	t.Pool, t.Route, t.Reason, t.Prefill, t.Decode = p.Pool, p.Route, p.Reason, p.Prefill, p.Decode
	t.PromptTokens, t.Weighed = p.PromptTokens, p.Weighed
	t.Foreseen = p.Foreseen
	if p.Waited > 0 {
		t.Waited, t.WaitedFor, t.Behind, t.BehindRemote = p.Waited, p.WaitedFor, p.Behind, p.BehindRemote
	}
}

// weighEvery is how often the prices of a decision are recorded for operators: recording costs more than deciding.
const weighEvery = 100 * time.Millisecond

// WantsWeighed reports whether to record the prices of this decision.
func (r *Recent) WantsWeighed(now time.Time) bool {
	last := r.weighed.Load()
	return now.UnixNano()-last >= int64(weighEvery) && r.weighed.CompareAndSwap(last, now.UnixNano())
}

// Change edits the trace of a request, if it is still there.
func (r *Recent) Change(id string, edit func(*Trace)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if i, ok := r.at[id]; ok {
		edit(&r.ring[i])
	}
}

// Latest returns the traces of the latest requests, newest first, at most n.
func (r *Recent) Latest(n int) []Trace {
	r.mu.Lock()
	defer r.mu.Unlock()
	n = max(n, 0)
	out := make([]Trace, 0, min(n, len(r.ring)))
	for i := range r.ring {
		if len(out) == n {
			break
		}
		out = append(out, r.ring[(r.next-1-i+2*len(r.ring))%len(r.ring)])
	}
	return out
}
