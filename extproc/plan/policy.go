// Package plan decides what a pass of a request does, on values. It knows neither gRPC nor Envoy's messages, waits
// for nothing and changes nothing.
//
//   - A [Policy] is a pool's configuration of splitting and retrying.
//   - A [Request] has the scanned body, and what was read from the state for it. Its [Attempt] is the result of the
//     passes before: [Next] reads it from a ticket.
//   - [Policy.MaySplit] and [Policy.MayPair] decide whether a request goes over two endpoints at all,
//     [Attempt.Exhausted] whether another one is tried.
//   - [First] decides for a request from its body, when the picker has chosen endpoints for it; [Resume] from the
//     ticket of a prefill leg that has ended. [Encode], [Pass], [OneHop], [BothLegs] and [Alone] are the other ways.
//   - A [Decision] is the result: where the request goes, with which edits and ticket, and what must be reserved.
//     Package extproc reads the state, lets the picker choose, and commits the decision, in this order.
package plan

import (
	"cmp"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	"tandem/extproc/kvtransfer"
	"tandem/extproc/openai"
	"tandem/kvstate"
	"tandem/picker"
)

// Policy is the configuration of how a pool's requests are split and retried.
type Policy struct {
	Dialect kvtransfer.Dialect // the zero value: one hop for everything
	Split   bool
	// ask prefill for the prompt's token ids, which are matched with KV events
	LearnTokens   bool
	Cached        CachedTokens   // whose count of cached tokens clients get
	CleanupDecode bool           // fetch orphaned hand-overs by a decode endpoint
	Priorities    EnginePriority // how engines learn a request's priority
	// for requests that may be split; without Model: the default one, and every request is split
	Place           picker.Policy
	RefuseLong      bool          // bodies over Limits.SplitBodyBytes get 413 instead of decode alone
	AutoRoles       bool          // endpoints that may serve both legs have words (picker/roles)
	OnFailure       OnFailure     // what follows a failed prefill
	Alone           WhenAlone     // when requests that can be split may be decoded alone
	Handoff         Handoff       // what makes the second hop
	Source          string        // where endpoints come from, for messages; default: a list of endpoints
	PrefillAttempts int           // at most, over all passes; default 3
	AttemptsTime    time.Duration // after this time since the request arrived no further endpoint is tried; default 1 m
	PrefillTimeout  time.Duration // time limit of the prefill hop: this ...
	// ... plus this for every token of the prompt and of the queue before it, until the speed is known
	PerToken      time.Duration
	EncodeTimeout time.Duration // time limit of the encode hop; 0: the prefill endpoint encodes media
	// how long a streamed answer may take to begin, plus PerToken if D computes the prompt; default 1 m
	StreamStart time.Duration
	// how long an answer that is not streamed may take, plus the same; 0: no limit of Tandem's
	WholeAnswer time.Duration
}

// OnFailure says what follows a failed prefill.
type OnFailure uint8

// The policies of a pool's onPrefillFailure.
const (
	OtherPrefill OnFailure = iota // another prefill endpoint while there is one, then decode alone
	DecodeAlone                   // decode alone at once
	Fail                          // 503
)

// WhenAlone says when a request that can be split may be decoded alone. Requests that cannot be split always may.
type WhenAlone uint8

// The policies of a pool's decodeAlone.
const (
	AloneByCost   WhenAlone = iota // if it costs less, as far as the pool's placement compares costs, and as a fallback
	AloneFallback                  // if no prefill endpoint can take the request
	AloneNever                     // never: 503
)

// Handoff says what makes the second hop of a split request.
type Handoff uint8

// The values of a pool's handoff.
const (
	HandoffEnvoy   Handoff = iota // Envoy, by a redirect: two passes
	HandoffSidecar                // llm-d's routing sidecar at D, which calls P before its engine
	HandoffDirect                 // this server calls P before it answers Envoy
)

// WithDefaults returns the policy with defaults for zero values.
func (p Policy) WithDefaults() Policy {
	p.PrefillAttempts = cmp.Or(p.PrefillAttempts, 3)
	p.AttemptsTime = cmp.Or(p.AttemptsTime, time.Minute)
	p.StreamStart = cmp.Or(p.StreamStart, time.Minute)
	return p
}

// Placement returns how the picker places the pool's requests.
func (p *Policy) Placement() picker.Policy {
	place := p.Place
	if place.Model == (picker.Model{}) {
		place = picker.DefaultPolicy()
		place.Split, place.Late = picker.SplitAlways, p.Place.Late
	}
	if p.Dialect.PairsOnly() {
		place.Split = picker.SplitAlways
	}
	never := p.Alone == AloneNever || p.OnFailure == Fail
	place.PairsOnly = p.Dialect.PairsOnly() || never && place.Split == picker.SplitAlways
	return place
}

// MayBeAlone reports whether decode may answer alone a request that prefill cannot compute.
func (p *Policy) MayBeAlone() bool {
	return p.Alone != AloneNever && p.OnFailure != Fail && !p.Dialect.PairsOnly()
}

// DecodeDecides reports whether decode alone is asked about a request that P has answered with a status. P got another
// body than the client's: one token, without stop strings and streams, and in some dialects other members too. An
// engine may refuse that although nothing is wrong with the client's own. A status about what both bodies have in
// common (the key, the path, the size) stays the client's. shaped: P may fail over its one token
// (openai.Request.Shaped).
func (p *Policy) DecodeDecides(status int, shaped bool) bool {
	switch status {
	case http.StatusBadRequest, http.StatusUnprocessableEntity, http.StatusNotImplemented:
		return p.MayBeAlone()
	case http.StatusInternalServerError:
		return shaped && p.MayBeAlone()
	}
	return false
}

// MustSplit reports whether a request that can be split is never decoded alone.
func (p *Policy) MustSplit() bool { return p.Placement().PairsOnly }

// Limits are the server's limits that all pools share.
type Limits struct {
	SplitBodyBytes int           // larger bodies are never split: Envoy could not replay them
	MaxRedirects   int           // that Envoy follows for one request
	TicketTTL      time.Duration // lifetime of a leg's ticket
	Models         bool          // tickets say what is recorded of the request: its model, and whether it is streamed
}

// Another reports whether a request that came back that often may come back once more.
func (l *Limits) Another(redirects int) bool { return redirects+1 < l.MaxRedirects }

// MaySplit sets a.Why if the request, with a body of so many bytes, must not be split into two hops. An error is
// the client's answer.
func (p *Policy) MaySplit(a *Attempt, r *openai.Request, bytes int, l Limits) error {
	switch {
	case bytes > l.SplitBodyBytes && p.RefuseLong:
		return openai.TooLarge(l.SplitBodyBytes)
	case a.Alone:
	case p.Dialect.Prefill == nil:
		a.decodeAlone("no_kv_transfer")
	case !p.Split:
		a.decodeAlone("policy")
	case bytes > l.SplitBodyBytes:
		a.decodeAlone("body_too_long")
	case a.Outdated && p.Alone != AloneNever && p.OnFailure != Fail: // a hand-over would be outdated again
		a.decodeAlone(standstill)
	case a.Redirects+2 >= l.MaxRedirects: // one for the hand-over, and one for a decode that fails
		a.decodeAlone("redirects_spent")
	case a.Prefills >= p.PrefillAttempts:
		a.decodeAlone("attempts_spent")
	case a.Prefills > 0 && a.Late(p):
		a.decodeAlone("time_spent")
	case !p.Dialect.Speaks(r.API()):
		a.decodeAlone("api_not_spoken")
	default:
		if why := r.Unsplittable(); why != "" {
			a.decodeAlone(why)
		}
	}
	return nil
}

// MayPair is MaySplit for a pool with concurrent legs.
func (p *Policy) MayPair(a *Attempt, r *openai.Request, bytes int, l Limits) error {
	if bytes > l.SplitBodyBytes && p.RefuseLong {
		return openai.TooLarge(l.SplitBodyBytes)
	}
	why := ""
	switch {
	case a.Alone:
	case !p.Split:
		why = "policy"
	case bytes > l.SplitBodyBytes:
		why = "body_too_long"
	case !l.Another(a.Redirects): // one for a leg that fails
		why = "redirects_spent"
	case a.Prefills >= cmp.Or(p.PrefillAttempts, 3):
		why = "attempts_spent"
	default:
		why = p.Dialect.Concurrent.Unpairable(r)
	}
	if why != "" {
		a.decodeAlone(why)
	}
	return nil
}

// RefusePair returns the client's answer to a request that neither a pair nor a single engine can answer.
func (p *Policy) RefusePair(pool *kvstate.Pool, a *Attempt, l Limits) error {
	if a.Why == "body_too_long" {
		return openai.TooLarge(l.SplitBodyBytes)
	}
	switch a.Why {
	case "", "no_prefill", "cheaper", "min_prefill_tokens":
		if err := fullFirst(pool); err != nil {
			return err
		}
	case "attempts_spent", "redirects_spent", "prefill_failed":
		if err := justFull(pool); err != nil {
			return err
		}
		message := "every pair of endpoints that was tried has failed this request" + a.failed()
		return openai.Unavailable("endpoint_failed", message, time.Second)
	case "unknown_peer", "policy": // nothing is wrong with the request
	default:
		return openai.BadRequest("not_over_two_engines", "", "a request of this kind ("+a.Why+
			") needs an engine that is not split into prefill and decode, and there is none here")
	}
	message := "no pair of endpoints can take this request now"
	if a.Why == "no_prefill" {
		message = p.noPair(pool)
	}
	return openai.Unavailable("no_endpoint", message, time.Second)
}

// RefuseAlone returns the 503 for a request that must not be decoded alone; why is the reason that it was not
// split. The endpoints that have failed the attempt are named.
func (p *Policy) RefuseAlone(pool *kvstate.Pool, a *Attempt, why string) error {
	if p.Alone != AloneNever && p.OnFailure != Fail {
		return nil
	}
	switch why {
	case "cheaper":
		if p.Placement().Split != picker.SplitAlways {
			return nil
		}
	case "no_prefill", "prefill_failed", "attempts_spent", "redirects_spent", "time_spent":
	default: // the request cannot be split, or an engine of both roles computes its prompt (NoRoom)
		return nil
	}
	switch why {
	case "attempts_spent", "redirects_spent", "time_spent":
		if err := justFull(pool); err != nil {
			return err
		}
		const message = "every way to answer this request that the pool allows was tried and failed"
		return openai.Unavailable("endpoint_failed", message+a.failed(), time.Second)
	case "prefill_failed":
		if err := full(pool, kvstate.RolePrefill); err != nil {
			return err
		}
		return PrefillFailed(a.failed())
	}
	if err := fullFirst(pool); err != nil {
		return err
	}
	if why == "cheaper" && works(pool, kvstate.RolePrefill) && works(pool, kvstate.RoleDecode) {
		message := "no pair of endpoints can take this request now: those that are left have failed it" + a.failed()
		if len(a.Excluded) == 0 {
			message = "no pair of endpoints can take this request now: none of those that work can share it"
		}
		return openai.Unavailable("no_endpoint", message, time.Second)
	}
	code := "no_prefill"
	if !works(pool, kvstate.RoleDecode) {
		code = "no_endpoint"
	}
	return openai.Unavailable(code, p.noPair(pool), time.Second)
}

// AnswerStart returns the time limit of a hop that answers the client, until the headers of its answer; Envoy's
// limit per try covers no more. computing is the time that D needs for the prompt. An answer that is not streamed
// has no headers until it is complete, so it has no limit (0), unless the pool has one for whole answers.
func (p *Policy) AnswerStart(stream bool, computing time.Duration) time.Duration {
	switch {
	case stream:
		return p.StreamStart + computing
	case p.WholeAnswer > 0:
		return p.WholeAnswer + computing
	}
	return 0
}

// LegLimit returns the shortest time limit of a ticket's leg; 0: none.
func (p *Policy) LegLimit(t *kvtransfer.Ticket) time.Duration {
	switch t.Stage {
	case kvtransfer.DecodeLeg:
		return p.AnswerStart(t.Stream, 0)
	case kvtransfer.EncodeLeg:
		return p.EncodeTimeout
	}
	return p.PrefillTimeout
}

// CachedTokens says whose count of the prompt's cached tokens clients get in usage.
type CachedTokens int

// Whose count of cached tokens clients get.
const (
	CachedOfDecode  CachedTokens = iota // D's: it counts what it fetched from P, or nothing of that
	CachedByLeg                         // P's: the answer takes the leg where answers are rewritten
	CachedInPassing                     // P's: the transport edits usage as the answer passes, on the leg that it takes
)

// LeastBytes returns the least number of bytes of an answer to a stream.
func (p *Policy) LeastBytes(api openai.API, requestID string, stream bool) int {
	if !stream {
		return 0
	}
	return openai.LeastStream(api, requestID, p.Dialect.Engines.VLLM)
}

// NotSplit returns why a request with that many uncached tokens is never split, whatever the price; "" if it may be.
func (p *Policy) NotSplit(tokens int64) string {
	switch {
	case p.Dialect.Prefill == nil && p.Dialect.Concurrent == nil:
		return "no_kv_transfer"
	case !p.Split:
		return "policy"
	case p.short(tokens):
		return "min_prefill_tokens"
	}
	return ""
}

// Whole returns why a request with so many uncached tokens is not split, although it may be: the picker chose no pair
// for it. full: an engine of both roles answers because there was no room. It returns no_room then, no_prefill if there
// is no pair, "" if decode alone is cheaper, and the client's answer as an error if it must not be decoded alone.
func (p *Policy) Whole(pool *kvstate.Pool, v *kvstate.View, tokens int64, full bool) (why string, refusal error) {
	if full {
		return NoRoom, nil
	}
	why = p.Unpaired(v, tokens)
	refusal = p.Refusal(pool, v, why)
	if why == "cheaper" {
		why = ""
	}
	return why, refusal
}

// Refusal returns the client's answer if a request is not split for this reason and must not be decoded alone; nil if
// it may.
func (p *Policy) Refusal(pool *kvstate.Pool, v *kvstate.View, why string) error {
	if err := p.RefuseAlone(pool, &Attempt{}, why); err != nil {
		return err
	}
	both := func(c kvstate.Candidate) bool { return c.Usable && c.Endpoint.Role == kvstate.RoleBoth }
	if p.Dialect.PairsOnly() && !slices.ContainsFunc(v.Endpoints, both) {
		message := p.noPair(pool) + ", and the dialect's decode endpoints do not decode alone"
		return openai.Unavailable("no_endpoint", message, time.Second)
	}
	return nil
}

// missing names the role, and the list or selector, that has no endpoint for a request.
func missing(pool *kvstate.Pool, role kvstate.Role, source string) string {
	name := nameOf(role)
	source = cmp.Or(source, "endpoints")
	all := slices.DeleteFunc(slices.Clone(pool.Endpoints()), func(e *kvstate.Endpoint) bool { return e.Role&role == 0 })
	switch {
	case len(all) == 0:
		return fmt.Sprintf("pool %s has no %s endpoint: there is none in its %s", pool.Spec.Name, name, source)
	case !slices.ContainsFunc(all, func(e *kvstate.Endpoint) bool { return !e.Failed() }):
		return fmt.Sprintf("no %s endpoint of pool %s works: all %d of its %s have failed",
			name, pool.Spec.Name, len(all), source)
	case !slices.ContainsFunc(all, (*kvstate.Endpoint).TakesWork):
		return fmt.Sprintf("no %s endpoint of pool %s takes requests: %s",
			name, pool.Spec.Name, outOfWork(all, source))
	}
	return fmt.Sprintf("no %s endpoint of pool %s can take this request now, of %d in its %s",
		name, pool.Spec.Name, len(all), source)
}

// outOfWork describes why endpoints take no new requests, with the number of endpoints for each reason.
func outOfWork(all []*kvstate.Endpoint, source string) string {
	failed, ending, paused := 0, 0, 0
	for _, e := range all {
		switch {
		case e.Failed():
			failed++
		case e.Draining:
			ending++
		default:
			paused++
		}
	}
	var out []string
	for _, c := range []struct {
		n        int
		one, are string
	}{
		{paused, "is paused or drained by the operator", "are paused or drained by the operator"},
		{failed, "has failed", "have failed"},
		{ending, "is terminating", "are terminating"},
	} {
		switch {
		case c.n == len(all) && c.n == 1:
			return fmt.Sprintf("the only one of its %s %s", source, c.one)
		case c.n == len(all):
			return fmt.Sprintf("all %d of its %s %s", c.n, source, c.are)
		case c.n == 1:
			out = append(out, "1 "+c.one)
		case c.n > 1:
			out = append(out, fmt.Sprintf("%d %s", c.n, c.are))
		}
	}
	return fmt.Sprintf("of the %d of its %s, %s", len(all), source, strings.Join(out, ", "))
}

// noPair describes the side of a pool that has no endpoint for a pair.
func (p *Policy) noPair(pool *kvstate.Pool) string {
	if works(pool, kvstate.RoleDecode) {
		return missing(pool, kvstate.RolePrefill, p.Source)
	}
	return missing(pool, kvstate.RoleDecode, p.Source)
}

// EndpointOf returns the endpoint of a pool at an address; nil: it is gone.
func EndpointOf(state *kvstate.State, pool, addr string) *kvstate.Endpoint {
	if p := state.Pool(pool); p != nil {
		return p.Endpoint(addr)
	}
	return nil
}

// works reports whether an endpoint of the pool with a role takes requests.
func works(pool *kvstate.Pool, role kvstate.Role) bool {
	return slices.ContainsFunc(pool.Endpoints(), func(e *kvstate.Endpoint) bool {
		return e.Role&role != 0 && e.TakesWork()
	})
}

// full returns the client's answer if an endpoint of a role is full: that of the first one which gets requests
// again, with its status. nil: none is full.
func full(pool *kvstate.Pool, role kvstate.Role) error {
	if pool == nil {
		return nil
	}
	var first *kvstate.Endpoint
	var least time.Duration
	status, now := 0, time.Now()
	for _, e := range pool.Endpoints() {
		if e.Role&role == 0 || !e.TakesWork() {
			continue
		}
		if left, code := e.FullFor(now); left > 0 && (first == nil || left < least) {
			first, least, status = e, left, code
		}
	}
	if first == nil {
		return nil
	}
	return fullError(role, first.Refusing(now), status, least)
}

// justFull is full for a request whose attempts are used up: the endpoint may get requests again by now.
func justFull(pool *kvstate.Pool) error {
	if err := fullFirst(pool); err != nil {
		return err
	}
	for _, e := range pool.Endpoints() {
		if status := e.JustFull(time.Now()); status > 0 {
			return fullError(e.Role, fmt.Sprintf("%s answered %d each time", e.DisplayName(), status), status, 0)
		}
	}
	return nil
}

func fullError(role kvstate.Role, says string, status int, least time.Duration) error {
	err := openai.Unavailable("endpoint_full", nameOf(role)+" "+says, least.Truncate(time.Second)+time.Second)
	if err.Status = status; status == http.StatusTooManyRequests {
		err.Type = "rate_limit_error"
	}
	return err
}

// fullFirst is full of decode endpoints if none of them takes requests now, else of prefill endpoints.
func fullFirst(pool *kvstate.Pool) error {
	takes := func(e *kvstate.Endpoint) bool {
		left, _ := e.FullFor(time.Now())
		return e.Role&kvstate.RoleDecode != 0 && e.TakesWork() && left == 0
	}
	decode, prefill := full(pool, kvstate.RoleDecode), full(pool, kvstate.RolePrefill)
	if decode == nil || prefill != nil && slices.ContainsFunc(pool.Endpoints(), takes) {
		return prefill
	}
	return decode
}

func nameOf(role kvstate.Role) string {
	if role == kvstate.RolePrefill {
		return "prefill"
	}
	return "decode"
}

// NoEndpoint turns the picker's refusal into the client's 503, or into the answer of the endpoint that is full.
func (p *Policy) NoEndpoint(pool *kvstate.Pool, err error) error {
	if errors.Is(err, picker.ErrFull) {
		if err := fullFirst(pool); err != nil {
			return err
		}
		err = picker.ErrNoEndpoint // it gets requests again, but the request does not wait
	}
	if errors.Is(err, picker.ErrNoEndpoint) {
		return openai.Unavailable("no_endpoint", missing(pool, kvstate.RoleDecode, p.Source), time.Second)
	}
	return fmt.Errorf("picking endpoints in pool %q: %w", pool.Spec.Name, err)
}

// Overloaded returns the client's error for a request that a full pool refuses.
func Overloaded() error {
	return openai.Overloaded("the pool is full, and this request gives way to others", time.Second)
}

// Missed turns a choice that misses the request's targets, and that the pool therefore refuses, into the client's
// error. The client may retry when the excess work before it will be done.
func Missed(r *picker.Request, c *picker.Choice, err error) error {
	if !errors.Is(err, picker.ErrMissed) {
		return err
	}
	after := time.Second
	if r.TTFT > 0 {
		after = max(after, kvstate.Seconds(r.Waited+c.FirstToken-r.TTFT))
	}
	return openai.TargetMissed(min(after, time.Minute))
}

// ClientsFault reports whether an engine's status is about the request itself, so that the client gets the engine's
// answer.
func ClientsFault(code int) bool {
	switch code {
	case 408, 425, 429: // of the moment, or of the engine's load
		return false
	}
	return code >= 400 && code < 500
}
