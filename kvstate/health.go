package kvstate

import "time"

// Health marks endpoints that fail, so that no request chooses them, and those that have recovered.
type Health struct {
	link        *link
	now         func() time.Time
	notify      func(e *Endpoint, good bool, cause HealthCause, why string) // may be nil
	onRecovered func(*Endpoint)
}

// HealthCause is the reason of a change of an endpoint's health.
type HealthCause string

// The causes.
const (
	CauseRequest   HealthCause = "request"    // a request failed there
	CauseTimeLimit HealthCause = "time_limit" // it did not answer a request in time
	CauseCheck     HealthCause = "check"      // a health check failed, or succeeded again
	CauseAnswer    HealthCause = "answer"     // it answered a request
	CauseReplica   HealthCause = "replica"    // another replica noticed
	CauseStill     HealthCause = "standstill" // it has requests, and its counters do not move
)

// failure is how an endpoint failed. It is never modified.
type failure struct {
	hung  bool // by a timeout
	cause HealthCause
	over  time.Time // when it was back; zero: it is not
}

func (f *failure) hangs() bool { return f != nil && f.hung }

// Hung reports whether an endpoint is marked because it did not answer in time.
func Hung(e *Endpoint) bool { return e.Failed() && e.state.condition.how.Load().hangs() }

// FailedBy returns the cause for which an endpoint is marked as failed; "" if it is not.
func (s *Health) FailedBy(e *Endpoint) HealthCause {
	if how := e.state.condition.how.Load(); how != nil && e.Failed() {
		return how.cause
	}
	return ""
}

// StandsStill reports whether an endpoint is marked because its core stands still, and a recent scrape shows that it
// still does: an engine that answers no scrapes is no longer thought to go on.
func (s *Health) StandsStill(e *Endpoint) bool {
	return s.FailedBy(e) == CauseStill && e.state.condition.progress.Standing(s.now())
}

// stands reports whether an endpoint is marked only because its core stands still.
func (e *Endpoint) stands() bool {
	if e.state.condition.failed.Load() == 0 || e.Paused() || e.Draining {
		return false
	}
	how := e.state.condition.how.Load()
	return how != nil && how.cause == CauseStill
}

// MarkFailed marks an endpoint as failed. It returns true if it was not already.
func (s *Health) MarkFailed(e *Endpoint) bool { return s.Mark(e, false, CauseRequest, "") }

// FailedFor returns how long an endpoint has been marked as failed.
func (s *Health) FailedFor(e *Endpoint) time.Duration {
	since := e.state.condition.failed.Load()
	if since == 0 {
		return 0
	}
	return s.now().Sub(time.Unix(0, since))
}

// Gone records that nothing listens at an endpoint that has failed, or will be marked now: what is there when it is
// back is another process, even if it has no counters that show it.
func (s *Health) Gone(e *Endpoint) { e.state.condition.gone.Store(true) }

// setFailed sets the mark. It returns false if it was set so before.
func (s *Health) setFailed(e *Endpoint, failed bool) bool {
	since := e.state.condition.failed.Load()
	if failed {
		return since == 0 && e.state.condition.failed.CompareAndSwap(0, s.now().UnixNano())
	}
	if since == 0 {
		return false
	}
	e.state.awaitReport(s.now()) // it may have been started anew, with other settings
	if e.state.condition.gone.Swap(false) {
		e.state.restarted()
	}
	if !e.state.condition.failed.CompareAndSwap(since, 0) {
		return false
	}
	if how := e.state.condition.how.Load(); how != nil {
		e.state.condition.how.CompareAndSwap(how, &failure{how.hung, how.cause, s.now()})
	}
	return true
}

// Back returns when an endpoint that had failed came back; zero if it never failed, or has failed again.
func Back(e *Endpoint) time.Time {
	if how := e.state.condition.how.Load(); how != nil {
		return how.over
	}
	return time.Time{}
}

// Mark marks an endpoint as failed. hung says that it did not answer in time; why says for people what was seen ("":
// only the cause is known). It returns true if the endpoint was not marked already.
func (s *Health) Mark(e *Endpoint, hung bool, cause HealthCause, why string) bool {
	next := failure{hung: hung, cause: cause}
	if old := e.state.condition.how.Load(); old != nil && e.Failed() {
		next.cause = old.cause // the first one counts
	}
	e.state.condition.how.Store(&next)
	marked := s.setFailed(e, true)
	if marked {
		s.link.changed()
		s.healthChanged(e, false, cause, why)
	}
	return marked
}

func (s *Health) healthChanged(e *Endpoint, good bool, cause HealthCause, why string) {
	if s.notify != nil {
		s.notify(e, good, cause, why)
	}
}

// MarkGood removes the mark of an endpoint that answered a request. It returns true if it was marked.
func (s *Health) MarkGood(e *Endpoint) bool { return s.markGood(e, CauseAnswer) }

// MarkHealthy is MarkGood for an endpoint that answered a health check.
func (s *Health) MarkHealthy(e *Endpoint) bool { return s.markGood(e, CauseCheck) }

// markGood does nothing to an endpoint that stands still: its API server may answer all the same.
func (s *Health) markGood(e *Endpoint, cause HealthCause) bool {
	marked := !e.state.condition.progress.Standing(s.now()) && s.setFailed(e, false)
	if marked {
		e.state.condition.beginsAnew.Store(0) // it may be another release
		s.onRecovered(e)
		s.link.changed()
		s.healthChanged(e, true, cause, "")
	}
	return marked
}

// ApplyFailed applies [Health.Mark] or [Health.MarkGood] of another replica.
func (s *Health) ApplyFailed(e *Endpoint, failed, hung bool) {
	if !failed && e.state.condition.progress.Standing(s.now()) {
		return
	}
	changed := s.setFailed(e, failed)
	if failed && (changed || hung && !Hung(e)) {
		e.state.condition.how.Store(&failure{hung: hung, cause: CauseReplica})
	}
	if changed {
		s.healthChanged(e, !failed, CauseReplica, "")
	}
}
