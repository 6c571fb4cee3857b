package e2e

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// A prefix in CPU memory is worth what loading it costs: its endpoint is chosen over those that have none of it, and
// loses to one that has it in GPU memory. For 1,500 tokens computing takes 150 ms, and loading 50: of a token that is
// taken for 160 KB, since a few transfers do not say how many bytes it has.
func TestPrefixesInCPUMemory(t *testing.T) {
	t.Parallel()
	f := start(t, options{
		prefills: 3, decodes: 1, kvEvents: "{loadBandwidth: {cpuBytes: 4000000000}}",
		engineArgs: []string{"--prefill-speed", "10000", "--blocks", "400", "--host-blocks", "100000", "--load-rate", "50e6"},
	})
	f.publishersConnect()
	known := 0
	// direct sends an engine a request past Tandem, which learns that it stored so many blocks.
	direct := func(e *engine, body string, stored float64) {
		t.Helper()
		before := f.sample("tandem_kv_events_blocks", e.addr)
		resp, err := client.Post("http://"+e.addr+"/v1/chat/completions", "application/json", strings.NewReader(body))
		require.NoError(t, err)
		resp.Body.Close()
		require.Equal(t, 200, resp.StatusCode)
		f.eventually("tandem_kv_events_blocks", e, atLeast(before+stored))
	}
	// evict has an engine use all its GPU memory for something else.
	evict := func(e *engine, name string) {
		for i := range 2 {
			direct(e, conversation(fmt.Sprint(name, i), 11), 330)
		}
		// Tandem counts requests that are not its own while the engine's metrics show them.
		f.eventually("tandem_engine_requests_external", e, func(v float64) bool { return v == 0 })
	}
	ask := func(name string, turns int) (served *engine, cached int) {
		t.Helper()
		id := fmt.Sprint(name, "-", turns)
		require.Equal(t, 200, f.post("/v1/chat/completions", conversation(name, turns), "x-request-id", id).status)
		p, _ := f.hops(id)
		return f.engineAt(p.Engine), p.CachedTokens
	}
	name := "tiers"
	before := map[*engine]float64{}
	for _, e := range f.prefills { // a prompt is learned only once an engine has reported its size of blocks
		direct(e, conversation("before", 1), 10)
		f.eventually("tandem_engine_requests_external", e, func(v float64) bool { return v == 0 })
		before[e] = f.sample("tandem_kv_events_blocks", e.addr)
	}
	first, _ := ask(name, 3)
	f.eventually("tandem_kv_events_blocks", first, atLeast(before[first]+90))
	known++
	require.True(t, f.knownPrompts(known, 20*time.Second))
	evict(first, name+" evicted ")

	again, cached := ask(name, 4)
	require.Equal(t, first.addr, again.addr, "the one that has the prefix in CPU memory")
	require.Greater(t, cached, 1000)
	loaded := metric(t, "http://"+first.addr, "vllm:kv_offload_total_bytes_total", `"CPU_to_GPU"`)
	require.Greater(t, loaded, 90.*16*512, "of 90 blocks")
	known++
	require.True(t, f.knownPrompts(known, 20*time.Second))
	evict(first, name+" evicted again ")

	other := f.prefills[0]
	if other == first {
		other = f.prefills[1]
	}
	direct(other, conversation(name, 4), 120)
	f.eventually("tandem_engine_requests_external", other, func(v float64) bool { return v == 0 })
	again, cached = ask(name, 5)
	require.Equal(t, other.addr, again.addr, "the one that has it in GPU memory")
	require.Greater(t, cached, 1000)
	known++
	require.True(t, f.knownPrompts(known, 20*time.Second))
}
