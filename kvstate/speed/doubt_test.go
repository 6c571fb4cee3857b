package speed

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// What was learned of an endpoint is doubted when nothing new is seen of it: it nears what its fleet is like, so that the
// endpoint gets work again. What is seen then counts for more than what was known.
func TestDoubt(t *testing.T) {
	for name, tt := range map[string]struct {
		was, is float64 // its ratio to the model; the fleet's is 1
		after   time.Duration
		known   float64 // then
		tried   float64 // after one second of its work has been observed
	}{
		"in use":                         {3, 3, 10 * time.Second, 3, 3},
		"a while ago":                    {3, 3, 40 * time.Second, 2, 2.05},
		"long ago":                       {3, 3, 160 * time.Second, 1, 1.7}, // 1.25: as its fleet
		"it has recovered":               {3, 1, 160 * time.Second, 1, 1},
		"it stood for long, and is well": {6, 1, 8 * time.Minute, 1, 1},
		"forgotten":                      {3, 3, 11 * time.Minute, 1, 1.7},
		"it was fast":                    {.3, 1, 160 * time.Second, 1, 1},
	} {
		t.Run(name, func(t *testing.T) {
			var s Learned
			now := int64(time.Hour)
			see := func(ratio float64) {
				now += int64(time.Second)
				s = s.Doubted(1, now, DoubtEndpoint)
				s.Add(Seconds(ratio), time.Second, 1, now)
			}
			for range 200 {
				see(tt.was)
			}
			now += int64(tt.after) - int64(time.Second)
			at := now + int64(time.Second)
			require.InDelta(t, tt.known, s.Within(1, at), .15)
			see(tt.is)
			require.InDelta(t, tt.tried, s.Within(1, now), .4)
		})
	}
}

// Seconds converts seconds to a duration.
func Seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }
