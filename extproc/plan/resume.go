package plan

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"time"

	"tandem/extproc/kvtransfer"
	"tandem/extproc/openai"
	"tandem/kvstate"
	"tandem/picker"
)

// HandOver is a prefill leg that ended well: what pass 2 has when it decides for the decode leg.
type HandOver struct {
	Ticket  *kvtransfer.Ticket
	Attempt kvtransfer.ID     // id of the ticket that the prefill leg was sent with
	Params  []byte            // KV parameters; nil: D computes the prompt
	Decode  *kvstate.Endpoint // D; nil: none was chosen yet
	Paired  bool              // D may get the parameters
	Late    bool              // it does not get them, since it would fetch P's KV after its lease
	API     openai.API        // of the client's request
	// Body is the prefill leg's or, if Restored, the client's, which r.Request has then scanned.
	Body     []byte
	Restored bool
	Invalid  error // the client's body cannot be scanned
}

// Bound sets the decode endpoint of a hand-over, if D must not be chosen again. There are two of these: P has pushed
// the blocks to the D of pass 1, or an avoided pair is tried.
func (h *HandOver) Bound(pool *kvstate.Pool, p *Policy) bool {
	t := h.Ticket
	d := pool.Endpoint(t.Decode)
	if d == nil || d.Failed() || p.Dialect.Push == nil && !pool.LoadTrial(t.Prefill, t.Decode, h.Attempt) {
		return false
	}
	if full, _ := d.FullFor(time.Now()); full > 0 {
		return false
	}
	h.Decode, h.Paired = d, true
	return true
}

// Choose chooses D among those that may pair with the prefill endpoint that holds the blocks, by the same price as in
// pass 1: the part of the prompt (r.Hashes) that a D holds from an earlier turn need not be transferred. If the prefill
// endpoint, or every endpoint that pairs with it, has left the pool between the hops, it chooses any other; Paired is
// then false, and D must not get the parameters. Likewise if no endpoint has room for the KV: then the prefill endpoint
// answers, whose prefix cache has the prompt. The error is the picker's: if the endpoints that pair with P are full,
// the request may wait for them.
func (h *HandOver) Choose(r *Request, v *kvstate.View, k *picker.Picker, p *Policy) error {
	t := h.Ticket
	r.Attempt.Excluded = t.Excluded
	want := r.Ask(p, t.PromptTokens, true)
	want.Bytes = 0
	want.Model, want.MinAnswer, want.MaxAnswer, want.Trial = t.Model, t.AnswerTokens, t.AnswerTokens, !t.Stream
	prefill := slices.IndexFunc(v.Endpoints, func(c kvstate.Candidate) bool { return c.Endpoint.Addr == t.Prefill })
	k.Policy = p.Placement()
	i, err := k.PickDecode(&want, v, prefill)
	if errors.Is(err, picker.ErrNoRoom) {
		h.Decode, h.Paired = v.Endpoints[prefill].Endpoint, false
		return nil
	}
	if errors.Is(err, picker.ErrNoEndpoint) && prefill >= 0 {
		prefill = -1
		i, err = k.PickDecode(&want, v, prefill)
	}
	if err != nil {
		return err
	}
	h.Decode, h.Paired = v.Endpoints[i].Endpoint, prefill >= 0 && p.Dialect.Push == nil
	if h.Late = h.Paired && p.fetchesLate(&v.Endpoints[i]); h.Late {
		h.Paired = false
	}
	return nil
}

// booking returns D's booking.
func (h *HandOver) booking(pool *kvstate.Pool) kvstate.Booking {
	prefill := pool.Endpoint(h.Ticket.Prefill)
	if prefill == h.Decode {
		prefill = nil // it fetches nothing
	}
	return bookingAfter(prefill, h.Ticket.PromptTokens, h.Ticket.AnswerTokens)
}

// AtPrefill reports whether the endpoint that computed the prompt answers the request itself.
func (h *HandOver) AtPrefill() bool { return h.Decode.Addr == h.Ticket.Prefill }

// Restores reports whether D's body is made from the client's, and not from the prefill leg's: D may continue after
// P's first token, or gets a completion with P's token ids.
func (h *HandOver) Restores(p *Policy, l Limits) bool {
	return h.Params != nil && h.Paired &&
		(p.Dialect.Continue != nil && l.Another(h.Ticket.Redirects) || h.completion(p))
}

func (h *HandOver) completion(p *Policy) bool {
	return p.Dialect.Completion != nil && h.API == openai.Completions
}

// Resume decides for the decode leg, with the KV parameters from P's answer.
func Resume(r *Request, h *HandOver, p *Policy) (*Decision, error) {
	t, e := h.Ticket, h.Decode
	params := h.Params
	if !h.Paired {
		params = nil
	}
	d := r.Decided(&Decision{
		Leg: LegDecode, Pool: r.Pool, Endpoint: e, Edits: t.Undo,
		PerTry: p.AnswerStart(t.Stream, r.Pool.PrefillTime(t.PromptTokens, p.PerToken)),
		Decode: Reservation{Endpoint: e, Booking: h.booking(r.Pool)}, Affinity: Affinity{t.Session, nil, e},
	})
	if len(r.Hashes) > 0 {
		d.Computes = e
	}
	leg := kvtransfer.Ticket{
		ID: t.ID, Stage: kvtransfer.DecodeLeg, Expires: r.Attempt.now().Add(r.Limits.TicketTTL), Started: t.Started,
		Pool: t.Pool, Prefill: t.Prefill, Decode: e.Addr, Split: true,
		Redirects: t.Redirects, Prefills: t.Prefills, Excluded: t.Excluded,
		PromptTokens: t.PromptTokens, Stream: t.Stream, Loads: params != nil, Model: r.modelIn(t.Model),
	}
	if params != nil && p.Dialect.Continue != nil {
		if h.Restored {
			leg.Params, leg.Undo = r.continueAfter(d, h, p)
		}
	} else if params != nil && h.completion(p) {
		leg.Undo = r.completeWith(d, h, p)
	} else if params != nil && p.Dialect.DecodeMember != nil {
		var err error
		if d.Edits, leg.Undo, err = r.decodeEdits(h, p, params); err != nil {
			return nil, err
		}
	}
	if !r.Limits.Another(t.Redirects) {
		d.Leg = LegPass
	}
	leg.Cached, leg.Written = cachedTokens(d, h, p)
	leg.BodyBytes = d.Edits.Len(len(h.Body))
	leg.LeastBytes = p.LeastBytes(h.API, r.ID, t.Stream && d.Leg != LegAnswer)
	d.Ticket = leg
	return d, nil
}

// completionsPath is where D continues P's answer, whatever the client's API is.
const completionsPath = "/v1/completions"

// continueAfter makes D's leg one that continues after P's first token, and defines how the client's answer is made
// from D's. If that is not possible, D gets the client's own body and generates the whole answer.
func (r *Request) continueAfter(d *Decision, h *HandOver, p *Policy) (answer []byte, undo openai.Edits) {
	d.Edits = nil // the body is the client's already
	err := h.Invalid
	if err == nil {
		r.Patch.Reset(&r.Client)
		answer, err = p.Dialect.Continue(&r.Client, &r.Patch, h.Params)
	}
	if err != nil {
		d.Lost = err
		return nil, nil
	}
	edits := r.Patch.Edits()
	r.memory.undo = edits.Inverse(r.memory.undo[:0], h.Body)
	if r.memory.undo.Size() > kvtransfer.MaxUndoBytes {
		return nil, nil
	}
	d.Leg, d.Edits = LegAnswer, edits
	if h.API != openai.Completions {
		d.Path = completionsPath
	}
	return answer, r.memory.undo
}

// completeWith makes D's leg a completion with P's token ids as its prompt. If that is not possible, D gets the
// client's own body. The undo of a prompt that is too long for a ticket leaves the ids in its place: if D fails, the
// request is planned again with them, which is the same prompt.
func (r *Request) completeWith(d *Decision, h *HandOver, p *Policy) openai.Edits {
	d.Edits = nil // the body is the client's already
	err := h.Invalid
	if err == nil {
		r.Patch.Reset(&r.Client)
		err = p.Dialect.Completion(&r.Patch, h.Params)
	}
	if err != nil {
		d.Lost = err
		return nil
	}
	d.Edits = r.Patch.Edits()
	undo := d.Edits.Inverse(r.memory.undo[:0], h.Body)
	if undo.Size() > kvtransfer.MaxUndoBytes {
		undo = slices.DeleteFunc(undo, func(e openai.Edit) bool { return len(e.New) > 0 })
	}
	r.memory.undo = undo
	return undo
}

// cachedTokens reports P's cached tokens to the client, if the pool wants that and the answer has such a field. It
// returns the numbers to store in the ticket.
func cachedTokens(d *Decision, h *HandOver, p *Policy) (cached, written int64) {
	t := h.Ticket
	switch {
	case t.Cached == 0:
		return 0, 0
	case p.Cached == CachedInPassing:
	case p.Cached != CachedByLeg, d.Leg != LegDecode && d.Leg != LegAnswer:
		return 0, 0
	}
	switch h.API {
	case openai.Chat, openai.Completions:
		if t.Stream && !t.StreamUsage {
			return 0, 0
		}
	case openai.Responses, openai.Messages:
	default:
		return 0, 0
	}
	if p.Cached == CachedByLeg {
		d.Leg = LegAnswer
	}
	return t.Cached, t.Written
}

// MaxDecodeMember bounds the difference in length between a decode body and the client's: the KV parameters, mostly
// block ids.
const MaxDecodeMember = 8 << 20

// decodeEdits turns the undo of a prefill body into the edits that make the decode body, and returns the undo of
// those. D's parameters follow the opening brace, where the undo's first edit usually is too. P answered 200, so its
// body is not an empty object, and a comma always follows.
func (r *Request) decodeEdits(h *HandOver, p *Policy, params []byte) (edits, back openai.Edits, err error) {
	undo, member := h.Ticket.Undo, r.memory.params[:0]
	member = append(p.Dialect.DecodeMember(member, params), ',')
	r.memory.params = member
	n := len(member)
	if n > MaxDecodeMember {
		return nil, nil, fmt.Errorf("a decode member of %d bytes", n)
	}
	front := bytes.IndexByte(h.Body, '{') + 1
	if len(undo) > 0 && undo[0].Start == front {
		member = append(member, undo[0].New...)
		r.memory.params = member
		edits = slices.Clone(undo)
		edits[0].New = member
	} else {
		edits = append(openai.Edits{{Start: front, End: front, New: member}}, undo...)
	}
	return edits, openai.Edits{{Start: front, End: front + n}}, nil
}
