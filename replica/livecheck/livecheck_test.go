package livecheck

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tandem/e2e/loopback"
	"tandem/kvstate/enginehttp"
	configv1 "tandem/protos/config/v1"
	"tandem/replica/config"
)

// An engine that takes the connection and says nothing, as one that loads its model may.
func TestHealthOfASilentEngine(t *testing.T) {
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer silent.Close()
	soon, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	why := Health(soon, enginehttp.New(0, func(*http.Transport) {}), endpointOf(&configv1.Pool{},
		&configv1.Endpoint{Address: silent.Addr().String(), Scheme: "http"}))
	require.Equal(t, "GET http://"+silent.Addr().String()+"/health: no answer within 5s; start the engine, or correct the address or the scheme", why)
}

// engineOf is an engine that reports a release; "": it reports none, and lists no models.
func engineOf(t *testing.T, release string) (addr string) {
	t.Helper()
	mux := http.NewServeMux()
	for _, path := range []string{"/health", "/metrics"} {
		mux.HandleFunc(path, func(http.ResponseWriter, *http.Request) {})
	}
	if release == "" {
		mux.HandleFunc("/v1/models", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, `{"data":[]}`) })
	} else {
		mux.HandleFunc("/version", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintf(w, `{"version":%q}`, release) })
	}
	s := httptest.NewServer(mux)
	t.Cleanup(s.Close)
	return strings.TrimPrefix(s.URL, "http://")
}

// h2cEngine is an engine that speaks HTTP/2 by prior knowledge and nothing else.
func h2cEngine(t *testing.T) (addr string) {
	t.Helper()
	mux := http.NewServeMux()
	mux.HandleFunc("/health", func(http.ResponseWriter, *http.Request) {})
	s := httptest.NewUnstartedServer(mux)
	s.Config.Protocols = new(http.Protocols)
	s.Config.Protocols.SetUnencryptedHTTP2(true)
	s.Start()
	t.Cleanup(s.Close)
	return strings.TrimPrefix(s.URL, "http://")
}

func live(t *testing.T, yaml string) (out []string) {
	t.Helper()
	c, _, err := config.Parse([]byte(yaml))
	require.NoError(t, err)
	for _, f := range Check(t.Context(), c, false).findings {
		out = append(out, f.text)
	}
	return out
}

func TestCheckLive(t *testing.T) {
	a, b, silent := engineOf(t, "0.32.0"), engineOf(t, "0.31.0"), engineOf(t, "")
	gone := loopback.Addresses(t, 1)[0]
	pool := func(dialect, first, second string) string {
		return fmt.Sprintf("pools: [{name: x, kvTransfer: %s, endpoints: [{role: prefill, address: %q}, {role: decode, address: %q}]}]", dialect, first, second)
	}
	require.Empty(t, live(t, pool("nixl", a, silent)))
	server := httptest.NewServer(http.NewServeMux())
	defer server.Close()
	other := strings.TrimPrefix(server.URL, "http://")
	require.Equal(t, []string{"pools[0].endpoints[1].address: what answers at " + other + " does not look like an engine: " +
		"GET /v1/models is 404, and it reports no release; correct the address"}, live(t, pool("nixl", a, other)))
	require.Empty(t, live(t, fmt.Sprintf("pools: [{name: x, kvTransfer: none, endpoints: [{address: %q}]}]", other)), "any server will do")
	require.Equal(t, []string{"pools[0].endpoints[1].address: the engine's release is 0.31.0 and that of pools[0].endpoints[0] is 0.32.0: these two are never paired, " +
		"since nobody has shown that they take each other's KV; start them alike, or set different groups"}, live(t, pool("nixl", a, b)))
	require.Empty(t, live(t, pool("shared", a, b)))
	require.Contains(t,
		live(t, fmt.Sprintf("pools: [{name: x, kvTransfer: nixl, endpoints: [{role: prefill, address: %q, release: v0.31.0}, {role: decode, address: %q, release: v0.31.0}]}]", a, b)),
		"pools[0].endpoints[0].release: is v0.31.0 here, and the engine says 0.32.0: correct it")

	down := live(t, pool("nixl", a, gone))
	require.Len(t, down, 1)
	require.Contains(t, down[0], "pools[0].endpoints[1].address: GET http://"+gone+"/health: ")
	require.Contains(t, down[0], "start the engine, or correct the address or the scheme")

	// An engine behind h2c is asked in h2c: one that speaks nothing else answers.
	for scheme, engine := range map[string]string{"h2c": h2cEngine(t), "http": a} {
		found := live(t, fmt.Sprintf("pools: [{name: x, kvTransfer: none, endpoints: [{address: %q, scheme: %s}]}]", engine, scheme))
		require.Empty(t, found, scheme)
	}
	wrong := live(t, fmt.Sprintf("pools: [{name: x, kvTransfer: none, endpoints: [{address: %q, scheme: h2c}]}]", a))
	require.Len(t, wrong, 1)
	require.Contains(t, wrong[0], "GET h2c://"+a+"/health: ")

	_, port, _ := net.SplitHostPort(gone)
	for dialect, at := range map[string]string{"sglang": "pools[0].endpoints[0].transfer.bootstrapPort: " + gone, "mooncake": "pools[0].endpoints[0].transfer.bootstrapPort: " + gone} {
		found := live(t, fmt.Sprintf("pools: [{name: x, kvTransfer: %s, endpoints: [{role: prefill, address: %q, transfer: {bootstrapPort: %s}}, {role: decode, address: %q}]}]", dialect, a, port, silent))
		require.Len(t, found, 1, dialect)
		require.Contains(t, found[0], at+" is not open: ")
		require.Equal(t, dialect == "mooncake", strings.HasSuffix(found[0], "other engines connect there: correct it, or look at kv_connector "+
			"of the engine's --kv-transfer-config, which it does not report: kvTransfer mooncake needs MooncakeConnector"), found[0])
	}
	ports := live(t, fmt.Sprintf("pools: [{name: x, kvTransfer: lmcache, endpoints: [{role: prefill, address: %q}, {role: decode, address: %q, lmcache: {initPort: %s, allocPort: %s}}]}]",
		a, b, strings.TrimPrefix(a, "127.0.0.1:"), port))
	require.Len(t, ports, 1)
	require.Contains(t, ports[0], "pools[0].endpoints[1].lmcache.allocPort: "+gone+" is not open: ")
}

// An engine that wants a key says so, in words: without one, with a wrong one, and not with its own.
func TestCheckLiveKeys(t *testing.T) {
	mux := http.NewServeMux()
	mux.HandleFunc("/health", func(http.ResponseWriter, *http.Request) {})
	mux.HandleFunc("/version", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, `{"version":"0.32.0"}`) })
	mux.HandleFunc("/v1/models", func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") != "Bearer s3cret" {
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		fmt.Fprint(w, `{"data":[{"id":"tiny"}]}`)
	})
	s := httptest.NewServer(mux)
	defer s.Close()
	engine := strings.TrimPrefix(s.URL, "http://")
	key := func(text string) string {
		file := filepath.Join(t.TempDir(), "key")
		require.NoError(t, os.WriteFile(file, []byte(text), 0o600))
		return file
	}
	wrong := key("other")
	for more, want := range map[string]string{
		"": "pools[0].endpoints[0].apiKeyFile: is missing: GET /v1/models is 401 (Unauthorized), so the engine wants an API key: name its file (tandem run: --api-key-file); " +
			"without it Tandem knows neither its models nor its adapters",
		", apiKeyFile: " + wrong: "pools[0].endpoints[0].apiKeyFile: GET /v1/models is 401 (Unauthorized) with the key in " + wrong +
			": put the engine's own key there",
		", apiKeyFile: " + key("s3cret"): "",
	} {
		found := live(t, fmt.Sprintf("pools: [{name: x, kvTransfer: none, endpoints: [{address: %q%s}]}]", engine, more))
		if want == "" {
			require.Empty(t, found)
			continue
		}
		require.Equal(t, []string{want}, found)
	}
}

// sglangOf is an SGLang server that reports its start options.
func sglangOf(t *testing.T, mode string, bootstrap int) (addr string) {
	t.Helper()
	mux := http.NewServeMux()
	mux.HandleFunc("/health", func(http.ResponseWriter, *http.Request) {})
	mux.HandleFunc("/server_info", func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprintf(w, `{"version":"0.5.23","disaggregation_mode":%q,"disaggregation_bootstrap_port":%d}`, mode, bootstrap)
	})
	s := httptest.NewServer(mux)
	t.Cleanup(s.Close)
	return strings.TrimPrefix(s.URL, "http://")
}

// SGLang's report is compared with the pool's dialect, and with the endpoint's role, port and release.
func TestCheckSGLang(t *testing.T) {
	open, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer open.Close()
	port := open.Addr().(*net.TCPAddr).Port
	pool := func(dialect, first, more, second string) string {
		return fmt.Sprintf("pools: [{name: x, kvTransfer: %s, endpoints: [{role: prefill, address: %q%s}, {role: decode, address: %q}]}]", dialect, first, more, second)
	}
	bootstrap := fmt.Sprintf(", transfer: {bootstrapPort: %d}", port)
	p, d := sglangOf(t, "prefill", port), sglangOf(t, "decode", 8998)
	require.Empty(t, live(t, pool("sglang", p, bootstrap, d)))
	require.Equal(t, []string{
		"pools[0].endpoints[0].role: is prefill here, and the engine runs with --disaggregation-mode decode: correct the role, or start the engine otherwise",
		"pools[0].endpoints[1].role: is decode here, and the engine runs with --disaggregation-mode prefill: correct the role, or start the engine otherwise",
	}, live(t, pool("sglang", d, bootstrap, p)))
	require.Equal(t, []string{
		fmt.Sprintf("pools[0].endpoints[0].transfer.bootstrapPort: is %d here, and the engine says %d: correct it", port, port+1),
		"pools[0].endpoints[1].role: is decode here, and the engine runs with --disaggregation-mode null: correct the role, or start the engine otherwise",
	}, live(t, pool("sglang", sglangOf(t, "prefill", port+1), bootstrap, sglangOf(t, "null", 8998))))
	require.Equal(t, []string{
		"pools[0].endpoints[0].address: the engine is SGLang, and the pool's kvTransfer is nixl, which only vLLM speaks: set kvTransfer to sglang, or correct the address",
		"pools[0].endpoints[1].address: the engine is SGLang, and the pool's kvTransfer is nixl, which only vLLM speaks: set kvTransfer to sglang, or correct the address",
	}, live(t, pool("nixl", p, "", d)))
	require.Equal(t, []string{
		"pools[0].endpoints[0].address: the engine is an SGLang of the mode prefill, and the pool's kvTransfer is shared: set that to sglang, or correct the address",
		"pools[0].endpoints[1].address: the engine is an SGLang of the mode decode, and the pool's kvTransfer is shared: set that to sglang, or correct the address",
	}, live(t, pool("shared", p, "", d)))
	whole := sglangOf(t, "null", 0)
	require.Empty(t, live(t, fmt.Sprintf("pools: [{name: x, kvTransfer: none, endpoints: [{address: %q}]}]", whole)))
	require.Empty(t, live(t, fmt.Sprintf("pools: [{name: x, kvTransfer: sglang, endpoints: [{role: prefill, address: %q%s}, {role: decode, address: %q}, {role: both, address: %q}]}]", p, bootstrap, d, whole)),
		"a server that was started for neither leg")
	require.Equal(t, []string{"pools[0].endpoints[0].release: is 0.5.16 here, and the engine says 0.5.23: correct it"},
		live(t, fmt.Sprintf("pools: [{name: x, kvTransfer: sglang, endpoints: [{role: prefill, address: %q, release: 0.5.16%s}, {role: decode, address: %q, release: 0.5.23}]}]", p, bootstrap, d)))
}

// Builds of one release for different hardware are one release, here as in discovery.
func TestCheckLiveBuilds(t *testing.T) {
	a, b := engineOf(t, "0.32.0+cpu"), engineOf(t, "0.32.0+cu129")
	for _, release := range []string{"", ", release: 0.32.0", ", release: v0.32.0"} {
		require.Empty(t, live(t, fmt.Sprintf("pools: [{name: x, kvTransfer: nixl, endpoints: [{role: prefill, address: %q%s}, {role: decode, address: %q%s}]}]", a, release, b, release)))
	}
}

// A model of each pool, which all of its engines serve that list theirs.
func TestModelsOfPools(t *testing.T) {
	r := Report{Engines: []Engine{{Pool: "a", models: []string{"Qwen/Qwen3-8B", "lora"}}, {Pool: "b", models: []string{"meta/Qwen3 8B"}},
		{Pool: "a", models: []string{"lora", "Qwen/Qwen3-8B"}}, {Pool: "b"}, {Pool: "silent"}}}
	require.Equal(t, []string{"Qwen/Qwen3-8B", "meta/Qwen3 8B"}, r.Models())
}
