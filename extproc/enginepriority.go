package extproc

import (
	"strconv"

	"tandem/extproc/kvtransfer"
	"tandem/extproc/openai"
	"tandem/extproc/plan"
)

// EnginePriority is how a pool's engines learn a request's priority: in the body's member priority, which replaces
// the client's.
type EnginePriority uint8

// The kinds of engines that take priorities.
const (
	NoEnginePriority EnginePriority = iota // the engines do not learn it
	VLLMPriority                           // lower goes first; takes --scheduling-policy priority
	SGLangPriority                         // higher goes first; takes --enable-priority-scheduling
)

// classStep is the weight of one step of priority for vLLM, where requests of one priority are ordered by their
// position in the queue, in milliseconds: more than positions will reach in a century, and with maxClass steps
// still an exact integer to every JSON reader.
const (
	classStep = 1 << 42
	maxClass  = 1 << 9
)

// setPriority puts the request's priority into the leg's body, as a change of x.patch. vLLM gets the priority and,
// within one, the key of the request's position in the queue: a second of work weighs as much as five of age.
// SGLang interrupts running requests for slightly more urgent ones (--priority-scheduling-preemption-threshold), so
// it gets the priority only.
func (x *planning) setPriority(policy *Policy) {
	value := int64(x.priority)
	switch policy.Priorities {
	case NoEnginePriority:
		return
	case VLLMPriority:
		place := x.Began.UnixMilli()/5 + x.work.Milliseconds()
		value = place - min(max(value, -maxClass), maxClass)*classStep
	case SGLangPriority:
	}
	x.patch.Set("priority", openai.FieldPriority, strconv.AppendInt(nil, value, 10))
}

// aloneEdits returns the edits of the body for an endpoint that does both, and their undo.
func (x firstPass) aloneEdits(policy Policy, id [16]byte, decode int, a *plan.Attempt) (edits, undo openai.Edits) {
	pulls := policy.Dialect.Pull != nil
	if pulls {
		x.pair = pairOf(x.requestID, id, kvtransfer.Side{}, kvtransfer.Side{})
		x.setSource(policy, decode)
		pulls = x.pair.Source != nil
	}
	if !pulls && policy.Priorities == NoEnginePriority && a.Encoded == nil {
		return nil, nil
	}
	x.patch.Reset(&x.req)
	if pulls {
		policy.Dialect.Pull(&x.patch, &x.pair)
	}
	x.insertEncoded(a)
	x.setPriority(&policy)
	edits = x.patch.Edits()
	x.undo = edits.Inverse(x.undo[:0], x.body.Bytes())
	return edits, x.undo
}
