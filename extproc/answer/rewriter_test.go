package answer

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// Every answer that is rewritten may be too large for it, not only one that is joined with prefill's.
func TestTooLarge(t *testing.T) {
	e := TooLarge(16 << 20)
	require.Equal(t, 503, e.Status)
	require.Equal(t, "answer_too_large", e.Code)
	require.Equal(t, "an answer of more than 16777216 bytes cannot be rewritten", e.Message)
}
