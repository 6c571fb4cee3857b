package proposal

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"tandem/kvstate/enginefacts"
	"tandem/replica/config"
)

func TestParse(t *testing.T) {
	for text, want := range map[string]Engine{
		"http://10.0.0.1:8000":     {Address: "10.0.0.1:8000", Scheme: "http"},
		"10.0.0.1:8000":            {Address: "10.0.0.1:8000", Scheme: "http"},
		"http://vllm-0:8000/v1/":   {Address: "vllm-0:8000", Scheme: "http"},
		"https://llm.example.com/": {Address: "llm.example.com:443", Scheme: "https"},
		"h2c://[::1]:8000":         {Address: "[::1]:8000", Scheme: "h2c"},
	} {
		got, err := Parse(text, "")
		require.NoError(t, err, text)
		require.Equal(t, want, got, text)
	}
	for text, says := range map[string]string{
		"":                   "is not an engine's address",
		"http://":            "is not an engine's address",
		"ftp://a:1":          "the scheme is not one of",
		"http://a:1/v1/chat": "and nothing else: http://a:1",
		"http://u:p@a:1":     "and nothing else: http://a:1",
	} {
		_, err := Parse(text, "")
		require.ErrorContains(t, err, says, text)
	}
}

// An engine that is named for both legs does both, and one that is named twice is one.
func TestMerge(t *testing.T) {
	require.Equal(t, []Engine{{Address: "a:1", Role: "both"}, {Address: "b:1", Role: "decode"}}, Merge([]Engine{
		{Address: "a:1", Role: "prefill"}, {Address: "a:1", Role: "decode"}, {Address: "b:1", Role: "decode"}, {Address: "b:1", Role: "decode"}}))
}

func vllm(role string, say func(*enginefacts.Info)) Engine {
	e := Engine{Address: role + ":8000", Scheme: "http", Role: role,
		Info: enginefacts.Info{Engine: enginefacts.VLLM, Version: "0.32.0", Models: []string{"m"}}}
	if role == "" {
		e.Address = "engine:8000"
	}
	if say != nil {
		say(&e.Info)
	}
	return e
}

func connector(name string) func(*enginefacts.Info) {
	return func(i *enginefacts.Info) { i.Told, i.Connector = true, name }
}

func serves(models ...string) func(*enginefacts.Info) {
	return func(i *enginefacts.Info) { i.Models = models }
}

func nothing(*enginefacts.Info) {}

// What is written can be read, and says what the engines say.
func TestWrite(t *testing.T) {
	lease := 120.0
	sglang := func(role, mode string, bootstrap int32) Engine {
		return vllm(role, func(i *enginefacts.Info) { i.Engine, i.Mode, i.Bootstrap = enginefacts.SGLang, mode, bootstrap })
	}
	for name, tt := range map[string]struct {
		engines []Engine
		o       Options
		pool    string // without the addresses of the engines
	}{
		"vLLM that says nothing": {[]Engine{vllm("prefill", nothing), vllm("decode", nothing)}, Options{},
			"kvTransfer: nixl # no engine says so: it is what most vLLMs run with"},
		"vLLM whose metrics show NIXL": {[]Engine{vllm("prefill", func(i *enginefacts.Info) { i.NIXL = true }), vllm("decode", nothing)}, Options{},
			"kvTransfer: nixl # the metrics of prefill:8000 have NIXL's"},
		"vLLM that tells": {[]Engine{
			vllm("prefill", func(i *enginefacts.Info) { connector("NixlConnector")(i); i.Extra.Lease = &lease }),
			vllm("decode", func(i *enginefacts.Info) { connector("NixlConnector")(i); i.Extra.Bidirectional = true })}, Options{},
			"nixl: {lease: 2m0s, declineExpired: true} # as the engines say"},
		"another connector": {[]Engine{vllm("prefill", connector("MooncakeConnector")), vllm("decode", connector("MooncakeConnector"))}, Options{},
			"kvTransfer: mooncake # MooncakeConnector"},
		"a dialect that was named": {[]Engine{vllm("prefill", connector("MoRIIOConnector")), vllm("decode", nothing)}, Options{KVTransfer: "nixl-push", Split: "always"},
			"kvTransfer: nixl-push # as you said\n  split: always"},
		"SGLang": {[]Engine{sglang("prefill", "prefill", 9100), sglang("decode", "decode", 0)}, Options{},
			"role: prefill, transfer: {bootstrapPort: 9100}} # SGLang 0.32.0, serves m"},
		"engines without any transfer": {[]Engine{vllm("", connector(""))}, Options{}, "kvTransfer: none # vLLM without --kv-transfer-config"},
		"SGLang alone":                 {[]Engine{sglang("", "null", 0)}, Options{}, "kvTransfer: none # SGLang without"},
		"engines of both roles": {[]Engine{vllm("", connector("NixlConnector")), {Address: "other:8000", Scheme: "https", Info: vllm("", connector("NixlConnector")).Info}}, Options{},
			"roles: auto # who prefills and who decodes follows the traffic"},
		"a key, and ranks": {[]Engine{vllm("prefill", func(i *enginefacts.Info) { i.TP = 2 }), vllm("decode", nothing)}, Options{KeyFile: "key"},
			"transfer: {tensorParallelSize: 2}"},
		"a model's name with a line of its own": {[]Engine{vllm("prefill", func(i *enginefacts.Info) { i.Models = []string{"m\n  - {address: x}"} }), vllm("decode", func(i *enginefacts.Info) { i.Models = nil })}, Options{},
			"kvTransfer: nixl"},
	} {
		t.Run(name, func(t *testing.T) {
			tt.o.Listen, tt.o.ExtProc, tt.o.Replan, tt.o.Admin, tt.o.EnvoyAdmin = "127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3", "127.0.0.1:4", "127.0.0.1:5"
			text, err := Write(tt.engines, tt.o)
			require.NoError(t, err)
			require.Contains(t, text, tt.pool)
			require.True(t, strings.HasPrefix(text, Mark+"\n"))
			cfg, _, err := config.Parse([]byte(text))
			require.NoError(t, err, text)
			require.Len(t, cfg.GetPools()[0].GetEndpoints(), len(tt.engines))
			require.Equal(t, "127.0.0.1:4", cfg.GetAdmin().GetListen())
		})
	}
}

// Engines that serve different models are pools of their own.
func TestWritePools(t *testing.T) {
	engine := func(at, role string, say func(*enginefacts.Info)) Engine {
		e := vllm(role, say)
		e.Address = at
		return e
	}
	engines := []Engine{engine("p1:1", "prefill", serves("Qwen/Qwen3-8B", "lora")), engine("p2:1", "prefill", serves("meta/Qwen3 8B")),
		engine("d1:1", "decode", serves("lora", "Qwen/Qwen3-8B")), engine("d2:1", "decode", serves("meta/Qwen3 8B"))}
	text, err := Write(engines, Options{Listen: "127.0.0.1:1", ExtProc: "127.0.0.1:2", Replan: "127.0.0.1:3", Admin: "127.0.0.1:4", EnvoyAdmin: "127.0.0.1:5"})
	require.NoError(t, err)
	cfg, _, err := config.Parse([]byte(text))
	require.NoError(t, err, text)
	require.Len(t, cfg.GetPools(), 2)
	for i, want := range []struct {
		name      string
		models    []string
		endpoints [2]string
	}{{"qwen3-8b", []string{"Qwen/Qwen3-8B", "lora"}, [2]string{"p1:1", "d1:1"}}, {"qwen3-8b-2", []string{"meta/Qwen3 8B"}, [2]string{"p2:1", "d2:1"}}} {
		p := cfg.GetPools()[i]
		require.Equal(t, want.name, p.GetName())
		require.Equal(t, want.models, p.GetModels())
		require.Equal(t, want.endpoints, [2]string{p.GetEndpoints()[0].GetAddress(), p.GetEndpoints()[1].GetAddress()})
	}
	require.Equal(t, "pool", poolName("///"))
}

// What cannot work is refused, in words that say what to do.
func TestWriteRefuses(t *testing.T) {
	for name, tt := range map[string]struct {
		engines []Engine
		says    string
	}{
		"nobody decodes":        {[]Engine{vllm("prefill", nothing)}, "name one with --decode"},
		"nobody prefills":       {[]Engine{vllm("decode", nothing)}, "name one with --prefill"},
		"no connector":          {[]Engine{vllm("prefill", connector("")), vllm("decode", nothing)}, "prefill:8000 runs without a KV connector"},
		"an unknown connector":  {[]Engine{vllm("prefill", connector("New\nOne")), vllm("decode", nothing)}, "name one with --kv-transfer"},
		"two dialects fit":      {[]Engine{vllm("prefill", connector("MoRIIOConnector")), vllm("decode", nothing)}, "may be moriio or moriio-read"},
		"two dialects":          {[]Engine{vllm("prefill", connector("NixlConnector")), vllm("decode", connector("MooncakeConnector"))}, "speak one dialect"},
		"two kinds of engine":   {[]Engine{vllm("prefill", connector("NixlConnector")), vllm("decode", func(i *enginefacts.Info) { i.Mode = "decode" })}, "decode:8000 needs sglang (SGLang)"},
		"no model in common":    {[]Engine{vllm("prefill", nothing), vllm("decode", func(i *enginefacts.Info) { i.Models = []string{"other"} })}, "of the engines with m: no engine decodes: name one with --decode, or with --engine if it does both (prefill:8000 serves m, decode:8000 serves other)"},
		"none in common by two": {[]Engine{vllm("prefill", nothing), vllm("decode", serves("m", "n")), vllm("", serves("n"))}, "engine:8000 serves n"},
		"one says no model":     {[]Engine{vllm("prefill", nothing), vllm("decode", serves()), vllm("", serves("n"))}, "decode:8000 does not say which models it serves"},
		"one transfer, one not": {[]Engine{vllm("", connector("")), vllm("decode", connector("NixlConnector"))}, "speak one dialect"},
	} {
		_, err := Write(tt.engines, Options{})
		require.ErrorContains(t, err, tt.says, name)
	}
}
