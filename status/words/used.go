package words

import (
	"fmt"
	"strings"
	"time"

	"tandem/extproc/usage"
)

// Share formats a share of all; "-" of nothing.
func Share(part, all float64) string {
	if all == 0 {
		return "-"
	}
	return fmt.Sprintf("%.0f %%", 100*part/all)
}

// Used describes in a line what a request used; "" if that is not known. expected is when its first token was expected;
// 0: unknown.
func Used(u *usage.Used, expected time.Duration) string {
	if u == nil {
		return ""
	}
	var parts []string
	add := func(format string, args ...any) { parts = append(parts, fmt.Sprintf(format, args...)) }
	switch {
	case u.Absurd:
		add("its answer names what are no numbers of tokens")
	case u.Prompt == nil && u.Answer == nil:
		add("its answer names no tokens")
	}
	if u.Prompt != nil {
		of := "tokens of prompt"
		if u.Cached != nil {
			of = fmt.Sprintf("tokens of prompt (%d cached)", *u.Cached)
		}
		add("%d %s", *u.Prompt, of)
	}
	if u.Answer != nil {
		add("%d of answer", *u.Answer)
	}
	ms := func(d time.Duration) string { return Millis(float64(d.Microseconds()) / 1000) }
	switch {
	case u.FirstToken > 0 && expected > 0:
		add("first token after %s (expected %s)", ms(u.FirstToken), ms(expected))
	case u.FirstToken > 0:
		add("first token after %s", ms(u.FirstToken))
	}
	if u.PerToken > 0 {
		add("%s a token then", ms(u.PerToken))
	}
	if u.Tenant != "" {
		add("tenant %s", Plain(u.Tenant))
	}
	if became := map[string]string{
		usage.Kept: "within the pool's targets", usage.Late: "later than the pool's targets",
		usage.Slow: "slower than the pool's targets",
	}[u.Promise]; became != "" {
		add("%s", became)
	}
	return "Used: " + strings.Join(parts, ", ") + ".\n"
}
