package kvtransfer

import (
	"encoding/base64"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"google.golang.org/protobuf/encoding/protowire"

	"tandem/extproc/kvtransfer/packed"
	"tandem/extproc/openai"
	"tandem/kvstate/media"
)

// Stage is a request's position between its passes.
type Stage uint8

// The stages, in the order in which a request reaches them. Numbers are those of tandem.ticket.v1.Ticket.Stage.
const (
	PrefillLeg Stage = 1 // the ticket goes out with the prefill leg: engines see it
	HandOver   Stage = 2 // prefill is done: the ticket carries the KV parameters into pass 2
	DecodeLeg  Stage = 3 // the ticket goes out with the decode leg, or the only hop: engines see it
	Failed     Stage = 4 // a hop failed: pass 2 plans again
	PairLegs   Stage = 5 // the ticket goes out with both legs at once: engines see it
	EncodeLeg  Stage = 6 // the ticket goes out with the encode leg, before all others, to Decode: engines see it
	Encoded    Stage = 7 // the encode leg is done: the ticket carries its result, for prefill
	Undecided  Stage = 8 // pass 1 has begun: the ticket is with a buffered body, in case the replica fails
)

// Redirects reports whether tickets of the stage arrive with a redirect, and so open pass 2.
func (s Stage) Redirects() bool { return s == HandOver || s == Failed || s == Encoded }

func (s Stage) String() string {
	switch s {
	case PrefillLeg:
		return "prefill_leg"
	case HandOver:
		return "hand_over"
	case DecodeLeg:
		return "decode_leg"
	case Failed:
		return "failed"
	case PairLegs:
		return "pair_legs"
	case EncodeLeg:
		return "encode_leg"
	case Encoded:
		return "encoded"
	case Undecided:
		return "undecided"
	default:
		return fmt.Sprintf("stage_%d", uint8(s))
	}
}

// MaxUndoBytes bounds the text in the undo of a leg (openai.Edits.Size). A request that needs more is not split, since
// its ticket would not fit a header.
const MaxUndoBytes = 8 << 10

// MaxHeaderBytes is the longest sealed ticket that may be sent as a header. Envoy accepts some 58 KiB of headers in
// total, the client's own included. A longer ticket is sent by reference: Params are stored apart, with ParamsRef in
// the ticket.
const MaxHeaderBytes = 40 << 10

// Ticket is the state of one request between its passes. Zero fields are absent.
type Ticket struct {
	// random. A hand-over is consumed under it; it is also the ticket's of the prefill leg, and the decode leg keeps
	// that of both
	ID      ID
	Stage   Stage
	Expires time.Time // in milliseconds
	Started time.Time // arrival of the request, in microseconds

	Pool         string
	Prefill      string    // address ip:port
	Decode       string    // address ip:port
	Reservations [2]uint64 // of Prefill and Decode
	Split        bool      // the request goes over two legs

	Redirects int      // that Envoy has followed for this request
	Prefills  int      // prefill legs that were sent
	Excluded  []string // addresses that failed the request
	Cause     string   // why the last hop failed: see Cause...; short and plain

	Undo      openai.Edits // turns the body of the leg back into the client's
	BodyBytes int          // length of the body that Undo applies to; 0: unknown

	// of a prefill leg: what is learned of its prompt's size
	OtherBytes int         // of the body, those that are no text of the prompt
	Counted    int64       // tokens that are not estimated from text or media
	Media      media.Count // at most 65,535 of a kind

	Stream      bool // the client wants a stream ...
	StreamUsage bool // ... with usage at its end

	PromptTokens    int64
	ExpectedCached  int64         // of those, expected in P's prefix cache when it was chosen
	AnswerTokens    int64         // expected in the answer
	ExpectedPrefill time.Duration // expected time of the prefill leg, in microseconds; 0: unknown
	Session         uint64        // hash of its name; 0: none
	Model           string        // set if endpoints of the pool report their models
	// hash of its last text block, under which the prefix index stores the others; 0: it has no full block
	Prompt uint64
	Learn  Learn // of a prefill leg
	// of the hand-over, for D; the encode leg's result, for P; or, on a decode leg, how its answer is rewritten
	Params    []byte
	ParamsRef [16]byte // the name under which Params are stored if they fit no header
	Cached    int64    // of the prompt, found in P's prefix cache, plus one; 0: unknown
	Written   int64    // of the prompt, written to P's prefix cache, plus one; 0: unknown
	Path      string   // the client's, if the leg or the redirect has another; else ""
	Authority string   // the client's Host; "": unknown
	Loads     bool     // of a decode leg: its request names KV of Prefill
	// of a leg to P: the answer is to have a form that one token may not have (openai.Request.Shaped)
	Shaped     bool
	LeastBytes int // minimum size of a complete answer of a decode leg; 0: unknown, or not streamed
}

// Clone returns a ticket that shares no memory with t.
func (t *Ticket) Clone() Ticket {
	out := *t
	out.Params = slices.Clone(t.Params) // nil is not the same as empty
	out.Undo = append(out.Undo[:0:0], t.Undo...)
	for i := range out.Undo {
		out.Undo[i].New = append([]byte(nil), out.Undo[i].New...)
	}
	out.Excluded = append([]string(nil), t.Excluded...)
	return out
}

// Learn is what is needed to learn a prompt's tokens from P's answer, by whichever replica sees it.
type Learn struct {
	Bytes int    // of its text; 0: learn nothing
	LoRA  string // the adapter; "": none
	Salt  uint64 // kvstate.SaltKey of its cache salt
}

// Errors of Keys.Open.
var (
	// ErrTicketForged: not sealed under one of the keys for this request id, or changed since.
	ErrTicketForged = errors.New("ticket is not genuine")
	// ErrTicketExpired: genuine, but too old. The ticket comes with this error: its reservations can be released, and
	// the request can be planned again. Its KV parameters must not be used.
	ErrTicketExpired = errors.New("ticket has expired")
	// ErrTicketVersion: from a release of Tandem that this one cannot read.
	ErrTicketVersion = errors.New("ticket is of another release")
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
	fieldLoads              protowire.Number = 64
	fieldLeastBytes         protowire.Number = 65
	fieldAnswerTokens       protowire.Number = 66
	fieldShaped             protowire.Number = 67
	fieldAuthority          protowire.Number = 70
	fieldOtherBytes         protowire.Number = 71
	fieldCounted            protowire.Number = 72
	fieldMedia              protowire.Number = 73

	fieldEditStart protowire.Number = 1
	fieldEditEnd   protowire.Number = 2
	fieldEditText  protowire.Number = 3
)

// Bounds of the fields. Tickets are authentic, but a stolen key must not let anybody exhaust memory.
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
	b = appendNumber(b, fieldLoads, protowire.EncodeBool(t.Loads))
	b = appendNumber(b, fieldShaped, protowire.EncodeBool(t.Shaped))
	b = appendNumber(b, fieldLeastBytes, uint64(t.LeastBytes))
	b = appendText(b, fieldAuthority, t.Authority)
	b = appendNumber(b, fieldOtherBytes, uint64(max(t.OtherBytes, 0)))
	b = appendNumber(b, fieldCounted, uint64(max(t.Counted, 0)))
	b = appendFixed(b, fieldMedia, packMedia(t.Media))
	return appendText(b, fieldModel, t.Model)
}

// packMedia packs the numbers of media into 16 bits each.
func packMedia(c media.Count) (packed uint64) {
	for i, n := range c {
		packed |= uint64(min(max(n, 0), math.MaxUint16)) << (16 * i)
	}
	return packed
}

func unpackMedia(packed uint64) (c media.Count) {
	for i := range c {
		c[i] = int32(packed >> (16 * i) & math.MaxUint16)
	}
	return c
}

// appendParams appends the last field; packed is the output of [packed.Pack] for Params.
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
			case fieldMedia:
				t.Media = unpackMedia(number)
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
	case fieldStage, fieldSplit, fieldStream, fieldStreamUsage, fieldLoads, fieldShaped:
		limit = 255
	case fieldRedirects, fieldPrefills, fieldLeastBytes:
		limit = maxCount
	case fieldBodyBytes, fieldPromptTokens, fieldCached, fieldWritten, fieldExpectedCached, fieldExpectedPrefill,
		fieldLearnBytes, fieldAnswerTokens, fieldOtherBytes, fieldCounted:
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
	case fieldLoads:
		t.Loads = v != 0
	case fieldShaped:
		t.Shaped = v != 0
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
	case fieldOtherBytes:
		t.OtherBytes = int(v)
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
	case fieldCounted:
		t.Counted = n
	}
}

func (t *Ticket) setText(f protowire.Number, v []byte) error {
	switch f {
	case fieldID:
		return set16((*[16]byte)(&t.ID), v)
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
	case fieldPackedParams:
		params, err := packed.Unpack([]byte{}, v, MaxParamsBytes) // keep empty Params apart from nil
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

// A sealed ticket, before base64 (URL alphabet, no padding):
//
//	version  1 byte
//	key id   4 bytes, derived from the key
//	nonce    12 random bytes
//	sealed   AES-256-GCM of the message, with the version and the request id as additional data; its tag last
//
// Random nonces allow 2^32 tickets under one key by NIST's rule (SP 800-38D: a chance of 2^-32 that a nonce came
// twice); at 1,000 requests/s that is two weeks, and the chance grows with the square. Change keys now and then.
const (
	sealVersion = 1
	sealHead    = 1 + 4
	sealMin     = sealHead + 12 + 16
	// maxSealed is the longest ticket that is read. Envoy refuses headers of that length.
	maxSealed = 64 << 10
)

var sealed64 = base64.RawURLEncoding.Strict()

// scratch is the temporary memory of sealing and opening.
type scratch struct{ message, packed, sealed, aad []byte }

// maxScratch bounds the memory that is kept for the next ticket.
const maxScratch = 256 << 10

// Seal appends t as a header value to dst, valid only for requests with this id. The result may be longer than
// MaxHeaderBytes when Params are long.
func (k *Keys) Seal(dst []byte, t *Ticket, requestID string) ([]byte, error) {
	if len(t.Excluded) > maxExcluded || len(t.Undo) > maxEdits || t.Undo.Size() > MaxUndoBytes ||
		len(t.Params) > MaxParamsBytes {
		return dst, fmt.Errorf("sealing a ticket: it holds too much: %d addresses, %d edits with %d bytes, %d bytes "+
			"of KV parameters",
			len(t.Excluded), len(t.Undo), t.Undo.Size(), len(t.Params))
	}
	if t.Redirects < 0 || t.Prefills < 0 || t.BodyBytes < 0 || t.PromptTokens < 0 {
		return dst, errors.New("sealing a ticket: it counts below zero")
	}
	s := k.pool.Get().(*scratch)
	defer k.release(s)
	s.message = appendTicket(s.message[:0], t)
	if t.Params != nil {
		s.packed = packed.Pack(s.packed[:0], t.Params)
		s.message = appendParams(s.message, s.packed)
	}
	return k.sealMessage(dst, s, requestID), nil
}

// sealMessage seals s.message.
func (k *Keys) sealMessage(dst []byte, s *scratch, requestID string) []byte {
	first := &(*k.ring.Load())[0]
	s.sealed = append(append(s.sealed[:0], sealVersion), first.id[:]...)
	s.setAAD(requestID)
	s.sealed = first.aead.Seal(s.sealed, nil, s.message, s.aad)
	return sealed64.AppendEncode(dst, s.sealed)
}

func (s *scratch) setAAD(requestID string) {
	s.aad = append(append(s.aad[:0], sealVersion), requestID...)
}

func (k *Keys) release(s *scratch) {
	if cap(s.message)+cap(s.packed)+cap(s.sealed) <= maxScratch {
		k.pool.Put(s)
	}
}

// Open reads a header value that Seal made for this request id, under any of the keys. Errors wrap ErrTicketForged,
// ErrTicketVersion, or ErrTicketExpired; the ticket is nil except with the last. Replicas' clocks may differ by less
// than tickets live.
func (k *Keys) Open(header, requestID string, now time.Time) (*Ticket, error) {
	if len(header) > maxSealed {
		return nil, fmt.Errorf("%w: %d bytes", ErrTicketForged, len(header))
	}
	s := k.pool.Get().(*scratch)
	defer k.release(s)
	message, err := k.openMessage(s, header, requestID)
	if err != nil {
		return nil, err
	}
	t := new(Ticket)
	if err := parseTicket(t, message); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrTicketVersion, err)
	}
	if !now.Before(t.Expires) {
		return t, fmt.Errorf("%w: %v ago, at stage %v", ErrTicketExpired, now.Sub(t.Expires), t.Stage)
	}
	return t, nil
}

// openMessage returns the message inside a header value, in memory of its own.
func (k *Keys) openMessage(s *scratch, header, requestID string) ([]byte, error) {
	s.message = append(s.message[:0], header...)
	var err error
	s.sealed, err = sealed64.AppendDecode(s.sealed[:0], s.message)
	// The decoder skips line breaks, so only the length shows that it has read everything.
	if err != nil || len(s.sealed) < sealMin || len(s.sealed) != sealed64.DecodedLen(len(header)) {
		return nil, fmt.Errorf("%w: not base64 of a ticket", ErrTicketForged)
	}
	if s.sealed[0] != sealVersion {
		return nil, fmt.Errorf("%w: version %d", ErrTicketVersion, s.sealed[0])
	}
	s.setAAD(requestID)
	known := false
	for _, each := range *k.ring.Load() {
		if each.id != [4]byte(s.sealed[1:sealHead]) {
			continue
		}
		known = true
		size := len(s.sealed) - sealMin
		message, err := each.aead.Open(make([]byte, 0, size), nil, s.sealed[sealHead:], s.aad)
		if err == nil {
			return message, nil
		}
	}
	if !known {
		return nil, fmt.Errorf("%w: sealed under a key that is not here", ErrTicketForged)
	}
	return nil, fmt.Errorf("%w: changed, or for another request", ErrTicketForged)
}
