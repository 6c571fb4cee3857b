package kvstate

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestExpectedPrefill(t *testing.T) {
	s := New(Options{})
	s.SetPool(PoolSpec{Name: "chat"}, nil)
	p := s.Pool("chat")
	p.ObservePrefill(10_000, time.Second)
	require.Zero(t, p.ExpectedPrefill(1000), "too little was seen")
	p.ObservePrefill(10_000, 3*time.Second)
	require.Equal(t, 200*time.Millisecond, p.ExpectedPrefill(1000), "a ratio of sums: 4 s for 20,000 tokens")
	require.Zero(t, p.ExpectedPrefill(-1))
}
