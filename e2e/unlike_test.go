package e2e

import (
	"fmt"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

// pairing is what a replica says of the pairs of its only pool.
func (f *fleet) pairing() (apart, allowed []string, attention string) {
	var s struct {
		Attention []struct{ Text string }
		Pools     []struct {
			Apart   []string `json:"apart"`
			Allowed []string `json:"unlike_allowed"`
		}
	}
	require.NoError(f.t, getJSON(f.admins[0]+"/status.json", &s))
	for _, n := range s.Attention {
		attention += n.Text + "\n"
	}
	return s.Pools[0].Apart, s.Pools[0].Allowed, attention
}

// startAnew kills an engine and starts it again with its arguments, as slowly as real ones do: Tandem sees that it is away,
// and that it is back.
func (f *fleet) startAnew(e *engine) {
	f.t.Helper()
	changed := func(to string) float64 {
		return metric(f.t, f.admins[0], "tandem_endpoint_health_changes_total", `to="`+to+`"`, `endpoint="`+e.addr+`"`)
	}
	out, up := changed("out"), changed("up")
	e.stop(syscall.SIGKILL)
	soon(f.t, "it is out", func() bool { return changed("out") > out })
	f.restart(e)
	soon(f.t, "it is back", func() bool { return changed("up") > up })
}

// Engines that would take each other's KV for what it is not never share a request: vLLM compares neither the block size
// nor the weights, and answers wrongly with a 200. It is the same for an engine that comes back with another size: it has
// to say what it is before it is paired.
func TestEnginesThatDoNotFit(t *testing.T) {
	t.Parallel()
	for _, dialect := range []string{"nixl", "nixl-push", "mooncake", "sglang"} {
		t.Run(dialect, func(t *testing.T) {
			t.Parallel()
			f := start(t, options{prefills: 2, decodes: 1, dialect: dialect, engineArgs: []string{"--block-size", "32"}})
			f.lenient = true // restarted engines lose their counts
			d := f.decodes[0]
			ask := func(name string, n int) (split int) {
				before := len(f.requests("", f.prefills...))
				for i := range n {
					got := f.post("/v1/chat/completions", question(fmt.Sprintf("%s %d", name, i), 100))
					if dialect != "sglang" { // whose D cannot decode alone
						require.Equal(t, 200, got.status, got.body)
					}
				}
				return len(f.requests("", f.prefills...)) - before
			}
			require.Equal(t, 10, ask("alike", 10))
			apart, _, _ := f.pairing()
			require.Empty(t, apart)

			d.args = append(d.args, "--block-size", "64")
			f.startAnew(d)
			require.Zero(t, ask("unlike", 20), "requests were split")
			require.Zero(t, metric(t, "http://"+d.addr, "enginesim_violations_total"))
			soon(t, "it is said", func() bool {
				apart, _, attention := f.pairing()
				return len(apart) == 1 && strings.HasPrefix(apart[0], "block size 32 (") &&
					strings.Contains(attention, "never paired: block size 32 (")
			})

			p := f.prefills[1]
			p.args = append(p.args, "--block-size", "64")
			f.startAnew(p)
			soon(t, "two engines fit", func() bool { return ask("again", 1) == 1 })
			require.Empty(t, f.requests("again 0", f.prefills[0]))
			for _, e := range f.engines() {
				require.Zero(t, metric(t, "http://"+e.addr, "enginesim_violations_total"), e.addr)
			}
		})
	}
}

// An operator may let engines differ. It is said all the time, and what comes of it is his.
func TestUnlikeEnginesThatMayPair(t *testing.T) {
	t.Parallel()
	f := start(t, options{prefills: 1, decodes: 1, pool: "  pairUnlike: [kvDtype]\n",
		engine: func(role string, _ int, _ func() string) ([]string, string) {
			dtype := map[string]string{"prefill": "fp8", "decode": "auto"}[role]
			return []string{"--model", "tiny", "--kv-cache-dtype", dtype, "--kv-load-failure", "recompute"}, ""
		}})
	f.lenient = true // what D cannot load waits for its lease
	for i := range 3 {
		require.Equal(t, 200, f.post("/v1/chat/completions", question(fmt.Sprint("unlike ", i), 100)).status)
	}
	require.NotEmpty(t, f.requests("", f.prefills...))
	apart, allowed, attention := f.pairing()
	require.Empty(t, apart)
	require.Len(t, allowed, 1)
	require.Contains(t, attention, "since pairUnlike says so, although nobody has shown that their answers are right: KV cache dtype auto (")
}
