package report

import (
	"bytes"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"tandem/replay"
)

func TestReportIsComplete(t *testing.T) {
	c := replay.DefaultConfig()
	c.Prefill, c.Decode = 2, 2
	tr, err := replay.Prepare("agent", 800, 1, .5, c)
	require.NoError(t, err)
	var progress bytes.Buffer
	results, err := replay.RunAll(t.Context(), tr, []string{"tandem", "random"}, c, &progress)
	require.NoError(t, err)
	require.Contains(t, progress.String(), "100 %")
	var page, table bytes.Buffer
	require.NoError(t, (&Report{Title: "<t>", About: replay.About(tr, c), Results: results}).Write(&page))
	require.Contains(t, page.String(), "&lt;t&gt;")
	require.NotContains(t, page.String(), "NaN")
	require.NotContains(t, page.String(), "http", "it needs nothing else")
	require.Equal(t, 4, strings.Count(page.String(), "<svg"))
	Print(&table, results)
	require.Equal(t, 3, strings.Count(table.String(), "\n"))
}
