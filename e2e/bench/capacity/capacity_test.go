package capacity

import (
	"errors"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// A latency that begins to grow at a rate of 500, and falters once below.
func TestDoubles(t *testing.T) {
	t.Parallel()
	var rates []float64
	low, held, err := Doubles(100, func(rate float64) (time.Duration, error) {
		rates = append(rates, rate)
		if rate > 420 || len(rates) == 2 {
			return 10 * time.Millisecond, nil
		}
		return 4 * time.Millisecond, nil
	})
	require.NoError(t, err)
	require.Equal(t, 4*time.Millisecond, low)
	require.InDelta(t, 413, held, 1)
	require.Equal(t, []float64{100, 150, 150, 225, 337.5, 506.25, 506.25}, rates[:7])
	require.Len(t, rates, 8)

	_, _, err = Doubles(100, func(rate float64) (time.Duration, error) {
		if rate > 100 {
			return 0, errors.New("refused")
		}
		return time.Millisecond, nil
	})
	require.EqualError(t, err, "refused")
}

func TestStreams(t *testing.T) {
	t.Parallel()
	stop := make(chan struct{})
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = w.Write([]byte("data: {}\n\n"))
		_ = http.NewResponseController(w).Flush()
		select {
		case <-stop:
		case <-r.Context().Done():
		}
	}))
	defer server.Close()
	s := NewStreams(server.Listener.Addr().String(), func() []byte { return []byte("{}") })
	require.NoError(t, s.Open(t.Context(), 2))
	require.NoError(t, s.Open(t.Context(), 100))
	require.Len(t, s.conns, 100)
	require.Zero(t, s.Ended())
	s.Close()
	require.Zero(t, s.Ended(), "these were closed")

	refusing := httptest.NewServer(http.NotFoundHandler())
	defer refusing.Close()
	s = NewStreams(refusing.Listener.Addr().String(), func() []byte { return nil })
	require.ErrorContains(t, s.Open(t.Context(), 1), "404")
}
