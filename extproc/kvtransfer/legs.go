package kvtransfer

import (
	"fmt"

	"tandem/extproc/openai"
)

// For those who send both legs of a completion themselves, one after the other, and none of them through Envoy.

// PrefillBody returns the body of the prefill leg of a completion. The dialect must have Prefill.
func (d *Dialect) PrefillBody(body []byte, pair *Pair) ([]byte, error) {
	var r openai.Request
	var p openai.Patch
	if err := r.Scan(openai.Completions, body, openai.Limits{}); err != nil {
		return nil, fmt.Errorf("reading a completion: %w", err)
	}
	p.Reset(&r)
	d.Prefill(&r, &p, pair)
	return p.Edits().Apply(nil, body), nil
}

// DecodeBody returns the body of the decode leg: that of the completion, an object without a space before its first
// member, with P's parameters for D.
func (d *Dialect) DecodeBody(body, params []byte) []byte {
	return append(append(d.DecodeMember([]byte("{"), params), ','), body[1:]...)
}
