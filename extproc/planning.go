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

// planning plans one pass of a request: it has the scanned body, the view of the endpoints, and the picker's
// choice. A pass reads, decides (a [plan.Decision]) and commits, in this order. Later streams reuse the memory.
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
	newID      bool   // the client's request id was missing or invalid
	stripped   bool   // a gateway's prefix was removed from the path

	explanation []byte // for a header; nil: no operator asked for it
	decision    []byte // dynamic metadata; nil: none
}

// maxKeptParams bounds the scratch for decode members that is kept for the next stream, in bytes.
const maxKeptParams = 64 << 10

// reset clears the request; the memory stays.
func (x *planning) reset() {
	x.waits, x.waited, x.blockedOn = waiter{hits: x.waits.hits[:0]}, 0, blockedOn{}
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

// decided stores a decision in the memory of the pass.
func (x *planning) decided(d *plan.Decision) *plan.Decision {
	x.made = *d
	return &x.made
}

// prompt is what is known of a request's prompt.
type prompt struct {
	hashes      []uint64                // of its text blocks
	known       prefixindex.KnownTokens // of its tokens
	ids         []uint32                // scratch for token ids
	tokenHashes []uint64                // scratch for their blocks
}

// wanted is what a request asks for in addition to its body.
type wanted struct {
	session  uint64   // hash of its name; 0: none
	labels   []string // that its endpoints must have
	priority int32
}

// foreseen is the estimated cost and time of a choice.
type foreseen struct {
	work       time.Duration // of the prefill, according to the cost model
	price      float64       // s
	prefilled  time.Duration // until the prefill endpoint has answered; 0: no prefill endpoint
	firstToken time.Duration // until the first token
}

// queued is how a request waited for its endpoints.
type queued struct {
	waits     waiter
	waited    time.Duration
	blockedOn blockedOn // what it waited for
}

// identify sets the request id: the client's own if it is valid, else a new one.
func (x *planning) identify() {
	id := string(x.msg.Headers.RequestID)
	x.reservedAs = reservationKey(x.msg.Headers.Reservation, x.msg.Headers.RequestID)
	if openai.RequestID(id) {
		x.requestID = id
		return
	}
	x.requestID, x.newID = newRequestID(), true
}

// scan reads the body. In the rare case that it has members which a client must not send, it cuts them.
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

// scanOther reads a JSON body of another API, for its model and for members that a client must not send: engines
// accept chat requests on more paths than the well-known ones. Ambiguous JSON is refused. JSON that is not an
// object has neither model nor members; the engine validates it.
func (x *planning) scanOther() (model string, err error) {
	kind, _, _ := strings.Cut(string(x.msg.Headers.ContentType), ";")
	if x.body.Len() == 0 || !strings.EqualFold(strings.TrimSpace(kind), "application/json") {
		return "", nil
	}
	// Engines check the media type only: vLLM 0.32.0 reads {"do_remote_prefill":true} with charset=latin1, or any
	// other parameter, on /invocations, and crashes.
	if err := openai.CheckHeaders(string(x.msg.Headers.ContentType), ""); err != nil {
		return "", err
	}
	err = x.scan(openai.PassThrough)
	if e := (*openai.Error)(nil); errors.As(err, &e) && e.Code == "invalid_body" {
		return "", nil
	}
	return x.req.Model(), err
}

// unpairedReason returns why the picker chose no pair.
func (x *planning) unpairedReason() string {
	if x.view.Prefills() {
		return "cheaper"
	}
	return "no_prefill"
}

// setSource sets x.pair's source to the endpoint that holds most of the prompt's prefix, if it holds sufficiently
// more than the one that computes the prompt, and if the dialect supports it.
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

// recallTokens finds the text blocks of a ticket's prompt by its last block. There are none if this replica does
// not receive updates from the replica that routed the prompt.
func (x *planning) recallTokens(pool *kvstate.Pool, t *kvtransfer.Ticket) {
	x.hashes = x.hashes[:0]
	if text := pool.TextOf(x.hashes, t.Prompt, maxBlocks); text != nil {
		x.hashes = text
	}
}

// addReportedHits raises hits to the blocks that engines reported for a prompt of so many tokens, as countTokens
// does in pass 1, where the request's text is available.
func (x *planning) addReportedHits(pool *kvstate.Pool, tokens int64) {
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
