package config

import (
	"fmt"
	"log/slog"
	"testing"

	"github.com/stretchr/testify/require"

	"tandem/extproc/kvtransfer"
	"tandem/extproc/plan"
	"tandem/picker"
)

// Every dialect can be configured with only addresses and roles (and, for multi, its members).
func TestEveryDialectCanBeConfigured(t *testing.T) {
	for _, name := range kvtransfer.Names() {
		more := ""
		if name == "multi" {
			more = "members: [nixl, offload], "
		}
		c, _, err := Parse(fmt.Appendf(nil, `pools: [{name: a, kvTransfer: %s, %sendpoints: [{address: "127.0.0.1:1", role: prefill}, {address: "127.0.0.1:2", role: decode}]}]`, name, more))
		require.NoError(t, err, name)
		d, err := newDialect(c.GetPools()[0], noArrivals{})
		require.NoError(t, err, name)
		require.Equal(t, name, d.Name)
		require.Equal(t, name == "lmcache", d.Push != nil)
	}
}

// noArrivals has no notifications.
type noArrivals struct{ kvtransfer.Arrivals }

// The bandwidths of tiers outside GPU memory are those of the model where the configuration does not say.
func TestLoadBandwidth(t *testing.T) {
	of := func(kvEvents string) picker.LoadBandwidth {
		c, _, err := Parse(fmt.Appendf(nil, `pools: [{name: a, kvTransfer: nixl, %sendpoints: `+
			`[{address: "127.0.0.1:1", role: prefill}, {address: "127.0.0.1:2", role: decode}]}]`, kvEvents))
		require.NoError(t, err)
		return placement(c.GetPools()[0]).Model.LoadBandwidth
	}
	usual := picker.DefaultModel().LoadBandwidth
	require.Equal(t, usual, of(""))
	require.Equal(t, usual, of("kvEvents: {replayPort: 5558}, "))
	require.Equal(t, picker.LoadBandwidth{usual[0], 7e9, 1 << 30},
		of("kvEvents: {replayPort: 5558, loadBandwidth: {diskBytes: 7G, remoteBytes: 1Gi}}, "))
}

// What a pool promises, and who decides on roles, is what the configuration says, or the defaults.
func TestTargetsAndRoles(t *testing.T) {
	of := func(pool string) (picker.Targets, bool) {
		c, _, err := Parse(fmt.Appendf(nil, `pools: [{name: a, kvTransfer: nixl, %sendpoints: [{address: "127.0.0.1:1", `+
			`role: both}, {address: "127.0.0.1:2", role: both}]}]`, pool))
		require.NoError(t, err)
		p, err := Policy(c, c.GetPools()[0], nil, slog.New(slog.DiscardHandler))
		require.NoError(t, err)
		return p.Place.Promise, p.AutoRoles
	}
	promise, auto := of("")
	require.Equal(t, picker.DefaultPromise(), promise)
	require.False(t, auto)
	promise, auto = of("roles: auto, targets: {ttft: 800ms, tpot: 30ms}, ")
	require.Equal(t, picker.Targets{TTFT: .8, TPOT: .03}, promise)
	require.True(t, auto)
}

// Clients get prefill's count of cached tokens where that costs nothing, or where the configuration says so.
func TestWhoseCachedTokens(t *testing.T) {
	for given, want := range map[[2]string]plan.CachedTokens{
		{"beside", ""}: plan.CachedOfDecode, {"beside", "auto"}: plan.CachedOfDecode, {"beside", "decode"}: plan.CachedOfDecode,
		{"beside", "prefill"}: plan.CachedByLeg, {"inside", ""}: plan.CachedInPassing, {"inside", "auto"}: plan.CachedInPassing,
		{"inside", "decode"}: plan.CachedOfDecode, {"inside", "prefill"}: plan.CachedInPassing,
	} {
		c, _, err := Parse(fmt.Appendf(nil, `{envoy: {run: %s}, pools: [{name: a, kvTransfer: nixl, cachedTokens: %q, endpoints: `+
			`[{address: "127.0.0.1:1", role: prefill}, {address: "127.0.0.1:2", role: decode}]}]}`, given[0], given[1]))
		require.NoError(t, err)
		p, err := Policy(c, c.GetPools()[0], nil, slog.New(slog.DiscardHandler))
		require.NoError(t, err)
		require.Equal(t, want, p.Cached, given)
	}
}

// The weight of a second of an answer is the picker's own where the configuration does not say.
func TestAnswerWeight(t *testing.T) {
	of := func(pool string) float64 {
		c, _, err := Parse(fmt.Appendf(nil, `pools: [{name: a, kvTransfer: nixl, %sendpoints: [{address: "127.0.0.1:1", `+
			`role: both}]}]`, pool))
		require.NoError(t, err)
		return placement(c.GetPools()[0]).AnswerWeight
	}
	require.InDelta(t, picker.DefaultAnswerWeight, of(""), 0)
	require.InDelta(t, 1, of("answerWeight: 1, "), 0)
	require.InDelta(t, 0.25, of("answerWeight: .25, "), 0)
}
