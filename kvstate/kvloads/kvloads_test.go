package kvloads

import (
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// What is remembered of hand-overs, of failures and of suspicions is bounded. Package kvstate tests the rest.
func TestBounds(t *testing.T) {
	now := time.Now()
	l := New()
	for i := range 2 * MaxPairs {
		p := strconv.Itoa(i)
		l.Started(p, "d1", now)
		l.Failed(p, "d1", now)
		l.Suspected(p, "d1", 1, now)
	}
	require.Len(t, l.started, MaxPairs)
	require.Len(t, l.pairs, MaxPairs)
	require.Len(t, l.suspects, MaxPairs)
	now = now.Add(max(LoadTime, SuspectTime) + time.Second)
	l.Started("new", "d1", now)
	require.Len(t, l.started, 1)
	l.Suspected("new", "d1", 1, now)
	require.Len(t, l.suspects, 1)
	l.Sweep(now.Add(Forgotten))
	require.Empty(t, l.pairs)
	require.Empty(t, l.suspects)
}
