package replay

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// BenchmarkRun is the public trace, 12,031 requests, at 80 % of a fleet's saturation.
func BenchmarkRun(b *testing.B) {
	for _, name := range []string{"tandem", "dynamo"} {
		b.Run(name, func(b *testing.B) {
			c := DefaultConfig()
			t, err := Prepare("mooncake", 0, 1, .8, c)
			require.NoError(b, err)
			for b.Loop() {
				_, err := Run(b.Context(), t, name, c)
				require.NoError(b, err)
			}
		})
	}
}
