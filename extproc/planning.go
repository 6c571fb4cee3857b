package extproc

import (
	"errors"
	"strings"
	"time"

	"tandem/extproc/kvtransfer"
	"tandem/extproc/openai"
	"tandem/extproc/plan"
	"tandem/kvstate"
	"tandem/kvstate/prefixindex"
	"tandem/picker"
)

// planning is one pass of a request that is being planned: the scanned body, the endpoints' state as it was read for it, and the
// picker's choice. A pass reads, decides (a [plan.Decision]) and commits, in this order. The memory is reused by later streams.
type planning struct {
	handler
	prompt
	queued
	foreseen
	wanted

	req    openai.Request
	patch  openai.Patch
	undo   openai.Edits
	params []byte // scratch for the decode member
	pair   kvtransfer.Pair
	source kvtransfer.Side // pair.Source points at it

	view   kvstate.View
	picker picker.Picker
	made   plan.Decision

	reservedAs string // see reservationKey
	newID      bool   // the client's request id was absent or unfit
	stripped   bool   // a gateway's prefix was taken off the path

	explanation []byte // for a header; nil: no operator asked
	decision    []byte // dynamic metadata; nil: none
}

// maxKeptParams is the largest scratch for decode members that is kept for the next stream, in bytes.
const maxKeptParams = 64 << 10

// reset forgets the request; its memory stays.
func (x *planning) reset() {
	x.waits, x.waited, x.stoodBy = waiter{hits: x.waits.hits[:0]}, 0, stoodBy{}
	x.req.Reset()
	clear(x.undo) // refers to the body
	x.pair, x.source = kvtransfer.Pair{}, kvtransfer.Side{}
	if cap(x.params) > maxKeptParams {
		x.params = nil
	}
	x.reservedAs, x.newID, x.stripped, x.wanted = "", false, false, wanted{}
	x.known = prefixindex.KnownTokens{}
	x.made, x.foreseen, x.explanation, x.decision = plan.Decision{}, foreseen{}, nil, nil
}

// decided keeps a decision in the memory of the pass.
func (x *planning) decided(d *plan.Decision) *plan.Decision {
	x.made = *d
	return &x.made
}

// prompt is what is known of a request's prompt.
type prompt struct {
	hashes      []uint64                // of its text blocks
	known       prefixindex.KnownTokens // of its tokens
	ids         []uint32                // scratch for token ids
	tokenHashes []uint64                // scratch for the blocks of these
}

// wanted is what a request asks for, beside its body.
type wanted struct {
	session  uint64   // hash of its name; 0: none
	labels   []string // that its endpoints must bear
	priority int32
}

// foreseen is what a choice will cost and take, as estimated.
type foreseen struct {
	work       time.Duration // of the prefill, as the model has it
	price      float64       // s
	prefilled  time.Duration // until the prefill endpoint has answered; 0: there is none
	firstToken time.Duration // until the first token
}

// queued is how a request waited for its endpoints.
type queued struct {
	waits   waiter
	waited  time.Duration
	stoodBy stoodBy // what it waited for
}

// identify settles the request id: the client's own if it is fit to be passed around and logged, else a new one.
func (x *planning) identify() {
	id := string(x.msg.Headers.RequestID)
	x.reservedAs = reservationKey(x.msg.Headers.Reservation, x.msg.Headers.RequestID)
	if openai.RequestID(id) {
		x.requestID = id
		return
	}
	x.requestID, x.newID = newRequestID(), true
}

// scan reads the body and, in the rare case that it carries members which are not the client's to send, cuts them.
func (x *planning) scan(api openai.API) error {
	if err := x.req.Scan(api, x.body.Bytes(), openai.Limits{}); err != nil {
		return err
	}
	if !x.req.HasControl() {
		return nil
	}
	x.s.metrics.ControlFieldsCut()
	x.spare.Grow(x.body.Len())
	x.spare.Data = x.req.Clean(x.spare.Data[:0])
	x.swapBody()
	return x.req.Scan(api, x.body.Bytes(), openai.Limits{})
}

// scanOther reads a JSON body of an API that is not otherwise understood, for its model and for members that are not a
// client's to send: engines take chat requests on more paths than the well-known ones. JSON that readers could
// understand differently is refused; JSON that is no object has neither model nor members, and is the engine's to judge.
func (x *planning) scanOther() (model string, err error) {
	kind, _, _ := strings.Cut(string(x.msg.Headers.ContentType), ";")
	if x.body.Len() == 0 || !strings.EqualFold(strings.TrimSpace(kind), "application/json") {
		return "", nil
	}
	// Engines look at the media type alone: vLLM 0.32.0 reads {"do_remote_prefill":true} with charset=latin1, or any other
	// parameter, on /invocations, and dies of it.
	if err := openai.CheckHeaders(string(x.msg.Headers.ContentType), ""); err != nil {
		return "", err
	}
	err = x.scan(openai.PassThrough)
	if e := (*openai.Error)(nil); errors.As(err, &e) && e.Code == "invalid_body" {
		return "", nil
	}
	return x.req.Model(), err
}

// whyUnpaired is why the picker chose no pair.
func (x *planning) whyUnpaired() string {
	if x.view.Prefills() {
		return "cheaper"
	}
	return "no_prefill"
}

// setSource names in x.pair the endpoint that has most of the prompt's beginning, if it is worth more than what the one
// that computes has itself, and if the dialect can make use of it.
func (x *planning) setSource(policy Policy, computes int) {
	if policy.Dialect.Pull == nil {
		return
	}
	own := &x.view.Endpoints[computes]
	most := own.Hit + pullBlocks - 1
	for i := range x.view.Endpoints {
		c := &x.view.Endpoints[i]
		if c.Hit > most && c.Usable && c.Endpoint.Role&kvstate.RolePrefill != 0 && c.Endpoint.Group == own.Endpoint.Group {
			most = c.Hit
			x.source = sideOf(c.Endpoint)
			x.pair.Source = &x.source
		}
	}
}

// recall finds the text blocks of a ticket's prompt, whose last it names. There are none where the prompt was routed by a replica
// that this one does not hear.
func (x *planning) recall(pool *kvstate.Pool, t *kvtransfer.Ticket) {
	x.hashes = x.hashes[:0]
	if text := pool.TextOf(x.hashes, t.Prompt, maxBlocks); text != nil {
		x.hashes = text
	}
}

// toldHits raises hits to what engines said that they hold of a prompt of so many tokens, as countTokens does in pass 1, which
// has the request's text.
func (x *planning) toldHits(pool *kvstate.Pool, tokens int64) {
	sizes := pool.TokenBlockSizes()
	if len(sizes) == 0 || len(x.hashes) == 0 {
		return
	}
	known := pool.KnownTokens(x.hashes)
	if known.TextBlocks == 0 {
		return
	}
	pool.DropGuesses(x.hashes, known.TextBlocks, &x.view)
	for _, size := range sizes {
		pool.TokenHits(known.Blocks(size), size, tokens, len(x.hashes), &x.view)
	}
}
