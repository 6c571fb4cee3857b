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
