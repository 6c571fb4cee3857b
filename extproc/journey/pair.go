package journey

import (
	"net/http"
	"time"

	"tandem/extproc/concurrent"
	"tandem/extproc/faults"
	"tandem/extproc/kvtransfer"
	"tandem/extproc/openai"
	"tandem/extproc/plan"
)

// Pair is a request both of whose legs are under way: P computes the prompt and sends its KV, while D waits for it. D
// has no token before P has done its part, and most engines answer a stream with 200 before they have done anything;
// what has gone to a client cannot be planned again. So D's good headers are held until P's verdict, or until they show
// that D has P's blocks (docs/adr/0089). When P dies, D often fails first, so a failed D waits for the verdict, too.
//
// Each method is an event, and returns what the transport does next. After [LetGo], [PlanAgain] and [Refuse] nothing
// follows. It is not safe for concurrent use.
type Pair struct {
	shared *Shared
	ticket *kvtransfer.Ticket // of P's body
	rules  PairRules
	d      decodeLeg
	failed faults.Failure // how D did, while it waits for P's verdict
	sent   bool           // P has done its part
}

// PairRules are what a transport and its engines add to the rules of a pair.
type PairRules struct {
	// Early: P's leg goes on without D's. So D's answer may go to the client before P's verdict, if it shows that D has
	// P's blocks.
	Early       bool
	StreamsLate bool // D answers 200 only when it has P's blocks, even if the answer is a stream
}

// decodeLeg is where D's leg of a pair stands.
type decodeLeg int

const (
	decodeSilent  decodeLeg = iota // it has not answered
	decodeHeld                     // it has answered well, and waits for P's verdict
	decodeFailing                  // it has failed, likewise
	decodeOver                     // it no longer needs P
)

// PairAction is what a transport does next with a pair.
type PairAction struct {
	Do    PairStep
	After time.Duration // > 0: [Pair.Elapsed] follows after it, if the pair is not over before
	// Holds: D has the prompt now: call [Shared.PairHolds].
	Holds   bool
	Abandon bool            // nobody waits for P's leg any more
	Leg     faults.Leg      // of [PlanAgain]: which leg failed ...
	Failure *faults.Failure // ... and how
	// Refusal is P's refusal of the request, of [Refuse].
	Refusal *concurrent.Outcome
}

// PairStep is the step of a [PairAction].
type PairStep int

// What a transport does next.
const (
	Await      PairStep = iota // nothing, until the next event
	SendDecode                 // D's leg is sent
	Hold                       // the headers of D's answer wait
	LetGo                      // D's answer goes to the client, now or when it comes
	PlanAgain                  // both legs end, and the request is planned again
	Refuse                     // the client gets P's refusal
)

// NewPair returns the pair of a ticket.
func (s *Shared) NewPair(t *kvtransfer.Ticket, r PairRules) *Pair {
	return &Pair{shared: s, ticket: t, rules: r}
}

// Begin is the first event: P's leg is under way.
func (p *Pair) Begin() PairAction { return PairAction{Do: SendDecode} }

// PrefillEnded is P's verdict: how its leg has ended.
func (p *Pair) PrefillEnded(v *concurrent.Outcome) PairAction {
	switch {
	case p.d == decodeOver:
		return PairAction{}
	case !v.OK:
		return p.prefillFailed(v)
	}
	p.sent = true
	switch p.d {
	case decodeFailing:
		return p.planAgain(faults.Decode, &p.failed)
	case decodeHeld:
		return p.letGo(true)
	default:
		return PairAction{Do: LetGo, Holds: true} // D may fail yet: then it alone is at fault
	}
}

func (p *Pair) prefillFailed(v *concurrent.Outcome) PairAction {
	f := &faults.Failure{Status: v.Status, RetryAfter: v.RetryAfter, Unreached: v.Unreached}
	if p.shared.pairMeans(p.ticket, faults.Prefill, f).Client {
		p.d = decodeOver
		return PairAction{Do: Refuse, Refusal: v, Abandon: true}
	}
	return p.planAgain(faults.Prefill, f)
}

// PrefillOverdue is the event that P has exceeded its time limit ([Shared.PairLimit]).
func (p *Pair) PrefillOverdue() PairAction {
	if p.d == decodeOver || p.sent {
		return PairAction{}
	}
	p.shared.Passes.Observer.PrefillLate(p.ticket)
	return p.planAgain(faults.Prefill, &faults.Failure{Unreached: true})
}

// DecodeHead is the head of D's answer, or of Envoy's in its place.
type DecodeHead struct {
	Status  int
	Failure faults.Failure // how D failed, if the status says so
	Whole   bool           // the answer is no stream: it is complete when its head comes
	Final   bool           // Envoy must not ask another endpoint
}

// DecodeAnswers is the event that D's answer begins.
func (p *Pair) DecodeAnswers(h *DecodeHead) PairAction {
	switch {
	case p.d == decodeOver:
		return PairAction{Do: LetGo}
	case faults.Failed(h.Status) && !h.Final && (h.Status != http.StatusNotFound || p.shared.Another(p.ticket)):
		return p.DecodeFails(&h.Failure)
	case h.Status != http.StatusOK && h.Status != http.StatusPartialContent: // D refuses this request
		p.d = decodeOver
		return PairAction{Do: LetGo, Abandon: true}
	case p.sent:
		return p.letGo(false)
	case p.rules.Early && h.Whole:
		return p.letGo(true)
	}
	p.d = decodeHeld
	a := PairAction{Do: Hold}
	if p.rules.Early && p.rules.StreamsLate {
		a.After = verdictSoon
	}
	return a
}

// verdictSoon is how long P's verdict may take after headers that say that D has P's blocks: when P dies, D may show it
// first.
const verdictSoon = 100 * time.Millisecond

// DecodeFails is the event that D has failed before its answer began.
func (p *Pair) DecodeFails(how *faults.Failure) PairAction {
	d := plan.EndpointOf(p.shared.Passes.State, p.ticket.Pool, p.ticket.Decode)
	if p.sent || how.Full() || d != nil && d.Failed() { // whatever P's verdict is, D is at fault
		return p.planAgain(faults.Decode, how)
	}
	p.d, p.failed = decodeFailing, *how
	return PairAction{After: concurrent.VerdictWait}
}

// DecodeLost is the event that D will not answer: P's verdict does not matter.
func (p *Pair) DecodeLost() PairAction {
	if p.d == decodeOver {
		return PairAction{}
	}
	return p.planAgain(faults.Decode, &faults.Failure{})
}

// Elapsed is the event that the time of an action is over.
func (p *Pair) Elapsed() PairAction {
	switch p.d {
	case decodeFailing:
		return p.planAgain(faults.Decode, &p.failed)
	case decodeHeld:
		return p.letGo(true)
	default:
		return PairAction{}
	}
}

// Drained is the event that the replica stops: Envoy goes on with what it has.
func (p *Pair) Drained() PairAction {
	switch p.d {
	case decodeOver:
		return PairAction{}
	case decodeFailing:
		return p.Elapsed()
	default:
		return p.letGo(false)
	}
}

// Refusal returns the body with which the client gets P's refusal of a request to a path.
func Refusal(v *concurrent.Outcome, path []byte) []byte {
	if len(v.Answer) > 0 {
		return v.Answer
	}
	e := openai.Error{
		Status: v.Status, Type: "invalid_request_error", Code: "prefill_refused",
		Message: "the prefill endpoint refused this request",
	}
	return e.For(path).JSON()
}

func (p *Pair) letGo(holds bool) PairAction {
	p.d = decodeOver
	return PairAction{Do: LetGo, Holds: holds}
}

func (p *Pair) planAgain(leg faults.Leg, how *faults.Failure) PairAction {
	p.d = decodeOver
	return PairAction{Do: PlanAgain, Leg: leg, Failure: how, Abandon: true}
}
