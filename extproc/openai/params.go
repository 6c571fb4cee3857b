package openai

import (
	"bytes"
	"errors"
)

// CutParams removes kv_transfer_params from D's answer, which describe its blocks and name internal hosts: vLLM with
// bidirectional_kv_xfer writes them into every answer, and from 0.33 into the last event of a stream. An answer without
// them stays byte for byte.
type CutParams struct{}

var (
	paramsKey = []byte(`"kv_transfer_params"`)
	null      = []byte("null")
)

// Begin implements [Rewriter].
func (CutParams) Begin(dst []byte) []byte { return dst }

// Whole implements [Rewriter].
func (CutParams) Whole(dst, answer []byte) ([]byte, error) {
	switch {
	case !bytes.Contains(answer, paramsKey):
		return append(dst, answer...), nil
	case !valid(answer):
		return dst, errors.New("decode's answer is not JSON")
	}
	return withoutParams(dst, answer[skipSpace(answer, 0):], false), nil
}

// Event implements [Rewriter].
func (CutParams) Event(dst, event []byte) []byte {
	if bytes.Contains(event, paramsKey) {
		if data := eventObject(event); data != nil {
			return appendEvent(dst, event, withoutParams(nil, data, true))
		}
	}
	return append(append(dst, event...), "\n\n"...)
}

// withoutParams appends an object without its kv_transfer_params: they become null, and in an event the member goes.
// The last event of /v1/responses has the whole answer in a member.
func withoutParams(dst, object []byte, event bool) []byte {
	if len(object) == 0 || object[0] != '{' {
		return append(dst, object...)
	}
	return appendMembers(dst, object, func(key string, value []byte) []byte {
		switch {
		case key == "response":
			return withoutParams(nil, value, false)
		case key != "kv_transfer_params":
			return value
		case event:
			return nil
		}
		return null
	})
}
