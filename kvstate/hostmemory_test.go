package kvstate

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// How fast engines load KV from CPU memory is learned from their counters, over all engines of a pool. A restart and a few
// bytes say nothing.
func TestLoadsAreLearned(t *testing.T) {
	at := time.Unix(1e9, 0)
	s := New(Options{Now: func() time.Time { return at }})
	s.SetPool(PoolSpec{Name: "p"}, []EndpointSpec{
		{Addr: "a", Role: RolePrefill}, {Addr: "b", Role: RolePrefill, Transfer: Transfer{TP: 4}},
	})
	p := s.Pool("p")
	var v View
	learned := func(addr string, h HostMemory) float64 {
		at = at.Add(time.Second)
		g := UnknownSignals()
		g.Running, g.At, g.Host = 0, at, h
		s.Observe(p.Endpoint(addr), g)
		s.View(p, nil, &v)
		return v.Load.LoadBandwidth
	}
	require.Zero(t, learned("a", HostMemory{Bytes: 1 << 40, LoadedBytes: 50e9, LoadTime: time.Second}), "since it started")
	require.Zero(t, learned("a", HostMemory{Bytes: 1 << 40, LoadedBytes: 50e9 + 1e6, LoadTime: 2 * time.Second}), "too little")
	require.InDelta(t, 5e9, learned("a", HostMemory{Bytes: 1 << 40, LoadedBytes: 60e9, LoadTime: 3 * time.Second}), 1e6)
	require.InDelta(t, 5e9, learned("a", HostMemory{Bytes: 1 << 40, LoadedBytes: 1e9, LoadTime: time.Second}), 1e6, "restarted")

	learned("b", HostMemory{Tokens: 1, LoadedTokens: 1, LoadTime: time.Second})
	require.InDelta(t, (10e9+4*100_000*TokenBytes)/(2+1),
		learned("b", HostMemory{Tokens: 1, LoadedTokens: 100_001, LoadTime: 2 * time.Second}), 1e6, "each of its ranks loads a part")
}
