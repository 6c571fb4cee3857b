package extproc

import (
	"strconv"

	"tandem/extproc/kvtransfer"
	"tandem/extproc/openai"
	"tandem/extproc/plan"
)

// EnginePriority is how the engines of a pool are told of a request's place among others: in the member priority of the body
// for those that schedule by it, in the place of what the client says there.
type EnginePriority uint8

// The engines that take priorities.
const (
	NoEnginePriority EnginePriority = iota // they are not told
	VLLMPriority                           // lower goes first; takes --scheduling-policy priority
	SGLangPriority                         // higher goes first; takes --enable-priority-scheduling
)

// classStep is what one step of a request's own priority is worth to vLLM, where those of one priority are told apart by
// their place in the queue, in milliseconds: more than places will be for a century, and with maxClass steps still a whole
// number to every JSON reader.
const (
	classStep = 1 << 42
	maxClass  = 1 << 9
)

// setPriority puts the request's place among others into the leg's body, as a change of x.patch. vLLM is told its priority
// and, within one, the key by which it stands in the queue: a second of work yields to five of age. SGLang interrupts what
// runs for what is only a little more urgent (--priority-scheduling-preemption-threshold), so it is told the priority alone.
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

// aloneEdits are what is changed of the body for an endpoint that does both, and their undo.
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
