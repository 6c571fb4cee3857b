package filter

import (
	"crypto/rand"
	"sync"
	"time"

	"tandem/extproc/core"
	"tandem/extproc/journey"
	"tandem/extproc/kvtransfer"
	"tandem/extproc/openai"
	"tandem/extproc/pass"
	"tandem/extproc/telemetry"
	"tandem/internal/memory"
)

// Shared is what all requests of a replica share. It is safe for concurrent use.
type Shared struct {
	Passes       *pass.Shared
	Memory       *memory.Budget
	MaxBodyBytes int // larger bodies are refused with 413
	PathPrefixes []string
	Decisions    bool             // also write decisions into dynamic metadata
	Started      time.Time        // of the replica
	Tracer       telemetry.Tracer // nil: no traces

	refusal  *openai.Error // what every request gets, and no other field is set; nil: requests are served
	journeys *journey.Shared
	scratch  sync.Pool // of *scratch

	mu       sync.Mutex
	restarts map[string]*attempt // by their keys: requests that begin again at this moment
	waiting  map[*Filter]struct{}
	insured  map[*Insured]struct{} // whose leg to D is open
}

// New returns what requests share. The core's options say Inside.
func New(c *core.Core) *Shared {
	s := &Shared{
		Passes: c.Passes, Memory: c.Memory, MaxBodyBytes: c.MaxBodyBytes, PathPrefixes: c.PathPrefixes,
		Decisions: c.DecisionMetadata, Started: c.Started, Tracer: c.Tracer, journeys: c.Journeys,
		restarts: map[string]*attempt{}, waiting: map[*Filter]struct{}{}, insured: map[*Insured]struct{}{},
	}
	s.scratch.New = func() any {
		m := &scratch{}
		m.meter.Observer = c.Observer
		c.Passes.Begin(&m.pass, &m.body, &m.meter)
		s.journeys.Begin(&m.legs, &m.pass)
		return m
	}
	return s
}

// Refused is what requests share that are all refused: their configuration is not valid.
func Refused(e *openai.Error) *Shared { return &Shared{refusal: e} }

// scratch is the memory of a request until it is on its way to D. Later requests use it again.
type scratch struct {
	pass    pass.Pass
	legs    journey.Legs
	meter   telemetry.Meter
	body    body
	answer  []byte // P's
	spoiled bool   // a panic may have left it in any state
}

// release returns the memory of a request.
func (s *Shared) release(m *scratch) {
	m.pass.Reset()
	m.meter.EndSpan("client_gone") // any other end has ended it
	m.meter.Reset()
	s.hold(m, 0)
	if !m.spoiled && cap(m.body.data)+cap(m.body.spare)+cap(m.answer) <= maxKept {
		m.body.data, m.body.spare, m.answer = m.body.data[:0], m.body.spare[:0], m.answer[:0]
		s.scratch.Put(m)
	}
}

// maxKept bounds the memory of a request that later ones use again, in bytes.
const maxKept = 8 << 20

// hold counts n bytes of a request against the budget of all, and reports whether there is room for them.
func (s *Shared) hold(m *scratch, n int) bool {
	return s.Memory.Replace(&m.body.held, int64(n))
}

// attempt is a request that begins again after its hop to D failed. It has what a sealed ticket carries where Tandem
// runs beside Envoy.
type attempt struct {
	ticket     kvtransfer.Ticket
	id         string // of the client's request
	reservedAs string
	trace      traceContext
	began      time.Time // when the client's request came
	explained  string    // the decision, for an operator; "": none asked
}

// putRestart keeps an attempt for the filter that comes with its key.
func (s *Shared) putRestart(a *attempt) (key string) {
	key = rand.Text()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.restarts[key] = a
	return key
}

// takeRestart returns the attempt of a key, once; nil: there is none.
func (s *Shared) takeRestart(key string) *attempt {
	s.mu.Lock()
	defer s.mu.Unlock()
	a := s.restarts[key]
	delete(s.restarts, key)
	return a
}

// body implements [pass.Body].
type body struct {
	data, spare []byte
	held        int64 // of the budget of all requests, bytes
	changed     bool  // it is no longer what Envoy has
}

// Bytes implements [pass.Body].
func (b *body) Bytes() []byte { return b.data }

// Rewrite implements [pass.Body].
func (b *body) Rewrite(size int, write func(to []byte) []byte) {
	if cap(b.spare) < size {
		b.spare = make([]byte, 0, size+size/8)
	}
	b.spare = write(b.spare[:0])
	b.data, b.spare = b.spare, b.data[:0]
	b.changed = true
}

// edit makes the body of a leg of the client's.
func (m *scratch) edit(edits openai.Edits) {
	if len(edits) > 0 {
		client := m.body.data
		m.body.Rewrite(edits.Len(len(client)), func(to []byte) []byte { return edits.Apply(to, client) })
	}
}
