package enginehttp

import (
	"bytes"
	"encoding/json"
	"testing"

	"tandem/internal/budget"
	"tandem/kvstate"

	"github.com/stretchr/testify/require"
)

func TestParseORCA(t *testing.T) {
	for value, want := range map[string]kvstate.Signals{
		`JSON {"named_metrics":{"kv_cache_usage_perc":0.12,"num_requests_waiting":3.0}}`:      {Running: -1, Waiting: 3, KVUsage: .12, KVTokens: -1},
		`JSON {"cpu_utilization":1,"named_metrics":{"num_requests_waiting":3.0}}`:             {Running: -1, Waiting: 3, KVUsage: -1, KVTokens: -1},
		`TEXT named_metrics.kv_cache_usage_perc=0.12, named_metrics.num_requests_waiting=3.0`: {Running: -1, Waiting: 3, KVUsage: .12, KVTokens: -1},
	} {
		got, ok := ParseORCA([]byte(value))
		require.True(t, ok, value)
		require.Equal(t, want, got, value)
	}
	for _, value := range []string{"", "JSON", "JSON {", `JSON {"named_metrics":{"kv_cache_usage_perc":1e9}}`, "TEXT kv_cache_usage_perc=NaN", "BIN x", `{"named_metrics":{}}`} {
		_, ok := ParseORCA([]byte(value))
		require.False(t, ok, value)
	}
}

func FuzzParseORCA(f *testing.F) {
	f.Add([]byte(`JSON {"named_metrics":{"kv_cache_usage_perc":0.12}}`))
	f.Add([]byte(`JSON {"named_metrics": {"other": 1, "num_requests_waiting": 2.0}}`))
	f.Add([]byte(`TEXT named_metrics.num_requests_waiting=3.0`))
	f.Fuzz(func(t *testing.T, value []byte) {
		s, ok := ParseORCA(value)
		require.Equal(t, ok, s.KVUsage >= 0 || s.Waiting >= 0)
		require.True(t, s.KVUsage <= 1 && s.Waiting < 1<<32)
		rest, isJSON := bytes.CutPrefix(value, []byte("JSON "))
		if fast := kvstate.UnknownSignals(); isJSON && readFlat(&fast, rest) { // as encoding/json reads it
			var load struct {
				Named map[string]float64 `json:"named_metrics"`
			}
			require.NoError(t, json.Unmarshal(rest, &load))
			slow := kvstate.UnknownSignals()
			for name, v := range load.Named {
				require.True(t, setNamed(&slow, []byte(name), v))
			}
			require.Equal(t, slow, fast)
		}
	})
}

// An answer's header is parsed on the request's path.
func TestParseORCAAllocs(t *testing.T) {
	for _, text := range []string{`JSON {"named_metrics":{"kv_cache_usage_perc":0.12,"num_requests_waiting":3.0}}`, `JSON {"named_metrics": {"kv_cache_usage_perc": 0.12, "num_requests_waiting": 3.0}}`} {
		value := []byte(text)
		budget.Allocs(t, 100, 0, func() { ParseORCA(value) })
	}
}
