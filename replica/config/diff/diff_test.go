package diff

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"tandem/replica/config"
)

func TestDifference(t *testing.T) {
	const base = `
admin: {listen: 127.0.0.1:9090}
state: {redis: {url: "redis://:secret@127.0.0.1:6379/0"}}
pools:
- {name: a, models: [m], kvTransfer: nixl, endpoints: [{address: "10.0.0.1:1", role: prefill}, {address: "10.0.0.2:1", role: decode}]}
- {name: b, kvTransfer: none, endpoints: [{address: "10.0.0.3:1"}]}
`
	for _, c := range []struct{ name, old, new, want string }{
		{"nothing", "", "", ""},
		{"a weight", `"10.0.0.2:1", role: decode`, `"10.0.0.2:1", role: decode, weight: 50`, `pools[a].endpoints[10.0.0.2:1].weight: "100" -> "50"`},
		{"a number that was absent", `"10.0.0.2:1", role: decode`, `"10.0.0.2:1", role: decode, transfer: {tensorParallelSize: 2}`,
			"pools[a].endpoints[10.0.0.2:1].transfer: \"\" -> \"set\"\npools[a].endpoints[10.0.0.2:1].transfer.tensorParallelSize: \"\" -> \"2\""},
		{"a switch", `models: [m], `, `models: [m], nixl: {reuseTokenIds: true}, `,
			"pools[a].nixl: \"\" -> \"set\"\npools[a].nixl.reuseTokenIds: \"false\" -> \"true\""},
		{"an endpoint more", `role: decode}]`, `role: decode}, {address: "10.0.0.4:1", role: both}]`,
			`pools[a].endpoints[10.0.0.4:1]: "" -> "address: 10.0.0.4:1, role: both, scheme: http, weight: 100"`},
		{"an endpoint less", `{address: "10.0.0.1:1", role: prefill}, `, ``,
			`pools[a].endpoints[10.0.0.1:1]: "address: 10.0.0.1:1, role: prefill, scheme: http, weight: 100" -> ""`},
		{"a policy", `models: [m], `, `models: [m, o], onPrefillFailure: fail, `,
			"pools[a].models: \"m\" -> \"m, o\"\npools[a].onPrefillFailure: \"otherPrefill\" -> \"fail\""},
		{"a pool of another name", "name: b,", "name: c,",
			"pools[b]: \"name: b, models: *, kvTransfer: none, engine: any, split: auto, longPrompts: decodeAlone, onPrefillFailure: otherPrefill, decodeAlone: byCost, prefillAttempts: 3, endpoints: 1, attemptsTime: 1m, streamStartTimeout: 1m, strandedBlocks: lease, answerWeight: 0.5, roles: fixed, handoff: envoy, binding: immediate, enginePriority: none\" -> \"\"\n" +
				"pools[c]: \"\" -> \"name: c, models: *, kvTransfer: none, engine: any, split: auto, longPrompts: decodeAlone, onPrefillFailure: otherPrefill, decodeAlone: byCost, prefillAttempts: 3, endpoints: 1, attemptsTime: 1m, streamStartTimeout: 1m, strandedBlocks: lease, answerWeight: 0.5, roles: fixed, handoff: envoy, binding: immediate, enginePriority: none\""},
		{"order", `{address: "10.0.0.1:1", role: prefill}, {address: "10.0.0.2:1", role: decode}`, `{address: "10.0.0.2:1", role: decode}, {address: "10.0.0.1:1", role: prefill}`,
			`pools[a].endpoints[]: "10.0.0.1:1, 10.0.0.2:1" -> "10.0.0.2:1, 10.0.0.1:1"`},
		{"a port, which takes a restart", "9090", "9091", `admin.listen: "127.0.0.1:9090" -> "127.0.0.1:9091" (restart)`},
		{"Envoy's", "admin: {", "envoy: {decodeIdleTimeout: 5m, maxBodyBytes: 2048}\nadmin: {",
			"extProc.maxMessageBytes: \"83886080\" -> \"16785408\" (restart)\nenvoy.maxBodyBytes: \"16777216\" -> \"2048\" (restart)\nenvoy.decodeIdleTimeout: \"30m\" -> \"5m\" (Envoy)"},
		{"a port that Envoy is led to", "admin: {", "replan: {listen: 127.0.0.1:7003}\nenvoy: {decodeIdleTimeout: 5m}\nadmin: {",
			"replan.listen: \"127.0.0.1:9003\" -> \"127.0.0.1:7003\" (restart)\nenvoy.replans: \"127.0.0.1:9003\" -> \"127.0.0.1:7003\" (restart)\n" +
				"envoy.decodeIdleTimeout: \"30m\" -> \"5m\" (Envoy)"},
		{"a secret", "secret", "other", `state.redis.url: "" -> "(changed)" (restart)`},
		{"TLS", "admin: {", "extProc: {tls: {certFile: c, keyFile: k}}\nadmin: {",
			"extProc.tls: \"\" -> \"set\" (restart)\nextProc.tls.certFile: \"\" -> \"c\" (restart)\nextProc.tls.keyFile: \"\" -> \"k\" (restart)\nextProc.tls.mode: \"\" -> \"files\" (restart)"},
	} {
		t.Run(c.name, func(t *testing.T) {
			require.Contains(t, base, c.old)
			before, _, err := config.Parse([]byte(base))
			require.NoError(t, err)
			after, _, err := config.Parse([]byte(strings.Replace(base, c.old, c.new, 1)))
			require.NoError(t, err)
			var lines []string
			for _, d := range Difference(before, after) {
				line := fmt.Sprintf("%s: %q -> %q", d.Path, d.Before, d.After)
				if !d.Live {
					line += " (restart)"
				}
				if d.Envoy {
					line += " (Envoy)"
				}
				lines = append(lines, line)
			}
			require.Equal(t, c.want, strings.Join(lines, "\n"))
			TakeEnvoy(before, after)
			for _, d := range Difference(before, after) {
				require.False(t, d.Envoy, "what is for Envoy alone is the same now: %s", d.Path)
			}
		})
	}
}

func TestFingerprint(t *testing.T) {
	of := func(text string) string {
		c, _, err := config.Parse([]byte(text))
		require.NoError(t, err)
		return Fingerprint(c)
	}
	one := "pools: [{name: a, kvTransfer: nixl, endpoints: [{role: prefill, address: \"h:1\"}, {role: decode, address: \"h:2\"}]}]\n"
	require.Equal(t, of(one), of("extProc: {listen: 127.0.0.1:7000}\n"+one), "replicas may listen on ports of their own")
	require.NotEqual(t, of(one), of(strings.Replace(one, "h:2", "h:3", 1)))
}

// What is new is named with all that it has.
func TestOutermost(t *testing.T) {
	require.Equal(t, []string{"admin.listen", "state", "statex", "envoy.extProcs"},
		Outermost([]string{"admin.listen", "state", "state.redis", "statex", "envoy.extProcs", "envoy.extProcs[1]"}))
	require.Empty(t, Outermost(nil))
}
