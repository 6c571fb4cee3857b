package kvtransfer

import (
	"fmt"
	"time"

	"google.golang.org/protobuf/encoding/protowire"

	"tandem/extproc/openai"
)

// The plaintext of a ticket is a tandem.ticket.v1.Ticket (protos/ticket/v1). Every request writes and reads it several
// times, so the codec is hand-written; tests compare it with the generated code.
const (
	fieldID                 protowire.Number = 1
	fieldStage              protowire.Number = 2
	fieldExpires            protowire.Number = 3
	fieldStarted            protowire.Number = 4
	fieldPool               protowire.Number = 5
	fieldPrefill            protowire.Number = 6
	fieldDecode             protowire.Number = 7
	fieldPrefillReservation protowire.Number = 8
	fieldDecodeReservation  protowire.Number = 9
	fieldSplit              protowire.Number = 10
	fieldRedirects          protowire.Number = 11
	fieldPrefills           protowire.Number = 12
	fieldExcluded           protowire.Number = 13
	fieldCause              protowire.Number = 14
	fieldUndo               protowire.Number = 15
	fieldBodyBytes          protowire.Number = 16
	fieldPromptTokens       protowire.Number = 17
	fieldParamsRef          protowire.Number = 18
	fieldPackedParams       protowire.Number = 19
	fieldStream             protowire.Number = 20
	fieldStreamUsage        protowire.Number = 21
	fieldSession            protowire.Number = 22
	fieldPath               protowire.Number = 23
	fieldCached             protowire.Number = 24
	fieldWritten            protowire.Number = 25
	fieldExpectedCached     protowire.Number = 30
	fieldExpectedPrefill    protowire.Number = 31
	fieldModel              protowire.Number = 40
	fieldPrompt             protowire.Number = 32
	fieldLearnBytes         protowire.Number = 33
	fieldLearnLoRA          protowire.Number = 34
	fieldLearnSalt          protowire.Number = 35
	fieldConversation       protowire.Number = 60
	fieldOwnIDs             protowire.Number = 61
	fieldTurnNamed          protowire.Number = 62
	fieldTurnAnswers        protowire.Number = 63
	fieldLoads              protowire.Number = 64
	fieldLeastBytes         protowire.Number = 65
	fieldAnswerTokens       protowire.Number = 66
	fieldAuthority          protowire.Number = 70

	fieldEditStart protowire.Number = 1
	fieldEditEnd   protowire.Number = 2
	fieldEditText  protowire.Number = 3
)

// Bounds of the fields. Tickets are authentic, but whoever steals a key must not be able to exhaust memory.
const (
	maxExcluded = 64
	maxEdits    = 1024
	maxCount    = 1 << 20 // redirects, prefills
	maxLength   = 1 << 40 // of a body
)

// appendTicket appends the message. It leaves out zero fields, like every proto3 encoder.
func appendTicket(b []byte, t *Ticket) []byte {
	b = appendBytes(b, fieldID, t.ID[:])
	b = appendNumber(b, fieldStage, uint64(t.Stage))
	b = appendNumber(b, fieldExpires, uint64(unix(t.Expires, time.Time.UnixMilli)))
	b = appendNumber(b, fieldStarted, uint64(unix(t.Started, time.Time.UnixMicro)))
	b = appendText(b, fieldPool, t.Pool)
	b = appendText(b, fieldPrefill, t.Prefill)
	b = appendText(b, fieldDecode, t.Decode)
	b = appendFixed(b, fieldPrefillReservation, t.Reservations[0])
	b = appendFixed(b, fieldDecodeReservation, t.Reservations[1])
	b = appendNumber(b, fieldSplit, protowire.EncodeBool(t.Split))
	b = appendNumber(b, fieldRedirects, uint64(t.Redirects))
	b = appendNumber(b, fieldPrefills, uint64(t.Prefills))
	for _, addr := range t.Excluded {
		b = protowire.AppendString(protowire.AppendTag(b, fieldExcluded, protowire.BytesType), addr)
	}
	b = appendText(b, fieldCause, t.Cause)
	for _, e := range t.Undo {
		b = appendEdit(b, e)
	}
	b = appendNumber(b, fieldBodyBytes, uint64(t.BodyBytes))
	b = appendNumber(b, fieldPromptTokens, uint64(t.PromptTokens))
	b = appendNumber(b, fieldStream, protowire.EncodeBool(t.Stream))
	b = appendNumber(b, fieldStreamUsage, protowire.EncodeBool(t.StreamUsage))
	b = appendNumber(b, fieldExpectedCached, uint64(t.ExpectedCached))
	b = appendNumber(b, fieldAnswerTokens, uint64(t.AnswerTokens))
	b = appendNumber(b, fieldExpectedPrefill, uint64(t.ExpectedPrefill.Microseconds()))
	if t.ParamsRef != ([16]byte{}) {
		b = appendBytes(b, fieldParamsRef, t.ParamsRef[:])
	}
	b = appendFixed(b, fieldSession, t.Session)
	b = appendText(b, fieldPath, t.Path)
	b = appendNumber(b, fieldCached, uint64(t.Cached))
	b = appendNumber(b, fieldWritten, uint64(t.Written))
	b = appendFixed(b, fieldPrompt, t.Prompt)
	b = appendNumber(b, fieldLearnBytes, uint64(t.Learn.Bytes))
	b = appendText(b, fieldLearnLoRA, t.Learn.LoRA)
	b = appendFixed(b, fieldLearnSalt, t.Learn.Salt)
	if t.Turn.Conversation != ([16]byte{}) {
		b = appendBytes(b, fieldConversation, t.Turn.Conversation[:])
	}
	b = appendNumber(b, fieldOwnIDs, protowire.EncodeBool(t.Turn.OwnIDs))
	b = appendNumber(b, fieldTurnNamed, protowire.EncodeBool(t.Turn.Named))
	b = appendNumber(b, fieldTurnAnswers, protowire.EncodeBool(t.Turn.Answers))
	b = appendNumber(b, fieldLoads, protowire.EncodeBool(t.Loads))
	b = appendNumber(b, fieldLeastBytes, uint64(t.LeastBytes))
	b = appendText(b, fieldAuthority, t.Authority)
	return appendText(b, fieldModel, t.Model)
}

// appendParams appends the last field; packed is the output of pack for Params.
func appendParams(b, packed []byte) []byte { return appendBytes(b, fieldPackedParams, packed) }

func unix(t time.Time, in func(time.Time) int64) int64 {
	if t.IsZero() {
		return 0
	}
	return in(t)
}

func appendEdit(b []byte, e openai.Edit) []byte {
	size := len(e.New)
	if size > 0 {
		size = protowire.SizeTag(fieldEditText) + protowire.SizeBytes(size)
	}
	for _, n := range [...]int{e.Start, e.End} {
		if n != 0 {
			size += 1 + protowire.SizeVarint(uint64(n))
		}
	}
	b = protowire.AppendTag(b, fieldUndo, protowire.BytesType)
	b = protowire.AppendVarint(b, uint64(size))
	b = appendNumber(b, fieldEditStart, uint64(e.Start))
	b = appendNumber(b, fieldEditEnd, uint64(e.End))
	if len(e.New) > 0 {
		b = appendBytes(b, fieldEditText, e.New)
	}
	return b
}

func appendBytes(b []byte, f protowire.Number, v []byte) []byte {
	return protowire.AppendBytes(protowire.AppendTag(b, f, protowire.BytesType), v)
}

func appendNumber(b []byte, f protowire.Number, v uint64) []byte {
	if v == 0 {
		return b
	}
	return protowire.AppendVarint(protowire.AppendTag(b, f, protowire.VarintType), v)
}

func appendFixed(b []byte, f protowire.Number, v uint64) []byte {
	if v == 0 {
		return b
	}
	return protowire.AppendFixed64(protowire.AppendTag(b, f, protowire.Fixed64Type), v)
}

func appendText(b []byte, f protowire.Number, v string) []byte {
	if v == "" {
		return b
	}
	return protowire.AppendString(protowire.AppendTag(b, f, protowire.BytesType), v)
}

// eachField visits the fields of a message: number has varints and fixed64, text the rest. Fields of other types are
// skipped, as unknown ones are by the visitors: a newer release may have written them.
func eachField(b []byte, visit func(f protowire.Number, typ protowire.Type, number uint64, text []byte) error) error {
	for len(b) > 0 {
		f, typ, n := protowire.ConsumeTag(b)
		if n < 0 {
			return fmt.Errorf("reading a tag: %w", protowire.ParseError(n))
		}
		b = b[n:]
		var number uint64
		var text []byte
		switch typ {
		case protowire.VarintType:
			number, n = protowire.ConsumeVarint(b)
		case protowire.Fixed64Type:
			number, n = protowire.ConsumeFixed64(b)
		case protowire.BytesType:
			text, n = protowire.ConsumeBytes(b)
		default:
			n = protowire.ConsumeFieldValue(f, typ, b)
		}
		if n < 0 {
			return fmt.Errorf("reading field %d: %w", f, protowire.ParseError(n))
		}
		b = b[n:]
		if err := visit(f, typ, number, text); err != nil {
			return fmt.Errorf("field %d: %w", f, err)
		}
	}
	return nil
}

// parseTicket reads the message into t. The undo refers to b.
func parseTicket(t *Ticket, b []byte) error {
	undoBytes := 0
	err := eachField(b, func(f protowire.Number, typ protowire.Type, number uint64, text []byte) error {
		switch typ {
		case protowire.VarintType:
			return t.setNumber(f, number)
		case protowire.Fixed64Type:
			switch f {
			case fieldPrefillReservation:
				t.Reservations[0] = number
			case fieldDecodeReservation:
				t.Reservations[1] = number
			case fieldSession:
				t.Session = number
			case fieldPrompt:
				t.Prompt = number
			case fieldLearnSalt:
				t.Learn.Salt = number
			}
			return nil
		case protowire.BytesType:
			if f == fieldUndo {
				return t.addUndo(text, &undoBytes)
			}
			return t.setText(f, text)
		default:
			return nil
		}
	})
	if err != nil {
		return err
	}
	if t.Stage < PrefillLeg || t.Stage > Undecided {
		return fmt.Errorf("the stage is %d", t.Stage)
	}
	if t.BodyBytes > 0 {
		return t.Undo.Check(t.BodyBytes)
	}
	return nil
}

func (t *Ticket) setNumber(f protowire.Number, v uint64) error {
	limit := uint64(1<<63 - 1)
	switch f {
	case fieldStage, fieldSplit, fieldStream, fieldStreamUsage, fieldOwnIDs, fieldTurnNamed, fieldTurnAnswers,
		fieldLoads:
		limit = 255
	case fieldRedirects, fieldPrefills, fieldLeastBytes:
		limit = maxCount
	case fieldBodyBytes, fieldPromptTokens, fieldCached, fieldWritten, fieldExpectedCached, fieldExpectedPrefill,
		fieldLearnBytes, fieldAnswerTokens:
		limit = maxLength
	}
	if v > limit {
		return fmt.Errorf("%d is too much", v)
	}
	switch f {
	case fieldStage:
		t.Stage = Stage(v)
	case fieldExpires:
		t.Expires = time.UnixMilli(int64(v))
	case fieldStarted:
		t.Started = time.UnixMicro(int64(v))
	case fieldSplit:
		t.Split = v != 0
	case fieldStream:
		t.Stream = v != 0
	case fieldStreamUsage:
		t.StreamUsage = v != 0
	case fieldOwnIDs:
		t.Turn.OwnIDs = v != 0
	case fieldTurnNamed:
		t.Turn.Named = v != 0
	case fieldTurnAnswers:
		t.Turn.Answers = v != 0
	case fieldLoads:
		t.Loads = v != 0
	case fieldLeastBytes:
		t.LeastBytes = int(v)
	case fieldRedirects:
		t.Redirects = int(v)
	case fieldPrefills:
		t.Prefills = int(v)
	case fieldBodyBytes:
		t.BodyBytes = int(v)
	case fieldExpectedPrefill:
		t.ExpectedPrefill = time.Duration(v) * time.Microsecond
	case fieldLearnBytes:
		t.Learn.Bytes = int(v)
	default:
		t.setTokens(f, int64(v))
	}
	return nil
}

// setTokens sets the fields that count tokens.
func (t *Ticket) setTokens(f protowire.Number, n int64) {
	switch f {
	case fieldPromptTokens:
		t.PromptTokens = n
	case fieldCached:
		t.Cached = n
	case fieldWritten:
		t.Written = n
	case fieldExpectedCached:
		t.ExpectedCached = n
	case fieldAnswerTokens:
		t.AnswerTokens = n
	}
}

func (t *Ticket) setText(f protowire.Number, v []byte) error {
	switch f {
	case fieldID:
		return set16(&t.ID, v)
	case fieldPool:
		t.Pool = string(v)
	case fieldPrefill:
		t.Prefill = string(v)
	case fieldDecode:
		t.Decode = string(v)
	case fieldExcluded:
		if len(t.Excluded) == maxExcluded {
			return fmt.Errorf("more than %d addresses", maxExcluded)
		}
		t.Excluded = append(t.Excluded, string(v))
	case fieldCause:
		t.Cause = string(v)
	case fieldModel:
		t.Model = string(v)
	case fieldLearnLoRA:
		t.Learn.LoRA = string(v)
	case fieldPath:
		t.Path = string(v)
	case fieldAuthority:
		t.Authority = string(v)
	case fieldParamsRef:
		return set16(&t.ParamsRef, v)
	case fieldConversation:
		return set16(&t.Turn.Conversation, v)
	case fieldPackedParams:
		params, err := unpack([]byte{}, v, MaxParamsBytes) // keep empty Params apart from nil
		t.Params = params
		return err
	}
	return nil
}

func set16(dst *[16]byte, v []byte) error {
	if len(v) != len(dst) {
		return fmt.Errorf("%d bytes, not %d", len(v), len(dst))
	}
	copy(dst[:], v)
	return nil
}

// addUndo reads one edit. sum is the size of the text of all edits.
func (t *Ticket) addUndo(message []byte, sum *int) error {
	if len(t.Undo) == maxEdits {
		return fmt.Errorf("more than %d edits", maxEdits)
	}
	if t.Undo == nil {
		t.Undo = make(openai.Edits, 0, 8)
	}
	var e openai.Edit
	err := eachField(message, func(f protowire.Number, typ protowire.Type, number uint64, text []byte) error {
		switch {
		case typ == protowire.BytesType && f == fieldEditText:
			e.New = text
			*sum += len(text)
		case typ == protowire.VarintType && number > maxLength:
			return fmt.Errorf("%d is too much", number)
		case typ == protowire.VarintType && f == fieldEditStart:
			e.Start = int(number)
		case typ == protowire.VarintType && f == fieldEditEnd:
			e.End = int(number)
		}
		return nil
	})
	if err == nil && *sum > MaxUndoBytes {
		err = fmt.Errorf("more than %d bytes of undo", MaxUndoBytes)
	}
	t.Undo = append(t.Undo, e)
	return err
}
