package kvstate

import "time"

// ContinuesAgain is how long an engine that did not continue another one's answer is not asked to. Until then it may
// have been started again with another release.
const ContinuesAgain = 10 * time.Minute

// DoesNotContinue records that an engine does not continue what another one has begun: asked to, it began anew. It
// serves everything else. It reports whether that is new.
func (e *Endpoint) DoesNotContinue(now time.Time) bool {
	return e.state.condition.beginsAnew.Swap(now.Add(ContinuesAgain).UnixNano()) < now.UnixNano()
}

// Continues reports whether an engine may be asked to continue what another one has begun.
func (e *Endpoint) Continues(now time.Time) bool {
	return e.state == nil || e.state.condition.beginsAnew.Load() < now.UnixNano()
}
