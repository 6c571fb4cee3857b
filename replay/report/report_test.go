package report

import (
	"bytes"
	"html"
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

// What the replay of a recording says is one page, whatever was asked.
func TestAnswerIsComplete(t *testing.T) {
	tr, err := replay.Prepare("agent", 120, 1, .5, replay.DefaultConfig())
	require.NoError(t, err)
	load, err := replay.LoadTrace(tr)
	require.NoError(t, err)
	c := replay.DefaultConfig()
	c.Prefill, c.Decode = 2, 1
	now := replay.Variant{Name: "<now>", Policy: "tandem", Config: c, Load: 1}
	replayed, err := now.Play(t.Context(), load)
	require.NoError(t, err)
	a := replay.NewAnswer(load, now, replayed, []string{"a <note>"})
	var plain, page bytes.Buffer
	require.NoError(t, WriteAnswer(&plain, a))
	require.NotContains(t, plain.String(), "<svg")
	v, err := now.With("3")
	require.NoError(t, err)
	require.NoError(t, a.WhatIf(t.Context(), &v))
	require.NoError(t, a.Advise(t.Context(), 3))
	require.NoError(t, a.Draw(t.Context()))
	require.NoError(t, WriteAnswer(&page, a))
	text := html.UnescapeString(page.String())
	require.Contains(t, page.String(), "&lt;now&gt;")
	require.Equal(t, 3, strings.Count(text, "<svg"))
	for _, want := range []string{"<now> (as it was)", "a <note>", "Goodput over load"} {
		require.True(t, strings.Contains(text, want), want)
	}
	for _, s := range a.Advice.Sentences() {
		require.True(t, strings.Contains(text, s), s)
	}
	require.False(t, strings.Contains(text, "NaN"))
	require.False(t, strings.Contains(text, "http"), "it needs nothing else")
}
