package answer

import (
	"bytes"

	"tandem/extproc/openai"
)

// CutParams removes kv_transfer_params from D's answer, which describe its blocks and name internal hosts: engines that
// hand KV over both ways write them into every answer. What has none stays byte for byte.
type CutParams struct{ turn openai.TurnAnswer }

var paramsKey = []byte(`"kv_transfer_params"`)

// Begin implements [openai.Rewriter].
func (*CutParams) Begin(dst []byte) []byte { return dst }

// Whole implements [openai.Rewriter].
func (c *CutParams) Whole(dst, answer []byte) ([]byte, error) {
	if !bytes.Contains(answer, paramsKey) {
		return append(dst, answer...), nil
	}
	c.turn.OwnIDs = true
	return c.turn.Whole(dst, answer)
}

// Event implements [openai.Rewriter].
func (c *CutParams) Event(dst, event []byte) []byte {
	if !bytes.Contains(event, paramsKey) {
		return append(append(dst, event...), "\n\n"...)
	}
	c.turn.OwnIDs = true
	return c.turn.Event(dst, event)
}

// WithoutParams removes kv_transfer_params from the events of D's answer, which has them if D declines expired KV. A
// nil one leaves an answer as it is.
type WithoutParams struct {
	events openai.Events
	by     CutParams
	out    []byte
}

// Feed returns what the client may have of the next bytes. An incomplete event waits for its end.
func (w *WithoutParams) Feed(piece []byte) ([]byte, error) {
	if w == nil {
		return piece, nil
	}
	w.out = w.out[:0]
	err := w.events.Feed(piece, func(event []byte) { w.out = w.by.Event(w.out, event) })
	return w.out, err //nolint:wrapcheck // it says all
}

// End returns what is left at the end. An event that lacks its end stays as it is.
func (w *WithoutParams) End() []byte {
	if w == nil {
		return nil
	}
	w.out = w.out[:0]
	w.events.End(func(event []byte) {
		if bytes.Contains(event, paramsKey) {
			w.out = w.by.Event(w.out, event)
		} else {
			w.out = append(w.out, event...)
		}
	})
	return w.out
}
