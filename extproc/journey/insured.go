package journey

import (
	"cmp"
	"net/http"
	"slices"
	"time"

	"tandem/extproc/faults"
	"tandem/extproc/kvtransfer"
	"tandem/extproc/migration"
	"tandem/extproc/openai"
	"tandem/extproc/pass"
	"tandem/extproc/plan"
	"tandem/kvstate"
)

// Insured is a streamed answer that shall outlive its engine (docs/continue.md): it is there from the first pass until
// the client has the end. When an engine ends its answer before its time, another one continues it; when an engine
// fails silently or is to be drained, another one is asked while the first goes on.
//
// Each method is an event, and returns what the transport does next. It is not safe for concurrent use.
type Insured struct {
	Stream migration.Stream // what the client has of the answer, and what the next engine is asked with

	shared *Shared
	policy migration.Policy
	id     string             // of the request
	ticket *kvtransfer.Ticket // of the last pass; the transport sets it
	state  StreamState
	begun  bool      // the client has the head of the answer
	since  time.Time // when the engine that is followed began to write

	times  int       // how often it was continued, or was to be
	died   []string  // the engines that ended it before its time, without another cause that is known
	loads  int       // how often KV that could not be loaded ended it before its first text
	cause  string    // why another engine is asked; "": none is
	last   time.Time // when the previous engine last sent something
	from   time.Time // when another engine was asked to continue
	said   []byte    // the error event with which the previous engine ended
	before *before   // the previous engine, while it is still there; nil: it is not
	rest   time.Time // no other engine is asked before this time while this one is well
}

// before is an engine that is still there while another one is asked to continue its stream.
type before struct {
	ticket kvtransfer.Ticket
	stream migration.Stream
	times  int
}

// StreamState is where the answer of the engine that is followed stands.
type StreamState int

// The states of an insured stream's leg.
const (
	StreamAsked  StreamState = iota // the engine was asked, and has not answered
	StreamNamed                     // Envoy answers in its place, and the body says why
	StreamLate                      // it answers, and its first event has to be checked: it may be another prompt's
	StreamHead                      // it answers, and has sent no event
	StreamWrites                    // it has sent an event: it alone serves the request
	StreamUnread                    // its answer passes as it is: it is no stream of events, or the end of one
)

// StreamStep is what a transport does next.
type StreamStep int

// What a transport does next with an insured stream.
const (
	ReadOn      StreamStep = iota // the client gets what the engine sends
	BeginAnswer                   // the client gets the head of the answer, if it has none yet
	Finish                        // the leg ends, and Rest is the end of the answer
	AskAgain                      // the leg ends, and a pass is planned: the client has nothing of this answer
	GoOn                          // the leg ends, and a pass is planned for an engine that continues the answer
	MoveOn                        // the same, while the leg goes on: what it sends is kept
	GoBack                        // the leg ends, and the engine before it is followed again
	PassEnd                       // the client gets Rest, and what else the engine sends, as it is
	AnswerError                   // the leg ends, and the client gets Err
	BreakOff                      // the leg ends, and the client's answer breaks off: Why
)

// StreamAction is what follows from an event of an insured stream.
type StreamAction struct {
	Do      StreamStep
	Ticket  kvtransfer.Ticket // of the pass that is planned ...
	Attempt plan.Attempt      // ... and what it knows
	Rest    []byte
	Why     string
	Err     *openai.Error
}

// Why a stream is to be continued; label values.
const (
	CauseReset     = "reset"     // the connection broke
	CauseEnded     = "ended"     // the answer ended without [DONE], or with an error
	CauseDifferent = "different" // the next engine wrote something else
	CauseAnew      = "anew"      // the next engine did not continue: it began anew
	CauseSilent    = "silent"    // its endpoint has failed, and nothing comes
	CauseMoved     = "moved"     // its endpoint gets no more work, by order
	CauseSlow      = "slow_client"
)

// What came of it, beyond [migration.Reason]; label values.
const (
	streamContinued = "continued"
	streamFinished  = "finished"
	streamStayed    = "stayed"
	streamTimes     = "times"       // it was continued too often
	streamDied      = "died_again"  // the engine that took over ended it, too: the answer may be what kills them
	streamRefused   = "no_endpoint" // none took it
)

// NewInsured returns the answer to a request for which [migration.Refusal] has no reason. t is where the transport
// keeps the ticket of the last pass.
func (s *Shared) NewInsured(
	r *openai.Request, p migration.Policy, t *kvtransfer.Ticket, requestID string,
) *Insured {
	return &Insured{shared: s, policy: p, Stream: migration.NewStream(r, p), ticket: t, id: requestID}
}

// State returns where the answer of the engine that is followed stands.
func (in *Insured) State() StreamState { return in.state }

// Begun reports whether the client has the head of the answer.
func (in *Insured) Begun() bool { return in.begun }

// HasPart reports whether the client has a part of the answer: what fails from now on is not its error.
func (in *Insured) HasPart() bool { return in.begun || in.before != nil }

// Joined reports whether several engines wrote the answer.
func (in *Insured) Joined() bool { return in.times > 0 }

// Asked is the event that an engine was asked. The first one's ticket has what prefill found in its cache.
func (in *Insured) Asked() {
	if in.state = StreamAsked; in.times == 0 {
		in.Stream.Cached = in.ticket.Cached - 1
	}
}

// StreamAnswer is the head of an engine's answer, or of Envoy's in its place.
type StreamAnswer struct {
	Status  int
	Engine  bool // the engine gave it
	Events  bool // it is a stream of events that can be read
	Failure faults.Failure
}

// Answers is the event that an answer begins.
func (in *Insured) Answers(a *StreamAnswer) StreamAction {
	failed := faults.Failed(a.Status)
	switch {
	case failed && !a.Engine:
		in.state = StreamNamed
		return StreamAction{}
	case failed && (in.shared.Another(in.ticket) || in.HasPart()):
		return in.Fails(&a.Failure)
	case failed && faults.Redirects(a.Status):
		return StreamAction{Do: AnswerError, Err: openai.Redirected()}
	case failed:
		return in.passes()
	case !a.Events && in.HasPart():
		return in.Fails(&faults.Failure{Status: a.Status})
	case !a.Events:
		return in.passes()
	case in.shared.AnswerRule(in.ticket).Late > 0:
		in.state = StreamLate
		return StreamAction{}
	}
	in.state = StreamHead
	return StreamAction{Do: BeginAnswer}
}

func (in *Insured) passes() StreamAction {
	in.state = StreamUnread
	return StreamAction{Do: BeginAnswer}
}

// Begins is the event that the client is to get the head of the answer. It reports whether it has none yet.
func (in *Insured) Begins() bool {
	first := !in.begun
	in.begun = true
	return first
}

// FirstByte is the event that an answer begins that has to be checked ([StreamLate]): if it may be made from KV that
// is another prompt's by now, the request is planned again.
func (in *Insured) FirstByte() StreamAction {
	s, t := in.shared, in.ticket
	in.state = StreamHead
	if s.Passes.Since(t) > s.AnswerRule(t).Late && s.IsOutdated(t, in.id) {
		return in.Fails(&faults.Failure{})
	}
	return StreamAction{Do: BeginAnswer}
}

// Writes is the event that the engine has sent its first event: from now on it alone serves the request.
func (in *Insured) Writes() {
	in.state, in.since = StreamWrites, time.Now()
	in.LeaveBefore()
	if in.cause != "" {
		streams := &in.shared.Passes.Observer.Streams
		streams.Continued(in.ticket.Pool, in.cause, streamContinued)
		streams.Paused(in.ticket.Pool, in.cause, time.Since(in.last))
		in.cause = ""
	}
}

// LeaveBefore is the event that the previous engine, if it is still there, is not needed any more.
func (in *Insured) LeaveBefore() {
	if b := in.before; b != nil {
		in.before = nil
		in.leave(&b.ticket, "moved")
	}
}

// leave releases what a leg held that has ended before its time.
func (in *Insured) leave(t *kvtransfer.Ticket, result string) {
	passes := in.shared.Passes
	passes.Observer.HopEnded(t.Pool, "decode", t.Decode, result, passes.Since(t), nil)
	passes.Release(pass.HeldBy(t))
}

// Resets is the event that the connection breaks. sent is when the engine last sent something.
func (in *Insured) Resets(sent time.Time) StreamAction {
	switch {
	case in.state == StreamUnread:
		return StreamAction{Do: BreakOff, Why: CauseReset}
	case in.Stream.Done():
		return StreamAction{Do: Finish}
	case in.state == StreamWrites:
		return in.breaks(CauseReset, sent)
	case (in.state == StreamHead || in.state == StreamLate) && in.diesAgain():
		return in.endsHere(CauseReset, nil)
	}
	return in.Fails(&faults.Failure{})
}

// Breaks is the event that the client gets no more of the engine's answer ([migration.Stream.Broken]).
func (in *Insured) Breaks(why migration.Reason, sent time.Time) StreamAction {
	switch why {
	case migration.Failed:
		return in.breaks(CauseEnded, sent)
	case migration.OtherStart: // the next engine did not continue: it ignored the token ids
		passes := in.shared.Passes
		if pool := passes.State.Pool(in.ticket.Pool); pool != nil {
			passes.DoesNotContinue(pool, in.ticket.Decode, in.id)
		}
		return in.breaks(CauseAnew, sent)
	default:
		return in.breaks(CauseDifferent, sent)
	}
}

// breaks asks for another engine to continue a stream whose engine ended it before its time.
func (in *Insured) breaks(cause string, sent time.Time) StreamAction {
	t, streams := in.ticket, &in.shared.Passes.Observer.Streams
	rest := in.Stream.Release(nil) // an error's event
	reason := in.Stream.Continue()
	switch {
	case reason == migration.Complete:
		streams.Continued(t.Pool, cause, streamFinished)
		return StreamAction{Do: Finish, Rest: in.Stream.Finish(nil)}
	case cause == CauseDifferent || cause == CauseAnew || reason != "": // D is well, or nobody else is asked
	case in.unloaded(cause):
	case in.diesAgain():
		return in.endsHere(cause, rest)
	}
	if reason == "" && in.times >= in.policy.Limit() {
		reason = streamTimes
	}
	switch {
	case reason == "":
		in.blame(cause)
		in.said = rest
		return in.goOn(GoOn, cause, kvtransfer.CauseStream, sent)
	case in.before != nil:
		in.shared.Passes.Observer.HopEnded(t.Pool, "decode", t.Decode, "failed", in.shared.Passes.Since(t), nil)
		return in.goBack()
	}
	streams.Continued(t.Pool, cause, string(reason))
	if cause == CauseEnded { // the client gets D's own error
		in.state = StreamUnread
		return StreamAction{Do: PassEnd, Rest: rest}
	}
	return StreamAction{Do: BreakOff, Why: cause + ": " + string(reason)}
}

// blame releases what the leg held, and records who is at fault that it ended.
func (in *Insured) blame(cause string) {
	t, passes := in.ticket, in.shared.Passes
	in.leave(t, "failed")
	switch pool := passes.State.Pool(t.Pool); {
	case cause == CauseDifferent, cause == CauseAnew: // D is well
	case cause == CauseReset:
		passes.Faults.Hop(t.Pool, in.id, t.Decode, &faults.Failure{})
	case pool != nil && in.notLoaded():
		passes.Faults.LoadFailed(pool, t.Prefill, t.Decode, faults.SeenStream)
	default:
		passes.Faults.Hop(t.Pool, in.id, t.Decode, &faults.Failure{Status: http.StatusInternalServerError})
	}
}

// notLoaded reports whether D's error may be that it could not load P's KV: there is no text yet.
func (in *Insured) notLoaded() bool { return in.ticket.Loads && in.Stream.Empty() }

// unloaded counts an error that may be a failed KV load. It reports whether another engine may still be asked.
func (in *Insured) unloaded(cause string) bool {
	const most = 2
	if cause != CauseEnded || !in.notLoaded() {
		return false
	}
	in.loads++
	return in.loads <= most
}

// mostDeaths is how many engines may die under one answer, however long each had written.
const mostDeaths = 3

// diesAgain counts an engine that has died under the answer, or ended it with an error. It reports whether to stop
// asking others, because the request may be what kills them. The first one is always replaced. The next ones are
// replaced only if they had written for a while ([migration.Policy.Soon]): a request that kills engines does so at the
// same place again.
func (in *Insured) diesAgain() bool {
	in.died = append(in.died, in.ticket.Decode)
	n := len(in.died)
	return n >= mostDeaths || n > 1 && (in.state != StreamWrites || time.Since(in.since) < in.policy.Soon())
}

// endsHere ends the answer for that reason. said is the engine's error, if it sent one. If the previous engine is still
// there, it goes on.
func (in *Insured) endsHere(cause string, said []byte) StreamAction {
	if in.before != nil {
		return in.goBack()
	}
	t, passes := in.ticket, in.shared.Passes
	passes.Observer.Streams.Continued(t.Pool, cause, streamDied)
	passes.Observer.DiedUnder(in.id, t, in.died)
	passes.Log.Warn(
		"engines died, or failed, one after the other under one request: it may be the cause, and no other "+
			"one is asked (docs/continue.md#a-request-that-kills-engines)", "request_id", in.id, "pool", t.Pool,
		"endpoints", in.died, "cause", cause)
	passes.Faults.CheckEndpoint(passes.State.Pool(t.Pool), t.Decode)
	switch {
	case cause == CauseEnded:
		in.state = StreamUnread
		return StreamAction{Do: PassEnd, Rest: said}
	case !in.begun:
		return StreamAction{Do: AnswerError, Err: openai.Unavailable("endpoint_failed",
			"two engines failed under this request, one after the other", time.Second)}
	}
	return StreamAction{Do: BreakOff, Why: cause + ": " + streamDied}
}

// goOn plans a pass that continues the stream on another engine than D.
func (in *Insured) goOn(step StreamStep, cause, planned string, sent time.Time) StreamAction {
	t := *in.ticket
	in.times++
	if in.cause == "" {
		in.last = sent
	}
	in.cause, in.from, t.Cause, t.Stage = cause, in.shared.Passes.Now(), planned, kvtransfer.Failed
	return StreamAction{Do: step, Ticket: t, Attempt: plan.Attempt{
		Redirects: 1, Started: t.Started, From: in.from, Excluded: []string{t.Decode}, DecodeFailed: true,
	}}
}

// Fails is the event that the leg has failed before its first event.
func (in *Insured) Fails(how *faults.Failure) StreamAction {
	if !in.shared.Another(in.ticket) || in.Stream.Continue() != "" {
		return in.NoneTakes(openai.Unavailable("endpoint_failed", "no endpoint answered; try again", time.Second))
	}
	next := in.shared.DecodeFailed(in.ticket, in.id, how)
	in.shared.Passes.Release(pass.HeldBy(in.ticket)) // the next pass resumes none
	a := plan.Next(&next)
	a.From = in.from
	return StreamAction{Do: AskAgain, Ticket: next, Attempt: a}
}

// NoneTakes is the event that no endpoint serves the request. The client gets an error or, if it has a part of the
// answer, what the engine said when it ended that. If the previous engine is still there, it goes on.
func (in *Insured) NoneTakes(e *openai.Error) StreamAction {
	switch {
	case in.before != nil:
		return in.goBack()
	case !in.begun:
		return StreamAction{Do: AnswerError, Err: e}
	}
	cause := cmp.Or(in.cause, CauseReset)
	in.shared.Passes.Observer.GivenUp(e)
	in.shared.Passes.Observer.Streams.Continued(in.ticket.Pool, cause, streamRefused)
	if in.cause == CauseEnded && len(in.said) > 0 {
		return StreamAction{Do: Finish, Rest: in.said}
	}
	return StreamAction{Do: BreakOff, Why: cause + ": " + e.Code + ": " + e.Message}
}

// Move is the event that the engine should be replaced while it is still there ([Shared.Replaces]).
func (in *Insured) Move(cause string, sent time.Time) StreamAction {
	if in.before != nil || len(in.died) > 1 || in.state != StreamWrites || in.times >= in.policy.Limit() ||
		time.Now().Before(in.rest) {
		return StreamAction{}
	}
	if cause == CauseMoved && in.Stream.Repeats() {
		return StreamAction{} // the client would wait until another engine has written all of it again
	}
	b := &before{ticket: *in.ticket, stream: in.Stream, times: in.times}
	if in.Stream.Continue() != "" {
		return StreamAction{}
	}
	in.before = b
	return in.goOn(MoveOn, cause, kvtransfer.CauseMoved, sent)
}

// restsFor is the pause before another engine is asked again, if none took the stream of an engine that should be
// replaced.
const restsFor = 5 * time.Second

// goBack has the previous engine go on, which is still there: no other one took its stream.
func (in *Insured) goBack() StreamAction {
	b, passes := in.before, in.shared.Passes
	in.before, in.rest = nil, time.Now().Add(restsFor)
	passes.Observer.Streams.Continued(b.ticket.Pool, in.cause, streamStayed)
	passes.Release(pass.HeldBy(in.ticket))
	in.Stream, in.times, in.state, in.cause = b.stream, b.times, StreamWrites, "" // it was not continued
	return StreamAction{Do: GoBack}
}

// silentAfter is how long a stream whose endpoint has failed may be silent.
const silentAfter = 2 * time.Second

// Replaces returns why the engine of an insured stream should be replaced; "": it should not. writes: it has sent an
// event; quiet: how long it has been silent. Before its first event it is [CauseReset]: its answer will not come.
func (s *Shared) Replaces(t *kvtransfer.Ticket, writes bool, quiet time.Duration) (cause string) {
	if !writes {
		if quiet >= Silence && s.Lost(t) {
			return CauseReset
		}
		return ""
	}
	e := plan.EndpointOf(s.Passes.State, t.Pool, t.Decode)
	switch {
	case e != nil && e.Failed() && quiet >= silentAfter:
		cause = CauseSilent
	case e == nil || e.Paused() || e.Draining:
		cause = CauseMoved
	}
	if cause != "" && !s.othersDecode(t, nil) {
		return ""
	}
	return cause
}

// othersDecode reports whether, as far as is known, an endpoint may decode that is neither the ticket's nor one of
// those given.
func (s *Shared) othersDecode(t *kvtransfer.Ticket, without []string) bool {
	pool := s.Passes.State.Pool(t.Pool)
	return pool != nil && slices.ContainsFunc(pool.Endpoints(), func(e *kvstate.Endpoint) bool {
		return e.Addr != t.Decode && e.TakesWork() && e.Role&kvstate.RoleDecode != 0 &&
			!slices.Contains(without, e.Addr)
	})
}
