package envoyconfigs

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tandem/e2e/loopback"
	"tandem/envoy-configs/lua"
	"tandem/extproc/usage/reader/readertest"
)

// counted is a bootstrap with the script that reads the tokens of answers, and a log of what it found.
const counted = `
admin: {address: {socket_address: {address: 127.0.0.1, port_value: %[2]s}}}
static_resources:
  listeners:
  - address: {socket_address: {address: 127.0.0.1, port_value: %[1]s}}
    filter_chains:
    - filters:
      - name: hcm
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: x
          access_log:
          - name: file
            typed_config:
              "@type": type.googleapis.com/envoy.extensions.access_loggers.file.v3.FileAccessLog
              path: %[3]s
              log_format: {text_format_source: {inline_string: "%%REQ(:PATH)%% %%DYNAMIC_METADATA(tandem.usage)%%\n"}}
          route_config: {virtual_hosts: [{name: x, domains: ["*"], routes: [{match: {prefix: /}, route: {cluster: x}}]}]}
          http_filters:
          - name: lua
            typed_config:
              "@type": type.googleapis.com/envoy.extensions.filters.http.lua.v3.Lua
              default_source_code: {inline_string: %[5]s}
          - name: router
            typed_config: {"@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router}
  clusters:
  - name: x
    load_assignment: {cluster_name: x, endpoints: [{lb_endpoints: [{endpoint: {address: {socket_address: {
      address: 127.0.0.1, port_value: %[4]s}}}}]}]}
`

// The script that reads the tokens of answers, in a real Envoy: every API's form, however they are cut into pieces.
// What a client can have an engine repeat is not taken for the engine's own word, and what is no number is said to be
// none. The client gets the answer as it was.
func TestTokensAreRead(t *testing.T) {
	cases := readertest.Answers()
	cases["plain and too large"] = readertest.Answer{
		Text: `{"x":"` + strings.Repeat("long", 1<<20) + `","usage":{"prompt_tokens":1}}`,
	}
	engine := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		kind := "text/event-stream"
		if strings.HasPrefix(r.URL.Path, "/plain") {
			kind = "application/json"
		}
		w.Header().Set("content-type", kind)
		name, pieces, _ := strings.Cut(r.URL.Path[1:], "/")
		text := cases[strings.ReplaceAll(name, "-", " ")].Text
		for size := map[string]int{"whole": 1 << 20, "cut": 50, "bytes": 1}[pieces]; text != ""; {
			n := min(size, len(text))
			_, _ = w.Write([]byte(text[:n]))
			if text = text[n:]; size < 1<<20 {
				w.(http.Flusher).Flush()
				time.Sleep(time.Millisecond) // so that Envoy mostly reads it alone
			}
		}
	}))
	defer engine.Close()
	log := filepath.Join(t.TempDir(), "log")
	script, err := json.Marshal(lua.Usage)
	require.NoError(t, err)
	port := func(address string) string { return address[strings.LastIndexByte(address, ':')+1:] }
	free := loopback.Addresses(t, 2)
	address, admin := "127.0.0.1:"+port(free[0]), "127.0.0.1:"+port(free[1])
	startEnvoy(t, fmt.Appendf(nil, counted, port(address), port(admin), log, port(engine.Listener.Addr().String()), script), admin)
	want := map[string]string{}
	for name, c := range cases {
		for _, pieces := range []string{"whole", "cut", "bytes"} {
			if pieces != "whole" && len(c.Text) > 1<<16 || pieces == "bytes" && len(c.Text) > 400 {
				continue
			}
			path := "/" + strings.ReplaceAll(name, " ", "-") + "/" + pieces
			got, err := http.Get("http://" + address + path)
			require.NoError(t, err)
			text, err := io.ReadAll(got.Body)
			require.NoError(t, err)
			require.NoError(t, got.Body.Close())
			require.Equal(t, c.Text, string(text), name)
			want[path] = c.Says
		}
	}
	require.Eventually(t, func() bool { // Envoy writes it each second
		text, _ := os.ReadFile(log)
		return strings.Count(string(text), "\n") == len(want)
	}, time.Minute, 50*time.Millisecond)
	text, err := os.ReadFile(log)
	require.NoError(t, err)
	for line := range strings.Lines(string(text)) {
		path, found, _ := strings.Cut(strings.TrimSpace(line), " ")
		if want[path] == "" {
			require.Equal(t, "-", found, path)
			continue
		}
		require.JSONEq(t, want[path], found, path)
	}
}
