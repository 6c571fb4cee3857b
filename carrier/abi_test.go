package main

import (
	"os"
	"regexp"
	"slices"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"

	"tandem/extproc/answer"
)

// The library looks for every function of Envoy's that it calls before it starts (hooks.c).
func TestEveryFunctionIsLookedFor(t *testing.T) {
	name := regexp.MustCompile(`envoy_dynamic_module_callback_\w+`)
	declared, err := os.ReadFile("abi.h")
	require.NoError(t, err)
	looked, err := os.ReadFile("hooks.c")
	require.NoError(t, err)
	names := func(b []byte) []string {
		return slices.Compact(slices.Sorted(slices.Values(name.FindAllString(string(b), -1))))
	}
	require.Equal(t, names(declared), names(looked))
}

// A stream's events are shown to the filter if they have one of the marks of package answer: hooks.c looks for the same.
func TestMarks(t *testing.T) {
	hooks, err := os.ReadFile("hooks.c")
	require.NoError(t, err)
	looked := regexp.MustCompile(`!has\(one, ("(?:[^"\\]|\\.)*")\)`).FindAllSubmatch(hooks, -1)
	var marks []string
	for _, m := range looked {
		mark, err := strconv.Unquote(string(m[1]))
		require.NoError(t, err)
		marks = append(marks, mark)
	}
	require.ElementsMatch(t, answer.Marks(), marks)
}
