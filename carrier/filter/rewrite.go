package filter

import (
	"context"
	"net/http"
	"slices"

	"tandem/extproc/answer"
	"tandem/extproc/kvtransfer"
	"tandem/extproc/openai"
	"tandem/internal/guard"
	"tandem/kvstate"
)

// rewrite is an answer of D's that the client does not get as it is: a stream event by event, in the hook of each
// piece; a whole answer when it is complete, in a goroutine, because it may be long.
type rewrite struct {
	f      *Filter
	by     openai.Rewriter
	stream bool
	begun  bool
	events openai.Events
	piece  []byte // scratch
	out    []byte // scratch
	held   int64  // of the budget of all requests, bytes
	ids    int64  // likewise, for token ids
}

// answers lets D's answer go on to the client, rewritten if its ticket says so. end: it has no body.
func answers(f *Filter, o *Outcome, end bool) Status {
	f.begun()
	if end || f.hop.ticket.Stage == 0 {
		return Continue
	}
	r := &rewrite{f: f, stream: openai.IsEventStream(string(f.envoy.ResponseHeader("content-type")))}
	if r.by = r.rewriter(o.Status); r.by == nil {
		return Continue
	}
	f.hop.rewrite = r
	f.envoy.HoldAnswer(true)
	f.envoy.SetResponseHeader("content-length", "")
	if r.stream {
		return Continue
	}
	return Stop
}

// rewriter returns how to rewrite an answer with a status; nil: it stays.
func (r *rewrite) rewriter(status int) openai.Rewriter {
	f := r.f
	t, p := &f.hop.ticket, f.hop.pair
	if status != http.StatusOK {
		if p != nil && status >= 400 && status < 500 && !kvstate.Refuses(status) {
			return refusal{}
		}
		return nil
	}
	switch {
	case t.Stage == kvtransfer.PairLegs:
		if p == nil || p.joined == nil {
			return nil
		}
		return openai.InputLogprobs{Prefill: p.joined}
	case t.Turn.Answers:
		return r.conversation(t)
	}
	by, err := answer.Rewriter(t)
	if err != nil {
		f.s.Passes.Log.Error("decode's answer stays as it is", "request_id", f.id, "err", err)
		return nil
	}
	if policy, _ := f.s.Passes.Policy(t.Pool); by == nil && t.Loads && policy.Dialect.Expiry != nil {
		return &answer.CutParams{}
	}
	return by
}

// conversation returns the rewriter of an answer that has a description of D's blocks, which is kept for the
// conversation's next turn.
func (r *rewrite) conversation(t *kvtransfer.Ticket) openai.Rewriter {
	f, of := r.f, clone(t)
	id, passes := f.id, f.s.Passes
	kept := func(params []byte, ids []uint32) { // StoreTurn may ask Redis
		params, ids = slices.Clone(params), slices.Clone(ids)
		go func() {
			defer guard.Recover(guard.With(context.Background(), passes.Guard), "envoy filter turn")
			passes.StoreTurn(id, &of, params, ids)
		}()
	}
	return answer.Conversation(t, kept, func(n int) bool { return f.s.Memory.Replace(&r.ids, int64(n)) })
}

// body is called for each piece of the answer. end: it is the last.
func (r *rewrite) body(end bool) Status {
	if !r.stream {
		return r.whole(end)
	}
	envoy := r.f.envoy
	r.piece = envoy.AppendPiece(r.piece[:0])
	r.out = r.out[:0]
	if !r.begun && len(r.piece) > 0 {
		r.begun, r.out = true, r.by.Begin(r.out)
	}
	each := func(event []byte) { r.out = r.by.Event(r.out, event) }
	if err := r.events.Feed(r.piece, each); err != nil {
		r.f.s.Passes.Log.Error("decode's answer is cut", "request_id", r.f.id, "err", err)
		envoy.Reset()
		return Stop
	}
	if end {
		r.events.End(each)
	}
	envoy.ReplacePiece(r.out)
	return Continue
}

// whole rewrites an answer that is complete, and lets it go on.
func (r *rewrite) whole(end bool) Status {
	f := r.f
	size := f.envoy.AnswerSize()
	switch {
	case r.begun:
	case size > maxAnswer:
		r.refuse(answer.TooLarge(maxAnswer))
	case end && !f.s.Memory.Replace(&r.held, 2*int64(size)):
		r.refuse(openai.ServerBusy())
	case end:
		r.begun = true
		got := f.envoy.AppendAnswer(make([]byte, 0, size))
		f.beside("answer", true, func(context.Context) func() {
			out, err := r.by.Whole(make([]byte, 0, size+4096), got)
			if err != nil {
				f.s.Passes.Log.Error("decode's answer stays as it is", "request_id", f.id, "err", err)
				out = got
			}
			return func() {
				f.got.tokens.Read(out, f.envoy.SetMetadataNumber)
				f.envoy.ReplaceAnswer(out)
				f.envoy.ContinueAnswer()
			}
		})
	}
	return Stop
}

func (r *rewrite) refuse(e *openai.Error) {
	r.begun = true
	r.f.hop.sent = false
	r.f.refuse(e)
}

// close gives the memory of an answer back.
func (r *rewrite) close() {
	r.f.s.Memory.Replace(&r.held, 0)
	r.f.s.Memory.Replace(&r.ids, 0)
}

// refusal is D's refusal of a request, without the members that Tandem added for D.
type refusal struct{}

// Begin implements [openai.Rewriter].
func (refusal) Begin(dst []byte) []byte { return dst }

// Whole implements [openai.Rewriter].
func (refusal) Whole(dst, answer []byte) ([]byte, error) { return openai.CutEcho(dst, answer), nil }

// Event implements [openai.Rewriter].
func (refusal) Event(dst, event []byte) []byte { return append(append(dst, event...), "\n\n"...) }
