package kvstate

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestSlownessIsBesidePeers(t *testing.T) {
	for _, c := range []struct {
		factors []float64
		want    []float64
	}{
		{[]float64{1, 6}, []float64{1. / 6, 6}},
		{[]float64{2, 2, 2, 12}, []float64{1, 1, 1, 6}},
		{[]float64{1, 3, 8}, []float64{1. / 5.5, 3. / 4.5, 4}},
		{[]float64{0, 5}, []float64{0, 0}}, // nothing is known of the only peer
		{[]float64{5}, []float64{0}},
	} {
		for i := range c.factors {
			require.InDelta(t, c.want[i], besidePeers(c.factors, i), 1e-9, c)
		}
	}
}

// An engine that writes slower than its peers, as their counters say, is found; nobody else is.
func TestASlowEngineIsFound(t *testing.T) {
	now := time.Unix(1e9, 0)
	s := New(Options{Now: func() time.Time { return now }})
	s.SetPool(PoolSpec{Name: "chat", Models: []string{"*"}}, decoders("a", "b", "c"))
	p := s.Pool("chat")
	engines := map[string]*writer{"a": {slow: 1, running: 4}, "b": {slow: 8, running: 4}, "c": {slow: 1, running: 4}}
	for range 20 {
		now = now.Add(2 * time.Second)
		for addr, w := range engines {
			w.look(s, p.Endpoint(addr), now)
		}
	}
	for _, one := range s.SlownessIn(p) {
		require.Zero(t, one.Prefill, "they only decode")
		require.Equal(t, one.Endpoint.Addr == "b", one.Decode >= SlowFrom, one)
	}
}
