package kvtransfer

import (
	"errors"
	"fmt"
	"time"

	"tandem/extproc/openai"
)

// Stage is where a request stands.
type Stage uint8

// The stages, in the order in which a request goes through them. Numbers are those of tandem.ticket.v1.Ticket.Stage.
const (
	PrefillLeg Stage = 1 // the ticket goes out with the prefill leg: engines see it
	HandOver   Stage = 2 // prefill is done: the ticket carries the KV parameters into pass 2
	DecodeLeg  Stage = 3 // the ticket goes out with the decode leg, or the only hop: engines see it
	Failed     Stage = 4 // a hop failed: pass 2 plans again
	PairLegs   Stage = 5 // the ticket goes out with both legs at once: engines see it
	EncodeLeg  Stage = 6 // the ticket goes out with the encode leg, before all others, to Decode: engines see it
	Encoded    Stage = 7 // that is done: the ticket carries what prefill is to be told of it
)

// Redirects reports whether tickets of the stage come with a redirect, and so open pass 2.
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
	default:
		return fmt.Sprintf("stage_%d", uint8(s))
	}
}

// Causes of a failed hop (Ticket.Cause), also label values of metrics.
const (
	CausePrefill = "prefill" // the prefill leg failed, or its answer could not be used
	CauseTurn    = "turn"    // a prefill leg that was to fetch the conversation's last turn failed: the request goes on as if none were kept
	CauseRouter  = "router"  // a replica failed while it decided a pass, which is repeated
	CauseEncode  = "encode"  // the encode leg failed: prefill encodes by itself
	CauseDecode  = "decode"  // the decode leg failed before it answered: its KV parameters count as spent
)

// MaxUndoBytes is how much text the undo of a leg may hold (openai.Edits.Size): a request that needs more is not split,
// since its ticket would not fit a header.
const MaxUndoBytes = 8 << 10

// MaxHeaderBytes is the longest sealed ticket that may go as a header. Envoy takes some 58 KiB of headers in all; the
// client's own need room beside it. A longer one goes by reference: Params kept elsewhere, ParamsRef in the ticket.
const MaxHeaderBytes = 40 << 10

// Ticket is the state of one request between its passes. The zero value of a field means there is none.
type Ticket struct {
	ID      [16]byte // random. A hand-over is spent under it; it bears that of its prefill leg, and its decode leg that of both
	Stage   Stage
	Expires time.Time // in milliseconds
	Started time.Time // when the request came in, in microseconds

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
	BodyBytes int          // length of the body that Undo applies to; 0: not known

	Stream      bool // the client wants a stream ...
	StreamUsage bool // ... with usage at its end

	PromptTokens    int64
	ExpectedCached  int64         // of those, expected in P's prefix cache when it was chosen
	AnswerTokens    int64         // expected in the answer
	ExpectedPrefill time.Duration // how long the prefill leg was expected to take, in microseconds; 0: not known
	Session         uint64        // hash of its name; 0: none
	Model           string        // where endpoints of the pool say what they serve
	Prompt          uint64        // hash of its last text block, by which the prefix index knows the others; 0: it has no whole one
	Learn           Learn         // of a prefill leg
	Params          []byte        // of the hand-over, for D, or of what was encoded, for P; with a decode leg whose answer is rewritten: how
	ParamsRef       [16]byte      // the name under which Params are kept where no header holds them
	Cached          int64         // of the prompt, found in P's prefix cache, plus one; 0: P did not say
	Written         int64         // of the prompt, put into P's prefix cache, plus one; 0: P did not say
	Path            string        // the client's, where that of the leg or of the redirect is another; "": it is not
	Authority       string        // the client's Host; "": not known
	Turn            TurnLeg       // where D keeps answers for the next turn
	Loads           bool          // of a decode leg: D was told to load KV of Prefill
	LeastBytes      int           // that a complete answer of a decode leg has; 0: not known, or it is not streamed
}

// TurnLeg is what a request has to do with the turns of its conversation, where D keeps their blocks (turn.go).
type TurnLeg struct {
	Conversation [16]byte // the name under which what D keeps is kept; zero: it is not
	OwnIDs       bool     // the client asked for token ids itself
	Told         bool     // of a prefill leg: P was told of the last turn
	Answers      bool     // of a decode leg: D's answer says what it keeps
}

// Learn is what whoever sees P's answer needs to learn a prompt's tokens from it: what was planned elsewhere included.
type Learn struct {
	Bytes int    // of its text; 0: nothing is to be learned
	LoRA  string // the adapter, "": none
	Salt  uint64 // kvstate.SaltKey of its cache salt
}

// Errors of Keys.Open.
var (
	// ErrTicketForged: not sealed under one of the keys for this request id, or changed since.
	ErrTicketForged = errors.New("ticket is not genuine")
	// ErrTicketExpired: genuine, and too old. The ticket comes with this error: what it booked can be released, and the
	// request can be planned again. Its KV parameters must not be used.
	ErrTicketExpired = errors.New("ticket has expired")
	// ErrTicketVersion: of a release of Tandem that this one cannot read.
	ErrTicketVersion = errors.New("ticket is of another release")
)
