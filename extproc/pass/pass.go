// Package pass takes one pass of a request from its body to a committed decision, in four steps:
//
//   - Read (read.go): the body is scanned, the request identified, its prompt hashed and counted in tokens.
//   - Choose (choose.go): the endpoints, at once or, in a pool that binds late, when it is the request's turn. One
//     place for every way and role.
//   - Decide (decide.go, and package plan): what happens next, as a value.
//   - Commit (commit.go): the only step that changes the state because of the decision. It includes the call to
//     prefill where no second hop of Envoy's does that (direct.go). [Held] says what a pass has reserved.
//
// [Pass.First] and [Pass.Other] begin with a body, [Pass.Gateway] with one of a gateway that makes one hop, and
// [Pass.Resume] with the ticket of a leg that has ended (resume.go); [Prefilled] learns from P's answers (learn.go).
// What happens to a request between its passes is package journey's.
//
// It knows neither gRPC nor Envoy's messages: a transport fills [Head], and is a [Body].
package pass

import (
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"sync/atomic"
	"time"

	"tandem/extproc/faults"
	"tandem/extproc/latebinding"
	"tandem/extproc/openai"
	"tandem/extproc/plan"
	"tandem/extproc/reclaim"
	"tandem/extproc/recorder"
	"tandem/extproc/telemetry"
	"tandem/internal/guard"
	"tandem/kvstate"
	"tandem/kvstate/residency"
	"tandem/picker"
)

// Options are what the passes of a server need.
type Options struct {
	State       *kvstate.State
	Log         *slog.Logger
	Guard       *guard.Guard
	Observer    *telemetry.Observer
	Faults      *faults.Faults
	Reclaim     *reclaim.Reclaimer
	Waiting     latebinding.Options
	Models      ModelAsker              // nil: engines are not asked for requests' models
	Tokenizer   Tokenizer               // for pools whose policy has a token source; may be nil
	Operator    func(token []byte) bool // reports whether a token may ask for decisions in a header; nil: none may
	Limits      plan.Limits
	HandOverTTL time.Duration        // lifetime of KV parameters after P's answer, a third of their lease at most
	Gateway     *plan.GatewayOptions // not nil: gateways ask, which set the headers of objectives
	// Inside: the transport keeps a request's tickets in memory between its passes. They are not sealed and never leave
	// the process, so none is consumed.
	Inside bool
}

// Shared is what the passes of a server share. It is safe for concurrent use.
type Shared struct {
	Options
	settings atomic.Pointer[activeSettings]
	seed     uint64           // of reservation ids
	Now      func() time.Time // the fleet's clock
	direct   *direct
}

// New returns what passes share, without settings: [Shared.Apply] sets them.
func New(o Options) *Shared {
	s := &Shared{Options: o, seed: rand.Uint64(), Now: time.Now, direct: newDirect()}
	if o.State != nil {
		s.Now = o.State.Clock.Now
	}
	return s
}

// Body is the body of a transport's request.
type Body interface {
	Bytes() []byte
	// Rewrite makes another body of it: write appends that to memory of at least size bytes.
	Rewrite(size int, write func(to []byte) []byte)
}

// Pass is one pass of one request. Later requests use the memory again.
type Pass struct {
	shared     *Shared
	Meter      *telemetry.Meter
	Head       Head
	Body       Body
	Source     *kvstate.Source // the connection that its reservations end with; nil: unknown
	ID         string          // of the request
	ReservedAs string          // name of its reservations
	Continues  bool            // another engine is to go on with an answer that one has begun

	Req    plan.Request
	view   kvstate.View
	picker picker.Picker
	waiter latebinding.Waiter

	policy     *Policy
	want       want
	asked      picker.Request
	choice     picker.Choice
	reserved   kvstate.View    // the endpoints, once it has reserved
	placed     bool            // its decision was carried out
	recomputed residency.Again // what of its prompt is computed again
	Prefilled  Prefilled       // learns from the answer of P that this pass, or a leg of the same stream, has

	// Rest continues a pass that ended with [latebinding.ErrWaits], for it could not wait.
	Rest func(ctx context.Context) (*plan.Decision, error)

	Explanation []byte            // for a header; nil: no operator asked for it
	Planned     telemetry.Planned // what was decided last
	chosen      recorder.Choice   // scratch
}

// Begin begins another pass, of a stream that meter measures.
func (s *Shared) Begin(x *Pass, body Body, meter *telemetry.Meter) {
	x.shared, x.Body, x.Meter = s, body, meter
	x.Prefilled.shared, x.Prefilled.Meter = s, meter
}

// Reset clears the pass; the memory stays.
func (x *Pass) Reset() {
	if !x.placed && x.shared != nil {
		x.shared.State.Withdrawn(x.Req.Pool, x.Req.Conversation)
	}
	x.placed, x.recomputed = false, residency.Again{}
	x.waiter.Committed()
	x.waiter.Reset()
	x.Req.Reset()
	x.Head, x.Source, x.ID, x.ReservedAs, x.Continues = Head{}, nil, "", "", false
	x.policy, x.want, x.asked, x.choice = nil, want{}, picker.Request{}, picker.Choice{}
	x.Prefilled.ID, x.Prefilled.Asked, x.Rest = "", 0, nil
	x.Explanation, x.Planned = nil, telemetry.Planned{}
}

// First plans a request to one of the APIs that can be split from its body: in pass 1 and, after a failed hop, in
// another attempt.
func (x *Pass) First(ctx context.Context, api openai.API, a plan.Attempt) (*plan.Decision, error) {
	if err := x.Head.checkTwice(); err != nil {
		return nil, err
	}
	if err := x.readPrompt(ctx, api, a); err != nil {
		return nil, err
	}
	return x.plan(ctx)
}

// Other plans a request that is never split (tokenize, embeddings, uploads, health, a stored response): one hop, with
// the body unchanged.
func (x *Pass) Other(ctx context.Context) (*plan.Decision, error) {
	return x.other(ctx, plan.Attempt{Started: x.shared.Now()})
}

func (x *Pass) other(ctx context.Context, a plan.Attempt) (*plan.Decision, error) {
	if err := x.Head.checkTwice(); err != nil {
		return nil, err
	}
	if err := x.readOther(ctx, a); err != nil {
		return nil, err
	}
	return x.plan(ctx)
}

// Gateway plans a request of a gateway that asks only where it goes. only are the endpoints that it allows, if limited;
// whole says that the request is not one that can be split.
func (x *Pass) Gateway(
	ctx context.Context, api openai.API, whole bool, only []string, limited bool,
) (*plan.Decision, error) {
	if err := x.Head.checkTwice(); err != nil {
		return nil, err
	}
	if err := x.readForGateway(ctx, api, whole); err != nil {
		return nil, err
	}
	x.want.only, x.want.limited = only, limited
	return x.plan(ctx)
}

// plan chooses endpoints for a request that was read, and decides. If the legs were to run at once and cannot, it
// chooses once more, for one endpoint.
func (x *Pass) plan(ctx context.Context) (*plan.Decision, error) {
	for {
		if err := x.choose(ctx); err != nil {
			if errors.Is(err, latebinding.ErrWaits) {
				x.Rest = x.plan
			}
			return nil, err
		}
		x.readChosen(ctx)
		if d, err := x.decide(); d != nil || err != nil {
			return d, err
		}
	}
}

// log writes a message about the request to the log.
func (x *Pass) log(level slog.Level, message string, args ...any) {
	x.shared.Log.Log(context.Background(), level, message, append([]any{"request_id", x.ID}, args...)...)
}
