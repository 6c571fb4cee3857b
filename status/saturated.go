package status

import (
	"fmt"
	"math"
	"strings"
	"time"

	"tandem/extproc/telemetry"
	"tandem/status/words"
)

// Prefill is saturated if its endpoints were busy for nearly the whole of a minute, or if at least half of the requests
// of a minute waited in Tandem's queue for long. Both look back a minute, so that the notice does not come and go.
const (
	fullPrefill = .9 // share of the time from which prompts wait long, and beyond which prices count no more
	fullFor     = time.Minute
	waitedLong  = time.Second
)

// PrefillLoad is how busy the prefill endpoints of a pool are.
type PrefillLoad struct {
	Busy float64   `json:"prefill_busy"`               // share of the last minute or so, 0 to 1
	Full time.Time `json:"prefill_full_last,omitzero"` // when they were last so busy that prompts wait
}

// samplePrefill notes how busy prefill is. Feed.mu is held.
func (f *Feed) samplePrefill(now time.Time) {
	before := f.loads
	f.loads = make(map[string]PrefillLoad, len(before))
	for _, p := range f.source.State.Pools() {
		f.source.State.View(p, nil, &f.view)
		busy := math.Round(f.view.Load.Prefill*1000) / 1000 // it fades for long
		load := PrefillLoad{Busy: busy, Full: before[p.Spec.Name].Full}
		if load.Busy >= fullPrefill && f.view.Load.Prefills > 0 {
			load.Full = now
		}
		f.loads[p.Spec.Name] = load
	}
}

// saturated says why a pool's prefill is saturated; "" if it is not. recent has the newest first.
func saturated(p *Pool, recent []telemetry.Trace, now time.Time) string {
	requests, waited, longest := 0, 0, time.Duration(0)
	for i := range recent {
		t := &recent[i]
		if t.Pool != p.Name || now.Sub(t.Started.Add(t.Waited)) > time.Minute {
			continue
		}
		requests++
		if t.Waited >= waitedLong {
			waited++
		}
		longest = max(longest, t.Waited)
	}
	var why []string
	busy := now.Sub(p.Full) < fullFor
	if busy {
		why = append(why, fmt.Sprintf("its endpoints were at times more than %.0f %% busy", 100*fullPrefill))
	}
	if waited > 0 && (busy || requests >= idleDecisions && 2*waited >= requests) {
		why = append(why, "requests waited in Tandem's queue for up to "+words.Millis(milliseconds(longest)))
	}
	return strings.Join(why, ", and ")
}
