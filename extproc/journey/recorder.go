// Package journey is the life of a request, the same for both transports. It knows neither gRPC nor Envoy's messages.
package journey

import (
	"time"

	"tandem/extproc/ended"
	"tandem/extproc/kvtransfer"
	"tandem/extproc/telemetry"
	"tandem/extproc/usage"
	"tandem/kvstate"
)

// Recorder records in these.
type Recorder struct {
	State    *kvstate.State
	Observer *telemetry.Observer
	Tracer   telemetry.Tracer // nil: no traces
}

// Record records the end of a request, whose last ticket was made at sealed. mine: this replica counts it.
func (to Recorder) Record(t *kvtransfer.Ticket, e *ended.Pass, sealed time.Time, mine bool) {
	var took, first time.Duration
	if t.Stage == kvtransfer.DecodeLeg || t.Stage == kvtransfer.PairLegs {
		took = max(e.Start.Add(e.Duration).Sub(sealed), 0)
		if e.FirstByte > 0 {
			first = max(e.Start.Add(e.FirstByte).Sub(sealed), 0)
		}
	}
	used := to.Observer.RequestEnded(t, e, took, first, mine)
	if mine && used != nil {
		telemetry.TraceAnswer(to.Tracer, t, e, used)
		learn(to.State, t, e, used)
	}
}

// mostKept is the length in bytes up to which Envoy buffers a whole answer for a slow client: half of what a listener
// buffers at least. The time of a longer answer may be the client's.
const mostKept = 4 << 20

// learn has the state learn from an answer that ended well: how long its model's are, and how fast its endpoint writes.
func learn(state *kvstate.State, t *kvtransfer.Ticket, e *ended.Pass, u *usage.Used) {
	pool := state.Pool(t.Pool)
	if pool == nil || u.Answer == nil || telemetry.EndedAs(t, e) != "ok" {
		return
	}
	var writing time.Duration
	if e.Body <= mostKept {
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
