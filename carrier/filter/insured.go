package filter

import (
	"cmp"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"tandem/extproc/answer"
	"tandem/extproc/faults"
	"tandem/extproc/journey"
	"tandem/extproc/kvtransfer"
	"tandem/extproc/migration"
	"tandem/extproc/names"
	"tandem/extproc/openai"
	"tandem/extproc/pass"
)

// Insured is D's answer to a request whose stream shall outlive its engine (docs/continue.md). The filter makes D's leg
// by itself, as a stream of Envoy's HTTP client, and reads what D sends. What follows from what happens to it is
// [journey.Insured]'s; here it is carried out. All of it runs on the worker, except where a comment says otherwise. The
// methods that Envoy calls do nothing on a nil Insured.
type Insured struct {
	f       *Filter
	api     openai.API
	journey *journey.Insured

	d     dLeg
	to    answering
	spare *spare // the leg of the previous engine, which is still there; nil: it is not

	lastSent atomic.Int64          // when D last sent something; Unix nanoseconds
	placed   atomic.Pointer[place] // where D's leg is; nil: nowhere. The watcher reads it
}

// dLeg is the leg to D that is followed now.
type dLeg struct {
	id     uint64   // of Envoy's stream; 0: none
	starts bool     // it is being started: its number is not known yet
	status int      // of the answer
	head   []Header // of the answer, for a client that has none yet
	reply  []byte   // the body of Envoy's answer in D's place
	params *answer.WithoutParams
}

// answering is what the client gets.
type answering struct {
	ended bool   // it has the end
	gone  string // why it ended too early; "": it did not
	out   []byte // scratch

	above     bool   // the client takes less than it is sent
	waiting   []byte // what it has not taken
	lastWaits bool   // its end follows
	held      int64  // of the memory budget
}

// place is where a leg is. It is never changed.
type place struct {
	ticket kvtransfer.Ticket
	writes bool // its answer has begun
}

// spare is the leg of an engine that is still there while another one is asked to continue its stream.
type spare struct {
	leg    uint64 // 0: it has ended
	hop    hop
	placed *place
	kept   []byte // what it sends meanwhile
	ended  bool   // in the regular way
	params *answer.WithoutParams
}

// Bounds of what is kept for one insured stream, in bytes.
const (
	maxWaiting = 4 << 20  // that its client has not taken
	maxSpare   = 1 << 20  // that an engine sends while another one is asked
	maxReply   = 4 << 10  // of an answer of Envoy's own
	sendPiece  = 64 << 10 // that is sent at once
)

// resultMemory is the result of a stream that is no longer insured because there is no memory for its token ids.
const resultMemory = "memory"

// InsuredOf returns the insured answer of a request; nil: it is not insured, or not yet.
func InsuredOf(f *Filter) *Insured { return f.insured.Load() }

// hasPart reports whether the client has a part of the answer: what fails from now on is not its error.
func (in *Insured) hasPart() bool { return in != nil && in.journey.HasPart() }

// joined reports whether several engines wrote the answer.
func (in *Insured) joined() bool { return in != nil && in.journey.Joined() }

// start starts D's leg.
func (in *Insured) start(r *pass.Routed, body []byte) {
	f := in.f
	c := legCall(f, r.Endpoint, r.Path, body, 0, r.Endpoint.RankName(), f.id)
	for i := range c.Set {
		if c.Set[i].Name == "accept" {
			c.Set[i].Value = cmp.Or(f.head.get("accept"), openai.EventStream)
		}
	}
	f.m.meter.Processed(names.RoleMain)
	f.drop()
	f.state = journey.Answering // if this fails, the stream is continued
	in.d = dLeg{}
	in.journey.Asked()
	if f.s.journeys.AnswerRule(&f.hop.ticket).Cut {
		in.d.params = &answer.WithoutParams{}
	}
	in.noteSent()
	in.placed.Store(&place{ticket: f.hop.ticket.Clone()})
	f.s.watchInsured(in, true)
	in.d.starts = true
	id, ok := f.envoy.StartStream(c)
	if started := in.d.starts; started && ok {
		in.d.id = id
	} else if started {
		in.d.starts = false
		in.carryOut(in.journey.Fails(&faults.Failure{}))
		return
	}
	in.d.starts = false
}

// mine reports whether an event is of the leg that is followed. One that comes while the leg is being started is, too.
func (in *Insured) mine(id uint64) bool {
	if in.d.starts {
		in.d.starts, in.d.id = false, id
	}
	return in.d.id != 0 && in.d.id == id && !in.to.ended
}

func (in *Insured) noteSent() { in.lastSent.Store(time.Now().UnixNano()) }

// sent returns when D last sent something. Any thread may call it.
func (in *Insured) sent() time.Time { return time.Unix(0, in.lastSent.Load()) }

// stop ends D's leg.
func (in *Insured) stop() {
	if id := in.d.id; id != 0 {
		in.d.id = 0
		in.f.envoy.ResetStream(id)
	}
}

// StreamHeaders is called when the answer to D's leg begins. end: that was all.
func (in *Insured) StreamHeaders(id uint64, headers func(do func(name, value []byte)), end bool) {
	if in == nil {
		return
	}
	in.f.guarded("stream headers", func() Status {
		if in.mine(id) {
			in.headers(headers)
			if end && in.d.id == id {
				in.data(nil, true)
			}
		}
		return Continue
	})
}

func (in *Insured) headers(headers func(do func(name, value []byte))) {
	in.noteSent()
	a := &prefilled{}
	status, engine := a.read(headers)
	in.d.status, in.d.head = status, a.headers
	events, coded := false, false
	for _, h := range a.headers {
		events = events || h.Name == "content-type" && openai.IsEventStream(h.Value)
		coded = coded || h.Name == "content-encoding" && !strings.EqualFold(h.Value, "identity")
	}
	in.carryOut(in.journey.Answers(&journey.StreamAnswer{
		Status: status, Engine: engine, Events: status == http.StatusOK && events && !coded,
		Failure: faults.Of(status, "via_upstream", string(a.RetryAfter)),
	}))
}

// begin sends the client the head of the answer, unless it has one.
func (in *Insured) begin() {
	if !in.journey.Begins() {
		return
	}
	in.f.got.first = time.Since(in.f.began)
	headers := append([]Header{{":status", strconv.Itoa(in.d.status)}}, slices.DeleteFunc(in.d.head,
		func(h Header) bool { return h.Name == ":status" })...)
	in.f.envoy.SendHeaders(in.f.got.sends(in.f, headers))
	in.d.head = nil
}

// StreamData is called with the next bytes of an answer. end: they are the last.
func (in *Insured) StreamData(id uint64, pieces [][]byte, end bool) {
	if in == nil {
		return
	}
	in.f.guarded("stream data", func() Status {
		if s := in.spare; s != nil && s.leg == id && !in.d.starts {
			s.keep(in, pieces, end)
		} else if in.mine(id) {
			in.data(pieces, end)
		}
		return Continue
	})
}

// keep stores what an engine sends while another one may still continue its stream. If there is too much of it, or no
// memory for it, the other one must continue.
func (s *spare) keep(in *Insured, pieces [][]byte, end bool) {
	for _, p := range pieces {
		s.kept = append(s.kept, p...)
	}
	if s.ended = end; end {
		s.leg = 0
	} else if len(s.kept) > maxSpare || !in.hold() {
		in.dropSpare()
	}
}

func (in *Insured) data(pieces [][]byte, end bool) {
	in.noteSent()
	in.to.out = in.to.out[:0]
	if end {
		in.d.id = 0
	}
	switch in.journey.State() {
	case journey.StreamNamed:
		for _, p := range pieces {
			in.d.reply = append(in.d.reply, p[:min(len(p), maxReply-len(in.d.reply))]...)
		}
		if end {
			failure := faults.Of(in.d.status, string(details(in.d.status, in.d.reply)), "")
			in.carryOut(in.journey.Fails(&failure))
		}
		return
	case journey.StreamUnread:
		for _, p := range pieces {
			in.to.out = append(in.to.out, p...)
		}
		in.give(in.to.out, end)
		return
	case journey.StreamLate:
		if !end && openai.IsComment(slices.Concat(pieces...)) {
			return
		}
		if a := in.journey.FirstByte(); a.Do != journey.BeginAnswer {
			in.carryOut(a)
			return
		}
	case journey.StreamAsked, journey.StreamHead, journey.StreamWrites:
	}
	in.begin()
	in.read(pieces, end)
}

// read gives the client what it gets of the next bytes of a stream.
func (in *Insured) read(pieces [][]byte, end bool) {
	stream := &in.journey.Stream
	for _, p := range pieces {
		p, err := in.d.params.Feed(p)
		if err != nil {
			in.cut(err.Error())
			return
		}
		in.to.out = stream.Feed(in.to.out, p)
	}
	if end {
		in.to.out = stream.End(stream.Feed(in.to.out, in.d.params.End()))
	}
	broken := stream.Broken()
	if in.journey.State() != journey.StreamWrites && !openai.IsComment(in.to.out) && broken == "" {
		in.writes()
	}
	switch broken {
	case "":
		in.give(in.to.out, end)
		in.count()
		return
	case migration.OtherStart:
	default:
		in.give(in.to.out, false)
	}
	if !in.to.ended {
		in.carryOut(in.journey.Breaks(broken, in.sent()))
	}
}

// writes notes that D has sent an event: from now on it alone serves the request.
func (in *Insured) writes() {
	if p := in.placed.Load(); p != nil {
		in.placed.Store(&place{ticket: p.ticket, writes: true})
	}
	in.journey.Writes()
	in.dropSpare()
}

// StreamTrailers is called at the end of an answer that has trailers.
func (in *Insured) StreamTrailers(id uint64) { in.StreamData(id, nil, true) }

// StreamReset is called when an answer breaks off, and after [Envoy.ResetStream].
func (in *Insured) StreamReset(id uint64) {
	if in == nil {
		return
	}
	in.f.guarded("stream reset", func() Status {
		if s := in.spare; s != nil && s.leg == id && !in.d.starts {
			s.leg = 0
		} else if in.mine(id) {
			in.d.id = 0
			in.carryOut(in.journey.Resets(in.sent()))
		}
		return Continue
	})
}

func (in *Insured) breakOff(why string) {
	in.to.ended, in.to.gone = true, why
	in.f.envoy.Reset()
}

// give sends the client a part of its answer. What it does not take waits.
func (in *Insured) give(data []byte, end bool) {
	if in.to.ended || len(data) == 0 && !end {
		return
	}
	in.f.got.tokens.Give(data, in.f.envoy.SetMetadataNumber)
	if in.to.above || len(in.to.waiting) > 0 {
		in.to.waiting, in.to.lastWaits = append(in.to.waiting, data...), end
		if !in.hold() || len(in.to.waiting) > maxWaiting {
			in.tooSlow()
		}
		return
	}
	in.to.ended = end
	in.f.envoy.Send(data, end) // with its end, Envoy ends the filter before this returns
}

// tooSlow ends the answer to a client that reads it too slowly: Envoy cannot make D wait.
func (in *Insured) tooSlow() {
	in.f.s.Passes.Observer.Streams.Continued(in.f.hop.ticket.Pool, journey.CauseSlow, journey.CauseSlow)
	in.stop()
	in.dropSpare()
	in.breakOff(journey.CauseSlow)
}

// count counts the memory of the stream. If there is none left, it is not insured any more.
func (in *Insured) count() {
	n := int64(in.journey.Stream.Bytes() + len(in.to.waiting))
	if in.to.ended || n-in.to.held < 4<<10 && in.to.held-n < 4<<10 {
		return
	}
	if !in.hold() {
		in.journey.Stream.Forget(resultMemory)
		in.hold()
	}
}

func (in *Insured) hold() bool {
	n := len(in.to.waiting)
	if in.spare != nil {
		n += len(in.spare.kept)
	}
	return in.f.s.Memory.Replace(&in.to.held, int64(n+in.journey.Stream.Bytes()))
}

// AboveWatermark is called when the client reads more slowly than it is sent to, BelowWatermark when it has taken that.
func (in *Insured) AboveWatermark() {
	if in != nil {
		in.to.above = true
	}
}

// BelowWatermark is the end of [Insured.AboveWatermark].
func (in *Insured) BelowWatermark() {
	if in == nil || in.to.ended {
		return
	}
	in.f.guarded("below watermark", func() Status {
		in.to.above = false
		for len(in.to.waiting) > 0 && !in.to.above && !in.to.ended {
			piece := in.to.waiting[:min(len(in.to.waiting), sendPiece)]
			rest := in.to.waiting[len(piece):]
			in.to.ended = len(rest) == 0 && in.to.lastWaits
			in.f.envoy.Send(piece, in.to.ended)
			in.to.waiting = rest
		}
		if len(in.to.waiting) == 0 {
			in.to.waiting = nil
		}
		if !in.to.ended {
			in.hold()
		}
		return Continue
	})
}

// close ends whatever is still open for an insured request that is over.
func (in *Insured) close() {
	if in == nil {
		return
	}
	in.to.ended = true
	in.f.s.watchInsured(in, false)
	in.dropSpare()
	in.stop()
	in.to.waiting = nil
	in.f.s.Memory.Replace(&in.to.held, 0)
}

// outcome completes what Envoy says of the end of the answer: Envoy sees only the client's side.
func (in *Insured) outcome(o *Outcome) {
	switch {
	case in == nil || !in.journey.Begun() || o.ClientGone():
	case in.to.gone == journey.CauseSlow:
		o.Flags |= flagClientGone
	case in.to.gone != "":
		o.Details = "upstream_reset_after_response_started{" + in.to.gone + "}"
	default:
		o.Details = "via_upstream"
	}
}
