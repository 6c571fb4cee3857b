package telemetry

import (
	"sync"
	"sync/atomic"
	"time"
)

// Trace is what became of one request, gathered from the server's doors.
type Trace struct {
	RequestID    string        `json:"request_id"`
	Pool         string        `json:"pool"`
	Route        string        `json:"route"`            // split, decode_alone, pass_through, stored_response: of the last pass planned
	Reason       string        `json:"reason,omitempty"` // why a request that could be split was not
	Prefill      string        `json:"prefill,omitempty"`
	Decode       string        `json:"decode"`
	PromptTokens int64         `json:"prompt_tokens"` // as P counted them, else estimated
	CachedTokens int64         `json:"cached_tokens"` // of those, found in P's prefix cache; -1: not known
	Replans      int           `json:"replans"`
	PrefillTime  time.Duration `json:"prefill_ns"` // of the pass that ended with P's answer
	DecodeTime   time.Duration `json:"decode_ns"`  // of the last pass
	Foreseen
	FirstByte    time.Duration `json:"first_byte_ns,omitempty"` // from the start to the first byte of the answer, which is of its headers: some engines send them before the first token
	Status       int           `json:"status"`                  // what the client got; 0: not known yet
	Waited       time.Duration `json:"waited_ns,omitempty"`     // for its endpoints, in pass 1
	WaitedFor    string        `json:"waited_for,omitempty"`    // prefill endpoint that had too much to do when it came
	Behind       int           `json:"behind,omitempty"`        // requests that waited before it then, in this replica
	BehindRemote int           `json:"behind_remote,omitempty"` // and in others
	Started      time.Time     `json:"started"`
	Weighed      []Weighed     `json:"weighed,omitempty"` // of the last pass planned; kept of a few requests a second
}

// Recent keeps the traces of the latest requests, for people who look. It is bounded and the oldest go first.
type Recent struct {
	mu   sync.Mutex
	ring []Trace
	next int
	at   map[string]int // by request id

	weighed atomic.Int64 // when a decision was last taken apart, Unix nanoseconds
}

const recentTraces = 256

// NewRecent returns an empty list.
func NewRecent() *Recent {
	return &Recent{ring: make([]Trace, 0, recentTraces), at: make(map[string]int, recentTraces)}
}

// Planned notes a pass: a request seen for the first time takes the place of the oldest one.
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

// weighEvery is how often a decision is taken apart for people who look: it costs more than the decision.
const weighEvery = 100 * time.Millisecond

// WantsWeighed reports whether this is a decision to be taken apart.
func (r *Recent) WantsWeighed(now time.Time) bool {
	last := r.weighed.Load()
	return now.UnixNano()-last >= int64(weighEvery) && r.weighed.CompareAndSwap(last, now.UnixNano())
}

// Change edits the trace of a request, if it is still kept.
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
