package filter

import (
	"bytes"
	"context"
	"net/http"
	"strings"
	"time"

	"tandem/extproc/envoywire"
	"tandem/extproc/faults"
	"tandem/extproc/kvtransfer"
	"tandem/extproc/openai"
	"tandem/extproc/reclaim"
	"tandem/internal/guard"
	"tandem/internal/periodic"
	"tandem/kvstate"
)

// watch has [Shared.Run] look after an answer that may not come, or no longer.
func (s *Shared) watch(f *Filter, begin bool) {
	if !f.hop.replan {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if delete(s.waiting, f); begin {
		s.waiting[f] = struct{}{}
	}
}

// ResponseHeaders is called when an answer begins: D's, or Envoy's own in its place.
func (f *Filter) ResponseHeaders(end bool) Status {
	if !f.hop.sent {
		return Continue
	}
	return f.guarded("response headers", func() Status {
		f.first = time.Since(f.began)
		if !f.hop.replan {
			return Continue
		}
		o := f.envoy.Outcome()
		if failed(o.Status) && f.decodeFailed(&o) {
			return Stop
		}
		return f.checkLate(end)
	})
}

// ResponseBody is called for the first piece of an answer whose headers wait for it.
func (f *Filter) ResponseBody(bool) Status {
	if !f.hop.holding {
		return Continue
	}
	return f.guarded("response body", func() Status {
		f.hop.holding = false
		f.envoy.HoldAnswer(false)
		return f.checkLate(true)
	})
}

// checkLate checks an answer that begins: if it may be made from KV that is another prompt's by now, the request is
// planned again. The headers of a stream come before its engine has done anything, so they wait for its first piece.
func (f *Filter) checkLate(begun bool) Status {
	t := &f.hop.ticket
	policy, _ := f.s.Passes.Policy(t.Pool)
	late := policy.Dialect.LateAfter()
	if !t.Loads || late == 0 {
		f.begun()
		return Continue
	}
	if !begun && bytes.HasPrefix(f.envoy.ResponseHeader("content-type"), []byte("text/event-stream")) {
		f.hop.holding = true
		f.envoy.HoldAnswer(true)
		return Stop
	}
	if f.s.Passes.Since(t) > late {
		if why := f.s.Passes.Outdated(t); why != "" {
			return f.refuseOutdated(string(why))
		}
	}
	f.begun()
	return Continue
}

// begun records that an answer is D's for good.
func (f *Filter) begun() {
	f.s.watch(f, false)
	f.hop.replan = false
}

// refuseOutdated has an answer that may be another prompt's planned again or, if that cannot be, replaced by an error.
func (f *Filter) refuseOutdated(why string) Status {
	t, passes := &f.hop.ticket, f.s.Passes
	passes.Observer.Outdated(t.Pool, t.Decode, why)
	passes.Log.Warn("an answer is refused: its KV may have been another prompt's (docs/security.md#wrong-text)",
		"request_id", f.id, "reason", why, "prefill", t.Prefill, "decode", t.Decode)
	if !f.planAgain(&faults.Failure{}) {
		f.hop.sent, f.hop.replan = false, false
		const message = "the endpoint stood still until the KV of this prompt may have been freed; try again"
		f.refuse(openai.Unavailable("kv_outdated", message, time.Second))
	}
	return Stop
}

// failed reports whether a status is not an endpoint's answer to the request, but that it did not serve it.
func failed(status int) bool {
	return status >= 500 || status < 200 || status == http.StatusRequestTimeout || kvstate.Refuses(status) ||
		status == http.StatusTooEarly
}

// decodeFailed plans a request again whose endpoint failed before its answer began. false: it cannot be.
func (f *Filter) decodeFailed(o *Outcome) bool {
	failure := faults.Of(o.Status, o.Details, string(f.envoy.ResponseHeader(envoywire.HeaderRetryAfter)))
	failure.Overdue = strings.HasPrefix(o.Details, "upstream_per_try_timeout")
	return f.planAgain(&failure)
}

// planAgain begins the request again, in another filter that continues the attempt. false: there is no way.
func (f *Filter) planAgain(failure *faults.Failure) bool {
	t, passes := &f.hop.ticket, f.s.Passes
	f.begun()
	if t.Redirects+1 >= passes.Limits.MaxRedirects {
		return false
	}
	key := f.s.putRestart(&attempt{passes.DecodeFailed(t, f.id, failure), f.reservedAs, f.began})
	f.envoy.SetHeader(headerAttempt, key)
	f.hop.handed = true // Envoy may end this filter before Restart returns
	ok := f.envoy.Restart()
	if f.s.takeRestart(key) != nil { // the other filter did not come
		f.hop.handed = false
	}
	return ok
}

// lost plans a request again whose answer does not come.
func (f *Filter) lost() {
	if f.hop.replan && !f.planAgain(&faults.Failure{}) {
		f.hop.sent = false
		f.refuse(openai.Unavailable("endpoint_failed", "the endpoint did not answer; try again", time.Second))
	}
}

// silence is how long an answer may not come before somebody looks whether it will.
const silence = 10 * time.Second

// Run looks after requests whose answers do not come, until ctx ends.
func (s *Shared) Run(ctx context.Context) {
	periodic.Run(ctx, 250*time.Millisecond, func(time.Time) {
		for _, f := range s.silent() {
			if s.Passes.Lost(&f.hop.ticket) {
				f.wake(f.lost)
			}
		}
		s.lookAfter()
	})
}

// silent returns the requests that have waited for long.
func (s *Shared) silent() (out []*Filter) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for f := range s.waiting {
		if s.Passes.Since(&f.hop.ticket) >= silence {
			out = append(out, f)
		}
	}
	return out
}

// wake has the worker do something, unless the request has ended.
func (f *Filter) wake(do func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.gone && f.then == nil {
		f.then = do
		f.waker.Wake()
	}
}

// finish records the end of the request, once, when nothing runs for it any more.
func (f *Filter) finish() {
	if f.ended {
		return
	}
	f.ended = true
	f.begun()
	f.drop()
	if f.hop.handed {
		return
	}
	f.s.Passes.Release(f.hop.held)
	if f.hop.sent {
		f.record()
	} else { // it may have to tell Redis
		go func() {
			defer guard.Recover(guard.With(context.Background(), f.s.Passes.Guard), "envoy filter end")
			f.record()
		}()
	}
}

// record tells what the end of the request says of its endpoints.
func (f *Filter) record() {
	t, passes, o := &f.hop.ticket, f.s.Passes, &f.outcome
	if t.ID == ([16]byte{}) {
		if f.resumed == nil {
			return // it was refused before endpoints were chosen
		}
		t = &f.resumed.ticket
	}
	InsuredOf(f).outcome(o)
	e := &envoywire.LogEntry{
		RequestID: []byte(f.id), Details: []byte(o.Details), Status: o.Status, Start: f.began,
		Duration: time.Since(f.began), ClientGone: o.ClientGone(),
		Answered: envoywire.Answered{FirstByte: f.first, Body: o.Bytes},
	}
	passes.Reclaim.Ended(t, &reclaim.End{
		RequestID: f.id, ClientGone: e.ClientGone, Asked: f.hop.sent, Tried: f.hop.sent, BookedHere: true,
	})
	passes.Faults.DecodeEnded(t, e)
	var took, first time.Duration
	if t.Stage == kvtransfer.DecodeLeg {
		sealed := passes.SealedAt(t)
		took = max(e.Start.Add(e.Duration).Sub(sealed), 0)
		if e.FirstByte > 0 {
			first = max(e.Start.Add(e.FirstByte).Sub(sealed), 0)
		}
	}
	passes.Observer.RequestEnded(t, e, took, first, true)
}
