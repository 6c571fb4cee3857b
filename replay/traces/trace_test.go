package traces

import (
	"bytes"
	"math"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestReadErrors(t *testing.T) {
	const good = `{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}`
	for text, want := range map[string]string{
		"":                     "x: no requests",
		good + "\n\n{\"timest": "x, line 3: unexpected end of JSON input",
		`{"input_length": 1}`:  "x, line 1: output_length 0 is not between 1 and 16777216",
		`{"output_length": 1}`: "x, line 1: input_length 0 is not between 1 and 16777216",
		`{"timestamp": -1}`:    "x, line 1: timestamp -1 is not between 0 and 1e12 ms",
		`{"input_length": 512, "output_length": 1, "hash_ids": [1, 2]}`: "x, line 1: 2 hash_ids for 512 tokens: one stands for 512",
	} {
		_, err := Read("x", strings.NewReader(text), 1)
		require.EqualError(t, err, want)
	}
	tr, err := Read("x", strings.NewReader(good+"\n"+good), 1)
	require.NoError(t, err)
	require.Len(t, tr.Requests, 2)
	require.Zero(t, tr.Duration())
}

func FuzzRead(f *testing.F) {
	f.Add([]byte(`{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		tr, err := Read("x", bytes.NewReader(text), 1)
		if err != nil {
			return
		}
		for _, q := range tr.Requests {
			require.True(t, q.Input > 0 && q.Output > 0 && len(q.Blocks) <= blocksOf(q.Input) && q.Arrival >= 0 && !math.IsNaN(q.Arrival))
		}
	})
}

// Requests of one program share its number, no other has it, and its last one says so.
func TestPrograms(t *testing.T) {
	tr, err := Generate("agent", 3000, 1, 1)
	require.NoError(t, err)
	last, first := map[uint64]bool{}, map[uint64]uint64{} // by program: ended, and the first block that is its own
	for _, q := range tr.Requests {
		require.NotZero(t, q.Program)
		require.False(t, last[q.Program])
		last[q.Program] = q.Last
		if len(q.Blocks) > 41 { // behind shared instructions
			require.Contains(t, []uint64{0, q.Blocks[40]}, first[q.Program])
			first[q.Program] = q.Blocks[40]
		}
	}
	require.Greater(t, len(last), 40)
}
