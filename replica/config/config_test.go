package config

import (
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	configv1 "tandem/protos/config/v1"
)

// complete is the complete configuration of the design.
const complete = `
extProc: {listen: 127.0.0.1:9002}
replan:  {listen: 127.0.0.1:9003}
admin:   {listen: 127.0.0.1:9090}
envoy:   {listen: 127.0.0.1:8080, admin: 127.0.0.1:9901, maxBodyBytes: 16777216}
state:   {redis: {url: "redis://127.0.0.1:6379/0"}}
tickets: {keyFile: /etc/tandem/ticket.key}
pools:
- name: chat
  models: ["*"]
  kvTransfer: nixl
  split: auto
  endpoints:
  - {address: 127.0.0.1:8101, role: prefill}
  - {address: 127.0.0.1:8201, role: decode}
`

// least is a configuration with only the required fields.
const least = `
pools:
- name: chat
  kvTransfer: nixl
  endpoints:
  - {address: 127.0.0.1:8101, role: prefill}
  - {address: engine.svc:8000, role: decode}
`

func TestCore(t *testing.T) {
	c, warnings, err := Parse([]byte(complete))
	require.NoError(t, err)
	require.Empty(t, warnings)
	require.Equal(t, int64(16777216), c.Envoy.MaxBodyBytes)
	require.Equal(t, "prefill", c.Pools[0].Endpoints[0].Role)
	require.Equal(t, "/etc/tandem/ticket.key", c.Tickets.KeyFile)
}

func TestDefaults(t *testing.T) {
	c, warnings, err := Parse([]byte(least))
	require.NoError(t, err)
	require.Empty(t, warnings)
	require.Equal(t, "127.0.0.1:9002", c.ExtProc.Listen)
	require.Equal(t, "127.0.0.1:9003", c.Replan.Listen)
	require.Equal(t, "127.0.0.1:9090", c.Admin.Listen)
	require.Equal(t, "127.0.0.1:8080", c.Envoy.Listen)
	require.Equal(t, "127.0.0.1:9901", c.Envoy.Admin)
	require.Equal(t, int64(16<<20), c.Envoy.MaxBodyBytes)
	require.Equal(t, int64(80<<20), c.ExtProc.MaxMessageBytes)
	require.Equal(t, []string{"127.0.0.1:9002"}, c.Envoy.ExtProcs)
	require.Equal(t, []string{"127.0.0.1:9003"}, c.Envoy.Replans)
	require.Equal(t, "duplex", c.Envoy.BodyMode)
	require.Equal(t, 30*time.Minute, Duration(c.Envoy.DecodeIdleTimeout))
	require.Equal(t, 10*time.Minute, Duration(c.Tickets.Ttl))
	require.Nil(t, c.Tracing)
	p := c.Pools[0]
	require.Equal(t, []string{"*"}, p.Models)
	require.Equal(t, "auto", p.Split)
	require.Equal(t, "decodeAlone", p.LongPrompts)
	require.Equal(t, "otherPrefill", p.OnPrefillFailure)
	require.Equal(t, int32(3), p.PrefillAttempts)
	require.Equal(t, 10*time.Second, Duration(p.PrefillTimeout.Base))
	require.Equal(t, 2*time.Millisecond, Duration(p.PrefillTimeout.PerToken))
	require.Equal(t, "http", p.Endpoints[1].Scheme)
}

func TestReplansOfSeveralReplicas(t *testing.T) {
	c, _, err := Parse([]byte(least + `
tickets: {keyFile: k}
replan: {listen: "0.0.0.0:9103"}
envoy: {extProcs: ["10.0.0.1:9002", "[::1]:9002", "10.0.0.1:9012"]}`))
	require.NoError(t, err)
	require.Equal(t, []string{"10.0.0.1:9103", "[::1]:9103"}, c.Envoy.Replans)
}

func TestNoneNeedsNoRoles(t *testing.T) {
	c, warnings, err := Parse([]byte(`pools: [{name: a, kvTransfer: none, endpoints: [{address: "[::1]:8000"}]}]`))
	require.NoError(t, err)
	require.Empty(t, warnings)
	require.Equal(t, "both", c.Pools[0].Endpoints[0].Role)
}

// edited is least with one piece replaced.
func edited(old, replacement string) string {
	if !strings.Contains(least, old) {
		panic("nothing to replace: " + old)
	}
	return strings.Replace(least, old, replacement, 1)
}

// A configuration that is refused, and every error. Warnings are in TestWarnings.
func TestValidationErrors(t *testing.T) {
	for name, tt := range map[string]struct {
		yaml   string
		errors []string
	}{
		"empty":                {"", []string{"the file must hold a mapping, with extProc, envoy, pools and so on; it holds empty"}},
		"a list":               {"- a", []string{"the file must hold a mapping, with extProc, envoy, pools and so on; it holds a list"}},
		"no pools":             {"{}", []string{"pools: is missing: at least one pool is needed"}},
		"tracing":              {"tracing: {sampleRatio: 2}\n" + least, []string{"tracing.endpoint: is missing: ip:port, [ip]:port or name:port", "tracing.sampleRatio: 2 is not between 0 and 1"}},
		"a share that is text": {"tracing: {endpoint: \"a:1\", sampleRatio: half}\n" + least, []string{`tracing.sampleRatio: must be a number, is the text "half"`}},
		"empty pools":          {"pools:", []string{"pools: is missing: at least one pool is needed"}},
		"broken YAML":          {"pools: [", []string{"not readable as YAML: line 1: did not find expected node content"}},
		"keys twice": {"admin: {}\nadmin: {}\nreplan: {}\nreplan: {}\n" + least, []string{
			`not readable as YAML: line 2: key "admin" already set in map`, `not readable as YAML: line 4: key "replan" already set in map`}},
		"role misspelt":       {edited("role: prefill", "role: prefil"), []string{`pools[0].endpoints[0].role: "prefil" is not a role: one of prefill, decode, both, encode; did you mean prefill?`}},
		"role missing":        {edited(", role: decode", ""), []string{"pools[0].endpoints: none of them decodes: at least one needs the role decode or both", "pools[0].endpoints[1].role: is missing: one of prefill, decode, both, encode"}},
		"unknown field":       {"extproc: {}\n" + least, []string{"extproc: unknown field; did you mean extProc?"}},
		"unknown deep field":  {edited("role: prefill", "role: prefill, adress: x"), []string{"pools[0].endpoints[0].adress: unknown field; did you mean address?"}},
		"far from all fields": {"zzzzzzzzzzzz: 1\n" + least, []string{"zzzzzzzzzzzz: unknown field; known here: extProc, replan, admin, envoy, state, tickets, pools, notices, envoyGateway, tracing, usage, record"}},
		"proto's spelling":    {"ext_proc: {}\n" + least, []string{"ext_proc: unknown field; did you mean extProc?"}},
		"a name of two lines": {"\"a\\nb\": 1\n" + least, []string{`"a\nb": unknown field; known here: extProc, replan, admin, envoy, state, tickets, pools, notices, envoyGateway, tracing, usage, record`}},
		"discovery":           {edited("kvTransfer: nixl", "kvTransfer: nixl\n  discovery: {dns: x}"), []string{`pools[0].discovery.dns: must be a list, is the text "x"`, "pools[0].endpoints: stand beside discovery: list endpoints or have them found"}},
		"both":                {edited("kvTransfer: nixl", "kvTransfer: nixl\n  discovery: {file: {path: x}}"), []string{"pools[0].endpoints: stand beside discovery: list endpoints or have them found"}},
		"pushes, direct":      {edited("kvTransfer: nixl", "kvTransfer: lmcache\n  handoff: direct"), []string{"pools[0].handoff: is direct, but lmcache's prefill endpoint sends the KV to a decode endpoint that waits for it: envoy"}},
		"at once, direct":     {edited("kvTransfer: nixl", "kvTransfer: mooncake\n  handoff: direct"), []string{"pools[0].handoff: is direct, but with kvTransfer mooncake both legs run at once, which takes an Envoy that makes both: envoy"}},
		"encode, at once":     {edited("kvTransfer: nixl", "kvTransfer: mooncake\n  encode: {timeout: never}"), []string{"pools[0].encode: takes legs that follow each other, not kvTransfer mooncake: remove it", `pools[0].encode.timeout: "never" is not a duration such as 300s, 5m or 250ms`}},
		"encode, direct":      {edited("kvTransfer: nixl", "kvTransfer: nixl\n  handoff: direct\n  encode: {}"), []string{"pools[0].encode: takes handoff envoy or sidecar, not direct: Envoy or the sidecar makes the hop to the encode endpoint"}},
		"misspelt dialect":    {edited("nixl", "nxil"), []string{`pools[0].kvTransfer: "nxil" is not one of ` + strings.Join(Dialects(), ", ") + `; did you mean nixl?`}},
		"no dialect":          {edited("  kvTransfer: nixl\n", ""), []string{"pools[0].kvTransfer: is missing: one of " + strings.Join(Dialects(), ", ") + "; none is for engines that prefill and decode by themselves"}},
		"no name":             {edited("name: chat", "models: [a]"), []string{"pools[0].name: is missing: what metrics and logs will call the pool"}},
		"name is a number":    {edited("name: chat", "name: 7"), []string{"pools[0].name: must be text, is the number 7: put it in quotes"}},
		"empty list item":     {edited("name: chat", "name: chat\n  models: [~]"), []string{"pools[0].models[0]: is empty"}},
		"empty model":         {edited("name: chat", "name: chat\n  models: [\"\"]"), []string{`pools[0].models[0]: is empty: a name that requests ask for, or "*"`}},
		"empty pool":          {"pools: [~]", []string{"pools[0]: must be a mapping, is empty"}},
		"text for a list":     {"pools: a", []string{`pools: must be a list, is the text "a"`}},
		"text for a mapping":  {"envoy: a\n" + least, []string{`envoy: must be a mapping, is the text "a"`}},
		"text for a number":   {edited("role: prefill", "role: prefill, weight: full"), []string{`pools[0].endpoints[0].weight: must be a whole number, is the text "full"`}},
		"text for a size":     {"envoy: {maxBodyBytes: 16 apples}\n" + least, []string{`envoy.maxBodyBytes: "16 apples" is not a size such as 16Mi, 512Ki or 16777216`}},
		"a size too large":    {"envoy: {maxBodyBytes: 9999999999Gi}\n" + least, []string{`envoy.maxBodyBytes: "9999999999Gi" is not a size such as 16Mi, 512Ki or 16777216`}},
		"a variable":          {"state: {redis: {url: \"redis://:${PASSWORD}@x\"}}\n" + least, []string{"state.redis.url: ${PASSWORD} is not replaced here: write the value, fill the file in before (envsubst), or use the setting that names a file where it is a secret"}},
		"a variable that breaks YAML": {"envoy: {listen: ${HOST}:80}\n" + least, []string{
			"not readable as YAML: did not find expected ',' or '}'",
			"${HOST} is not replaced here: write the value, fill the file in before (envsubst), or use the setting that names a file where it is a secret"}},
		"yes for a word": {edited("kvTransfer: nixl", "kvTransfer: nixl\n  split: yes"), []string{"pools[0].split: is true (YAML reads yes and on as true, no and off as false), which is not one of always, auto, never"}},
		"off for a word": {edited("kvTransfer: nixl", "kvTransfer: nixl\n  enginePriority: off"), []string{"pools[0].enginePriority: is false (YAML reads yes and on as true, no and off as false), which is not one of none, vllm, sglang"}},
		"yes for a name": {edited("name: chat", "name: yes"), []string{"pools[0].name: must be text, is true: put it in quotes"}},
		"an engine's words": {strings.Replace(edited("kvTransfer: nixl", "kvTransfer: NixlConnector"), "role: prefill", "role: kv_producer", 1), []string{
			`pools[0].endpoints[0].role: "kv_producer" is not a role: one of prefill, decode, both, encode; did you mean prefill?`,
			`pools[0].kvTransfer: "NixlConnector" is not one of ` + strings.Join(Dialects(), ", ") + `; did you mean nixl?`}},
		"an engine's word, misspelt": {edited("kvTransfer: nixl", "kvTransfer: NixlConnectr"), []string{
			`pools[0].kvTransfer: "NixlConnectr" is not one of ` + strings.Join(Dialects(), ", ") + `; did you mean nixl?`}},
		"an engine's fields": {"state: {redis: {url: \"redis://x\", port: 1}}\n" + strings.NewReplacer("kvTransfer: nixl", "kvTransfer: nixl\n  kv_connector: x",
			"role: prefill", "role: prefill, kv_role: x, host: x, port: 1, url: x").Replace(least), []string{
			"pools[0].endpoints[0].host: unknown field; did you mean address?", "pools[0].endpoints[0].kv_role: unknown field; did you mean role?",
			"pools[0].endpoints[0].port: unknown field; did you mean address?", "pools[0].endpoints[0].url: unknown field; did you mean address?",
			"pools[0].kv_connector: unknown field; did you mean kvTransfer?",
			"state.redis.port: unknown field; known here: url, nodes, mode, sentinelMaster, passwordFile, keyPrefix, lease, tls"}},
		"a store of Mooncake": {edited("kvTransfer: nixl", "kvTransfer: mooncake-store"), []string{
			`pools[0].kvTransfer: "mooncake-store" is not one of ` + strings.Join(Dialects(), ", ") + `; did you mean shared?`}},
		"TensorRT-LLM's word": {edited("role: prefill", "role: context"), []string{
			`pools[0].endpoints[0].role: "context" is not a role: one of prefill, decode, both, encode; did you mean prefill?`}},
		"everything at once": {"admin: {listen: 9090, tokenFle: x}\nenvoy: {maxBodyBytes: 1}\ntracing: 7\npools:\n- {name: a, name: b, kvTransfer: nxil, endpoints: [{address: x, role: 1}, {address: \"d:1\", role: decode}]}\n", []string{
			`not readable as YAML: line 5: key "name" already set in map`,
			"admin.listen: must be host:port, is the number 9090: 127.0.0.1:9090 for this machine alone",
			"admin.tokenFle: unknown field; did you mean tokenFile?",
			"envoy.maxBodyBytes: 1 is not between 1Ki and 128Mi",
			`pools[0].endpoints[0].address: "x" is not an address: ip:port, [ip]:port or name:port`,
			"pools[0].endpoints[0].role: must be text, is the number 1: put it in quotes",
			`pools[0].kvTransfer: "nxil" is not one of ` + strings.Join(Dialects(), ", ") + `; did you mean nixl?`,
			"tracing: must be a mapping, is the number 7"}},
		"half a byte":       {"envoy: {maxBodyBytes: 4096.5}\n" + least, []string{"envoy.maxBodyBytes: must be a whole number between -9223372036854775808 and 9223372036854775807, is 4096.5"}},
		"over int32":        {edited("name: chat", "name: chat\n  prefillAttempts: 3000000000"), []string{"pools[0].prefillAttempts: must be a whole number between -2147483648 and 2147483647, is 3000000000"}},
		"no time, no unit":  {"envoy: {decodeIdleTimeout: 0}\n" + least, []string{"envoy.decodeIdleTimeout: must have a unit, is 0: leave it out for the default, or write 1s for a second"}},
		"time without unit": {"envoy: {decodeIdleTimeout: 300}\n" + least, []string{"envoy.decodeIdleTimeout: must have a unit, is 300: 300s for seconds, 300ms for milliseconds"}},
		"time as text":      {"tickets: {ttl: \"300\"}\n" + least, []string{`tickets.ttl: "300" is not a duration such as 300s, 5m or 250ms`}},
		"time too long":     {"tickets: {ttl: 25h}\n" + least, []string{`tickets.ttl: 25h is not between 1s and 24h`}},
		"answerWeight":      {edited("kvTransfer: nixl", "kvTransfer: nixl\n  answerWeight: 2"), []string{"pools[0].answerWeight: 2 is not between 0.1 and 1"}},
		"targets": {edited("kvTransfer: nixl", "kvTransfer: nixl\n  targets: {ttft: 0s, tpot: 2d}"), []string{
			`pools[0].targets.tpot: "2d" is not a duration such as 300s, 5m or 250ms`, "pools[0].targets.ttft: 0s is not between 1ms and 24h"}},
		"roles":           {edited("kvTransfer: nixl", "kvTransfer: nixl\n  roles: dynamic"), []string{`pools[0].roles: "dynamic" is not one of fixed, auto`}},
		"roles need two":  {edited("kvTransfer: nixl", "kvTransfer: nixl\n  roles: auto"), []string{"pools[0].roles: is auto, but 0 endpoints have the role both: at least two are needed"}},
		"roles of others": {edited("kvTransfer: nixl", "kvTransfer: sglang\n  roles: auto"), []string{"pools[0].roles: is auto, but engines with kvTransfer sglang serve one leg only: with nixl, offload, shared they serve either"}},
		"address twice":   {edited("engine.svc:8000", "127.0.0.1:08101"), []string{"pools[0].endpoints[1].address: 127.0.0.1:08101 is already pools[0].endpoints[0].address"}},
		"address without port": {edited("engine.svc:8000", "engine.svc"), []string{
			`pools[0].endpoints[1].address: "engine.svc" is not an address: ip:port, [ip]:port or name:port`}},
		"address with scheme": {edited("engine.svc:8000", `"http://engine:8000"`), []string{
			`pools[0].endpoints[1].address: "http://engine:8000" is not an address: ip:port, [ip]:port or name:port; did you mean engine:8000?`}},
		"address port 0":     {edited("engine.svc:8000", "engine.svc:0"), []string{`pools[0].endpoints[1].address: "engine.svc:0" has no port between 1 and 65535`}},
		"address port 65536": {edited("engine.svc:8000", "engine.svc:65536"), []string{`pools[0].endpoints[1].address: "engine.svc:65536" has no port between 0 and 65535`}},
		"address no host":    {edited("engine.svc:8000", `":8000"`), []string{`pools[0].endpoints[1].address: ":8000" has no host; 0.0.0.0 or [::] means every interface`}},
		"address broken IP":  {edited("engine.svc:8000", "10.0.0.256:8000"), []string{`pools[0].endpoints[1].address: "10.0.0.256" is neither an IP address nor a name`}},
		"address with zone":  {edited("engine.svc:8000", `"[fe80::1%eth0]:8000"`), []string{`pools[0].endpoints[1].address: "fe80::1%eth0" is neither an IP address nor a name`}},
		"no address":         {edited("address: engine.svc:8000, ", ""), []string{"pools[0].endpoints[1].address: is missing: ip:port, [ip]:port or name:port"}},
		"endpoint is Envoy": {"envoy: {listen: \"0.0.0.0:8000\"}\n" + edited("engine.svc:8000", "localhost:8000"), []string{
			"pools[0].endpoints[1].address: localhost:8000 is envoy.listen: a request would go in circles"}},
		"always, no pair":       {"pools: [{name: a, kvTransfer: nixl, split: always, decodeAlone: never, endpoints: [{address: \"127.0.0.1:8101\", role: both}]}]", []string{"pools[0].endpoints: no two of them can share a request, and with split always and decodeAlone never nothing else answers: add one that prefills or decodes, or say decodeAlone: fallback"}},
		"always, whole servers": {"pools: [{name: a, kvTransfer: sglang, split: always, decodeAlone: never, endpoints: [{address: \"127.0.0.1:8101\", role: both}, {address: \"127.0.0.1:8102\", role: both}]}]", []string{"pools[0].endpoints: no two of them can share a request, and with split always and decodeAlone never nothing else answers: add one that prefills or decodes, or say decodeAlone: fallback"}},
		"no decode":             {edited("role: decode", "role: prefill"), []string{"pools[0].endpoints: none of them decodes: at least one needs the role decode or both"}},
		"always, no prefill":    {edited("role: prefill", "role: decode") + "  split: always\n", []string{"pools[0].endpoints: none of them prefills, but split is always: at least one needs the role prefill or both"}},
		"no endpoints":          {"pools: [{name: a, kvTransfer: none}]", []string{"pools[0].endpoints: is missing: at least one endpoint is needed, or discovery"}},
		"two pools alike": {least + "- {name: chat, kvTransfer: none, endpoints: [{address: \"127.0.0.1:8101\"}]}\n", []string{
			"pools[1].endpoints[0].address: 127.0.0.1:8101 is already pools[0].endpoints[0].address",
			`pools[1].models[0]: "*" is in pools[0] already; a model belongs to one pool; a pool that names no models has "*", all that no other pool names`, `pools[1].name: "chat" names two pools`}},
		"names with a port": {"admin: {hosts: [tandem.example.com, \"*.corp.example\", \"tandem.example.com:9090\", \"*\"]}\n" + least, []string{
			`admin.hosts[2]: "tandem.example.com:9090" is not a host name without port, such as tandem.example.com or *.example.com`,
			`admin.hosts[3]: "*" is not a host name without port, such as tandem.example.com or *.example.com`}},
		"listeners clash":      {"admin: {listen: \"0.0.0.0:9002\"}\n" + least, []string{"admin.listen: 0.0.0.0:9002 clashes with extProc.listen: give it another port"}},
		"replicas without key": {"envoy: {extProcs: [\"a:1\", \"b:1\"]}\n" + least, []string{"tickets.keyFile: is missing: several replicas (envoy.extProcs) need the same keys to read each other's tickets; or set state.redis, and they share them"}},
		"replica twice":        {"tickets: {keyFile: k}\nenvoy: {extProcs: [\"a:1\", \"A:1\"], replans: [\"a:2\"]}\n" + least, []string{"envoy.extProcs[1]: A:1 is already envoy.extProcs[0]"}},
		"small messages":       {"extProc: {maxMessageBytes: 16777216}\n" + least, []string{"extProc.maxMessageBytes: 16Mi is not above envoy.maxBodyBytes (16Mi) and at most 1Gi: a whole body comes in one message"}},
		"half a TLS":           {"extProc: {tls: {certFile: c}}\nenvoy: {extProcTls: {certFile: c, serverName: name}}\n" + least, []string{"envoy.extProcTls.keyFile: certFile and keyFile belong together: set both or none", "envoy.extProcTls.serverName: has no effect without caFile: set that too", "extProc.tls.keyFile: is missing: a PEM file"}},
		"redis without url":    {"state: {redis: {}}\n" + least, []string{"state.redis.url: is missing: redis://[user:password@]host:port/db"}},
		"redis with a secret":  {"state: {redis: {url: \"http://:secret@x\"}}\n" + least, []string{"state.redis.url: is not of the form redis://[user:password@]host:port/db"}},
		"large bodies":         {"envoy: {maxBodyBytes: 1Gi}\n" + least, []string{"envoy.maxBodyBytes: 1Gi is not between 1Ki and 128Mi"}},
		"large messages": {"extProc: {maxMessageBytes: 4097Mi}\nenvoy: {maxBodyBytes: 1000}\n" + least, []string{
			"envoy.maxBodyBytes: 1000 is not between 1Ki and 128Mi",
			"extProc.maxMessageBytes: 4097Mi is not above envoy.maxBodyBytes (1000) and at most 1Gi: a whole body comes in one message"}},
		"redis, all wrong": {"state: {redis: {url: \"redis://:p@x/1\", nodes: [x], mode: cluster, sentinelMaster: m, passwordFile: f, keyPrefix: \"{a}\", lease: 5m, tls: {certFile: c}}}\n" + least, []string{
			`state.redis.keyPrefix: "{a}" is not made of letters, digits and - _ . :`, "state.redis.lease: 5m is not between 500ms and 1m: a dead replica's reservations count that long",
			`state.redis.nodes[0]: "x" is not an address: ip:port, [ip]:port or name:port`, "state.redis.passwordFile: the url has a password too: take one out",
			"state.redis.sentinelMaster: has no effect unless mode is sentinel", "state.redis.tls: has no effect with redis://: write rediss://",
			"state.redis.tls.keyFile: certFile and keyFile belong together: set both or none"}},
		"redis, one of many": {"state: {redis: {url: \"redis://x\", nodes: [\"y:1\"]}}\n" + least, []string{"state.redis.nodes: a single Redis has one node, that of the url: set mode to cluster or sentinel"}},
		"redis, no master":   {"state: {redis: {url: \"redis://x\", mode: sentinel, lease: 3}}\n" + least, []string{"state.redis.lease: must have a unit, is 3: 3s for seconds, 3ms for milliseconds", "state.redis.sentinelMaster: is missing: what the Sentinels call the master"}},
		"session of nothing": {least + "  session: {}\n", []string{"pools[0].session: names nothing: set header, cookie or body"}},
		"body mode":          {"envoy: {bodyMode: stream}\n" + least, []string{`envoy.bodyMode: "stream" is not one of auto, duplex, buffered`}},
	} {
		t.Run(name, func(t *testing.T) {
			_, _, err := Parse([]byte(tt.yaml))
			var m ValidationErrors
			require.ErrorAs(t, err, &m)
			require.Equal(t, strings.Join(tt.errors, "\n"), m.Error())
		})
	}
}

// Discovery and the endpoint picker's settings, by the section that contains them.
func TestDiscoveryAndPicker(t *testing.T) {
	pool := func(discovery string) string {
		return "pools: [{name: a, kvTransfer: nixl, discovery: {" + discovery + "}}]"
	}
	for text, want := range map[string]string{
		pool("file: {path: x}"): "",
		pool("dns: [{name: p.svc, port: 80, role: prefill}, {name: _http._tcp.d.svc}]"):   "",
		pool("kubernetes: {selector: a=b, ports: [8000, 8001]}"):                          "",
		pool("kubernetes: {selector: a=b, labels: {convention: aibrix}}"):                 "",
		pool("inferencePool: {name: a, labels: {defaultRole: none}}"):                     "",
		"{extProc: {protocol: endpointPicker}, " + pool("inferencePool: {name: a}") + "}": "",
		pool(""): "pools[0].discovery: holds 0 of file, dns, kubernetes, inferencePool: one is needed",
		pool("file: {path: x}, inferencePool: {name: a}"):                       "pools[0].discovery: holds 2 of file, dns, kubernetes, inferencePool: one is needed",
		pool("file: {scheme: ftp, path: x}"):                                    `pools[0].discovery.file.scheme: "ftp" is not one of http, https, h2c; did you mean http?`,
		pool("dns: [{name: 10.0.0.1}]"):                                         `pools[0].discovery.dns[0].name: "10.0.0.1" is not a DNS name`,
		pool("kubernetes: {selector: a=b}"):                                     "pools[0].discovery.kubernetes.ports: is missing: the ports of the engines, or labels.portLabel",
		pool("kubernetes: {selector: a=b, ports: [8000, 8000]}"):                "pools[0].discovery.kubernetes.ports[1]: 8000 is not between 1 and 65535, or is there twice",
		pool("kubernetes: {selector: a, ports: [1,2,3,4,5,6,7,8,9]}"):           "pools[0].discovery.kubernetes.ports: has 9, at most 8 are possible",
		pool("kubernetes: {selector: a, ports: [1], labels: {ranksLabel: dp}}"): "",
		"pools: [{name: a, kvTransfer: nixl, handoff: direct, discovery: {inferencePool: {name: a, labels: {ranksLabel: dp}}}}]": "pools[0].discovery.inferencePool.labels.ranksLabel: needs handoff envoy, not direct: only there the rank goes with the request",
		pool("inferencePool: {}"):                                 "pools[0].discovery.inferencePool.name: is missing: an InferencePool of the cluster",
		pool("inferencePool: {name: a, labels: {convention: x}}"): `pools[0].discovery.inferencePool.labels.convention: "x" is not one of llm-d, aibrix, production-stack, kthena`,
		"{extProc: {protocol: endpointPicker}, pools: [{name: a, kvTransfer: nixl, handoff: envoy, discovery: {file: {path: x}}}]}": "pools[0].handoff: is envoy, but a gateway that asks an endpoint picker makes one hop: sidecar or direct",
		"{extProc: {protocol: endpointPicker, endpointPicker: {fallbacks: 8}}, " + pool("file: {path: x}") + "}":                    "extProc.endpointPicker.fallbacks: 8 is not between 0 and 7",
		"{extProc: {tls: {mode: none}}, " + pool("file: {path: x}") + "}":                                                           `extProc.tls.mode: "none" is not one of files, selfSigned, plaintext`,
	} {
		_, _, err := Parse([]byte(text))
		if want == "" {
			require.NoError(t, err, text)
		} else {
			require.EqualError(t, err, want, text)
		}
	}
}

// What nothing in a cluster can be called, and selectors that cannot be parsed, are refused: the pool would stay empty.
func TestNamesOfTheCluster(t *testing.T) {
	pool := func(discovery string) string {
		return "pools: [{name: a, kvTransfer: nixl, discovery: {" + discovery + "}}]"
	}
	for text, want := range map[string]string{
		pool("kubernetes: {selector: \"a in (b\", ports: [8000]}"):            `pools[0].discovery.kubernetes.selector: "a in (b" cannot be read as labels, as kubectl -l takes them: unable to parse requirement: found '', expected: ',' or ')'`,
		pool("kubernetes: {selector: \"a=b,c notin (d),!e\", ports: [8000]}"): "",
		pool("kubernetes: {selector: a=b, ports: [8000], namespace: Prod}"):   `pools[0].discovery.kubernetes.namespace: nothing in a cluster can be called "Prod": a lowercase RFC 1123`,
		pool("inferencePool: {name: a_b}"):                                    `pools[0].discovery.inferencePool.name: nothing in a cluster can be called "a_b": a lowercase RFC 1123`,
		pool("inferencePool: {name: a, labels: {roleLabel: \"a b\"}}"):        `pools[0].discovery.inferencePool.labels.roleLabel: nothing in a cluster can be called "a b": name part must`,
		pool("inferencePool: {name: a, labels: {prefill: [\"a/b\"]}}"):        `pools[0].discovery.inferencePool.labels.prefill[0]: nothing in a cluster can be called "a/b": a valid label`,
		pool("inferencePool: {name: a, labels: {keep: [gpu, \"-x\"]}}"):       `pools[0].discovery.inferencePool.labels.keep[1]: nothing in a cluster can be called "-x": name part must`,
	} {
		_, _, err := Parse([]byte(text))
		if want == "" {
			require.NoError(t, err, text)
		} else {
			require.ErrorContains(t, err, want, text)
		}
	}
}

// A configuration that is accepted, and what it is warned of. Errors are in TestValidationErrors.
func TestWarnings(t *testing.T) {
	for name, tt := range map[string]struct {
		yaml     string
		warnings []string
	}{
		"https":              {edited("role: decode", "role: decode, scheme: https"), []string{"envoy.endpointTls.caFile: is missing: Envoy will take any certificate of https endpoints"}},
		"always, one engine": {"pools: [{name: a, kvTransfer: nixl, split: always, endpoints: [{address: \"127.0.0.1:8101\", role: both}]}]", []string{"pools[0].endpoints: no two of them can share a request, so nothing is split, though split is always: add one that prefills or decodes"}},
		"no prefill":         {edited("role: prefill", "role: decode"), []string{"pools[0].endpoints: none of them prefills, so nothing will be split"}},
		"groups":             {edited("role: prefill", "role: prefill, group: a"), []string{`pools[0].endpoints[0]: no endpoint that decodes pairs with it (group "a"), so it will never be used`}},
		"mutual TLS": {"extProc: {tls: {certFile: c, keyFile: k, clientCaFile: a}}\n" + least, []string{
			"envoy.extProcTls.certFile: is missing: extProc.tls.clientCaFile makes the server refuse an Envoy without a certificate",
			"envoy.extProcTls.caFile: is missing: Envoy will take any certificate of the external processor"}},
		"encode, alone": {edited("kvTransfer: nixl", "kvTransfer: nixl\n  encode: {}"), []string{"pools[0].encode: has no effect: no endpoint has the role encode"}},
		"encode, unasked": {least + "  - {address: e.svc:8000, role: encode}\n", []string{
			"pools[0].endpoints[2].role: is encode, which has no effect without the pool's encode: set that too, {} is enough"}},
		"encode": {edited("kvTransfer: nixl", "kvTransfer: lmcache\n  encode: {timeout: 3s}") + "  - {address: e.svc:8000, role: encode}\n", []string{
			"pools[0].kvTransfer: lmcache is experimental: no real engine has run with it yet, only simulators (docs/protocols.md)"}},
		"replicas alone": {"tickets: {keyFile: k}\nenvoy: {extProcs: [\"a:1\", \"b:1\"], replans: [\"a:2\"]}\n" + least, []string{
			"state.redis: is missing: each of the 2 replicas (envoy.extProcs) knows only what it did itself: load, prefixes, failures, " +
				"and orders such as drain (docs/howto/redis.md)",
			"envoy.replans: names 1 of the 2 replicas (envoy.extProcs): without them requests that fail are not planned again: " +
				"name the replan port of each"}},
		"decode drained":       {edited("role: decode", "role: decode, weight: 0"), []string{"pools[0].endpoints: every one that decodes has weight 0, so no request can be served"}},
		"all drained":          {strings.ReplaceAll(least, "}", ", weight: 0}"), []string{"pools[0].endpoints: every one that decodes has weight 0, so no request can be served"}},
		"no transfer, drained": {"pools: [{name: a, kvTransfer: none, endpoints: [{address: \"a:1\", weight: 0}]}]", []string{"pools[0].endpoints: every one that decodes has weight 0, so no request can be served"}},
		"prefill drained":      {edited("role: prefill", "role: both, weight: 0"), []string{"pools[0].endpoints: every one that prefills has weight 0, so decode computes the prompts, where the pool allows it"}},
		"prefill idles":        {edited("role: prefill", "role: prefill, weight: 0") + "  split: never\n", nil},
		"one of them drained":  {least + "  - {address: e.svc:8000, role: both, weight: 0}\n", nil},
		"adapters":             {strings.ReplaceAll(least, "}", ", loras: [sql]}"), nil},
		"an adapter that does not decode": {edited("role: prefill", "role: prefill, loras: [sql]"), []string{
			`pools[0].endpoints[0].loras: has "sql", but no endpoint that decodes has it or reports it: add it there`}},
		"an adapter of two pools": {`pools:
- {name: a, models: [m], kvTransfer: none, endpoints: [{address: "a:1", loras: [sql, own]}]}
- {name: b, models: [l, own], kvTransfer: none, endpoints: [{address: "b:1", loras: [sql]}]}`, []string{
			`pools[0].endpoints[0].loras: nobody can ask for "own" here: its requests go to pools[1]`,
			`pools[1].endpoints[0].loras: nobody can ask for "sql" here: its requests go to pools[0]`}},
		"replicas and redis": {"state: {redis: {url: \"redis://x/0\"}}\nenvoy: {extProcs: [\"a:1\", \"b:1\"]}\n" + least, nil},
	} {
		t.Run(name, func(t *testing.T) {
			_, warnings, err := Parse([]byte(tt.yaml))
			require.NoError(t, err)
			require.Equal(t, tt.warnings, warnings)
		})
	}
}

// Warnings come with errors, but for those that an error calls in question.
func TestWarningsBesideErrors(t *testing.T) {
	const idle = "pools[0].endpoints[0].role: is prefill, and nothing is sent there, since kvTransfer none splits nothing: " +
		"set kvTransfer to what the engines use, or the role to both"
	const replicas = "tickets: {keyFile: k}\nenvoy: {extProcs: [\"a:1\", \"b:1\"], replans: [\"a:2\", \"b:2\"]}\n"
	none := strings.Replace(least, "kvTransfer: nixl", "kvTransfer: none", 1)
	for name, tt := range map[string]struct {
		yaml, mistake string
		want          []string
	}{
		"another setting":           {none + "  splitt: x\n", "splitt: unknown field; did you mean split?", []string{idle}},
		"another endpoint":          {none + "  - {address: e.svc:8000, role: both, weigth: 3}\n", "weigth", []string{idle}},
		"a value":                   {none + "  prefillAttempts: 9\n", "9 is not between", []string{idle}},
		"the same setting":          {edited("role: prefill", "role: prefil"), "is not a role", nil},
		"part of it":                {edited("role: prefill", "role: decode, weigth: 3"), "weigth", nil},
		"what was meant":            {least + "  queue: {}\n  binding: immediate\n  objective: {}\n", "objective: unknown field; did you mean objectives?", nil},
		"what it rests on":          {least + "  minPrefillTokens: 9\n  split: x\n", "split: \"x\" is not one of", nil},
		"nothing of that":           {least + "  queue: {}\n  binding: immediate\n  sessionn: {}\n", "sessionn", []string{"pools[0].queue: has no effect: requests wait with binding late, or with objectives.onMiss queue"}},
		"a section that was meant":  {replicas + "state: {rediss: {}}\n" + least, "rediss", nil},
		"a section that is not it":  {replicas + "state: {other: {}}\n" + least, "other", []string{"state.redis: is missing: each of the 2 replicas (envoy.extProcs) knows only what it did itself: load, prefixes, failures, and orders such as drain (docs/howto/redis.md)"}},
		"a dialect that is unknown": {strings.Replace(edited("kvTransfer: nixl", "kvTransfer: nixll"), "role: prefill", "role: prefill, transfer: {bootstrapPort: 1}", 1), "nixll", nil},
		"a port of that":            {strings.Replace(least, "role: prefill", "role: prefill, transfer: {bootstrapPort: 1}", 1) + "  kvTransferr: mooncake\n", "kvTransferr", nil},
		"the whole file":            {none + "  kvTransfer: none\n", "not readable as YAML", nil},
	} {
		t.Run(name, func(t *testing.T) {
			_, warnings, err := Parse([]byte(tt.yaml))
			require.ErrorContains(t, err, tt.mistake)
			require.Equal(t, tt.want, warnings)
		})
	}
}

func TestPathsAreSortedAsOneReadsThem(t *testing.T) {
	require.Negative(t, comparePaths("pools[2].name", "pools[10].name"))
	require.Negative(t, comparePaths("pools[2].endpoints[9]", "pools[2].endpoints[10]"))
	require.Negative(t, comparePaths("admin", "pools[0]"))
	require.Negative(t, comparePaths("pools", "pools[0]"))
	require.Zero(t, comparePaths("pools[1].a", "pools[1].a"))
}

func TestLoad(t *testing.T) {
	_, _, err := Load("")
	require.EqualError(t, err, "no configuration file given (-f FILE)")
	_, _, err = Load(filepath.Join(t.TempDir(), "none.yaml"))
	require.ErrorIs(t, err, os.ErrNotExist)
	file := filepath.Join(t.TempDir(), "tandem.yaml")
	require.NoError(t, os.WriteFile(file, []byte("{}"), 0o600))
	_, _, err = Load(file)
	require.EqualError(t, err, file+":\npools: is missing: at least one pool is needed")
}

// Every field has a comment: the reference consists of these comments.
func TestEveryFieldIsDocumented(t *testing.T) {
	source, err := os.ReadFile("../../protos/config/v1/config.proto")
	require.NoError(t, err)
	field := regexp.MustCompile(`^  (repeated |optional )?\w+ \w+ = \d+;`)
	previous := ""
	for line := range strings.Lines(string(source)) {
		if field.MatchString(line) {
			require.Regexp(t, `^  // .*\.$`, strings.TrimRight(previous, "\n"), line)
		}
		previous = line
	}
}

// The shape pass knows these kinds and no others.
func TestKindsOfFields(t *testing.T) {
	var walk func(d protoreflect.MessageDescriptor)
	walk = func(d protoreflect.MessageDescriptor) {
		for i := range d.Fields().Len() {
			f := d.Fields().Get(i)
			switch f.Kind() {
			case protoreflect.MessageKind:
				walk(f.Message())
			case protoreflect.StringKind, protoreflect.BoolKind, protoreflect.Int32Kind, protoreflect.Int64Kind, protoreflect.DoubleKind:
			default:
				t.Errorf("%s: checkValue does not know %s", f.FullName(), f.Kind())
			}
		}
	}
	walk((&configv1.Config{}).ProtoReflect().Descriptor())
}

// The options of fields are well-formed: words are those of a text, and a range is of numbers, sizes or durations.
func TestOptionsOfFields(t *testing.T) {
	words, ranges := 0, 0
	var walk func(d protoreflect.MessageDescriptor)
	walk = func(d protoreflect.MessageDescriptor) {
		for i := range d.Fields().Len() {
			f := d.Fields().Get(i)
			if f.Kind() == protoreflect.MessageKind {
				walk(f.Message())
			}
			if n := len(wordsOf(f)); n > 0 {
				words++
				require.Equal(t, protoreflect.StringKind, f.Kind(), f.FullName())
				require.Greater(t, n, 1, f.FullName())
			}
			low, high, _ := rangeOf(f)
			if high == "" {
				continue
			}
			ranges++
			for _, text := range []string{low, high} {
				var err error
				switch f.Kind() {
				case protoreflect.StringKind:
					_, err = time.ParseDuration(text)
				case protoreflect.Int64Kind:
					_, ok := bytesOf(text)
					require.True(t, ok, f.FullName())
				default:
					_, err = strconv.ParseFloat(text, 64)
				}
				require.NoError(t, err, f.FullName())
			}
		}
	}
	walk((&configv1.Config{}).ProtoReflect().Descriptor())
	require.Greater(t, words, 20)
	require.Greater(t, ranges, 20)
	_, _, err := Parse([]byte("notices: {keep: 5}\n" + least))
	require.EqualError(t, err, "notices.keep: must have a unit, is 5: 5s for seconds, 5ms for milliseconds")
}

// FuzzParse: any text yields a configuration that reads back as itself, or mistakes of one line each.
func FuzzParse(f *testing.F) {
	f.Add([]byte(complete))
	f.Add([]byte(least))
	f.Add([]byte("a: &a [*a]"))
	f.Add([]byte("pools: [{endpoints: [{address: \"[::1]:1\"}, ~]}]"))
	f.Add([]byte("envoy: {maxBodyBytes: 1e400}"))
	quotedBytes := regexp.MustCompile(`("max(?:Body|Message)Bytes"): ?"(\d+)"`)
	f.Fuzz(func(t *testing.T, text []byte) {
		c, _, err := Parse(text)
		if err != nil {
			var m ValidationErrors
			require.ErrorAs(t, err, &m)
			require.NotEmpty(t, m)
			for _, mistake := range m {
				require.NotEmpty(t, mistake.Hint)
				require.NotContains(t, mistake.Path, "\n")
			}
			return
		}
		again, err := protojson.Marshal(c)
		require.NoError(t, err)
		again = quotedBytes.ReplaceAll(again, []byte("$1:$2")) // protojson writes 64 bits as text
		c2, _, err := Parse(again)
		require.NoError(t, err)
		require.True(t, proto.Equal(c, c2))
	})
}

func TestKVEvents(t *testing.T) {
	pool := func(events, endpoint string) string {
		return "pools: [{name: chat, kvTransfer: none, " + events + " endpoints: [{address: 127.0.0.1:8101" + endpoint + "}]}]"
	}
	c, warnings, err := Parse([]byte(pool("kvEvents: {replayPort: 5558},", "")))
	require.NoError(t, err)
	require.Empty(t, warnings)
	require.Equal(t, []int32{5557, 5558, 1}, []int32{c.Pools[0].KvEvents.Port, c.Pools[0].KvEvents.ReplayPort, c.Pools[0].KvEvents.Ranks})
	_, warnings, err = Parse([]byte(pool("kvEvents: {},", "")))
	require.NoError(t, err)
	require.Equal(t, []string{"pools[0].kvEvents.replayPort: is missing: an event that is lost makes all that an endpoint holds unknown"}, warnings)
	for text, want := range map[string]string{
		pool("", ", kvEventsPort: 5557"):                        "pools[0].endpoints[0].kvEventsPort: has no effect without the pool's kvEvents: set that too, {} is enough",
		pool("kvEvents: {},", ", kvReplayPort: 5558"):           "pools[0].endpoints[0].kvReplayPort: has no effect without kvEventsPort: set that too",
		pool("kvEvents: {port: 65535, ranks: 2},", ""):          "pools[0].kvEvents.port: 65535 is not a port",
		pool("kvEvents: {loadBandwidth: {diskBytes: -1}},", ""): "pools[0].kvEvents.loadBandwidth.diskBytes: -1 is negative",
		pool("kvEvents: {ranks: 2000},", ""):                    "pools[0].kvEvents.ranks: 2000 is not between 1 and 1024",
		pool("kvEvents: {listen: \"127.0.0.1:9002\"},", ""):     "pools[0].kvEvents.listen: 127.0.0.1:9002 clashes with extProc.listen: give it another port",
	} {
		_, _, err := Parse([]byte(text))
		require.ErrorContains(t, err, want)
	}
}

// Sizes may have units, and a caller's mistakes are among the others.
func TestSizes(t *testing.T) {
	for size, want := range map[string]int64{"16Mi": 16 << 20, "512KiB": 512 << 10, "\"2M\"": 2e6, "16MB": 16e6, "4096": 4096, "64k": 64e3} {
		c, _, err := Parse([]byte("envoy: {maxBodyBytes: " + size + "}\n" + least))
		require.NoError(t, err, size)
		require.Equal(t, want, c.Envoy.MaxBodyBytes)
	}
	_, _, err := Parse([]byte("envoy: {listen: x}\n"+least), func(c *configv1.Config) ValidationErrors {
		return ValidationErrors{{Path: "admin.tokenFile", Hint: "for " + c.Admin.Listen}}
	})
	require.EqualError(t, err, "admin.tokenFile: for 127.0.0.1:9090\nenvoy.listen: \"x\" is not an address: ip:port, [ip]:port or name:port")
}

// A pool that never splits uses no prefill endpoint.
func TestIdleRoles(t *testing.T) {
	_, warnings, err := Parse([]byte(strings.Replace(least, "kvTransfer: nixl", "kvTransfer: none", 1)))
	require.NoError(t, err)
	require.Len(t, warnings, 1)
	require.Contains(t, warnings[0], "pools[0].endpoints[0].role: is prefill, and nothing is sent there")
}

// The header of tenants must be one that may be kept, and is found by its name in lower case.
func TestUsage(t *testing.T) {
	parse := func(usage string) (*configv1.Config, error) {
		c, _, err := Parse([]byte(usage + "\npools: [{name: a, kvTransfer: none, endpoints: [{address: 10.0.0.1:80}]}]\n"))
		return c, err
	}
	c, err := parse("usage: {tenantHeader: X-Tenant}")
	require.NoError(t, err)
	require.Equal(t, "x-tenant", c.GetUsage().GetTenantHeader())
	require.EqualValues(t, 100, c.GetUsage().GetTenants())
	c, err = parse("")
	require.NoError(t, err)
	require.Nil(t, c.GetUsage())
	for text, want := range map[string]string{
		"usage: true": "must be a mapping", "usage: {tenants: -1}": "not between 1 and 10000",
		"usage: {tenantHeader: Authorization}":           "is a secret",
		"usage: {tenantHeader: x-tandem-ticket}":         "not the name of a header that a gateway may set",
		"usage: {tenantHeader: a b}":                     "not the name of a header that a gateway may set",
		"usage: {}\nextProc: {protocol: endpointPicker}": "does not go with",
	} {
		_, err := parse(text)
		require.ErrorContains(t, err, want, text)
	}
}

// An empty section records with the defaults, which hold for an order, too.
func TestRecordDefaults(t *testing.T) {
	c, _, err := Parse([]byte("record: {}\npools: [{name: a, kvTransfer: none, endpoints: [{address: \"10.0.0.1:1\"}]}]\n"))
	require.NoError(t, err)
	require.Equal(t, RecordDefaults().String(), c.Record.String())
	require.Equal(t, int64(1<<30), c.Record.MaxBytes)
	require.Equal(t, "24h", c.Record.For)
}
