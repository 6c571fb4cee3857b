package plan

import (
	"errors"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"tandem/extproc/kvtransfer"
	"tandem/extproc/openai"
	"tandem/kvstate"
	"tandem/picker"
)

// First decides for a request from its body: in pass 1 and, after a failed hop, in another attempt. c is the picker's
// choice among the endpoints of v. An error is the client's answer.
func First(r *Request, v *kvstate.View, c picker.Choice, p *Policy) (*Decision, error) {
	if err := r.Attempt.Exhausted(p, v.Endpoints[c.Decode].Endpoint.Addr); err != nil {
		return nil, err
	}
	if c.Prefill < 0 {
		if r.Attempt.Why == "" {
			r.Attempt.Why = p.Unpaired(v, c.Uncached)
		}
		if c.Full && r.Attempt.Why == "cheaper" && v.Endpoints[c.Decode].Endpoint.Role&kvstate.RolePrefill != 0 {
			r.Attempt.Why = NoRoom
		}
		return Alone(r, v, c, p)
	}
	if p.fetchesLate(&v.Endpoints[c.Decode]) {
		r.Attempt.Why, c.Uncached = standstill, lacking(r, v, c.Decode)
		return Alone(r, v, c, p)
	}
	if lacks := lacking(r, v, c.Decode); p.Dialect.Push != nil && p.Dialect.Push.LeavesAll(r.Tokens, r.Tokens-lacks) &&
		p.RefuseAlone(r.Pool, &r.Attempt, "cheaper") == nil {
		r.Attempt.Why, c.Uncached = "held_by_decode", lacks
		return Alone(r, v, c, p)
	}
	d, why := Split(r, v, c, p)
	if why == "" {
		return d, nil
	}
	r.Attempt.Why = why
	return Alone(r, v, c, p)
}

// prefillBooking returns the booking of the prefill endpoint of a choice.
func (r *Request) prefillBooking(c *picker.Choice) kvstate.Booking {
	b := c.PrefillBooking()
	b.Media = r.Size.Media.Any()
	return b
}

// lacking returns the number of the prompt's tokens that an endpoint does not hold.
func lacking(r *Request, v *kvstate.View, at int) int64 {
	blocks := int64(max(len(r.Hashes), 1))
	return r.Tokens - r.Tokens*min(int64(v.Endpoints[at].Hit), blocks)/blocks
}

// Unpaired returns why the picker chose no pair for a prompt of which decode lacks that many tokens.
func (p *Policy) Unpaired(v *kvstate.View, uncached int64) string {
	switch {
	case !v.Prefills():
		return "no_prefill"
	case p.short(uncached):
		return "min_prefill_tokens"
	}
	return "cheaper"
}

// NoRoom is why an engine of both roles answers a request alone: there is no room to hand its KV over (docs/adr/0052).
const NoRoom = "no_room"

// standstill is the reason if decode stands still and would fetch the KV too late, so that it computes the prompt
// itself.
const standstill = "standstill"

// fetchesLate reports whether a decode endpoint that is chosen may fetch P's KV after its lease, and had better compute
// the prompt itself once it goes on: it stands still, and is chosen only since no other one can take the request.
// Beside Envoy a stream has its headers by the time the KV is outdated, so it could not be planned again.
func (p *Policy) fetchesLate(c *kvstate.Candidate) bool {
	return c.Stands && p.Dialect.Lease > 0 && p.MayBeAlone()
}

// short reports whether decode lacks too few tokens for a split, whatever that costs.
func (p *Policy) short(uncached int64) bool {
	place := p.Placement()
	return place.Split == picker.SplitAuto && uncached < place.MinPrefillTokens
}

// PrefillLimit returns the time limit of the prefill hop of a choice.
func PrefillLimit(r *Request, v *kvstate.View, c picker.Choice, p *Policy) time.Duration {
	return p.PrefillTimeout + r.Pool.PrefillTime(r.Tokens+v.Endpoints[c.Prefill].PromptTokens, p.PerToken)
}

// AskPrefill makes of the client's body what the prefill endpoint of a view is asked; D is known already.
func (r *Request) AskPrefill(v *kvstate.View, p *Policy, at int, decode *kvstate.Endpoint) {
	r.Sides = kvtransfer.Pair{
		RequestID: r.ID, Attempt: NewID(), Prefill: SideOf(v.Endpoints[at].Endpoint), Decode: SideOf(decode),
	}
	r.SetSource(v, p, at)
	r.Patch.Reset(&r.Client)
	p.Dialect.Prefill(&r.Client, &r.Patch, &r.Sides)
	r.insertEncoded()
	if r.learns(p) && !slices.Contains(p.Dialect.TokenIDs, r.Client.API()) {
		r.Patch.Set("return_token_ids", openai.FieldReturnTokenIDs, []byte("true"))
	}
}

// Expect writes into the ticket of a prefill leg what the leg is expected to take, and what can be learned from its
// answer.
func (r *Request) Expect(t *kvtransfer.Ticket, c picker.Choice, p *Policy) {
	t.ExpectedCached, t.ExpectedPrefill = r.Tokens-c.Uncached, kvstate.Seconds(c.PrefillTime).Truncate(time.Microsecond)
	if t.Prompt = r.LastBlock(); r.learns(p) {
		t.Learn = r.toLearn()
	}
	r.learnable(t)
}

// Split decides for two hops, the first of which is the prefill leg, or returns why that is not possible.
func Split(r *Request, v *kvstate.View, c picker.Choice, p *Policy) (_ *Decision, why string) {
	prefill, decode := v.Endpoints[c.Prefill].Endpoint, v.Endpoints[c.Decode].Endpoint
	r.AskPrefill(v, p, c.Prefill, decode)
	edits, undo, ok := r.Edits(p)
	if !ok {
		return nil, "undo_too_large"
	}
	d := r.Decided(&Decision{
		Leg: LegPrefill, Pool: r.Pool, Endpoint: prefill, Edits: edits, PerTry: PrefillLimit(r, v, c, p),
		// a traced hop has a span of its own, which the leg's filter starts
		Inline:   p.Dialect.Inline && !p.CleanupDecode && !r.Traced,
		Prefill:  Reservation{Endpoint: prefill, Booking: r.prefillBooking(&c)},
		Decode:   Reservation{Endpoint: decode, Booking: c.DecodeBooking(v)},
		Computes: prefill, // not D: pass 2 may choose another
		Affinity: Affinity{Session: r.Session, Prefill: prefill},
		Report:   Report{Route: "split", Prefill: prefill, Decode: decode},
		Ticket:   r.ticket(kvtransfer.PrefillLeg, edits.Len(len(r.Client.Body()))),
	})
	t := &d.Ticket
	t.ID, t.Prefill, t.Decode, t.Split = r.Sides.Attempt, prefill.Addr, decode.Addr, true
	t.Prefills, t.Undo = r.Attempt.Prefills+1, undo
	t.Stream, t.StreamUsage, t.Session = r.Streams(), r.Client.WantsUsage(), r.Session
	t.AnswerTokens = c.AnswerTokens
	t.Shaped = r.Client.Shaped()
	t.Excluded = r.Attempt.avoided(prefill.Addr)
	if c.Named { // pass 2 must ask for the model again
		t.Model = r.Client.Model()
	}
	r.Expect(t, c, p)
	push := p.Dialect.Push
	d.Decode.Booking.Tentative = push == nil // pass 2 chooses D again, and reserves it for the answer
	if push != nil {
		d.PerTry += push.Patience // the leg answers when the KV has arrived at D
		if d.Decode.Buffer = decode.Transfer.BufferTokens; d.Decode.Buffer > 0 {
			d.Decode.Patience = push.Patience
		}
	}
	return d, ""
}

// Alone decides for the one hop that answers the whole request.
func Alone(r *Request, v *kvstate.View, c picker.Choice, p *Policy) (*Decision, error) {
	if err := p.RefuseAlone(r.Pool, &r.Attempt, r.Attempt.Why); err != nil {
		return nil, err
	}
	reason := r.Attempt.Why
	chosen := reason == "cheaper" || reason == "min_prefill_tokens" || reason == NoRoom
	if chosen && r.Attempt.Prefills > 0 && !r.Attempt.DecodeFailed {
		reason = "prefill_failed" // else it would not be planned again
	}
	at := c.Decode
	c.Prefill = -1
	e := v.Endpoints[at].Endpoint
	d := r.Decided(&Decision{
		Leg: LegDecode, Pool: r.Pool, Endpoint: e,
		PerTry:   p.AnswerStart(r.Streams(), r.Pool.PrefillTime(r.Tokens+v.Endpoints[at].PromptTokens, p.PerToken)),
		Decode:   Reservation{Endpoint: e, Booking: c.DecodeBooking(v)},
		Computes: e, Affinity: Affinity{Session: r.Session, Decode: e},
		Report: Report{Route: "decode_alone", Reason: reason, Decode: e},
		Ticket: r.ticket(kvtransfer.DecodeLeg, 0),
	})
	if r.lastHop(len(r.Client.Body())) {
		d.Leg = LegPass
		d.Edits, d.Ticket.Undo = r.ownEdits(p)
	} else {
		d.Edits, d.Ticket.Undo = r.aloneEdits(v, p, d.Ticket.ID, at)
	}
	d.Ticket.Decode, d.Ticket.BodyBytes, d.Ticket.Stream = e.Addr, d.Edits.Len(len(r.Client.Body())), r.Streams()
	d.Ticket.LeastBytes = p.LeastBytes(r.Client.API(), r.ID, r.Streams())
	return d, nil
}

// lastHop reports whether the next answer is the client's: no endpoint is left, Envoy could not follow one more
// redirect, or it could not replay the body, which has so many bytes.
func (r *Request) lastHop(bytes int) bool {
	return r.Attempt.Last || !r.Limits.Another(r.Attempt.Redirects) || bytes > r.Limits.SplitBodyBytes
}

// aloneEdits returns the edits of the body for an endpoint that does both, and their undo.
func (r *Request) aloneEdits(v *kvstate.View, p *Policy, id kvtransfer.ID, at int) (edits, undo openai.Edits) {
	pulls := p.Dialect.Pull != nil
	if pulls {
		r.Sides = kvtransfer.Pair{RequestID: r.ID, Attempt: id}
		r.SetSource(v, p, at)
		pulls = r.Sides.Source != nil
	}
	if !pulls && r.Attempt.Encoded == nil {
		return r.ownEdits(p)
	}
	r.Patch.Reset(&r.Client)
	if pulls {
		p.Dialect.Pull(&r.Patch, &r.Sides)
	}
	r.insertEncoded()
	edits, undo, _ = r.Edits(p)
	return edits, undo
}

// ownEdits returns the edits that give a body what the operator has set, and nothing else, and their undo.
func (r *Request) ownEdits(p *Policy) (edits, undo openai.Edits) {
	takes := r.TakesPriority || r.Client.Has(openai.FieldPriority)
	if p.Priorities == NoEnginePriority || !takes || r.Client.Empty() {
		return nil, nil
	}
	r.Patch.Reset(&r.Client)
	edits, undo, _ = r.Edits(p)
	return edits, undo
}

// OneHop decides for the one hop of a request whose prefill, if c has one, bypasses Envoy: the sidecar or, before the
// hop, this server has the prompt computed (Decision.Direct).
func OneHop(r *Request, v *kvstate.View, c picker.Choice, p *Policy) (*Decision, error) {
	e := v.Endpoints[c.Decode].Endpoint
	if err := r.Attempt.Exhausted(p, e.Addr); err != nil {
		return nil, err
	}
	d := r.Decided(&Decision{
		Leg: LegDecode, Pool: r.Pool, Endpoint: e,
		PerTry: p.AnswerStart(r.Streams(), p.PrefillTimeout+r.Pool.PrefillTime(r.Tokens, p.PerToken)),
		Decode: Reservation{Endpoint: e, Booking: c.DecodeBooking(v)}, Computes: e,
		Affinity: Affinity{Session: r.Session, Decode: e},
		Report:   Report{Route: "decode_alone", Reason: r.Attempt.Why, Decode: e},
		Ticket:   r.ticket(kvtransfer.DecodeLeg, len(r.Client.Body())),
	})
	var asked *kvstate.Endpoint // by the sidecar
	if c.Prefill >= 0 {
		at := v.Endpoints[c.Prefill].Endpoint
		d.Affinity.Prefill, d.Report.Prefill, d.Report.Route = at, at, "split"
		if d.Direct = p.Handoff != HandoffSidecar; !d.Direct {
			asked = at
		}
	}
	d.Sidecar = Sidecar(r, v, c, p, asked)
	edits, undo := r.ownEdits(p)
	d.Edits, d.Ticket.Undo = cloned(edits), slices.Clone(undo) // the patch is used again, for the prefill
	d.Ticket.Decode, d.Ticket.BodyBytes = e.Addr, d.Edits.Len(len(r.Client.Body()))
	if r.lastHop(len(r.Client.Body())) {
		d.Leg = LegPass
	}
	return d, nil
}

// Sidecar returns the headers for the sidecar at D, nil if there is none. prefill computes the prompt; nil: D.
func Sidecar(r *Request, v *kvstate.View, c picker.Choice, p *Policy, prefill *kvstate.Endpoint) *SidecarHeaders {
	if p.Handoff != HandoffSidecar {
		return nil
	}
	h := &SidecarHeaders{}
	if prefill != nil {
		h.Prefill = prefill.Addr
	}
	if p.EncodeTimeout > 0 && r.Client.HasMedia() {
		var encoders []string
		for i := range v.Endpoints {
			if c := &v.Endpoints[i]; encodes(c) {
				encoders = append(encoders, c.Endpoint.Addr)
			}
		}
		h.Encoders = strings.Join(encoders, ",")
	}
	computes := c.Decode
	if c.Prefill >= 0 {
		computes = c.Prefill
	}
	r.Sides.Source = nil
	if r.SetSource(v, p, computes); r.Sides.Source != nil {
		h.Source = r.Sides.Source.Addr
	}
	return h
}

// minEncodeRedirects is the number of redirects for an encode leg and a split request whose decode fails once.
const minEncodeRedirects = 4

// EncodesFirst reports whether a request has an encode leg before all others, if an endpoint can take it.
func EncodesFirst(r *Request, p *Policy) bool {
	return p.EncodeTimeout > 0 && p.Handoff == HandoffEnvoy && r.Attempt.Redirects == 0 &&
		r.Limits.MaxRedirects >= minEncodeRedirects && len(r.Client.Body()) <= r.Limits.SplitBodyBytes &&
		r.Client.HasMedia()
}

// PickEncoder returns the position of the usable encode endpoint with the fewest requests, any of several equal ones;
// -1 if there is none.
func PickEncoder(v *kvstate.View) int {
	best, equal := -1, uint64(0) // endpoints with as few requests as best
	for i := range v.Endpoints {
		c := &v.Endpoints[i]
		switch {
		case !encodes(c) || best >= 0 && c.Requests > v.Endpoints[best].Requests:
		case best < 0 || c.Requests < v.Endpoints[best].Requests:
			best, equal = i, 1
		default:
			if equal++; rand.Uint64N(equal) == 0 {
				best = i
			}
		}
	}
	return best
}

// Encode decides for an encode leg.
func Encode(r *Request, e *kvstate.Endpoint, p *Policy) *Decision {
	r.Tokens = r.Estimate()
	d := r.Decided(&Decision{
		Leg: LegEncode, Pool: r.Pool, Endpoint: e, PerTry: p.EncodeTimeout,
		Decode: Reservation{Endpoint: e, Booking: kvstate.Booking{For: kvstate.RoleEncode, PromptTokens: r.Tokens}},
		Ticket: r.ticket(kvtransfer.EncodeLeg, len(r.Client.Body())),
	})
	d.Edits, d.Ticket.Undo = r.ownEdits(p)
	d.Ticket.Decode, d.Ticket.BodyBytes = e.Addr, d.Edits.Len(len(r.Client.Body()))
	return d
}

// encodes reports whether the candidate can encode media now.
func encodes(c *kvstate.Candidate) bool {
	return c.Endpoint.Role&kvstate.RoleEncode != 0 && c.Usable && !c.Endpoint.Failed()
}

// Pass decides for one hop straight to an endpoint, without retry or redirect. bytes is the length of the body.
func Pass(r *Request, e *kvstate.Endpoint, bytes int, route string, p *Policy) *Decision {
	tokens := r.Estimate()
	d := r.Decided(&Decision{
		Leg: LegPass, Pool: r.Pool, Endpoint: e, Decode: Reservation{Endpoint: e, Booking: Decoding(tokens)},
		Report: Report{Route: route, Decode: e},
		Ticket: kvtransfer.Ticket{
			ID: NewID(), Stage: kvtransfer.DecodeLeg,
			Expires: r.Attempt.now().Add(r.Limits.TicketTTL), Started: r.Attempt.Started,
			Redirects: r.Attempt.Redirects, Excluded: r.Attempt.Excluded,
			Pool: r.Pool.Spec.Name, Decode: e.Addr, BodyBytes: bytes, PromptTokens: tokens,
			Model: r.modelIn(r.Client.Model()),
		},
	})
	if r.Attempt.Started.IsZero() {
		d.Ticket.Started = r.Attempt.now()
	}
	d.Edits, d.Ticket.Undo = r.ownEdits(p)
	d.Ticket.BodyBytes = d.Edits.Len(bytes)
	return d
}

// OrOther has the request of a [Pass] planned again if its endpoint answers 404, as one does that lacks the model, or
// cannot be reached: it has done nothing for the request. If an endpoint is asked once more because no other is left,
// the client gets its answer. bytes is the length of the client's body: a body that was not read cannot be sent again.
func OrOther(d *Decision, r *Request, bytes int) *Decision {
	if bytes > 0 && !r.lastHop(bytes) && r.Attempt.failures(d.Endpoint.Addr) == 0 {
		d.Leg = LegOther
	}
	return d
}

// BothLegs decides for a request whose two legs are to run concurrently. It returns nil if they cannot; r.Why is the
// reason. If nobody knows yet which engine P is, its legs run one after the other: P's answer shows it.
func BothLegs(r *Request, v *kvstate.View, legs *kvtransfer.Legs, c picker.Choice, p *Policy) (*Decision, error) {
	if c.Prefill < 0 {
		if r.Attempt.Why = p.Unpaired(v, c.Uncached); len(r.Attempt.Excluded) > 0 {
			r.Attempt.Why = "prefill_failed"
		}
		return nil, nil
	}
	d, err := bothLegs(r, legs, c, p)
	if !errors.Is(err, kvtransfer.ErrUnknownPeer) {
		return d, err
	}
	r.Attempt.Why = "unknown_peer"
	if p.Dialect.Prefill == nil || r.Attempt.Redirects+2 >= r.Limits.MaxRedirects {
		return nil, nil
	}
	d, why := Split(r, v, c, p)
	if why != "" {
		r.Attempt.Why = why
	}
	return d, nil
}

// bothLegs returns nil if the undo of P's leg does not fit a ticket. The error is the dialect's.
func bothLegs(r *Request, legs *kvtransfer.Legs, c picker.Choice, p *Policy) (*Decision, error) {
	dialect, prefill, decode := p.Dialect.Concurrent, legs.Prefill, legs.Decode
	r.Patch.Reset(&r.Client)
	how, err := dialect.Plan(&r.Client, &r.Patch, legs)
	if err != nil {
		return nil, err
	}
	if p.Dialect.Engines.VLLM && how.DecodeRank == "" {
		how.DecodeRank = decode.RankName()
	}
	edits, undo, ok := r.Edits(p)
	if !ok {
		r.Attempt.Why = "undo_too_large"
		return nil, nil
	}
	d := r.Decided(&Decision{
		Leg: LegPair, Pool: r.Pool, Endpoint: decode, Edits: edits,
		Pair:     &Pair{Prefill: prefill, Cancel: dialect.CancelsPrefill, Plan: how},
		Prefill:  Reservation{Endpoint: prefill, Booking: r.prefillBooking(&c)},
		Decode:   Reservation{Endpoint: decode, Booking: bookingAfter(prefill, c.PromptTokens, c.AnswerTokens)},
		Computes: prefill, Report: Report{Route: "pair", Prefill: prefill, Decode: decode},
		Ticket: r.ticket(kvtransfer.PairLegs, edits.Len(len(r.Client.Body()))),
	})
	t := &d.Ticket
	t.ID, t.Prefill, t.Decode, t.Split, t.Prefills = legs.ID, prefill.Addr, decode.Addr, true, r.Attempt.Prefills+1
	t.Undo, t.Params, t.Prompt, t.Loads, t.Shaped = undo, how.Decode, r.LastBlock(), true, r.Client.Shaped()
	r.learnable(t)
	t.LeastBytes = p.LeastBytes(r.Client.API(), r.ID, r.Streams() && !how.Joined)
	return d, nil
}
