package journey

import (
	"time"

	"tandem/extproc/ended"
	"tandem/extproc/kvtransfer"
	"tandem/extproc/pass"
	"tandem/extproc/reclaim"
	"tandem/extproc/telemetry"
	"tandem/extproc/usage"
	"tandem/kvstate"
)

// Shared is what the journeys of a server share. It is safe for concurrent use.
type Shared struct {
	Passes *pass.Shared
	Tracer telemetry.Tracer // nil: no traces
}

// Ending is the end of a request, as a transport knows it.
type Ending struct {
	Ticket *kvtransfer.Ticket // of the last pass: it says what the request holds
	Ended  *ended.Pass
	Here   bool // this replica made the reservations of that pass
	// HandedOver: the ticket is that of a prefill leg, whose answer the next pass has read without deciding.
	HandedOver bool
}

// End ends a request: it releases what the request still holds, frees or counts KV that nobody will fetch, records what
// the end shows of the endpoints and what the request used, its row, metrics and span, and has later decisions learn
// from it. It is called once for each request at each replica that learns of its end. It reports whether this replica
// is the one that counts the request.
func (s *Shared) End(o *Ending) (mine bool) {
	p, t, e := s.Passes, o.Ticket, o.Ended
	mine = p.Release(pass.HeldBy(t)) || o.Here
	p.Reclaim.Ended(t, e, o.Here)
	p.Faults.DecodeEnded(t, e)
	if o.HandedOver {
		t.ID, t.Stage, t.Redirects = t.ID.Inline(), kvtransfer.HandOver, t.Redirects+1
	}
	s.record(t, e, mine)
	if mine && t.Stage == kvtransfer.HandOver && e.ClientGone && !p.Reclaim.Enabled(t.Pool) {
		p.Reclaim.Left(t, reclaim.ClientGone)
	}
	return mine
}

// record records the row, the metrics and the span of a request, and what it used.
func (s *Shared) record(t *kvtransfer.Ticket, e *ended.Pass, mine bool) {
	p := s.Passes
	var took, first time.Duration
	if t.Stage == kvtransfer.DecodeLeg || t.Stage == kvtransfer.PairLegs {
		sealed := p.SealedAt(t)
		took = max(e.Start.Add(e.Duration).Sub(sealed), 0)
		if e.FirstByte > 0 {
			first = max(e.Start.Add(e.FirstByte).Sub(sealed), 0)
		}
	}
	used := p.Observer.RequestEnded(t, e, took, first, mine)
	if mine && used != nil {
		telemetry.TraceAnswer(s.Tracer, t, e, used)
		learn(p.State, t, e, used)
	}
}

// mostKept is the length in bytes up to which Envoy buffers a whole answer for a slow client: half of what a listener
// buffers at least. The time of a longer answer may be the client's.
const mostKept = 4 << 20

// learn teaches the state from an answer that ended well: how long its model's are, and how fast its endpoint writes.
func learn(state *kvstate.State, t *kvtransfer.Ticket, e *ended.Pass, u *usage.Used) {
	pool := state.Pool(t.Pool)
	if pool == nil || u.Answer == nil || telemetry.EndedAs(t, e) != "ok" {
		return
	}
	var writing time.Duration
	if e.Body <= mostKept && !e.Continued {
		writing = u.PerToken * time.Duration(*u.Answer-1)
	}
	prompt := t.PromptTokens
	if u.Prompt != nil {
		prompt = *u.Prompt
	}
	if endpoint := pool.Endpoint(telemetry.AnsweredBy(t)); endpoint != nil {
		kvstate.Answered(endpoint, u.Model, prompt, *u.Answer, writing, time.Now())
	}
}
