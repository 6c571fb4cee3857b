package kvstate

import (
	"time"

	"tandem/kvstate/standstill"
)

// OnExpired sets what is called when an endpoint's engine freed n requests' KV that nobody had fetched in time. It must
// not block. Call it before the state is in use.
func (s *State) OnExpired(f func(e *Endpoint, n int64)) { s.expired = f }

// follow watches an engine's counters from scrape to scrape: an engine that has requests and stands still is marked
// as failed until it goes on, although it may answer health checks. Each replica decides by itself, since all learn
// of each scrape.
func (s *State) follow(e *Endpoint, before, after *Signals) {
	if after.ScrapedAt.IsZero() || before != nil && !after.ScrapedAt.After(before.ScrapedAt) {
		return
	}
	remote, now := e.RemoteLoad(), s.o.Now().UnixNano()
	switch e.state.condition.progress.Observe(standstill.Sample{
		At: after.ScrapedAt, Reserved: e.state.requests.Load() + remote.Requests,
		Counts: standstill.Counts{Work: after.Work, Running: after.Running, Waiting: after.Waiting,
			Usage: after.KVUsage, Done: after.Answers.Answers},
		Patience: max(time.Duration(e.state.queue.lead.Load()), remote.Lead) +
			max(time.Duration(e.state.local.until.Load()-now), remote.Local, 0),
	}) {
	case standstill.Stood:
		s.Health.Mark(e, true, CauseStill, "it has requests, and its counters do not move")
	case standstill.Moved:
		s.Health.markGood(e, CauseStill)
	case standstill.Same:
	}
	if before != nil && after.Expired > before.Expired && !before.ScrapedAt.IsZero() && e.expiresForOthers() {
		e.state.condition.progress.Expired(after.ScrapedAt)
		if s.expired != nil {
			s.expired(e, after.Expired-before.Expired)
		}
	}
}

// Outdated returns why KV that prefill has held for decode since a moment may be another prompt's by now, if decode has
// not fetched it yet; "" if nothing says so. prefill may be nil.
func (s *State) Outdated(prefill, decode *Endpoint, since time.Time) standstill.Reason {
	var holder *standstill.Tracker
	if prefill != nil {
		holder = &prefill.state.condition.progress
	}
	return standstill.Outdated(holder, &decode.state.condition.progress, since, s.o.Now())
}

// expiresForOthers reports whether KV that the engine frees because nobody has fetched it in time is what it kept for
// decode. An engine that decodes and can be asked for its KV keeps each answer's, too, and frees that after a time of
// its own (vLLM's bidirectional_kv_xfer and decoder_kv_blocks_ttl): its count says nothing of hand-overs.
func (e *Endpoint) expiresForOthers() bool {
	switch e.Role & RoleBoth {
	case RolePrefill:
		return true
	case RoleBoth:
		return !e.state.condition.progress.KeepsAnswers()
	}
	return false
}
