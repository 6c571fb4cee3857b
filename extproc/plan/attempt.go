package plan

import (
	"slices"
	"strings"
	"time"

	"tandem/extproc/kvtransfer"
	"tandem/extproc/openai"
	"tandem/kvstate"
)

// Attempt is what is known about a request before one of its passes is planned.
type Attempt struct {
	Redirects int // that Envoy has followed so far
	Prefills  int // prefill legs tried so far
	Started   time.Time
	From      time.Time        // of an answer that is continued: from when its attempts count; zero: from Started
	Clock     func() time.Time // of the fleet; nil: time.Now
	Excluded  []string         // addresses that failed it
	Encoded   []byte           // members with the encoded media for prefill; nil: none
	Alone     bool             // do not split, whatever the policy
	Why       string           // the reason for Alone

	PairFailed   [2]string // addresses of the pair that failed last, if it is unknown which of the two did
	DecodeFailed bool      // the last failed hop was to decode
	Last         bool      // no other endpoint is left: what the next one answers is the client's
	LacksModel   bool      // the last endpoint that was asked answered 404: it does not serve the model
	Outdated     bool      // its endpoint stood still, is waited for, and should compute the prompt itself
}

// Next returns the attempt of a request from the ticket that came back, whichever hop of it failed.
func Next(t *kvtransfer.Ticket) Attempt {
	cause, _ := kvtransfer.CauseOf(t.Cause)
	a := Attempt{
		Redirects: t.Redirects, Prefills: t.Prefills, Started: t.Started, Excluded: t.Excluded,
		DecodeFailed: cause.DecodeFailed,
		Outdated:     t.Cause == kvtransfer.CauseOutdated, LacksModel: t.Cause == kvtransfer.CauseModel,
	}
	if t.Loads && (a.DecodeFailed || t.Cause == kvtransfer.CausePrefill) {
		a.PairFailed = [2]string{t.Prefill, t.Decode}
	}
	return a
}

// Failed applies the pool's onPrefillFailure to an attempt whose ticket says that the prefill failed. An error is the
// client's answer.
func (a *Attempt) Failed(p *Policy, pool *kvstate.Pool, t *kvtransfer.Ticket) error {
	if t.Cause == kvtransfer.CauseRefused {
		a.decodeAlone("prefill_refused")
		return nil
	}
	if cause, known := kvtransfer.CauseOf(t.Cause); known && !cause.Lost || !t.Split {
		return nil
	}
	switch p.OnFailure {
	case DecodeAlone:
		a.decodeAlone("prefill_failed")
	case Fail:
		if err := full(pool, kvstate.RolePrefill); err != nil {
			return err
		}
		return PrefillFailed(a.failed())
	case OtherPrefill:
	}
	return nil
}

// PrefillFailed is the answer to a request whose prefill failed for good. at names endpoints: ": 10.0.1.1:8000".
func PrefillFailed(at string) error {
	return openai.Unavailable("prefill_failed", "the prefill of this request failed"+at, time.Second)
}

// avoided returns the addresses that pass 2 must not choose as D when prefill computes the prompt: those that
// failed the request, and the P of a pair that failed it, which may be dead, if this pass chose another.
func (a *Attempt) avoided(prefill string) []string {
	if p := a.PairFailed[0]; p != "" && p != prefill && !slices.Contains(a.Excluded, p) {
		return append(slices.Clone(a.Excluded), p)
	}
	return a.Excluded
}

func (a *Attempt) decodeAlone(why string) { a.Alone, a.Why = true, why }

// Late reports whether the time for further attempts is over. The first decode after a failed prefill is not
// another attempt, so it is always allowed.
func (a *Attempt) Late(p *Policy) bool { return a.Age() > p.AttemptsTime }

// Age returns the time since the request arrived, or since its answer was to be continued.
func (a *Attempt) Age() time.Duration {
	if !a.From.IsZero() {
		return a.now().Sub(a.From)
	}
	return a.now().Sub(a.Started)
}

func (a *Attempt) now() time.Time {
	if a.Clock == nil {
		return time.Now()
	}
	return a.Clock()
}

// Exhausted returns why a request must not go to one more decode endpoint; nil if it may.
func (a *Attempt) Exhausted(p *Policy, decode string) error {
	failedTwice := func(e string) bool { return a.failures(e) >= maxTries }
	why := ""
	switch {
	case a.DecodeFailed && a.Late(p):
		why = "no endpoint answered this request in the time there is for it"
	case a.failures(decode) > 0 && slices.ContainsFunc(a.Excluded, failedTwice):
		why = "every endpoint that could answer this request has failed it" + a.failed()
	default:
		return nil
	}
	return openai.Unavailable("endpoint_failed", why, time.Second)
}

// Unserved ends a request whose model the last endpoint did not serve, if the next endpoint has answered 404 before,
// although it was chosen among those that may have the model. Then no other is left, and the client gets the next
// answer: the engine's own words for what it has not found. If no engine may be asked, it returns the client's answer
// as an error.
func (a *Attempt) Unserved(p *Policy, decode *kvstate.Endpoint, model string) error {
	if !a.LacksModel || a.failures(decode.Addr) == 0 {
		return nil
	}
	if !p.MayBeAlone() {
		return openai.ModelNotFound(model)
	}
	a.Last = true
	a.decodeAlone("model_not_found")
	return nil
}

// maxTries is how often one endpoint may fail a request. If every endpoint has failed the request, one of them is tried
// a second time, since it may have recovered, but no more.
const maxTries = 2

// failures returns how often an endpoint has failed the request.
func (a *Attempt) failures(addr string) (times int) {
	for _, e := range a.Excluded {
		if e == addr {
			times++
		}
	}
	return times
}

// failed names the endpoints that failed the request, for its client: ": 10.0.2.1:8000 (twice)".
func (a *Attempt) failed() string {
	var said []string
	for i, addr := range a.Excluded {
		if slices.Contains(a.Excluded[:i], addr) {
			continue
		}
		if a.failures(addr) >= maxTries {
			addr += " (twice)"
		}
		said = append(said, addr)
	}
	if len(said) == 0 {
		return ""
	}
	return ": " + strings.Join(said, ", ")
}

// Retries returns the endpoints that stay excluded even if no other is left: those that failed the request maxTries
// times.
func (a *Attempt) Retries() []string {
	if len(a.Excluded) == 0 {
		return nil
	}
	return slices.DeleteFunc(slices.Clone(a.Excluded), func(addr string) bool { return a.failures(addr) < maxTries })
}
