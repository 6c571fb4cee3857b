package filter

import (
	"bytes"

	"tandem/extproc/answer"
	"tandem/extproc/openai"
)

// withoutParams removes kv_transfer_params from the events of D's answer, which has them if D declines expired KV. A
// nil one leaves an answer as it is.
type withoutParams struct {
	events openai.Events
	by     answer.CutParams
	out    []byte
}

// feed returns what the client may have of the next bytes. An incomplete event waits for its end.
func (w *withoutParams) feed(piece []byte) ([]byte, error) {
	if w == nil {
		return piece, nil
	}
	w.out = w.out[:0]
	err := w.events.Feed(piece, func(event []byte) { w.out = w.by.Event(w.out, event) })
	return w.out, err //nolint:wrapcheck // it says all
}

// end returns what is left at the end. An event that lacks its end stays as it is.
func (w *withoutParams) end() []byte {
	if w == nil {
		return nil
	}
	w.out = w.out[:0]
	w.events.End(func(event []byte) {
		if bytes.Contains(event, []byte(`"kv_transfer_params"`)) {
			w.out = w.by.Event(w.out, event)
		} else {
			w.out = append(w.out, event...)
		}
	})
	return w.out
}
