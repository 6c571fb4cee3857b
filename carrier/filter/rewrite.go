package filter

import (
	"bytes"
	"context"
	"strconv"

	"tandem/extproc/answer"
	"tandem/extproc/journey"
	"tandem/extproc/openai"
)

// rewrite is an answer of D's that the client does not get as it is: a stream event by event, in the hook of each
// piece; a whole answer when it is complete, in a goroutine, because it may be long, or as it passes, if only its
// counts of cached tokens are replaced.
type rewrite struct {
	f      *Filter
	by     openai.Rewriter
	events *answer.Stream        // nil: the answer is no stream
	counts *openai.PassingCounts // nil: it is held until it is complete
	marked bool                  // of a stream: events without a mark stay as they are, and need no hook
	loose  bool                  // the answer may pass as it is: then nothing makes it fail
	begun  bool
	piece  []byte // scratch
	out    []byte // scratch
	held   int64  // of the budget of all requests, bytes
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
	if coding := f.envoy.ResponseHeader("content-encoding"); len(coding) > 0 {
		f.s.Passes.Log.Error("decode's answer stays as it is", "request_id", f.id, "content_encoding", string(coding))
		return Continue
	}
	counts, loose := r.by.(openai.CachedTokens)
	f.hop.rewrite, r.loose = r, loose
	f.envoy.HoldAnswer(true)
	if openai.IsEventStream(string(f.envoy.ResponseHeader("content-type"))) {
		f.envoy.SetResponseHeader("content-length", "")
		r.events, r.marked = answer.NewStream(r.by), answer.Marked(r.by)
		f.envoy.PassEvents(r.marked)
		return Continue
	}
	if loose { // the headers wait for the first piece: mostly it is all, and then the length is known
		r.counts = &openai.PassingCounts{By: counts}
	} else {
		f.envoy.SetResponseHeader("content-length", "")
	}
	return Stop
}

// rewriter returns how to rewrite an answer with a status; nil: it stays.
func (r *rewrite) rewriter(status int) openai.Rewriter {
	f := r.f
	how := journey.Rewriting{Status: status, Inside: true}
	if p := f.hop.pair; p != nil && p.joined != nil {
		how.Joined = func() ([]byte, bool) { return p.joined, true }
	}
	by, err := f.s.journeys.Rewriter(&f.hop.ticket, &how)
	if err != nil {
		f.s.Passes.Log.Error("decode's answer stays as it is", "request_id", f.id, "err", err)
	}
	return by
}

// body is called for pieces of the answer. end: it is the last.
func (r *rewrite) body(end bool) Status {
	if r.events == nil && r.counts == nil {
		return r.whole(end)
	}
	envoy := r.f.envoy
	r.piece = envoy.AppendPiece(r.piece[:0])
	if r.counts != nil {
		r.count(end)
	} else if !r.edit(end) {
		return Stop
	}
	if !bytes.Equal(r.piece, r.out) {
		envoy.ReplacePiece(r.out)
	}
	return Continue
}

// count replaces the counts in a piece of a whole answer.
func (r *rewrite) count(end bool) {
	envoy := r.f.envoy
	r.out = r.counts.Append(r.out[:0], r.piece, end)
	if !r.begun {
		r.begun = true
		if n := len(r.piece); end || string(envoy.ResponseHeader("content-length")) == strconv.Itoa(n) {
			envoy.SetResponseHeader("content-length", strconv.Itoa(len(r.out)))
		} else {
			envoy.SetResponseHeader("content-length", "")
		}
	}
	if r.counts.Over() {
		envoy.HoldAnswer(false)
	}
}

// edit rewrites the events that a piece of a stream completes. false: the answer is cut.
func (r *rewrite) edit(end bool) bool {
	var err error
	r.out, err = r.events.Append(r.out[:0], r.piece, end)
	switch {
	case err == nil:
		r.f.envoy.PassEvents(r.marked && r.events.Between())
	case r.loose:
		r.out = r.events.Release(r.out)
		r.f.envoy.HoldAnswer(false)
	default:
		r.f.s.Passes.Log.Error("decode's answer is cut", "request_id", r.f.id, "err", err)
		r.f.envoy.Reset()
	}
	return err == nil || r.loose
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
}
