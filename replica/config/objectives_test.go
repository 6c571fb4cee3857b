package config

import (
	"testing"

	"github.com/stretchr/testify/require"

	"tandem/kvstate"
	"tandem/picker/admission"
	configv1 "tandem/protos/config/v1"
)

func TestObjectives(t *testing.T) {
	with := func(top, pool string) string {
		return "{" + top + "pools: [{name: a, kvTransfer: nixl, " + pool + ` endpoints: [{address: "10.0.0.1:1", role: prefill, loras: [sql], labels: [tier=gold]}, {address: "10.0.0.2:1", role: decode, loras: [sql]}]}]}`
	}
	c, warnings, err := Parse([]byte(with("", "binding: late, objectives: {default: {ttft: 2s}, named: [{name: batch, priority: -1}]},")))
	require.NoError(t, err)
	require.Empty(t, warnings)
	p := c.GetPools()[0]
	require.Equal(t, "60s", p.GetQueue().GetMaxWait(), "one replica: bodies are not buffered")
	require.Equal(t, kvstate.Seconds(admission.MaxWait), Duration(p.GetQueue().GetMaxWait()), "the replay's default")
	require.Equal(t, "20s", onlyPool(t, with("envoy: {bodyMode: auto}, ", "binding: late,")).GetQueue().GetMaxWait())
	require.EqualValues(t, 4096, p.GetQueue().GetMaxWaiting())
	require.Equal(t, "goOn", p.GetObjectives().GetOnMiss())
	for pool, binding := range map[string]string{"": "late", "split: always,": "late", "split: never,": "immediate", "binding: immediate,": "immediate"} {
		require.Equal(t, binding, onlyPool(t, with("", pool)).GetBinding(), pool)
		require.Equal(t, binding == "late", Waits(onlyPool(t, with("", pool))), pool)
	}
	alone := onlyPool(t, `pools: [{name: a, kvTransfer: none, endpoints: [{address: "10.0.0.1:1"}]}]`)
	require.Equal(t, "immediate", alone.GetBinding(), "nothing is split")
	require.True(t, Waits(onlyPool(t, with("", "binding: immediate, objectives: {onMiss: queue},"))))

	for pool, want := range map[string]string{
		"binding: later,":                              `pools[0].binding: "later" is not one of immediate, late; did you mean late?`,
		"queue: {maxWait: 30},":                        "pools[0].queue.maxWait: must have a unit, is 30: 30s for seconds, 30ms for milliseconds",
		"binding: late, queue: {maxWaiting: -1},":      "pools[0].queue.maxWaiting: -1 is not between 1 and 65536",
		"enginePriority: trtllm,":                      `pools[0].enginePriority: "trtllm" is not one of none, vllm, sglang; did you mean vllm?`,
		"objectives: {onMiss: drop},":                  `pools[0].objectives.onMiss: "drop" is not one of goOn, queue, shed`,
		"objectives: {default: {name: x}},":            `pools[0].objectives.default.name: "x": requests that get the default name none`,
		"objectives: {named: [{priority: 1}]},":        "pools[0].objectives.named[0].name: is missing: what requests call it",
		"objectives: {named: [{name: x}, {name: x}]},": `pools[0].objectives.named[1].name: "x" is there twice`,
		"objectives: {default: {ttft: 0s}},":           "pools[0].objectives.default.ttft: 0s is not between 1ms and 24h",
	} {
		_, _, err := Parse([]byte(with("", pool)))
		require.EqualError(t, err, want, pool)
	}
	_, _, err = Parse([]byte(with("envoy: {bodyMode: auto}, ", "binding: late, queue: {maxWait: 1m},")))
	require.ErrorContains(t, err, "pools[0].queue.maxWait: is above 20s, and envoy.bodyMode auto")
	_, warnings, err = Parse([]byte(with("", "binding: immediate, queue: {},")))
	require.NoError(t, err)
	require.Equal(t, []string{"pools[0].queue: has no effect: requests wait with binding late, or with objectives.onMiss queue"}, warnings)

	_, warnings, err = Parse([]byte(with("", "split: never, binding: late,")))
	require.NoError(t, err)
	require.Equal(t, []string{"pools[0].binding: has no effect: requests wait for prefill endpoints, and nothing is split here"}, warnings)

	for field, want := range map[string]string{
		"loras: ['a,b']": `pools[0].endpoints[0].loras[0]: "a,b" is empty, or has a comma or a space in it`,
		"labels: [gold]": `pools[0].endpoints[0].labels[0]: "gold" is not name=value`,
	} {
		_, _, err := Parse([]byte(`pools: [{name: a, kvTransfer: none, endpoints: [{address: "10.0.0.1:1", ` + field + `}]}]`))
		require.EqualError(t, err, want)
	}
}

// onlyPool returns the only pool of a valid configuration.
func onlyPool(t *testing.T, text string) *configv1.Pool {
	t.Helper()
	c, _, err := Parse([]byte(text))
	require.NoError(t, err)
	return c.GetPools()[0]
}
