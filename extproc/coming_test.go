package extproc

import (
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/require"

	"tandem/extproc/core"
	"tandem/extproc/kvtransfer"
)

// What waits for prefill is not at work on D yet, and may be sent to another: it fills no D before pass 2 has chosen one. What P
// pushes goes to the D of pass 1, so there it counts from then on.
func TestDecodeCountsWhatComesToIt(t *testing.T) {
	for name, atFirst := range map[string]int64{"nixl": 0, "lmcache": 1} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newStand(t, core.Options{})
				policy := splitting()
				var err error
				policy.Dialect, err = kvtransfer.New(kvtransfer.Options{Name: name, Arrivals: &player{t: t}})
				require.NoError(t, err)
				s.pool("chat", policy, "p1", "d1")
				booked := func() (n [2]int64) {
					for i, e := range []string{"p1", "d1"} {
						n[i], _ = s.state.Pool("chat").Endpoint(addressOf(e)).Load()
					}
					return n
				}
				q := s.newRequest("/v1/chat/completions", "r1", chatBody)
				require.Zero(t, q.pass().status())
				require.Equal(t, [2]int64{1, atFirst}, booked())
				require.Equal(t, 2, s.state.Bookings.Reservations(), "its place on D is held")
				answered := engineAnswer{status: 200, body: prefilled(params(3))}
				q.prefillLeg(answered)
				q.follow()
				require.Zero(t, q.pass().status())
				require.Equal(t, [2]int64{0, 1}, booked())
				s.log(q.entry(200, "via_upstream"))
				require.Equal(t, [2]int64{}, booked())
				require.Zero(t, s.state.Bookings.Reservations())
			})
		})
	}
}
