package extproc

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"tandem/extproc/core"
	"tandem/extproc/names"
)

// Two replicas whose hosts' clocks are 700 s apart have Redis's time: a ticket of one is good at the other, and no more
// than it should be.
func TestReplicasWithOtherClocks(t *testing.T) {
	for name, c := range map[string]struct {
		back, waited time.Duration // by how much the fleet's clock is set back between the hops, and how long they are apart
		leg          string
	}{
		"one time":                {0, 0, "decode"},
		"too old":                 {0, 21 * time.Second, "prefill"},
		"a server that is behind": {30 * time.Second, 0, "prefill"}, // or the ticket would be good for 50 s
		"a server that is ahead":  {-30 * time.Second, 0, "prefill"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newStand(t, core.Options{})
				s.pool("chat", splitting(), "p1", "p2", "d1")
				s.state.Clock.Set(time.Now(), time.Now().Add(-700*time.Second), 0)
				q := s.newRequest("/v1/chat/completions", "r1", chatBody)
				q.pass()
				require.Equal(t, 307, q.prefillLeg(engineAnswer{status: 200, body: prefilled(params(2))}).status())
				q.follow()
				time.Sleep(c.waited)
				s.state.Clock.Set(time.Now(), s.state.Clock.Now().Add(-c.back), 0)
				q.pass()
				require.Equal(t, c.leg, q.headers[names.HeaderLeg])
			})
		})
	}
}
