package telemetry

import (
	"cmp"
	"sync"
	"sync/atomic"
	"time"

	"tandem/extproc/kvtransfer"
	"tandem/extproc/usage"
)

// Trace is the history of one request, collected over its passes. Each replica has the part that it served: the one
// that planned a pass has Route, and the others what they saw of its legs. [Merge] makes one of all parts.
type Trace struct {
	RequestID string   `json:"request_id"`
	Replicas  []string `json:"replicas,omitempty"` // that served a pass or a leg of it, in order; set by Merge
	Pool      string   `json:"pool"`
	// of the last pass: split, decode_alone, pass_through, stored_response; "": planned at another replica
	Route        string        `json:"route"`
	Reason       string        `json:"reason,omitempty"`       // why a request that could be split was not
	Always       bool          `json:"split_always,omitempty"` // the pool splits every prompt
	Prefill      string        `json:"prefill,omitempty"`
	Decode       string        `json:"decode"`
	PromptTokens int64         `json:"prompt_tokens"` // as P counted them, else an estimate
	CachedTokens int64         `json:"cached_tokens"` // of those, found in P's prefix cache; -1: unknown
	Replans      int           `json:"replans"`
	PrefillTime  time.Duration `json:"prefill_ns"` // of the pass that ended with P's answer
	DecodeTime   time.Duration `json:"decode_ns"`  // of the last pass
	Foreseen
	Answered
	Status int `json:"status"` // that the client got; 0: not known yet, or none was sent
	Queued
	Served
	Started time.Time `json:"started"`           // when the request came in, in microseconds
	Weighed []Weighed `json:"weighed,omitempty"` // of the last pass; kept for a few requests per second
}

// Answered is what became of a request's answer. Times count from the start of the request.
type Answered struct {
	// to the first byte of the answer's headers; some engines send them before the first token
	FirstByte time.Duration `json:"first_byte_ns,omitempty"`
	Streamed  bool          `json:"streamed,omitempty"` // if not, FirstByte is that of the whole answer
	// to the first byte of a stream's body; 0: not known
	FirstToken time.Duration `json:"first_token_ns,omitempty"`
	Took       time.Duration `json:"took_ns,omitempty"` // to its end
	Ended      string        `json:"ended,omitempty"`   // as [EndedAs] has it, or EndedCut; "": not known
	Refused    string        `json:"refused,omitempty"` // code of the error with which Tandem itself ended it
	// what it used; nil: not known, or the configuration has no usage
	Used *usage.Used `json:"usage,omitempty"`
	// replicas that are gone and to which Envoy may have reported the end, if none of the others knows it
	GoneWith []string `json:"end_gone_with,omitempty"`
	// another replica, which was not asked, may know the end
	EndElsewhere bool `json:"end_elsewhere,omitempty"`
}

// EndedCut is how a request ended whose answer broke off after its status was sent.
const EndedCut = "cut"

// EndedTicketRefused is how a request ended if a replica could not read its ticket: no endpoint failed.
const EndedTicketRefused = "ticket_refused"

// HasFailed reports whether the request failed.
func (t *Trace) HasFailed() bool {
	switch t.Ended {
	case "":
		return t.Status >= 500
	case "failed", EndedCut, EndedTicketRefused:
		return true
	}
	return false
}

// AnsweredBy returns the endpoint whose answer the client got, or was to get.
func (t *Trace) AnsweredBy() string { return cmp.Or(t.Decode, t.Prefill) }

// Queued is how a request waited for its endpoints.
type Queued struct {
	Waited time.Duration `json:"waited_ns,omitempty"` // in pass 1
	// the endpoint that was too busy when it arrived, to compute its prompt
	WaitedFor    string `json:"waited_for,omitempty"`
	ForMemory    bool   `json:"waited_for_memory,omitempty"` // conversations that come back left its KV no room there
	Behind       int    `json:"behind,omitempty"`            // requests that were waiting before it in this replica
	BehindRemote int    `json:"behind_remote,omitempty"`     // and in others
}

// Served is the part of a request that one replica served.
type Served struct {
	Pass  int  `json:"pass"`                    // the last one that this part is about: redirects before it
	Plans int  `json:"plans"`                   // passes that were planned
	Final bool `json:"prefill_final,omitempty"` // prefill's answer was the client's
	Next  int  `json:"next_pass,omitempty"`     // that follows the end of a prefill leg, here or at another replica

	Failed []FailedHop `json:"failed_hops,omitempty"` // in order; each ended a plan
	// the engines that died, or failed, under its answer, if it was given up for that
	DiedUnder []string `json:"died_under,omitempty"`
}

// FailedHop is a hop of a request that failed, so that the request was planned again or failed as well.
type FailedHop struct {
	Hop      string `json:"hop"`                // the cause of tandem_replans_total: prefill, decode, encode, turn, ...
	Endpoint string `json:"endpoint,omitempty"` // that failed; "": none did
}

// Recent keeps the traces of the latest requests, for operators. It is bounded and drops the oldest first.
type Recent struct {
	mu   sync.Mutex
	ring []Trace
	next int
	at   map[traceKey]int

	weighed atomic.Int64 // when the last recorded prices were due, Unix nanoseconds; see wantsWeighed
}

// traceKey identifies a request: clients may send one id with several.
type traceKey struct {
	id      string
	started int64 // Unix microseconds, as tickets have them
}

func (t *Trace) key() traceKey { return traceKey{t.RequestID, t.Started.UnixMicro()} }

const recentTraces = 256

// NewRecent returns an empty list.
func NewRecent() *Recent {
	return &Recent{ring: make([]Trace, 0, recentTraces), at: make(map[traceKey]int, recentTraces)}
}

// trace returns the request's trace: a new one takes the place of the oldest.
func (r *Recent) trace(id string, started time.Time) *Trace {
	t := Trace{RequestID: id, Started: started.Truncate(time.Microsecond).Round(0), CachedTokens: -1}
	key := t.key()
	if i, ok := r.at[key]; ok {
		return &r.ring[i]
	}
	i := len(r.ring)
	if i < recentTraces {
		r.ring = append(r.ring, t)
	} else {
		i, r.next = r.next, (r.next+1)%recentTraces
		delete(r.at, r.ring[i].key())
		r.ring[i] = t
	}
	r.at[key] = i
	return &r.ring[i]
}

// record records the plan of a pass.
func (r *Recent) record(p *Planned) {
	r.mu.Lock()
	defer r.mu.Unlock()
	t := r.trace(p.RequestID, p.Started)
	if t.Status == 0 {
		t.Plans++
		t.Replans = t.Plans - 1
	}
	t.Pass = p.Pass
	t.Pool, t.Route, t.Reason, t.Prefill, t.Decode = p.Pool, p.Route, p.Reason, p.Prefill, p.Decode
	t.PromptTokens, t.Weighed, t.Streamed, t.Always = p.PromptTokens, p.Weighed, p.Streamed, p.Always
	t.Foreseen = p.Foreseen
	if p.Waited > 0 {
		t.Waited, t.WaitedFor, t.Behind, t.BehindRemote = p.Waited, p.WaitedFor, p.Behind, p.BehindRemote
	}
}

// weighEvery is the mean interval at which the prices of decisions are recorded for operators, and weighBurst how many
// may follow each other at once: recording costs more than deciding.
const (
	weighEvery = 100 * time.Millisecond
	weighBurst = 10
)

// wantsWeighed reports whether to record the prices of this decision.
func (r *Recent) wantsWeighed(now time.Time) bool {
	last := r.weighed.Load()
	due := max(last, now.UnixNano()-int64(weighBurst*weighEvery)) + int64(weighEvery)
	return due <= now.UnixNano() && r.weighed.CompareAndSwap(last, due)
}

// leg edits the trace of a request, of which this replica serves a leg or the next pass. Another replica may have
// planned it.
func (r *Recent) leg(id string, ticket *kvtransfer.Ticket, edit func(*Trace)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	t := r.trace(id, ticket.Started)
	t.Pass = max(t.Pass, ticket.Redirects)
	if t.Route == "" {
		t.Pool, t.Prefill = ticket.Pool, ticket.Prefill
		t.PromptTokens = max(t.PromptTokens, ticket.PromptTokens)
	}
	edit(t)
}

// change edits the trace of a request, if this replica has one.
func (r *Recent) change(id string, started time.Time, edit func(*Trace)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if i, ok := r.at[traceKey{id, started.UnixMicro()}]; ok {
		edit(&r.ring[i])
	}
}

// ticketRefused records that the ticket of a request was refused, in the newest plan of its id that has no end. It
// reports whether there is one. Without the ticket nothing else names the request.
func (r *Recent) ticketRefused(id string, status int) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	for i := range r.ring {
		t := &r.ring[(r.next-1-i+2*len(r.ring))%len(r.ring)]
		if t.RequestID == id && t.Route != "" && t.Status == 0 && t.Ended == "" {
			t.Status, t.Ended, t.Took = status, EndedTicketRefused, max(time.Since(t.Started), 0)
			return true
		}
	}
	return false
}

// Latest returns the traces of the latest requests, newest first, at most n, those planned at other replicas included.
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
