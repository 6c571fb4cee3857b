package recorder

import (
	"errors"
	"time"

	"github.com/cespare/xxhash/v2"

	"tandem/recording"
)

// errRetries means that the file could not be written a moment ago, and is tried again later.
var errRetries = errors.New("the file could not be written a moment ago")

// Choice is what is known of a request when a pass of it is planned.
type Choice struct {
	ID      string
	Started time.Time // when the request came in
	Again   bool      // it was planned before
	Pool    string
	Model   string   // that the client asked for
	Listed  bool     // the pool has a model of that name
	Blocks  []uint64 // hashes of the prompt, of 512 bytes each
	Text    []byte   // the prompt's text; nil: it is not only text
	Bytes   int      // of the prompt
	Tokens  int64    // likewise, as far as is known
	Route   string
	Prefill string // addresses
	Decode  string

	Priority int32
	Stream   bool
	Waited   time.Duration
}

// blockBytes is the number of bytes of a block.
const blockBytes = 512

// Chosen records what is known when a request's endpoints are chosen.
func (r *Recorder) Chosen(c *Choice) {
	if r == nil {
		return
	}
	s := r.now.Load()
	if s == nil {
		return
	}
	key := keyFor(c.ID, c.Started)
	s.mu.Lock()
	defer s.mu.Unlock()
	p := s.pending[key]
	if p != nil {
		if c.Again {
			p.line.Replans++
		}
	} else if p = s.new(); p == nil {
		s.drop()
		return
	} else {
		s.pending[key] = p
		s.first(p, c)
	}
	l := &p.line
	l.Route, l.Prefill, l.Decode = c.Route, c.Prefill, c.Decode
	l.Waited += c.Waited.Seconds()
}

// first records what only a request's first pass knows.
func (s *session) first(p *pending, c *Choice) {
	s.numbers++
	l := &p.line
	p.started = c.Started
	*l = recording.Request{
		N: s.numbers, T: max(c.Started.Sub(s.began).Seconds(), 0), Pool: c.Pool, Model: c.Model, Priority: c.Priority,
		Blocks: l.Blocks[:0], Bytes: c.Bytes, Prompt: c.Tokens, Guess: true, Cached: -1, Answer: -1, Stream: c.Stream,
	}
	if !c.Listed && c.Model != "" {
		l.Model = s.named(xxhash.Sum64String(c.Model))
	}
	before, found := s.conversations.extended(c)
	p.tip = tipOf(c)
	p.tip.number, p.tip.root = l.N, l.N
	if found {
		l.On, l.Same, p.tip.root = before.number, before.blocks, before.root
		p.before = before.slot
		s.gap(p)
	}
	if s.about.Sample > 1 {
		p.skipped = s.seal(p.tip.root)%uint64(s.about.Sample) != 0
	}
	p.tip.slot = s.conversations.add(&p.tip)
	if p.skipped {
		return
	}
	for _, h := range c.Blocks[l.Same:] {
		l.Blocks = append(l.Blocks, s.seal(h))
	}
	s.hashes += len(l.Blocks)
}

// gap sets the time from the end of the answer before to a request's arrival, if that end is known: Envoy may report it
// after the client has asked again.
func (s *session) gap(p *pending) {
	l, before := &p.line, &s.conversations.slots[p.before]
	if l.On == 0 || before.number != l.On {
		return
	}
	if l.Gap = -1; before.ended > 0 && before.ended <= l.T {
		l.Gap = l.T - before.ended
	}
}

// named returns the keyed hash of a name with that hash, as text.
func (s *session) named(hash uint64) string { return hexOf(s.seal(hash)) }

// hexOf writes what a file keeps of a hash.
func hexOf(h uint64) string {
	const digits = "0123456789abcdef"
	var out [12]byte
	for i := len(out) - 1; i >= 0; i-- {
		out[i] = digits[h&15]
		h >>= 4
	}
	return string(out[:])
}

// Counted records what P's answer says of the prompt; below 0: nothing.
func (r *Recorder) Counted(id string, started time.Time, prompt, cached int64) {
	r.edit(id, started, func(l *recording.Request) {
		if prompt > 0 {
			l.Prompt, l.Guess = prompt, false
		}
		l.Cached = cached
	})
}

// Prefilled records how long P's leg took.
func (r *Recorder) Prefilled(id string, started time.Time, took time.Duration) {
	r.edit(id, started, func(l *recording.Request) { l.P = took.Seconds() })
}

func (r *Recorder) edit(id string, started time.Time, change func(*recording.Request)) {
	if r == nil {
		return
	}
	s := r.now.Load()
	if s == nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if p := s.pending[keyFor(id, started)]; p != nil {
		change(&p.line)
	}
}

// End is how a request ended. Unknown counts are below 0, unknown times are 0.
type End struct {
	ID                     []byte
	Started                time.Time // when the request came in
	Ended                  time.Time
	Tenant                 []byte
	Prefill, Decode        string // that served the last pass; "": as chosen
	Prompt, Cached, Answer int64
	Head, First, Each      time.Duration
	Status                 int
	How                    string
}

// Ended records the end of a request that this replica has planned.
func (r *Recorder) Ended(e *End) {
	if r == nil {
		return
	}
	s := r.now.Load()
	if s == nil {
		return
	}
	key := keyFor(e.ID, e.Started)
	s.mu.Lock()
	defer s.mu.Unlock()
	p := s.pending[key]
	if p == nil {
		return // it began before the recording
	}
	s.conversations.ended(&p.tip, e.Ended.Sub(s.began).Seconds())
	if !p.skipped {
		s.line(p, e)
		if len(s.buffer) > soonBuffer {
			r.notify()
		}
	}
	s.remove(key, p)
}

// line adds a request's line to those that are written.
func (s *session) line(p *pending, e *End) {
	l := &p.line
	s.gap(p)
	if len(e.Tenant) > 0 {
		l.Who = s.named(xxhash.Sum64(e.Tenant))
	}
	if e.Decode != "" {
		l.Decode = e.Decode
	}
	if e.Prompt >= 0 {
		l.Prompt, l.Guess = e.Prompt, false
	}
	if e.Cached >= 0 && l.Cached < 0 { // else P counted them; D loaded all
		l.Cached = e.Cached
	}
	l.Answer, l.Status, l.Ended = e.Answer, e.Status, e.How
	l.Head, l.First, l.Each = e.Head.Seconds(), e.First.Seconds(), e.Each.Seconds()
	l.Took = max(e.Ended.Sub(e.Started), 0).Seconds()
	if len(s.buffer) > maxBuffer {
		s.drop()
		return
	}
	s.buffer = recording.Append(s.buffer, l)
	s.lines++
}

// drop counts a request that is not recorded.
func (s *session) drop() {
	s.counted.Dropped++
	s.wiring.Lines(Dropped, 1)
}
