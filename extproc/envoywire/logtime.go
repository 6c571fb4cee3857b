package envoywire

import "time"

// maxLogDelay is how late an entry of the access log may come; Envoy sends them every 0.2 s.
const maxLogDelay = 2 * time.Second

// SetTime replaces the start of an entry that is read now, if Envoy's clock cannot be right.
func (e *LogEntry) SetTime(now time.Time) {
	if late := now.Sub(e.Start.Add(e.Duration)); late < 0 || late > maxLogDelay {
		e.Start = now.Add(-e.Duration)
	}
}
