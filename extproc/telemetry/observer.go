package telemetry

import (
	"cmp"
	"context"
	"encoding/json"
	"log/slog"
	"net/http"
	"slices"
	"strconv"
	"time"

	"golang.org/x/time/rate"

	"tandem/extproc/ended"
	"tandem/extproc/kvtransfer"
	"tandem/extproc/names"
	"tandem/extproc/recorder"
	"tandem/extproc/usage"
	"tandem/kvstate"
	"tandem/picker"
)

// Observer is what a server reports to: behind it stand the metrics, the latest requests and the log. A handler
// reports to the [Meter] of its stream, which adds the span.
type Observer struct {
	*Metrics
	*Recent
	Recorder *recorder.Recorder // nil: requests are not recorded
	log      *slog.Logger
	cuts     *rate.Limiter // of log lines about answers that broke off: the end of an engine cuts many at once
}

// cutsLogged is the number of answers that broke off that the log names each second.
const cutsLogged = 10

// NewObserver returns an observer without requests.
func NewObserver(m *Metrics, log *slog.Logger) *Observer {
	return &Observer{Metrics: m, Recent: NewRecent(), log: log, cuts: rate.NewLimiter(cutsLogged, cutsLogged)}
}

// AnsweredBy returns the endpoint that answered the pass of a ticket.
func AnsweredBy(t *kvtransfer.Ticket) string {
	if t.Stage == kvtransfer.PrefillLeg {
		return t.Prefill
	}
	return cmp.Or(t.Decode, t.Prefill)
}

// RequestEnded reports the end of a request as Envoy logs it, and returns what it used; nil: nobody counts it. took is
// the time of the last hop, first the time to its first byte; mine says that this replica counts it.
func (o *Observer) RequestEnded(
	t *kvtransfer.Ticket, e *ended.Pass, took, first time.Duration, mine bool,
) *usage.Used {
	how := EndedAs(t, e)
	if how == "failed" && e.Status > 0 && e.Status < 500 {
		how = EndedCut
	}
	refused := e.Refusal()
	if refused == names.CodeTicketRefused {
		how = EndedTicketRefused
	}
	used := o.Usage.Ended(t, e, EndedAs(t, e), AnsweredBy(t), mine)
	whole, firstToken := max(e.Start.Add(e.Duration).Sub(t.Started), 0), usage.FirstToken(t, e)
	if mine {
		o.Metrics.requestEnded(t, e, took, first)
		o.liveTotals.usage.ended(used)
		if firstToken > 0 {
			observe(o.whole.firstToken.WithLabelValues(t.Pool, AnsweredBy(t)), firstToken, exemplarIn(e.Traceparent))
			o.liveTotals.usage.firstToken.observe(firstToken)
		}
		o.recordEnd(t, e, used, how, whole, firstToken)
		if how == EndedTicketRefused {
			o.liveTotals.ticketFailures.Add(1)
		}
		if how == EndedCut && o.cuts.Allow() {
			o.log.Warn("an answer broke off", "request_id", string(e.RequestID), "pool", t.Pool,
				"endpoint", AnsweredBy(t), "status", e.Status, "after", whole, "details", string(e.Details))
		}
	}
	var expected time.Duration
	o.change(string(e.RequestID), t.Started, func(trace *Trace) {
		if trace.Used = used; trace.ExpectedFirst > 0 && trace.Replans == 0 {
			expected = trace.Waited + trace.ExpectedFirst
		}
		trace.DecodeTime, trace.Status, trace.Ended, trace.Took = took, e.Status, how, whole
		trace.Refused, trace.FirstToken = refused, firstToken
		if t.Stage == kvtransfer.DecodeLeg && t.Redirects > trace.Pass { // another replica chose D anew
			trace.Decode = t.Decode
		}
		if e.FirstByte > 0 {
			trace.FirstByte = max(e.Start.Add(e.FirstByte).Sub(trace.Started), 0)
		}
	})
	if mine && how == "ok" && expected > 0 && firstToken > 0 {
		o.whole.foreseen.WithLabelValues(t.Pool).Observe(firstToken.Seconds() / expected.Seconds())
	}
	return used
}

// recordEnd records the end of a request. Without usage only times are known, not the time per token.
func (o *Observer) recordEnd(
	t *kvtransfer.Ticket, e *ended.Pass, u *usage.Used, how string, whole, firstToken time.Duration,
) {
	end := recorder.End{
		ID: e.RequestID, Started: t.Started, Ended: t.Started.Add(whole), Prompt: -1, Cached: -1, Answer: -1,
		Status: e.Status, How: how, Tenant: e.Usage.Tenant, First: firstToken,
	}
	if t.Stage == kvtransfer.DecodeLeg || t.Stage == kvtransfer.PairLegs {
		end.Decode = t.Decode
	}
	if e.FirstByte > 0 {
		end.Head = max(e.Start.Add(e.FirstByte).Sub(t.Started), 0)
	}
	if u != nil {
		for _, of := range [...]struct {
			to   *int64
			from *int64
		}{{&end.Prompt, u.Prompt}, {&end.Cached, u.Cached}, {&end.Answer, u.Answer}} {
			if of.from != nil {
				*of.to = *of.from
			}
		}
		end.Each = u.PerToken
	}
	o.Recorder.Ended(&end)
}

// DiedUnder reports that a request is given up because one engine after the other died, or failed, while it answered
// it.
func (o *Observer) DiedUnder(requestID string, t *kvtransfer.Ticket, engines []string) {
	o.change(requestID, t.Started, func(trace *Trace) { trace.DiedUnder = slices.Clone(engines) })
}

// RequestLost reports that this replica cannot read the ticket of a request, which therefore fails.
func (o *Observer) RequestLost(requestID string) {
	o.TicketRefused()
	o.liveTotals.ticketsRefused.Add(1)
	o.ticketRefusedOf(requestID, http.StatusServiceUnavailable)
}

// EntryRefused reports the end of a pass whose ticket this replica cannot read. If another one could not either, the
// request failed.
func (o *Observer) EntryRefused(e *ended.Pass) {
	o.TicketRefused()
	if e.Refusal() == names.CodeTicketRefused {
		o.ticketRefusedOf(string(e.RequestID), e.Status)
	}
}

// ticketRefusedOf counts the end of a request without a readable ticket, if this replica planned it.
func (o *Observer) ticketRefusedOf(requestID string, status int) {
	if o.ticketRefused(requestID, status) {
		o.liveTotals.ended("failed")
		o.liveTotals.ticketFailures.Add(1)
	}
}

// AnswerBegan reports the endpoint whose answer begins, and its status. started is when the request came in.
func (o *Observer) AnswerBegan(requestID string, started time.Time, e *kvstate.Endpoint, status int) {
	o.change(requestID, started, func(trace *Trace) { trace.Decode, trace.Status = e.Addr, status })
}

// WantsWeighed reports whether the plan should name the prices of all endpoints.
func (x *Meter) WantsWeighed() bool { return x.Recording() || x.Observer.wantsWeighed(time.Now()) }

// Planned reports the plan of a pass.
func (x *Meter) Planned(ctx context.Context, p *Planned) {
	x.Observer.decided(p.Pool, p.Route, p.Reason)
	x.Observer.record(p)
	x.spanPlanned(p)
	if x.Observer.log.Enabled(ctx, slog.LevelDebug) {
		x.Observer.log.DebugContext(ctx, "planned", "request_id", p.RequestID, "pool", p.Pool, "route", p.Route,
			"reason", p.Reason, "prefill", p.Prefill, "decode", p.Decode, "prompt_tokens", p.PromptTokens,
			"body_bytes", p.BodyBytes, "waited", p.Waited)
	}
}

// Replanned reports that a hop of a request failed: t is the ticket that came back. Another plan follows, or an error.
func (x *Meter) Replanned(requestID string, t *kvtransfer.Ticket) {
	x.Observer.Metrics.Replanned(t)
	failed := FailedHop{Hop: t.Cause}
	if c, ok := kvtransfer.CauseOf(t.Cause); ok && c.At != nil {
		failed.Endpoint = c.At(t)
	}
	x.Observer.leg(requestID, t, func(trace *Trace) { trace.Failed = append(trace.Failed, failed) })
}

// HandedOver reports where pass 2 sends the request of a ticket, and whether the KV parameters go with it.
func (x *Meter) HandedOver(requestID string, t *kvtransfer.Ticket, d *kvstate.Endpoint, withParams bool) {
	x.Observer.leg(requestID, t, func(trace *Trace) { trace.Decode = d.Addr })
	x.spanHandOver(d, withParams)
}

// PrefillRefused reports that P refused the request itself.
func (x *Meter) PrefillRefused(t *kvtransfer.Ticket, code int, took time.Duration) {
	x.Observer.prefillEnded(t, code, "refused", took, x.Exemplar)
}

// PrefillLost reports a prefill leg of which no answer came. overdue: it exceeded its time limit. Envoy's status stands
// for it.
func (o *Observer) PrefillLost(t *kvtransfer.Ticket, overdue bool, took time.Duration) {
	code := http.StatusServiceUnavailable
	if overdue {
		code = http.StatusGatewayTimeout
	}
	o.prefillEnded(t, code, "failed", took, nil)
}

// PrefillEnded reports how a prefill leg ended. next is the redirect's ticket; nil: P's answer is the client's.
func (x *Meter) PrefillEnded(
	requestID string, t *kvtransfer.Ticket, code int, took time.Duration, next *kvtransfer.Ticket,
) {
	result := "ok"
	if next != nil && next.Stage == kvtransfer.Failed && next.Cause != kvtransfer.CausePoolGone {
		result = "failed"
		if next.Cause == kvtransfer.CauseRefused || next.Cause == kvtransfer.CauseModel {
			result = "refused"
		}
	}
	x.Observer.prefillEnded(t, code, result, took, x.Exemplar)
	x.Observer.Recorder.Prefilled(requestID, t.Started, took)
	x.Observer.leg(requestID, t, func(trace *Trace) {
		trace.PrefillTime = took
		if next == nil {
			trace.Decode, trace.Final = "", true
		} else {
			trace.Next = next.Redirects
		}
	})
	if next != nil {
		x.spanPrefilled(code, next)
	}
}

// MirrorEnded reports how the prefill leg of concurrent legs ended (ok, refused, failed).
func (x *Meter) MirrorEnded(requestID string, t *kvtransfer.Ticket, code int, result string, took time.Duration) {
	x.Observer.prefillEnded(t, code, result, took, x.Exemplar)
	x.SpanLegEnded(result, code)
	x.Observer.Recorder.Prefilled(requestID, t.Started, took)
	x.Observer.leg(requestID, t, func(trace *Trace) { trace.PrefillTime = took })
}

// PromptRead reports the prompt's counts in P's answer.
func (x *Meter) PromptRead(requestID string, t *kvtransfer.Ticket, got kvtransfer.Answer, took time.Duration) {
	x.Observer.Prompt(t.Pool, got)
	if t.Stage == kvtransfer.PairLegs {
		x.spanAnswered(got)
	} else {
		x.Observer.compare(t, got, took)
	}
	x.Observer.leg(requestID, t, func(trace *Trace) {
		trace.CachedTokens = got.CachedTokens
		if got.PromptTokens > 0 {
			trace.PromptTokens = got.PromptTokens
		}
	})
	x.Observer.Recorder.Counted(requestID, t.Started, got.PromptTokens, got.CachedTokens)
}

// LegEnded reports how a hop ended (ok, refused, failed, client_gone). status is the engine's; 0: none came.
func (x *Meter) LegEnded(pool, hop, endpoint, result string, status int, took time.Duration) {
	x.Observer.HopEnded(pool, hop, endpoint, result, took, x.Exemplar)
	x.SpanLegEnded(result, status)
}

// Weigh returns endpoints with the parts of their prices, at most maxWeighed. split: the request goes over two.
func Weigh(all []picker.Weighed, split bool) []Weighed {
	out := make([]Weighed, 0, min(len(all), maxWeighed))
	for _, c := range all[:cap(out)] {
		w := Weighed{Endpoint: c.Endpoint, Role: c.Role, Word: c.Word, Out: c.Out != "", Why: c.Out, Hit: c.Hit,
			Discards: c.Discards, Back: c.Back}
		prefill, decode, alone := c.Parts()
		if split {
			w.Prefill, w.Decode, w.Alone = without0(prefill), without0(decode), without0(alone)
		} else {
			w.Decode = without0(alone)
		}
		if c.Alone != nil {
			switch {
			case c.TooLong:
				w.NotAlone = NotAloneTooLong
			case c.Busy:
				w.NotAlone = NotAloneBusy
			}
		}
		out = append(out, w)
	}
	return out
}

// without0 removes the parts that are zero.
func without0(all []Part) []Part {
	return slices.DeleteFunc(all, func(p Part) bool { return p.Value == 0 })
}

// maxWeighed bounds what is reported of a large fleet.
const maxWeighed = 64

// maxExplanation bounds the explanation in a header, in bytes; Envoy accepts some 58 KiB of headers in all.
const maxExplanation = 8 << 10

// Explanation renders a decision for a header: JSON, with as many endpoints as fit, the chosen ones first. It reorders
// and shortens the candidates.
func Explanation(pool string, q Queued, e *picker.Explanation) []byte {
	chosen := func(w picker.Weighed) int {
		if w.Endpoint == e.Prefill || w.Endpoint == e.Decode {
			return 0
		}
		return 1
	}
	slices.SortStableFunc(e.Candidates, func(a, b picker.Weighed) int { return chosen(a) - chosen(b) })
	for {
		text, err := json.Marshal(struct {
			Pool         string  `json:"pool"`
			Waited       float64 `json:"waited"` // s
			WaitedFor    string  `json:"waited_for,omitempty"`
			ForMemory    bool    `json:"waited_for_memory,omitempty"`
			Behind       int     `json:"behind,omitempty"`
			BehindRemote int     `json:"behind_remote,omitempty"`
			*picker.Explanation
		}{pool, q.Waited.Seconds(), q.WaitedFor, q.ForMemory, q.Behind, q.BehindRemote, e})
		switch {
		case err != nil: // a price that is not a number: there is no endpoint
			return []byte(`{"pool":` + strconv.Quote(pool) + `,"refused":` + strconv.Quote(e.Refused) + `}`)
		case len(text) <= maxExplanation || len(e.Candidates) == 0:
			return text
		}
		e.Candidates = e.Candidates[:len(e.Candidates)/2]
	}
}
