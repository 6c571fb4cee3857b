package jsontext

import (
	"encoding/json"
	"os"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestLax reads the table that vLLM's own request models wrote (e2e/oracles/judge_coercion.py).
func TestLax(t *testing.T) {
	text, err := os.ReadFile("../../../extproc/openai/testdata/coerced.json")
	require.NoError(t, err)
	var table struct {
		Count map[string]*int64
		Flag  map[string]*bool
	}
	require.NoError(t, json.Unmarshal(text, &table))
	for raw, want := range table.Count {
		n, ok := LaxInteger([]byte(raw))
		require.Equal(t, want != nil, ok, raw)
		require.True(t, !ok || n == *want, raw)
	}
	for raw, want := range table.Flag {
		v, ok := LaxBool([]byte(raw))
		require.Equal(t, want != nil, ok, raw)
		require.True(t, !ok || v == *want, raw)
	}
}
