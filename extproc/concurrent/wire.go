package concurrent

import (
	"errors"
	"fmt"
	"slices"

	"tandem/extproc/kvtransfer"
	"tandem/extproc/openai"
)

// DecodeEdits returns the edits that turn P's body, which must have that many bytes, into D's: they undo the changes
// made for P, and replace P's members by D's, unless they are meant for both.
func DecodeEdits(t *kvtransfer.Ticket, bytes int) (openai.Edits, error) {
	if bytes != t.BodyBytes {
		return nil, fmt.Errorf("the body of a decode leg has %d bytes, %d were sent", bytes, t.BodyBytes)
	}
	if err := t.Undo.Check(bytes); err != nil {
		return nil, fmt.Errorf("undoing a leg's edits: %w", err)
	}
	switch {
	case len(t.Undo) == 0:
		return nil, errors.New("the undo of a prefill leg is empty")
	case t.Params == nil:
		return t.Undo[1:], nil
	}
	edits := slices.Clone(t.Undo) // the ticket's own is for the client's body, if the pair fails
	edits[0].New = append(append(t.Params, ','), edits[0].New...)
	return edits, nil
}

// DecodeUndo returns the edits that turn D's body, which [DecodeEdits] has made, into the client's; t is the ticket of
// P's body.
func DecodeUndo(t *kvtransfer.Ticket) openai.Edits {
	if t.Params == nil {
		return t.Undo[:1] // P's first members are in it
	}
	front := t.Undo[0].Start
	return openai.Edits{{Start: front, End: front + len(t.Params) + 1}}
}
