package filter

import (
	"context"

	"tandem/extproc/answer"
	"tandem/extproc/journey"
	"tandem/extproc/openai"
)

// rewrite is an answer of D's that the client does not get as it is: a stream event by event, in the hook of each
// piece; a whole answer when it is complete, in a goroutine, because it may be long.
type rewrite struct {
	f      *Filter
	by     openai.Rewriter
	events *answer.Stream // nil: the answer is no stream
	begun  bool
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
	r := &rewrite{f: f}
	if r.by = r.rewriter(o.Status); r.by == nil {
		return Continue
	}
	f.hop.rewrite = r
	f.envoy.HoldAnswer(true)
	f.envoy.SetResponseHeader("content-length", "")
	if openai.IsEventStream(string(f.envoy.ResponseHeader("content-type"))) {
		r.events = answer.NewStream(r.by)
		return Continue
	}
	return Stop
}

// rewriter returns how to rewrite an answer with a status; nil: it stays.
func (r *rewrite) rewriter(status int) openai.Rewriter {
	f := r.f
	how := journey.Rewriting{
		RequestID: f.id, Status: status, Inside: true,
		Room: func(n int) bool { return f.s.Memory.Replace(&r.ids, int64(n)) },
	}
	if p := f.hop.pair; p != nil && p.joined != nil {
		how.Joined = func() ([]byte, bool) { return p.joined, true }
	}
	by, err := f.s.journeys.Rewriter(&f.hop.ticket, &how)
	if err != nil {
		f.s.Passes.Log.Error("decode's answer stays as it is", "request_id", f.id, "err", err)
	}
	return by
}

// body is called for each piece of the answer. end: it is the last.
func (r *rewrite) body(end bool) Status {
	if r.events == nil {
		return r.whole(end)
	}
	envoy := r.f.envoy
	r.piece = envoy.AppendPiece(r.piece[:0])
	var err error
	if r.out, err = r.events.Append(r.out[:0], r.piece, end); err != nil {
		r.f.s.Passes.Log.Error("decode's answer is cut", "request_id", r.f.id, "err", err)
		envoy.Reset()
		return Stop
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
		f.offWorker("answer", true, func(passing, context.Context) onWorker {
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
	r.f.takeBack()
	r.f.refuse(e)
}

// close gives the memory of an answer back.
func (r *rewrite) close() {
	r.f.s.Memory.Replace(&r.held, 0)
	r.f.s.Memory.Replace(&r.ids, 0)
}
