package telemetry

import (
	"encoding/json"
	"fmt"
	"os"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tandem/picker"
)

// A large fleet's explanation fits a header: those chosen stand first, and some others.
func TestExplanationFitsAHeader(t *testing.T) {
	e := picker.Explanation{Prefill: "10.0.1.9:8000", Decode: "10.0.2.8:8000"}
	for i := range 500 {
		e.Candidates = append(e.Candidates, picker.Weighed{
			Endpoint: fmt.Sprintf("10.0.%d.%d:8000", 1+i%2, i/2), Role: "prefill",
			Prefill: &picker.PrefillPrice{Queue: 1.0 / 3, Work: 2.0 / 3},
		})
	}
	text := Explanation("chat", Queued{Waited: time.Second, WaitedFor: "10.0.1.9:8000", Behind: 3, BehindRemote: 2}, &e)
	require.LessOrEqual(t, len(text), maxExplanation)
	require.Greater(t, len(text), maxExplanation/4)
	var got struct {
		Waited     float64
		Candidates []picker.Weighed
	}
	require.NoError(t, json.Unmarshal(text, &got))
	require.InDelta(t, 1, got.Waited, 0)
	require.ElementsMatch(t, []string{e.Prefill, e.Decode}, []string{got.Candidates[0].Endpoint, got.Candidates[1].Endpoint})
}

// The documentation has a row for every field of the header.
func TestExplanationIsDocumented(t *testing.T) {
	text, err := os.ReadFile("../../docs/operations.md")
	require.NoError(t, err)
	_, section, found := strings.Cut(string(text), "### The header x-tandem-explain\n")
	require.True(t, found)
	section, _, _ = strings.Cut(section, "\n## ")
	var documented []string
	for _, row := range regexp.MustCompile("(?m)^\\| (`[^|]*) \\|").FindAllStringSubmatch(section, -1) {
		for _, name := range regexp.MustCompile("`([a-z_]+)`").FindAllStringSubmatch(row[1], -1) {
			documented = append(documented, name[1])
		}
	}
	fields := []string{"pool", "waited", "waited_for", "waited_for_memory", "behind", "behind_remote"}
	for _, v := range []any{picker.Explanation{}, picker.Weighed{}} {
		for field := range reflect.TypeOf(v).Fields() {
			name, _, _ := strings.Cut(field.Tag.Get("json"), ",")
			fields = append(fields, name)
		}
	}
	slices.Sort(documented)
	slices.Sort(fields)
	require.Equal(t, slices.Compact(fields), slices.Compact(documented))
}

// The parts of prices stand in docs, those of each price in its row.
func TestPartsAreDocumented(t *testing.T) {
	operations, err := os.ReadFile("../../docs/operations.md")
	require.NoError(t, err)
	why, err := os.ReadFile("../../docs/howto/why-there.md")
	require.NoError(t, err)
	for row, price := range map[string]any{
		"prefill": picker.PrefillPrice{}, "decode_leg": picker.DecodePrice{}, "alone": picker.AlonePrice{},
	} {
		var parts []string
		for field := range reflect.TypeOf(price).Fields() {
			name, _, _ := strings.Cut(field.Tag.Get("json"), ",")
			parts = append(parts, "`"+name+"`")
			require.Contains(t, string(why), "\n| `"+name+"` | ", "docs/howto/why-there.md")
		}
		_, line, found := strings.Cut(string(operations), "\n| `"+row+"` | price of ")
		require.True(t, found, row)
		line, _, _ = strings.Cut(line, "\n")
		_, line, _ = strings.Cut(line, ": ")
		require.Equal(t, strings.Join(parts, ", ")+" |", line, "docs/operations.md, row %s", row)
	}
}
