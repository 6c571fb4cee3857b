package replay

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"tandem/replay/sessions"
)

// A table has a line for each contender, and all cells of its head; a day and users who give up have their own columns.
func TestLoopPrints(t *testing.T) {
	all, err := sessions.Generate("people", 50, 1)
	require.NoError(t, err)
	loops := agentLoops(all)
	for _, l := range []loop{loops[0], loops[len(loops)-2], loops[len(loops)-1]} {
		l.play.Active, l.play.Warm, l.play.Measured, l.play.Drain = 5, 0, min(l.play.Measured, 4*3600), 10
		if l.who = []string{"idle", "tandem/never@8", "tandem@2+6"}; l.play.Most > 0 {
			l.play.Most = 9
		}
		rows, err := l.run(t.Context(), []uint64{1, 2})
		require.NoError(t, err)
		var out strings.Builder
		l.print(&out, rows)
		lines := strings.Split(strings.TrimSpace(out.String()), "\n")
		require.Len(t, lines, 2+2+3)
		for _, line := range lines[2:] {
			require.Equal(t, strings.Count(lines[2], "|"), strings.Count(line, "|"), line)
		}
		require.Contains(t, lines[4], "| idle | ")
		require.Contains(t, lines[4], "| 1.000 |")
	}
}

func TestParseContender(t *testing.T) {
	for name, want := range map[string]string{
		"tandem/never@8": "", "tandem@2+6": "", "idle": "", "least-requests/never@16": "",
		"tandem-no-events/auto@8": "", "tandem-no-events@2+6": "",
		"tandem/sometimes": `"tandem/sometimes": tandem/sometimes is not always, auto, never or roles`,
		"tandem@2+":        `"tandem@2+": 2+ is not a fleet such as 2+6 or 8`,
		"tandem@x":         `"tandem@x": x is not a fleet such as 2+6 or 8`,
	} {
		_, err := ParseContender(name)
		if want == "" {
			require.NoError(t, err)
		} else {
			require.EqualError(t, err, want)
		}
	}
}
