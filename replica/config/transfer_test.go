package config

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tandem/extproc/kvtransfer"
)

// pool returns a configuration of one pool with two endpoints, and what more the pool and each of them has.
func pool(dialect, more, prefill, decode string) string {
	return fmt.Sprintf(`pools:
- name: chat
  kvTransfer: %s
  %s
  endpoints:
  - {address: "10.0.0.5:8000", role: prefill%s}
  - {address: "10.0.0.6:8000", role: decode%s}
`, dialect, more, prefill, decode)
}

// besidesExperimental returns the warnings but those of experimental dialects.
func besidesExperimental(warnings []string) []string {
	return slices.DeleteFunc(warnings, func(w string) bool { return strings.Contains(w, " is experimental: ") })
}

// Address and role suffice for every dialect but multi, which needs its members.
func TestDialectDefaults(t *testing.T) {
	for _, dialect := range Dialects() {
		more := ""
		if dialect == "multi" {
			more = "members: [nixl, offload]"
		}
		c, warnings, err := Parse([]byte(pool(dialect, more, "", "")))
		require.NoError(t, err, dialect)
		p := c.Pools[0]
		if dialect == "none" {
			require.Len(t, warnings, 1, "its prefill endpoint has nothing to do")
			continue
		}
		said := len(warnings) > 0 && strings.HasPrefix(warnings[0], "pools[0].kvTransfer: "+dialect+" is experimental: ")
		require.Equal(t, kvtransfer.Named(dialect).Engines.Experimental, said, "%s: %s", dialect, warnings)
		warnings = besidesExperimental(warnings)
		if dialect != "lmcache" {
			require.Empty(t, warnings, dialect)
			require.Nil(t, c.Notices)
			continue
		}
		require.Equal(t, []string{"notices.listen: 127.0.0.1:7500 is not reached from other machines, such as 10.0.0.5:8000: set an address that is pd_proxy_host of the engines"}, warnings)
		require.Equal(t, "127.0.0.1:7500", c.Notices.Listen)
		require.Equal(t, 10*time.Second, Duration(p.Lmcache.NoticeTimeout))
		require.Nil(t, p.Endpoints[0].Lmcache)
		require.EqualValues(t, 7300, p.Endpoints[1].Lmcache.InitPort)
		require.EqualValues(t, 7400, p.Endpoints[1].Lmcache.AllocPort)
	}
	c, _, err := Parse([]byte(pool("orchestrated", "", "", "")))
	require.NoError(t, err)
	require.Equal(t, "disagg_prefill_resp", c.Pools[0].Orchestrated.Key)
	require.Equal(t, "answer", c.Pools[0].Orchestrated.HandOver)
	c, _, err = Parse([]byte(pool("offload", "", "", "")))
	require.NoError(t, err)
	require.Equal(t, []int32{5710, 0}, []int32{c.Pools[0].Endpoints[0].GetTransfer().GetP2PPort(), c.Pools[0].Endpoints[1].GetTransfer().GetP2PPort()})
	c, warnings, err := Parse([]byte(pool("lmcache", "lmcache: {skipNotices: true}", "", "")))
	require.NoError(t, err)
	require.Empty(t, besidesExperimental(warnings))
	require.Nil(t, c.Notices)
}

// Errors about KV transfer are reported at the start, with the endpoint, the field and the remedy.
func TestTransferErrors(t *testing.T) {
	const at = "pools[0].endpoints"
	for name, tt := range map[string]struct {
		yaml string
		want []string
	}{
		"another dialect's settings": {pool("nixl", "lmcache: {noticeTimeout: 1s}\n  orchestrated: {}\n  members: [nixl]", ", transfer: {p2pPort: 1}", ", lmcache: {initPort: 1}"), []string{
			at + "[0].transfer.p2pPort: has no effect here: it belongs to endpoints that prefill, with kvTransfer offload",
			at + "[1].lmcache: has no effect here: it belongs to endpoints that decode, with kvTransfer lmcache",
			"pools[0].lmcache: has no effect with kvTransfer nixl: remove it, or set kvTransfer to lmcache",
			"pools[0].members: has no effect with kvTransfer nixl: remove it, or set kvTransfer to multi",
			"pools[0].orchestrated: has no effect with kvTransfer nixl: remove it, or set kvTransfer to orchestrated"}},
		"a receiver that prefills":        {pool("lmcache", "", ", lmcache: {initPort: 7300}", ""), []string{at + "[0].lmcache: has no effect here: it belongs to endpoints that decode, with kvTransfer lmcache"}},
		"notices are waited for too long": {pool("lmcache", "lmcache: {noticeTimeout: 30s}", "", ""), []string{"pools[0].lmcache.noticeTimeout: 30s is not between 1ms and 25s: Envoy gives up on the processor after 30s"}},
		"a first token, elsewhere":        {pool("lmcache", "lmcache: {retFirstToken: true}\n  handoff: sidecar", "", ""), []string{"pools[0].lmcache.retFirstToken: needs handoff envoy, not sidecar: prefill's token is put in front of decode's answer there"}},
		"cached tokens of pairs":          {pool("mooncake", "cachedTokens: prefill", "", ""), []string{"pools[0].cachedTokens: is prefill, which takes legs that follow each other, not kvTransfer mooncake: decode"}},
		"cached tokens, elsewhere":        {pool("nixl", "cachedTokens: prefill\n  handoff: direct", "", ""), []string{"pools[0].cachedTokens: is prefill, which takes handoff envoy, not direct: answers come through the external processor there"}},
		"cached tokens of nobody":         {pool("nixl", "cachedTokens: both", "", ""), []string{`pools[0].cachedTokens: "both" is not one of auto, decode, prefill`}},
		"a number for a time":             {pool("lmcache", "lmcache: {noticeTimeout: 30}", "", ""), []string{"pools[0].lmcache.noticeTimeout: must have a unit, is 30: 30s for seconds, 30ms for milliseconds"}},
		"a text for a truth":              {pool("lmcache", "lmcache: {skipNotices: \"yes\"}", "", ""), []string{`pools[0].lmcache.skipNotices: must be true or false, is the text "yes"`}},
		"init and alloc alike":            {pool("lmcache", "", "", ", lmcache: {allocPort: 7300}"), []string{at + "[1].lmcache.allocPort: 10.0.0.6:7300 is taken by " + at + "[1].lmcache.initPort: engines on one machine need ports of their own"}},
		"ranks overlap":                   {pool("lmcache", "", ", transfer: {tensorParallelSize: 4}", ", transfer: {tensorParallelSize: 4}, lmcache: {initPort: 7300, allocPort: 7303}"), []string{at + "[1].lmcache.allocPort: 10.0.0.6:7303 is taken by " + at + "[1].lmcache.initPort: engines on one machine need ports of their own"}},
		"two receivers of one machine":    {pool("lmcache", "", "", "") + "  - {address: \"10.0.0.6:8001\", role: decode}\n", []string{at + "[2].lmcache.allocPort: 10.0.0.6:7400 is taken by " + at + "[1].lmcache.allocPort: engines on one machine need ports of their own", at + "[2].lmcache.initPort: 10.0.0.6:7300 is taken by " + at + "[1].lmcache.initPort: engines on one machine need ports of their own"}},
		"no ports left":                   {pool("lmcache", "", ", transfer: {tensorParallelSize: 8}", ", transfer: {tensorParallelSize: 8}, lmcache: {initPort: 65530}"), []string{at + "[1].lmcache.initPort: 65530 is not a port, or 8 ranks need more ports than there are above it"}},
		"two tiers of one machine":        {pool("offload", "", "", "") + "  - {address: \"10.0.0.5:8001\", role: prefill}\n", []string{at + "[2].transfer.p2pPort: 10.0.0.5:5710 is taken by " + at + "[0].transfer.p2pPort: engines on one machine need ports of their own"}},
		"no ranks":                        {pool("nixl", "", ", transfer: {tensorParallelSize: -1}", ""), []string{at + "[0].transfer.tensorParallelSize: -1 is not between 1 and 1024"}},
		"half of the releases":            {pool("nixl", "", ", release: 0.32.0", ""), []string{at + "[1].release: is missing, and pools[0].endpoints[0] has one: endpoints pair by release, so give it to all of the pool or to none"}},
		"not a release":                   {pool("nixl", "", ", release: latest", ", release: latest"), []string{at + `[0].release: "latest" is not a release such as 0.32.0`, at + `[1].release: "latest" is not a release such as 0.32.0`}},
		"a release that takes no ids":     {pool("nixl", "nixl: {reuseTokenIds: true}", ", release: 0.31.0", ", release: 0.32.0"), []string{at + "[0].release: 0.31.0 does not take prefill's token ids: nixl.reuseTokenIds needs vLLM 0.32 or newer on both sides"}},
		"a release without the tier":      {pool("offload", "", ", release: 0.24.0", ", release: 0.25.1"), []string{at + "[0].release: 0.24.0 has no P2P tier: kvTransfer offload needs vLLM 0.25 or newer on both sides"}},
		"turns that prefill fetches":      {pool("nixl", "nixl: {bidirectional: true, turnTtl: 60s}", "", ""), []string{"pools[0].nixl.bidirectional: is gone since decode appends a conversation's next turn (docs/adr/0103): remove it, and set declineExpired if the engines run with bidirectional_kv_xfer", "pools[0].nixl.turnTtl: is gone with nixl.bidirectional: remove it"}},
		"a host with a port":              {pool("nixl", "", ", transfer: {host: \"10.0.0.9:5600\"}", ""), []string{at + `[0].transfer.host: "10.0.0.9:5600" is neither an IP address nor a name; it has no port`}},
		"no members":                      {pool("multi", "", "", ""), []string{"pools[0].members: is missing: the connectors within MultiConnector, some of nixl, offload, shared"}},
		"unknown members":                 {pool("multi", "members: [nixl, lmcache, nixl]", "", ""), []string{`pools[0].members[1]: "lmcache" is not one of nixl, offload, shared`, "pools[0].members[2]: nixl is there twice"}},
		"a key that clients may send":     {pool("orchestrated", "orchestrated: {key: prefill_resp}", "", ""), []string{`pools[0].orchestrated.key: "prefill_resp" is not disagg_ and letters, digits or _: names that begin so are cut from what clients send`}},
		"handing over something else":     {pool("orchestrated", "orchestrated: {handOver: all}", "", ""), []string{`pools[0].orchestrated.handOver: "all" is not one of answer, params`}},
		"listeners clash":                 {"notices: {listen: \"127.0.0.1:9002\"}\n" + pool("lmcache", "", "", ""), []string{"notices.listen: 127.0.0.1:9002 clashes with extProc.listen: give it another port"}},
	} {
		t.Run(name, func(t *testing.T) {
			_, _, err := Parse([]byte(tt.yaml))
			var m ValidationErrors
			require.ErrorAs(t, err, &m)
			require.Equal(t, strings.Join(tt.want, "\n"), m.Error())
		})
	}
}

// Endpoints that cannot understand each other are never paired; those without a partner are named.
func TestIncompatibleEndpoints(t *testing.T) {
	for name, tt := range map[string]struct {
		yaml string
		want string
	}{
		"releases": {pool("nixl", "", ", release: 0.31.0", ", release: 0.32.0"), `pools[0].endpoints[0]: no endpoint that decodes pairs with it (group "", release 0.31.0), so it will never be used`},
		"replicas": {"notices: {listen: \"0.0.0.0:7500\"}\ntickets: {keyFile: k}\nenvoy: {extProcs: [\"a:1\", \"b:1\"]}\n" + pool("lmcache", "", "", ""),
			"notices: a notice reaches one replica, and prefill legs at the others wait noticeTimeout in vain: share it through state.redis, or set lmcache.skipNotices (pd_skip_proxy_notification of the engines)"},
		"no notices": {"notices: {}\n" + pool("nixl", "", "", ""), "notices: has no effect: no pool has kvTransfer lmcache with notices"},
	} {
		t.Run(name, func(t *testing.T) {
			_, warnings, err := Parse([]byte(tt.yaml))
			require.NoError(t, err)
			alone := func(w string) bool { return strings.HasPrefix(w, "state.redis: is missing") }
			require.Equal(t, []string{tt.want}, slices.DeleteFunc(besidesExperimental(warnings), alone))
		})
	}
	_, _, err := Parse([]byte("notices: {listen: \"0.0.0.0:7500\"}\n" + pool("lmcache", "", ", transfer: {tensorParallelSize: 2}", "")))
	require.EqualError(t, err, "pools[0].endpoints[0].transfer.tensorParallelSize: is 2, and no endpoint of its group that decodes has the same: with kvTransfer lmcache a rank passes KV to the rank of the same number")
	c, _, err := Parse([]byte(pool("nixl", "", ", transfer: {tensorParallelSize: 2}, release: v0.32.0, group: a", ", transfer: {tensorParallelSize: 8}, release: v0.32.0, group: a")))
	require.NoError(t, err)
	p := c.Pools[0]
	require.Equal(t, "a v0.32.0", PairsAs(p, p.Endpoints[0]))
	require.Equal(t, PairsAs(p, p.Endpoints[0]), PairsAs(p, p.Endpoints[1]), "NIXL works other layouts out")
}

func TestDataParallelRanks(t *testing.T) {
	of := func(n int, dialect, more string) string {
		return fmt.Sprintf(`pools: [{name: a, kvTransfer: %s, %s endpoints: [{address: "10.0.0.1:1", role: prefill, dataParallelRanks: %d}, {address: "10.0.0.2:1", role: decode}]}]`, dialect, more, n)
	}
	for name, tt := range map[string]struct{ yaml, want string }{
		"none": {of(0, "nixl", ""), ""}, "two": {of(2, "nixl", ""), ""}, "sglang": {of(64, "sglang", ""), ""}, "mooncake": {of(8, "mooncake", ""), ""},
		"too many":        {of(65, "nixl", ""), "pools[0].endpoints[0].dataParallelRanks: 65 is not between 1 and 64"},
		"below zero":      {of(-1, "nixl", ""), "pools[0].endpoints[0].dataParallelRanks: -1 is not between 1 and 64"},
		"another dialect": {of(2, "trtllm", ""), "pools[0].endpoints[0].dataParallelRanks: kvTransfer trtllm has no word for ranks: give each rank a port and an endpoint of its own, or leave it to the engine"},
		"events twice": {of(2, "nixl", "kvEvents: {ranks: 2},"),
			"pools[0].kvEvents.ranks: is 2, and endpoints have data-parallel ranks, which count events by rank: leave one out"},
	} {
		c, _, err := Parse([]byte(tt.yaml))
		if tt.want != "" {
			require.EqualError(t, err, tt.want, name)
			continue
		}
		require.NoError(t, err, name)
		pools, err := PoolSpecs(c)
		require.NoError(t, err)
		require.EqualValues(t, c.Pools[0].Endpoints[0].DataParallelRanks, pools[0].Endpoints[0].Ranks)
	}
}

// vLLM's NIXL and Mooncake need tensor-parallel sizes of which one is a multiple of the other.
func TestRankMultiples(t *testing.T) {
	of := func(dialect, prefill, decode, group string) error {
		_, _, err := Parse(fmt.Appendf(nil, "pools: [{name: a, kvTransfer: %s, endpoints: [{role: prefill, address: \"h:1\"%s}, "+
			"{role: decode, address: \"h:2\"%s%s}, {role: decode, address: \"h:3\"}]}]", dialect, prefill, decode, group))
		return err
	}
	const three, two, four = ", transfer: {tensorParallelSize: 3}", ", transfer: {tensorParallelSize: 2}", ", transfer: {tensorParallelSize: 4}"
	const wrong = "pools[0].endpoints[0].transfer.tensorParallelSize: is 3, and 2 of h:2, with which it pairs: one must be a " +
		"multiple of the other, or the engines refuse the handshake; set different groups"
	for _, dialect := range []string{"nixl", "nixl-push", "mooncake"} {
		require.EqualError(t, of(dialect, three, two, ""), wrong)
		require.NoError(t, of(dialect, two, four, ""))
		require.NoError(t, of(dialect, four, two, ""))
		require.NoError(t, of(dialect, three, "", ""), "the other one is not known")
		require.NoError(t, of(dialect, three, two, ", group: other"))
	}
	require.NoError(t, of("shared", three, two, ""))
}

// With lmcache rank n of one engine talks to rank n of the other, so that only equal sizes pair.
func TestRanksOneToOne(t *testing.T) {
	of := func(prefill, decode string) error {
		_, _, err := Parse(fmt.Appendf(nil, "pools: [{name: a, kvTransfer: lmcache, endpoints: [{role: prefill, address: \"h:1\"%s}, "+
			"{role: decode, address: \"h:2\"%s}]}]", prefill, decode))
		return err
	}
	const two, three, four = ", transfer: {tensorParallelSize: 2}", ", transfer: {tensorParallelSize: 3}", ", transfer: {tensorParallelSize: 4}"
	for _, sizes := range [][3]string{{two, three, "2"}, {two, four, "2"}, {four, two, "4"}, {two, "", "2"}} {
		require.EqualError(t, of(sizes[0], sizes[1]), "pools[0].endpoints[0].transfer.tensorParallelSize: is "+sizes[2]+
			", and no endpoint of its group that decodes has the same: with kvTransfer lmcache a rank passes KV to the rank of the same number")
	}
	require.NoError(t, of(two, two))
	require.NoError(t, of("", ""))
}
