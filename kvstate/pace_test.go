package kvstate

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// The time limit of a prefill follows the observed times of the pool's endpoints, within bounds.
func TestPrefillTime(t *testing.T) {
	const perToken = 2 * time.Millisecond
	for _, c := range []struct {
		name   string
		tokens int64
		took   time.Duration
		want   time.Duration // for 1,000 tokens
	}{
		{"nothing seen", 0, 0, 2 * time.Second},
		{"too little seen", 1000, time.Minute, 2 * time.Second},
		{"four times what they take", 20_000, 20 * time.Second, 4 * time.Second},
		{"not below a quarter of what is configured", 20_000, time.Second, 500 * time.Millisecond},
		{"not above sixteen times that", 20_000, time.Hour, 32 * time.Second},
		{"old times fade", 5 << 20, 5 << 20 * time.Millisecond, 4 * time.Second},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := New(Options{})
			s.SetPool(PoolSpec{Name: "p"}, nil)
			p := s.Pool("p")
			p.ObservePrefill(c.tokens, c.took)
			require.Equal(t, c.want, p.PrefillTime(1000, perToken))
			s.SetPool(PoolSpec{Name: "p"}, []EndpointSpec{{Addr: "a:1", Role: RolePrefill}})
			require.Equal(t, c.want, s.Pool("p").PrefillTime(1000, perToken), "a pool that changes keeps what it learned")
		})
	}
}
