package words

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tandem/extproc/usage"
)

func TestUsed(t *testing.T) {
	n := func(n int64) *int64 { return &n }
	for want, u := range map[string]*usage.Used{
		"":                                    nil,
		"Used: its answer names no tokens.\n": {},
		"Used: its answer names what are no numbers of tokens.\n":                   {Absurd: true},
		"Used: its answer names no tokens, first token after 12 ms.\n":              {FirstToken: 12 * time.Millisecond},
		"Used: 10 tokens of prompt, 3 of answer, within the pool's targets.\n":      {Prompt: n(10), Answer: n(3), Promise: usage.Kept},
		"Used: 10 tokens of prompt (8 cached), 0 of answer, tenant a?b.\n":          {Prompt: n(10), Cached: n(8), Answer: n(0), Tenant: "a\nb"},
		"Used: 3 of answer, 5.0 ms a token then, slower than the pool's targets.\n": {Answer: n(3), PerToken: 5 * time.Millisecond, Promise: usage.Slow},
	} {
		require.Equal(t, want, Used(u, 0))
	}
	require.Equal(t, "Used: its answer names no tokens, first token after 12 ms (expected 9.0 ms).\n",
		Used(&usage.Used{FirstToken: 12 * time.Millisecond}, 9*time.Millisecond))
	require.Equal(t, "-", Share(0, 0))
	require.Equal(t, "75 %", Share(3, 4))
}
