package answer

import (
	"fmt"

	"tandem/extproc/openai"
)

// Stream rewrites a streamed answer event by event, however its bytes arrive.
type Stream struct {
	by     openai.Rewriter
	events openai.Events
	begun  bool
	out    []byte // while a piece is rewritten
	each   func(event []byte)
}

// NewStream returns a stream that is rewritten by a rewriter.
func NewStream(by openai.Rewriter) *Stream {
	s := &Stream{by: by}
	s.each = func(event []byte) { s.out = s.by.Event(s.out, event) }
	return s
}

// Append appends to dst what the client gets for the next piece of the answer. end marks the last one. An incomplete
// event waits for its end. It returns an error if an event is too long.
func (s *Stream) Append(dst, piece []byte, end bool) ([]byte, error) {
	s.out = dst
	if !s.begun && len(piece) > 0 {
		s.begun, s.out = true, s.by.Begin(s.out)
	}
	err := s.events.Feed(piece, s.each)
	if end && err == nil {
		s.events.End(s.each)
	}
	if dst, s.out = s.out, nil; err != nil {
		err = fmt.Errorf("decode's answer: %w", err)
	}
	return dst, err
}

// Between reports whether the next byte begins an event.
func (s *Stream) Between() bool { return s.events.Between() }

// Release appends to dst what waits for its end, as it came.
func (s *Stream) Release(dst []byte) []byte { return s.events.Release(dst) }

// Marks stand in each event that a rewriter changes which is [Marked]. carrier/hooks.c has them, too.
func Marks() []string { return []string{`_tokens"`, `kv_transfer_params"`} }

// Marked reports whether a rewriter changes no event without one of the [Marks].
func Marked(by openai.Rewriter) bool {
	switch by := by.(type) {
	case openai.CachedTokens, openai.CutParams:
		return true
	case openai.Both:
		return Marked(by.First) && Marked(by.Second)
	}
	return false
}

// WithoutEcho is the rewriter of an engine's refusal: without the members that Tandem had added for the engine.
type WithoutEcho struct{}

// Begin implements [openai.Rewriter].
func (WithoutEcho) Begin(dst []byte) []byte { return dst }

// Whole implements [openai.Rewriter].
func (WithoutEcho) Whole(dst, answer []byte) ([]byte, error) { return openai.CutEcho(dst, answer), nil }

// Event implements [openai.Rewriter].
func (WithoutEcho) Event(dst, event []byte) []byte { return append(append(dst, event...), "\n\n"...) }
