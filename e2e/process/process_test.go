package process

import (
	"net/http"
	"net/http/httptest"
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestProcess(t *testing.T) {
	g := Group{Dir: t.TempDir()}
	t.Cleanup(g.Stop)
	_, err := g.Start("none", nil, "/there/is/none")
	require.ErrorContains(t, err, "starting none")

	p, err := g.Start("busy", []string{"BUSY=yes"}, "sh", "-c", "while [ $BUSY = yes ]; do :; done")
	require.NoError(t, err)
	require.Eventually(t, func() bool {
		used, err := p.CPU()
		return err == nil && used > 0
	}, 30*time.Second, time.Millisecond)
	require.Positive(t, p.Peak())

	var none *Process
	used, err := none.CPU()
	require.NoError(t, err)
	require.Zero(t, used)

	began := time.Now()
	g.Stop()
	require.Less(t, time.Since(began), 500*time.Second, "it was ended, and not waited for")
	_, err = p.CPU()
	require.ErrorContains(t, err, "CPU clock of")
}

// If a program ends before it is ready, Wait returns its output.
func TestWait(t *testing.T) {
	g := Group{Dir: t.TempDir()}
	t.Cleanup(g.Stop)
	p, err := g.Start("fails", nil, "sh", "-c", "echo no such flag; exit 1")
	require.NoError(t, err)
	ports, err := FreePorts(2)
	require.NoError(t, err)
	require.NotEqual(t, ports[0], ports[1])
	silent := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusServiceUnavailable) }))
	defer silent.Close()
	require.ErrorContains(t, p.Wait(t.Context(), silent.URL), "no such flag")

	p, err = g.Start("serves", nil, "sleep", "1000")
	require.NoError(t, err)
	asked := 0
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if asked++; asked < 3 {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
	}))
	defer s.Close()
	require.NoError(t, p.Wait(t.Context(), s.URL))
	require.Equal(t, 3, asked)
}

// Ports stay reserved, even if nothing listens there yet.
func TestFreePorts(t *testing.T) {
	given := map[string]bool{}
	for range 40 {
		ports, err := FreePorts(2)
		require.NoError(t, err)
		for _, p := range ports {
			require.NotContains(t, given, p)
			given[p] = true
		}
		runtime.GC() // collects unreachable listeners
	}
}
