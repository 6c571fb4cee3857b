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

// A flag that would change nothing of what is played is refused, and so is a fleet that cannot be.
func TestFlagsOfRecordings(t *testing.T) {
	trace := filepath.Join(t.TempDir(), "trace.jsonl")
	lines := ""
	for i := range 40 {
		lines += fmt.Sprintf(`{"timestamp":%d,"input_length":2000,"output_length":20,"hash_ids":[]}`+"\n", i*1000)
	}
	require.NoError(t, os.WriteFile(trace, []byte(lines), 0o600))
	recorded := filepath.Join(t.TempDir(), "recorded.jsonl")
	require.NoError(t, os.WriteFile(recorded, []byte(`{"tandem_recording":1,"id":"a","block_bytes":512,"sample":1}`), 0o600))
	turns := filepath.Join(t.TempDir(), "turns.jsonl") // whose input_length is what each adds
	require.NoError(t, os.WriteFile(turns, []byte(strings.ReplaceAll(lines, `{"time`, `{"session_id":1,"time`)), 0o600))
	for args, want := range map[string]string{
		"--trace " + turns:                            "is sessions: --sessions says how many at a time",
		"--recording " + trace + " --advise 1":        "fleets have 2 to 1024 engines, not 1",
		"--recording " + trace + " --advise -1":       "fleets have 2 to 1024 engines, not -1",
		"--recording " + trace + " --advise 0":        "fleets have 2 to 1024 engines, not 0",
		"--recording " + trace + " --policy random":   "--policy has nothing to do with --recording",
		"--recording " + trace + " --split sometimes": "is not always, auto or never",
		"--recording " + recorded + " --split never":  "--split: a recording has its own; --what-if plays it otherwise",
		"--recording " + recorded + " --load 2":       "--load has nothing to do with --recording",
		"--recording " + recorded:                     "no requests are recorded",
	} {
		require.ErrorContains(t, run(t.Context(), append([]string{"replay"}, strings.Fields(args)...), io.Discard, io.Discard), want, args)
	}
	first := map[string]float64{}
	for _, slow := range []string{"1", "10"} {
		var out strings.Builder
		require.NoError(t, run(t.Context(), []string{"replay", "--recording", trace, "--prefill", "2", "--decode", "2", "--slow", slow,
			"--kv-tokens", "0", "--json"}, &out, io.Discard))
		var r struct {
			Replayed struct {
				Kept float64
				TTFT struct{ Mean float64 }
			}
		}
		require.NoError(t, json.Unmarshal([]byte(out.String()), &r), out.String())
		first[slow] = r.Replayed.TTFT.Mean
		if slow == "1" {
			require.InDelta(t, 1, r.Replayed.Kept, .01, "memory without end")
		}
	}
	require.InEpsilon(t, 10, first["10"]/first["1"], .25)
}
