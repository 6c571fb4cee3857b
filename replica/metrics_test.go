package replica

import (
	"fmt"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"
)

// What runs, and since when the configuration in force is.
func TestTheConfigurationInForceIsShown(t *testing.T) {
	require.NoError(t, testutil.GatherAndCompare(newRegistry("1.2.3"), strings.NewReader(fmt.Sprintf(
		"# HELP tandem_build_info Always 1; the labels say what runs.\n# TYPE tandem_build_info gauge\n"+
			"tandem_build_info{goversion=%q,version=%q} 1\n", runtime.Version(), "1.2.3")), "tandem_build_info"))

	r := startReloading(t)
	at := func() float64 { return testutil.ToFloat64(r.last) }
	results := func() [2]float64 {
		result := func(of string) float64 { return testutil.ToFloat64(r.reloads.WithLabelValues(of)) }
		return [2]float64{result("applied"), result("refused")}
	}
	started := at()
	require.InDelta(t, time.Now().Unix(), started, 60)
	require.Equal(t, [2]float64{}, results())
	require.NoError(t, os.WriteFile(r.config, []byte("pools: 3\n"), 0o600))
	_, err := r.reload(t.Context())
	require.Error(t, err)
	require.Equal(t, [2]float64{0, 1}, results())
	require.InDelta(t, started, at(), 0, "that in force stays")
	r.write(strings.Replace(twoPools, "name: b", "name: c", 1))
	_, err = r.reload(t.Context())
	require.NoError(t, err)
	require.Equal(t, [2]float64{1, 1}, results())
	require.Greater(t, at(), started)
}
