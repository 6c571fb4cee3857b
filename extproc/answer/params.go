package answer

import (
	"bytes"

	"tandem/extproc/openai"
)

var paramsKey = []byte(`"kv_transfer_params"`)

// WithoutParams removes kv_transfer_params from the events of D's answer, which has them if D declines expired KV. A
// nil one leaves an answer as it is.
type WithoutParams struct {
	events openai.Events
	out    []byte
}

// Feed returns the next bytes without what the client must not get. An incomplete event waits for its end.
func (w *WithoutParams) Feed(piece []byte) ([]byte, error) {
	if w == nil {
		return piece, nil
	}
	w.out = w.out[:0]
	err := w.events.Feed(piece, func(event []byte) { w.out = openai.CutParams{}.Event(w.out, event) })
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
			w.out = openai.CutParams{}.Event(w.out, event)
		} else {
			w.out = append(w.out, event...)
		}
	})
	return w.out
}
