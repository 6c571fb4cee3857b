package faults

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// A failure may be reported before or after somebody asks for it. The first report counts.
func TestAwait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var l tries
		l.report([16]byte{1}, Failure{Status: 503, RetryAfter: 2 * time.Second})
		l.report([16]byte{1}, Failure{Status: 500})
		f, ok := l.await(t.Context(), [16]byte{1}, time.Second)
		require.True(t, ok)
		require.Equal(t, Failure{Status: 503, RetryAfter: 2 * time.Second}, f)

		time.AfterFunc(500*time.Millisecond, func() { l.report([16]byte{2}, Failure{Status: 429}) })
		f, ok = l.await(t.Context(), [16]byte{2}, time.Second)
		require.True(t, ok)
		require.Equal(t, 429, f.Status)

		_, ok = l.await(t.Context(), [16]byte{3}, time.Second)
		require.False(t, ok, "nobody reported it")
		gone, leave := context.WithCancel(t.Context())
		leave()
		_, ok = l.await(gone, [16]byte{4}, time.Hour)
		require.False(t, ok)
	})
}
