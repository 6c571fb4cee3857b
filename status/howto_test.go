package status

import (
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tandem/extproc/telemetry"
)

// The how-to about idle prefill starts from the lines that are printed, and from no others.
func TestPrefillIdlesHowTo(t *testing.T) {
	now := time.Now()
	alone := make([]telemetry.Trace, 23)
	for i := range alone {
		alone[i] = telemetry.Trace{Pool: "chat", Started: now, Route: "decode_alone", Reason: "cheaper"}
		if i >= 20 {
			alone[i].Route, alone[i].Reason = "pass_through", ""
		}
	}
	printed := map[string]bool{}
	for _, tt := range []struct {
		change func(p1, p2 *Endpoint)
		recent []telemetry.Trace
	}{
		{func(_, _ *Endpoint) {}, alone},
		{func(p1, p2 *Endpoint) {
			p1.State, p1.FailedBy, p1.FailedS, p2.State = "out", "check", 12, "out"
		}, nil},
		{func(p1, p2 *Endpoint) { p1.Paused, p1.State, p2.Paused, p2.State = true, "paused", true, "paused" }, nil},
		{func(p1, p2 *Endpoint) { p1.State, p2.State = "stale", "stale" }, nil},
		{func(p1, p2 *Endpoint) { p1.Unpaired, p1.Group, p2.Unpaired = true, "b", true }, nil},
	} {
		endpoints := []Endpoint{
			{Name: "p1", Role: "prefill", State: "up"}, {Name: "p2", Role: "prefill", State: "up"},
			{Name: "d1", Role: "decode", State: "up"},
		}
		tt.change(&endpoints[0], &endpoints[1])
		s := Status{Ready: true, Now: now, Sharing: Sharing{Replicas: 1}, Pools: []Pool{{Name: "chat", Endpoints: endpoints}}}
		lines(printed, attention(&s, tt.recent))
	}
	some := Status{Ready: true, Now: now, Sharing: Sharing{Replicas: 1}, Pools: []Pool{{Name: "chat", Endpoints: []Endpoint{
		{Name: "p1", Role: "prefill", State: "paused", Paused: true}, {Name: "p2", Role: "prefill", State: "out"},
		{Name: "d1", Role: "decode", State: "up"},
	}}}}
	for _, n := range attention(&some, nil) {
		if strings.Contains(n.Text, "is left") {
			lines(printed, []Notice{n})
		}
	}

	text, err := os.ReadFile("../docs/howto/prefill-idles.md")
	require.NoError(t, err)
	written := map[string]bool{}
	for line := range strings.Lines(string(text)) {
		line, code := strings.CutPrefix(strings.TrimRight(line, "\n"), "    ")
		if code && (strings.HasPrefix(line, "warning") || strings.HasPrefix(line, "PROBLEM")) {
			written[line] = true
		}
	}
	require.Equal(t, printed, written)
}

// lines adds notices as they are printed.
func lines(to map[string]bool, notices []Notice) {
	var text strings.Builder
	printAttention(&text, notices)
	for line := range strings.Lines(text.String()) {
		if line = strings.TrimSpace(line); line != "" {
			to[line] = true
		}
	}
}
