package plan

import (
	cryptorand "crypto/rand"
	"math/rand/v2"
	"strconv"
	"time"

	"tandem/extproc/kvtransfer"
	"tandem/extproc/openai"
	"tandem/kvstate"
	"tandem/kvstate/prefixindex"
	"tandem/kvstate/residency"
	"tandem/picker"
)

// Request is a request while one of its passes is planned: its body, what was read from the state for it, and the
// memory of the decision. Later requests reuse the memory.
type Request struct {
	Client  openai.Request // the client's body, scanned
	Attempt Attempt
	Limits  Limits
	Prompt
	Foreseen Foreseen

	ID   string // both hops, all logs and the engines have it
	Pool *kvstate.Pool
	// TakesPriority: engines read the member priority in bodies of the request's path. In other requests, what the
	// operator sets only replaces what the client has set.
	TakesPriority bool
	Size          kvstate.PromptSize      // of the prompt, for an estimate of its tokens
	Tokens        int64                   // of the prompt: exact, or an estimate
	Session       uint64                  // hash of its name; 0: none
	Named         uint64                  // hash of what its client calls its conversation; 0: nothing
	Conversation  *residency.Conversation // nil: unknown
	Labels        []string                // that its endpoints must have
	Priority      int32
	Targets       picker.Targets  // times that the client asks for
	Began         time.Time       // when this pass began
	Traced        bool            // its hops have spans
	Patch         openai.Patch    // scratch: the changes of a leg's body
	Sides         kvtransfer.Pair // scratch: what a dialect knows of an attempt
	memory        struct {        // that the decision refers to
		undo     openai.Edits
		params   []byte
		source   kvtransfer.Side // Sides.Source points at it
		decision Decision
	}
}

// Foreseen is the estimated cost and time of a choice.
type Foreseen struct {
	Work       time.Duration // of the prefill, according to the cost model
	Price      float64       // s
	Other      float64       // as [picker.Choice.Other]
	Prefilled  time.Duration // until the prefill endpoint has answered; 0: no prefill endpoint
	FirstToken time.Duration
	Token      time.Duration // from one token of the answer to the next
}

// Foresee returns the estimates of a choice.
func Foresee(c *picker.Choice) Foreseen {
	return Foreseen{kvstate.Seconds(c.Work), c.Price, c.Other,
		kvstate.Seconds(c.PrefillTime), kvstate.Seconds(c.FirstToken), kvstate.Seconds(c.TokenTime)}
}

// maxKeptParams bounds the memory of decode members that is kept for the next request, in bytes.
const maxKeptParams = 64 << 10

// Reset clears the request; the memory stays.
func (r *Request) Reset() {
	r.Client.Reset()
	clear(r.memory.undo) // refers to the body
	r.Sides, r.memory.source = kvtransfer.Pair{}, kvtransfer.Side{}
	if cap(r.memory.params) > maxKeptParams {
		r.memory.params = nil
	}
	r.memory.decision = Decision{}
	r.Attempt, r.Limits, r.Foreseen, r.Known = Attempt{}, Limits{}, Foreseen{}, prefixindex.KnownTokens{}
	r.Size, r.TakesPriority = kvstate.PromptSize{}, false
	r.Named, r.Conversation = 0, nil
	r.ID, r.Pool, r.Tokens, r.Session, r.Labels, r.Priority, r.Targets = "", nil, 0, 0, nil, 0, picker.Targets{}
	r.Began, r.Traced = time.Time{}, false
}

// Decided stores a decision in the request's memory.
func (r *Request) Decided(d *Decision) *Decision {
	r.memory.decision = *d
	return &r.memory.decision
}

// Ask returns the picker's request for a prompt of that many tokens, over two endpoints or one, without the priority
// and what only a queue needs. All that choose endpoints ask with it, in every pass.
func (r *Request) Ask(p *Policy, tokens int64, split bool) picker.Request {
	q := picker.Request{
		PromptTokens: tokens, Blocks: len(r.Hashes), Model: r.Client.Model(), Labels: r.Labels, Split: split,
		Targets: r.Targets, Rand: rand.Uint64(), Bytes: int64(r.Size.Text),
		Beside: r.Pool.TokensBeside(r.Client.Model(), &r.Size),
		Faults: picker.Faults{
			Excluded: r.Attempt.Excluded, FailedPair: r.Attempt.PairFailed,
			Trial: !r.Streams(), MustPair: split && p.MustSplit(), LacksModel: r.Attempt.LacksModel,
		},
	}
	if q.MustPair {
		q.Final = r.Attempt.Retries()
	}
	q.MinAnswer, q.MaxAnswer = r.Client.AnswerTokens()
	q.MeanAnswer = kvstate.AnswerTokens(r.Pool, q.Model)
	return q
}

// Streams reports whether the client wants its answer as a stream.
func (r *Request) Streams() bool { return r.Client.True(openai.FieldStream) }

// ticket returns the beginning of a leg's ticket; bytes is the length of the leg's body.
func (r *Request) ticket(stage kvtransfer.Stage, bytes int) kvtransfer.Ticket {
	a := &r.Attempt
	return kvtransfer.Ticket{
		ID: NewID(), Stage: stage, Pool: r.Pool.Spec.Name, BodyBytes: bytes, PromptTokens: r.Tokens,
		Expires: a.now().Add(r.Limits.TicketTTL), Started: a.Started,
		Redirects: a.Redirects, Prefills: a.Prefills, Excluded: a.Excluded, Model: r.modelIn(r.Client.Model()),
		Stream: r.Limits.Models && r.Streams(), // else only where a later pass needs it
	}
}

// learnable stores in a prefill leg's ticket what is learned of the prompt's size from P's count of its tokens.
func (r *Request) learnable(t *kvtransfer.Ticket) {
	t.OtherBytes, t.Counted, t.Media = len(r.Client.Body())-r.Size.Text, r.Size.Counted, r.Size.Media
	if r.Size.Media.Any() && len(r.Client.Model()) <= maxModelName {
		t.Model = r.Client.Model()
	}
}

// maxModelName is the longest model, in bytes, that a ticket names for what is recorded of the request.
const maxModelName = 256

// modelIn returns the model that a ticket names for what is recorded of the request.
func (r *Request) modelIn(model string) string {
	if !r.Limits.Models || len(model) > maxModelName {
		return ""
	}
	return model
}

// NewID returns the random id of an attempt and its ticket.
func NewID() (id kvtransfer.ID) {
	_, _ = cryptorand.Read(id[:]) // never fails (crypto/rand)
	return id
}

// SideOf returns what a dialect needs to know of an endpoint.
func SideOf(e *kvstate.Endpoint) kvtransfer.Side {
	return kvtransfer.Side{Addr: e.HostPort(), Transfer: e.Transfer}
}

// Edits ends the changes in r.Patch with the request's priority, and returns them with their undo, which leaves the
// priority. All legs end with it. ok is false if the undo does not fit a ticket.
func (r *Request) Edits(p *Policy) (edits, undo openai.Edits, ok bool) {
	r.setPriority(p)
	edits = r.Patch.Edits()
	r.memory.undo = edits.Inverse(r.memory.undo[:0], r.Client.Body())
	return edits, r.memory.undo, r.memory.undo.Size() <= kvtransfer.MaxUndoBytes
}

// insertEncoded adds the location of the prompt's encoded media for the engine that computes the prompt.
func (r *Request) insertEncoded() {
	if r.Attempt.Encoded != nil {
		r.Patch.Insert(kvtransfer.EncodedMember, r.Attempt.Encoded) // a client's own was cut
	}
}

// pullBlocks is the least difference in blocks (of BlockBytes each, some 1,000 tokens in all) for which a prefix is
// fetched from another endpoint.
const pullBlocks = 8

// SetSource sets r.Sides.Source to the endpoint that holds most of the prompt's prefix, if it holds sufficiently
// more than the one that computes the prompt, and if the dialect supports it.
func (r *Request) SetSource(v *kvstate.View, p *Policy, computes int) {
	if p.Dialect.Pull == nil {
		return
	}
	own := &v.Endpoints[computes]
	most := own.Hit + pullBlocks - 1
	for i := range v.Endpoints {
		c := &v.Endpoints[i]
		e := c.Endpoint
		if c.Hit > most && c.Usable && e.Role&kvstate.RolePrefill != 0 && e.Group == own.Endpoint.Group {
			most = c.Hit
			r.memory.source = SideOf(e)
			r.Sides.Source = &r.memory.source
		}
	}
}

// EnginePriority is how a pool's engines learn a request's priority: in the body's member priority, which replaces
// the client's.
type EnginePriority uint8

// The kinds of engines that take priorities.
const (
	NoEnginePriority EnginePriority = iota // the engines do not learn it
	VLLMPriority                           // lower goes first; takes --scheduling-policy priority
	SGLangPriority                         // higher goes first; takes --enable-priority-scheduling
)

// classStep is the weight of one step of priority for vLLM, where requests of one priority are ordered by their
// position in the queue, in milliseconds: more than positions will reach in a century, and with maxClass steps
// still an exact integer to every JSON reader.
const (
	classStep = 1 << 42
	maxClass  = 1 << 9
)

// setPriority puts the request's priority into the leg's body, as a change of r.Patch that is not undone: what the
// operator says is never replaced by what the client says, on no leg. vLLM gets the priority and,
// within one, the key of the request's position in the queue: a second of work weighs as much as five of age.
// SGLang interrupts running requests for slightly more urgent ones (--priority-scheduling-preemption-threshold), so
// it gets the priority only.
func (r *Request) setPriority(p *Policy) {
	value := int64(r.Priority)
	switch p.Priorities {
	case NoEnginePriority:
		return
	case VLLMPriority:
		place := r.Began.UnixMilli()/5 + r.Foreseen.Work.Milliseconds()
		value = place - min(max(value, -maxClass), maxClass)*classStep
	case SGLangPriority:
	}
	r.Patch.Own("priority", openai.FieldPriority, strconv.AppendInt(nil, value, 10))
}

// BlockBytes is the number of bytes of a prompt in one block of the prefix index, MaxBlocks the number of blocks
// that it covers: 4 MiB of text, or a million tokens. Who holds these counts as if it held all of a longer prompt.
const (
	BlockBytes = 512
	MaxBlocks  = 1 << 13 // recordings have no more, either
)

// Prompt is what is known of a request's prompt.
type Prompt struct {
	Hashes      []uint64                // of its text blocks
	Known       prefixindex.KnownTokens // of its tokens
	IDs         []uint32                // scratch for token ids
	tokenBlocks []uint64                // scratch for their blocks
}

// Hash computes the hashes of the prompt's text blocks.
func (r *Request) Hash() { r.Hashes = r.Client.PromptHash(r.Hashes[:0], BlockBytes, MaxBlocks) }

// LastBlock returns what a ticket stores of the prompt for the replica that continues the request: only the last of
// its block hashes, because all of them would not fit. The index has the others ([kvstate.Pool.TextOf]), since the
// prompt was routed.
func (r *Request) LastBlock() uint64 {
	if len(r.Hashes) == 0 {
		return 0
	}
	return r.Hashes[len(r.Hashes)-1]
}

// RecallTokens finds the tokens of the prompt, as far as they are known, if engines of the pool report blocks of
// tokens. It reports whether an engine should be asked for the rest.
func (r *Request) RecallTokens() (ask bool) {
	r.Known = prefixindex.KnownTokens{}
	if len(r.Pool.TokenBlockSizes()) == 0 || len(r.Hashes) == 0 {
		return false
	}
	if r.Size.Media.Any() { // token ids do not identify media; the ids in front of the media may be known
		r.Known = r.Pool.KnownTokens(r.Hashes)
		return false
	}
	if ids := r.Client.PromptIDs(); ids != nil {
		var ok bool
		if r.IDs, ok = openai.TokenIDs(r.IDs[:0], ids); ok && len(r.IDs) > 0 {
			r.Known.TextBlocks = len(r.Hashes) // there is nothing to learn
		}
		return false
	}
	r.Known = r.Pool.KnownTokens(r.Hashes)
	return 2*r.Known.TextBlocks < len(r.Hashes)
}

// Estimate estimates the tokens of the prompt.
func (r *Request) Estimate() int64 { return r.Pool.EstimateTokens(r.Client.Model(), &r.Size) }

// CountTokens sets r.Tokens to an estimate, or to what is known from [Request.RecallTokens].
func (r *Request) CountTokens() {
	switch {
	case r.Known.TextBlocks == 0:
		r.Tokens = r.Estimate()
	case r.Client.PromptIDs() != nil:
		r.Tokens = int64(len(r.IDs))
	default:
		rest := max(r.Client.PromptBytes()-r.Known.TextBlocks*BlockBytes, 0)
		beside := r.Pool.TokensBeside(r.Client.Model(), &r.Size)
		r.Tokens = int64(r.Known.Tokens) + r.Pool.PromptTokens(rest) + beside
	}
}

// MatchTokens raises the hits of a view of pool, which may be a later version of r.Pool, to the blocks of tokens that
// engines reported.
func (r *Request) MatchTokens(pool *kvstate.Pool, v *kvstate.View) {
	sizes := pool.TokenBlockSizes()
	if len(sizes) == 0 || r.Known.TextBlocks == 0 {
		return
	}
	if r.Client.PromptIDs() == nil {
		matchKnown(pool, v, r.Hashes, &r.Known, r.Tokens)
		return
	}
	pool.DropGuesses(r.Hashes, r.Known.TextBlocks, v)
	prompt := r.TokenPrompt(pool)
	prompt.IDs = r.IDs
	for _, size := range sizes {
		r.tokenBlocks = prompt.Blocks(r.tokenBlocks[:0], size)
		pool.TokenHits(r.tokenBlocks, size, int64(len(r.IDs)), len(r.Hashes), v)
	}
}

func matchKnown(pool *kvstate.Pool, v *kvstate.View, hashes []uint64, known *prefixindex.KnownTokens, tokens int64) {
	pool.DropGuesses(hashes, known.TextBlocks, v)
	for _, size := range pool.TokenBlockSizes() {
		pool.TokenHits(known.Blocks(size), size, tokens, len(hashes), v)
	}
}

// MatchReported is MatchTokens for pass 2, which has the number of the prompt's tokens, but not its text.
func (r *Request) MatchReported(v *kvstate.View, tokens int64) {
	if len(r.Pool.TokenBlockSizes()) == 0 || len(r.Hashes) == 0 {
		return
	}
	if known := r.Pool.KnownTokens(r.Hashes); known.TextBlocks > 0 {
		matchKnown(r.Pool, v, r.Hashes, &known, tokens)
	}
}

// TokenPrompt returns what identifies the blocks of the prompt's tokens, without the tokens.
func (r *Request) TokenPrompt(pool *kvstate.Pool) prefixindex.TokenPrompt {
	salt, _ := r.Client.String(openai.FieldCacheSalt)
	return prefixindex.TokenPrompt{LoRA: pool.LoRA(r.Client.Model()), Salt: prefixindex.SaltKey(salt)}
}

// learns reports whether to ask prefill for the prompt's token ids: if there are KV events and some of the tokens
// are unknown. vLLM returns them since 0.10.2 for chat and completions; earlier releases and other engines ignore
// the member.
func (r *Request) learns(p *Policy) bool {
	api := r.Client.API()
	return p.LearnTokens && r.Known.TextBlocks < len(r.Hashes) && !r.Size.Media.Any() &&
		(api == openai.Chat || api == openai.Completions)
}

// toLearn returns what the ticket of a prefill leg stores in addition, if the prompt's tokens are to be learned
// from P's answer.
func (r *Request) toLearn() kvtransfer.Learn {
	prompt := r.TokenPrompt(r.Pool)
	return kvtransfer.Learn{Bytes: r.Client.PromptBytes(), LoRA: prompt.LoRA, Salt: prompt.Salt}
}
