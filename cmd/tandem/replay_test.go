package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// Sessions are played on engines as fast as a profile says: an idle one with a tenth of the speed needs ten times as
// long for the same first tokens.
func TestSessionsOnProfiledEngines(t *testing.T) {
	first := map[float64]float64{}
	for _, speed := range []float64{10_000, 1000} {
		file := filepath.Join(t.TempDir(), "profile.json")
		require.NoError(t, os.WriteFile(file, fmt.Appendf(nil, `{"tandem_profile":1,"prefill":[{"tokens":1000,"s":%f},{"tokens":9000,"s":%f}],`+
			`"steps":[{"answers":1,"kv":0,"s":0.02},{"answers":8,"kv":90000,"s":0.02}],"kv":500000}`, 1000/speed, 9000/speed), 0o600))
		var out strings.Builder
		require.NoError(t, run(t.Context(), []string{"replay", "--trace", "people", "--sessions", "2", "--policy", "idle", "--both", "2",
			"--warm-up", "0", "--measured", "600", "--profile", file, "--json"}, &out, io.Discard))
		var r struct{ TTFT struct{ Mean float64 } }
		require.NoError(t, json.Unmarshal([]byte(out.String()), &r), out.String())
		first[speed] = r.TTFT.Mean
	}
	require.InEpsilon(t, 10, first[1000]/first[10_000], .25)
}
