package kvstate

import (
	"bytes"
	"encoding/json"
	"testing"
	"time"

	"tandem/internal/budget"

	"github.com/stretchr/testify/require"
)

func TestParseORCA(t *testing.T) {
	for value, want := range map[string]Signals{
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
		if fast := UnknownSignals(); isJSON && fast.flat(rest) { // as encoding/json has it
			var load struct {
				Named map[string]float64 `json:"named_metrics"`
			}
			require.NoError(t, json.Unmarshal(rest, &load))
			slow := UnknownSignals()
			for name, v := range load.Named {
				require.True(t, slow.named([]byte(name), v))
			}
			require.Equal(t, slow, fast)
		}
	})
}

// An answer's header is read in its request's path.
func TestParseORCAAllocs(t *testing.T) {
	for _, text := range []string{`JSON {"named_metrics":{"kv_cache_usage_perc":0.12,"num_requests_waiting":3.0}}`, `JSON {"named_metrics": {"kv_cache_usage_perc": 0.12, "num_requests_waiting": 3.0}}`} {
		value := []byte(text)
		budget.Allocs(t, 100, 0, func() { ParseORCA(value) })
	}
}

// Signals are worth less and less; what one source does not say another has said before, for as long as that is not too old. How much
// KV there is room for is no matter of age.
func TestSignalsAge(t *testing.T) {
	s := New(Options{})
	s.SetPool(PoolSpec{Name: "p"}, []EndpointSpec{{Addr: "a", Role: RoleBoth}})
	e, at := s.Pool("p").Endpoints()[0], time.Now()
	require.Zero(t, e.Signals().Trust(at), "none at all")
	s.Observe(e, Signals{Running: 4, Waiting: 1, KVUsage: .5, KVTokens: 1000, At: at})
	for age, trust := range map[time.Duration]float64{0: 1, signalsFresh: 1, (signalsFresh + signalsDead) / 2: .5, signalsDead: 0, time.Hour: 0} {
		require.InDelta(t, trust, e.Signals().Trust(at.Add(age)), 1e-9, age)
	}
	s.Observe(e, Signals{Running: -1, Waiting: 7, KVUsage: -1, KVTokens: -1, At: at.Add(time.Second)})
	require.Equal(t, Signals{Running: 4, Waiting: 7, KVUsage: .5, KVTokens: 1000, At: at.Add(time.Second)}, *e.Signals())
	s.Observe(e, Signals{Running: 9, Waiting: 9, KVUsage: .9, KVTokens: 9, At: at})
	require.Equal(t, int64(4), e.Signals().Running, "old news")
	room := func() int64 {
		var v View
		s.View(s.Pool("p"), nil, &v)
		return v.Endpoints[0].KVTokens
	}
	require.EqualValues(t, 1000, room())
	s.Observe(e, Signals{Running: -1, Waiting: 2, KVUsage: -1, KVTokens: -1, At: at.Add(time.Minute)})
	require.Equal(t, Signals{Running: -1, Waiting: 2, KVUsage: -1, KVTokens: -1, At: at.Add(time.Minute)}, *e.Signals())
	require.Zero(t, room(), "it does not say")
}
