package filter

import (
	"slices"
	"time"
)

// Envoy is what Envoy does for one request. Its methods may be called in a hook of the filter only, on its worker.
type Envoy interface { //nolint:interfacebloat // as many as the filter needs of its ABI
	// EachHeader calls do with every header of the request. The slices are Envoy's, until the hook ends or a header is
	// set.
	EachHeader(do func(name, value []byte))
	SetHeader(name, value string)
	RemoveHeader(name string)
	// SetMetadata and SetMetadataNumber set a value of the dynamic metadata of a namespace.
	SetMetadata(namespace, name, value string)
	SetMetadataNumber(namespace, name string, value float64)
	// BodySize returns how much of the request's body has been received, in bytes.
	BodySize() int
	// AppendBody appends that body to dst.
	AppendBody(dst []byte) []byte
	// ReplaceBody makes another body of the parts. It may be called once the whole body has been received.
	ReplaceBody(parts ...[]byte)
	// Call sends a request of its own; [Filter.CallDone] is called at its end. false: it cannot be sent.
	Call(c *Call) bool
	// Detach prepares a call that does not end with the request. It has the request's headers as they are now.
	Detach(c *Call) Detached
	// Continue lets the request go on to the next filter; anew: on the route that its headers choose now.
	Continue(anew bool)
	// Cluster returns the cluster of the request's route; "": it has none.
	Cluster() string
	// SendTo has the request go to an endpoint (ip:port) of that cluster, or fail there. false: Envoy refuses the text.
	SendTo(endpoint string) bool
	// KeepUpTo says how much of the request's body Envoy may keep, in bytes.
	KeepUpTo(n int)
	// Respond answers the request in place of an endpoint. Envoy's local_reply_config may change how it looks.
	Respond(status int, headers []Header, body []byte, details string)
	// Answer is Respond for an endpoint's own answer, which nothing changes. headers include :status.
	Answer(headers []Header, body []byte)
	// Restart begins the request again in a new filter, with its headers as they are now and the body that was sent on.
	// false: it cannot; the request goes on as if nothing had been asked.
	Restart() bool
	// HoldAnswer decides whether Envoy shows the pieces of the answer to [Filter.ResponseBody].
	HoldAnswer(hold bool)
	// PassEvents says whether pieces that consist of whole events without a mark ([answer.Marked]) are left out of
	// that, until it is called again. HoldAnswer ends it.
	PassEvents(pass bool)
	// ResponseHeader returns a header of the answer; nil: it has none.
	ResponseHeader(name string) []byte
	// SetResponseHeader sets a header of the answer, before it has gone on; "" removes it.
	SetResponseHeader(name, value string)
	// Count has [Counted] called for the pieces of the answer that go to the client, after ResponseBody. events: the
	// answer is a stream of events, and pieces whose lines have no counts of tokens are left out.
	Count(events bool)
	// EachPiece calls do with each part of the piece that a hook is called for. They are Envoy's, until the hook ends.
	EachPiece(do func(part []byte))
	// AppendPiece appends to dst the piece of the answer that a hook is called for, and ReplacePiece replaces it.
	AppendPiece(dst []byte) []byte
	ReplacePiece(b []byte)
	// AnswerSize returns how much of the answer's body is kept, in bytes, with the piece that a hook is called for.
	AnswerSize() int
	// AppendAnswer appends that to dst.
	AppendAnswer(dst []byte) []byte
	// ReplaceAnswer replaces it, after the hook.
	ReplaceAnswer(b []byte)
	// ContinueAnswer lets an answer go on that a hook has stopped.
	ContinueAnswer()
	// Outcome returns what Envoy knows of the answer.
	Outcome() Outcome
	// StartStream starts a request of its own whose answer comes piece by piece: its events go to [Insured], perhaps
	// before StartStream returns. false: it cannot be sent.
	StartStream(c *Call) (id uint64, ok bool)
	// ResetStream ends such a request.
	ResetStream(id uint64)
	// SendHeaders begins an answer to the client, Send goes on with it, and Reset breaks it off. headers include
	// :status. With the end of an answer Envoy may end the filter before they return.
	SendHeaders(headers []Header)
	Send(data []byte, end bool)
	Reset()
	// Waker returns a value that wakes the filter from any goroutine.
	Waker() Waker
}

// Waker wakes a filter: Envoy calls [Filter.Woken] on its worker soon. Wake must not be called after Close.
type Waker interface {
	Wake()
	Close()
}

// Detached is a call that goes on when the request that made it has ended. Its methods may be called in any goroutine.
type Detached interface {
	// Send sends it, once more if it was sent before. done is called once, on another thread, and must not wait.
	Send(done func(*Answer))
}

// Header is one header.
type Header struct{ Name, Value string }

// Call is a request of the filter's own. It has the headers of the client's request except those that it [Call.Drops].
type Call struct {
	Cluster string
	Set     []Header // in addition
	Body    []byte
	Timeout time.Duration
}

// Drops reports whether a header of the client's request is left out of the call.
func (c *Call) Drops(name []byte) bool {
	return dropped(name) || slices.ContainsFunc(c.Set, func(h Header) bool { return h.Name == string(name) })
}

// Answer is what came of a call. Headers and Body are Envoy's, until the hook ends.
type Answer struct {
	OK      bool // false: it was cut off, or is larger than what Envoy keeps
	Headers func(do func(name, value []byte))
	Body    [][]byte
}

// Outcome is the state of Envoy's answer to a request.
type Outcome struct {
	Status  int    // of the answer; 0: there is none
	Details string // Envoy's response code details
	Flags   uint64 // Envoy's response flags
	Bytes   uint64 // of the answer's body that were sent

	// When bytes of the answer went to the client, LastBody only of a counted one; zero: none did.
	FirstBody, LastBody time.Time
}

// Response flags of Envoy (1.40, envoy/stream_info/stream_info.h).
const (
	flagConnectionFailure = 0x20
	flagClientGone        = 0x4000
	flagClientReset       = 0x10000000
)

// ClientGone reports whether the client left before the end.
func (o *Outcome) ClientGone() bool { return o.Flags&(flagClientGone|flagClientReset) != 0 }

// Status tells Envoy what to do after a hook. Its numbers are those of Envoy's enums (FilterHeadersStatus and
// FilterDataStatus in envoy/http/filter.h, 1.40).
type Status int

// The statuses that the filter uses.
const (
	Continue Status = 0
	// Stop stops here: the next filter sees nothing, and the body is kept.
	Stop Status = 1
	// Pause also has the client, or the endpoint, wait with its body: this filter sees nothing of it. Of headers only.
	Pause Status = 4
)
