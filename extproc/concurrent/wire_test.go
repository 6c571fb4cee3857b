package concurrent

import (
	"testing"

	"github.com/stretchr/testify/require"

	"tandem/extproc/kvtransfer"
	"tandem/extproc/openai"
)

// D's body is made from P's by the ticket's undo, which is needed again where the pair fails: the next pair's body is
// the client's, without a member of D's.
func TestDecodeEditsLeaveTheUndoAsItIs(t *testing.T) {
	prefills := `{"mine":1,"model":"m"}`
	ticket := kvtransfer.Ticket{BodyBytes: len(prefills), Params: []byte(`"theirs":2`), Undo: openai.Edits{{Start: 1, End: 10}}}
	edits, err := DecodeEdits(&ticket, len(prefills))
	require.NoError(t, err)
	decodes := edits.Apply(nil, []byte(prefills))
	require.Equal(t, `{"theirs":2,"model":"m"}`, string(decodes))
	require.Equal(t, `{"model":"m"}`, string(ticket.Undo.Apply(nil, []byte(prefills))))
	require.Equal(t, `{"model":"m"}`, string(DecodeUndo(&ticket).Apply(nil, decodes)))
}
