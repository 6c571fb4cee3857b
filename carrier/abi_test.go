package main

import (
	"os"
	"regexp"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
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
