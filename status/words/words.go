// Package words has figures, times, lists and reasons as people read them, and texts for a terminal.
package words

import (
	"cmp"
	"fmt"
	"strings"
	"time"
)

// Number formats a count or a rate.
func Number(v float64) string {
	switch {
	case v >= 1e4:
		return fmt.Sprintf("%.0fk", v/1e3)
	case v >= 10 || v == float64(int64(v)):
		return fmt.Sprintf("%.0f", v)
	case v < .095: // one request in a minute is not none
		return fmt.Sprintf("%.2f", v)
	}
	return fmt.Sprintf("%.1f", v)
}

// Millis formats a time in milliseconds; "-" for 0.
func Millis(v float64) string {
	switch {
	case v == 0:
		return "-"
	case v >= 48*3600e3:
		return fmt.Sprintf("%.0f days", v/24/3600e3)
	case v >= 2*3600e3:
		return fmt.Sprintf("%.1f h", v/3600e3)
	case v >= 600e3:
		return fmt.Sprintf("%.0f min", v/60e3)
	case v >= 1000:
		return fmt.Sprintf("%.1f s", v/1000)
	case v >= 10:
		return fmt.Sprintf("%.0f ms", v)
	case v >= 0.1:
		return fmt.Sprintf("%.1f ms", v)
	}
	return fmt.Sprintf("%.0f µs", v*1000)
}

// About formats a time that was interpolated in a bucket a quarter wide.
func About(v float64) string {
	if v == 0 {
		return Millis(v)
	}
	return "~" + Millis(v)
}

// PerSecond formats a rate of bytes for people: two digits, never an exponent.
func PerSecond(bytes float64) string {
	units := []string{"B/s", "KB/s", "MB/s", "GB/s", "TB/s"}
	i := 0
	for ; bytes >= 999.5 && i < len(units)-1; i++ {
		bytes /= 1000
	}
	if bytes < 9.95 {
		return fmt.Sprintf("%.1f %s", bytes, units[i])
	}
	return fmt.Sprintf("%.0f %s", bytes, units[i])
}

// Paint colours a printed text for a terminal: red what needs attention, bold the headings.
func Paint(text string) string {
	const red, bold, plain = "\x1b[31m", "\x1b[1m", "\x1b[0m"
	var out strings.Builder
	for line := range strings.Lines(text) {
		body, end := strings.TrimSuffix(line, "\n"), line[len(strings.TrimSuffix(line, "\n")):]
		switch {
		case strings.HasPrefix(body, "PROBLEM"), strings.HasPrefix(body, "  5"), strings.Contains(body, "NOT READY"),
			strings.HasPrefix(strings.TrimLeft(body, " 0123456789"), ", cut "),
			strings.Contains(body, "  OUT "), strings.Contains(body, "  NO ANSWER "), strings.Contains(body, "  GONE,"):
			body = red + body + plain
		case body != "" && !strings.HasPrefix(body, " "):
			body = bold + body + plain
		}
		out.WriteString(body + end)
	}
	return out.String()
}

// Ago returns a time in the past for people.
func Ago(now, then time.Time) string {
	return max(now.Sub(then), 0).Round(time.Second).String() + " ago"
}

// At returns a time of day in the terminal's zone, with the date if it is not within the last half of a day.
func At(now, then time.Time) string {
	if now.Sub(then) > 12*time.Hour {
		return then.Local().Format("Jan 2 15:04:05")
	}
	return then.Local().Format(time.TimeOnly)
}

// Since returns how long something has lasted.
func Since(now, from time.Time) string { return max(now.Sub(from), 0).Round(time.Second).String() }

// After returns a text after another one, "" if there is none.
func After(first, text string) string {
	if text == "" {
		return ""
	}
	return first + text
}

// MinutesAgo is coarse, for a text that should not change every second: screen readers read changes out.
func MinutesAgo(d time.Duration) string {
	if d < time.Minute {
		return "less than a minute ago"
	}
	return fmt.Sprintf("%d min ago", int(d.Minutes()))
}

// Count names n things.
func Count(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}

// List joins names, at most the first few.
func List(names []string) string {
	const shown = 4
	if len(names) > shown {
		return strings.Join(names[:shown], ", ") + fmt.Sprintf(" and %d more", len(names)-shown)
	}
	return strings.Join(names, ", ")
}

// State names the state of an endpoint or a pool. state is "" for a pool, and from a replica of an earlier release.
func State(state string, paused bool) string {
	switch {
	case state == "out" && paused: // as expected of an engine that is drained and restarted
		return "OUT, paused"
	case state == "out":
		return "OUT"
	case paused && state != "draining":
		return "paused"
	}
	return cmp.Or(state, "up")
}

// Join joins two remarks, either of which may be empty.
func Join(a, b string) string {
	if a == "" || b == "" {
		return a + b
	}
	return a + ", " + b
}

// Role returns the role of an endpoint, with what it does now if that changes.
func Role(role, word string) string {
	if word == "" {
		return role
	}
	return role + ", now " + word
}
