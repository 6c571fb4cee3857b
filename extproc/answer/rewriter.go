// Package answer is about answers that an option has rewritten on their way to the client. Only these depend on a
// replica of Tandem; all others stream through Envoy alone.
//
//   - [Rewriter] and [Joined] say how D's answer is rewritten, from its ticket (rewriter.go).
//   - [Replacer] restores the model name that the client asked for (replacer.go).
//
// Package openai edits the bodies; package extproc has the handlers.
package answer

import (
	"fmt"

	"tandem/extproc/kvtransfer"
	"tandem/extproc/openai"
)

// Rewriter returns how to rewrite D's answer, if its ticket alone says so: with P's first token, or with the number of
// tokens that P had cached. Otherwise it is nil.
func Rewriter(t *kvtransfer.Ticket) (openai.Rewriter, error) {
	switch {
	case t.Stage == kvtransfer.DecodeLeg && t.Params != nil:
		c, err := kvtransfer.ReadContinuation(t.Params)
		if err != nil {
			return nil, fmt.Errorf("the ticket of an answer leg: %w", err)
		}
		return c, nil
	case t.Stage == kvtransfer.DecodeLeg && t.Cached > 0:
		return Cached(t), nil
	}
	return nil, nil
}

// TooLarge is the error for an answer that must be rewritten but has more than limit bytes.
func TooLarge(limit int) *openai.Error {
	return openai.Unavailable("answer_too_large",
		fmt.Sprintf("an answer of more than %d bytes cannot be rewritten", limit), 0)
}

// Cached returns the rewriter that reports P's cached tokens.
func Cached(t *kvtransfer.Ticket) openai.Rewriter {
	return openai.CachedTokens{N: t.Cached - 1, Written: t.Written - 1}
}

// Joined inserts P's answer into D's when the legs run concurrently. The replica that serves P's leg stores P's answer
// under the attempt's id before it ends the leg, and all replicas learn when the leg ends. D generates no token before
// that, so the wait is short.
type Joined struct {
	Prefill func() (answer []byte, ok bool) // waits for P's answer

	with *openai.InputLogprobs
}

func (j *Joined) wait() {
	if j.with == nil {
		j.with = &openai.InputLogprobs{}
		j.with.Prefill, _ = j.Prefill()
	}
}

// Begin implements [openai.Rewriter].
func (*Joined) Begin(dst []byte) []byte { return dst }

// Whole implements [openai.Rewriter].
func (j *Joined) Whole(dst, answer []byte) ([]byte, error) {
	j.wait()
	return j.with.Whole(dst, answer)
}

// Event implements [openai.Rewriter].
func (j *Joined) Event(dst, event []byte) []byte {
	j.wait()
	return j.with.Event(dst, event)
}
