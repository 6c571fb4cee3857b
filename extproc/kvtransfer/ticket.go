package kvtransfer

import (
	"errors"
	"fmt"
	"time"

	"tandem/extproc/openai"
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

// Causes of a failed hop (Ticket.Cause), also label values of metrics.
const (
	CausePrefill = "prefill" // the prefill leg failed, or its answer could not be used
	// CauseTurn: a prefill leg that was to fetch the conversation's last turn failed. The request continues as if no
	// turn were kept.
	CauseTurn   = "turn"
	CauseRouter = "router" // a replica failed while it decided a pass, which is repeated
	CauseEncode = "encode" // the encode leg failed: prefill encodes by itself
	CauseDecode = "decode" // the decode leg failed before it answered: its KV parameters count as consumed
	// CausePoolGone: the pool was removed, or its dialect changed, between the hops. No endpoint is at fault.
	CausePoolGone = "pool_gone"
)

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
	ID      [16]byte
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
	// of the hand-over, for D, or the encode leg's result, for P; on a decode leg whose answer is rewritten: how
	Params     []byte
	ParamsRef  [16]byte // the name under which Params are stored if they fit no header
	Cached     int64    // of the prompt, found in P's prefix cache, plus one; 0: unknown
	Written    int64    // of the prompt, written to P's prefix cache, plus one; 0: unknown
	Path       string   // the client's, if the leg or the redirect has another; else ""
	Authority  string   // the client's Host; "": unknown
	Turn       TurnLeg  // if D keeps answers for the next turn
	Loads      bool     // of a decode leg: its request names KV of Prefill
	LeastBytes int      // minimum size of a complete answer of a decode leg; 0: unknown, or not streamed
}

// TurnLeg describes a request's part in its conversation, if D keeps blocks for the next turn (turn.go).
type TurnLeg struct {
	Conversation [16]byte // the name under which the turn is stored; zero: it is not
	OwnIDs       bool     // the client asked for token ids itself
	Named        bool     // of a prefill leg: P's request names the last turn
	Answers      bool     // of a decode leg: D's answer describes the blocks that it keeps
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
