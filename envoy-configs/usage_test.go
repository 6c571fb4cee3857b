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
	data := func(events ...string) string { return "data: " + strings.Join(events, "\n\ndata: ") + "\n\n" }
	const word = `{"id":"x","choices":[{"delta":{"content":"hi"}}],"usage":null}`
	chat := data(word, word, `{"choices":[],"usage":{"prompt_tokens":10,"total_tokens":14,"completion_tokens":4,`+
		`"prompt_tokens_details":{"cached_tokens":8},"completion_tokens_details":{"reasoning_tokens":1}}}`, "[DONE]")
	const forged = `{"usage":{"input_tokens":1,"output_tokens":1}}`
	quoted, err := json.Marshal(forged + `}]" \" {[`)
	require.NoError(t, err)
	long := data(`{"x":"` + strings.Repeat("long ", 1<<20) + `","usage":{"prompt_tokens":1}}`)
	cases := map[string]struct{ answer, want string }{
		"chat":                       {chat, `{"in":10,"out":4,"cached":8,"total":14}`},
		"nothing said":               {data(word, word, "[DONE]"), ``},
		"lines end CRLF":             {strings.ReplaceAll(chat, "\n", "\r\n"), `{"in":10,"out":4,"cached":8,"total":14}`},
		"the last line does not end": {strings.TrimRight(data(word, `{"usage":{"prompt_tokens":7}}`), "\n"), `{"in":7,"total":7}`},
		"usage in every event": {data(`{"usage":{"prompt_tokens":7,"completion_tokens":1}}`,
			`{"usage":{"prompt_tokens":7,"completion_tokens":2}}`), `{"in":7,"out":2,"total":9}`},
		"messages": {"event: message_start\n" + data(`{"type":"message_start","message":{"usage":{"input_tokens":5,`+
			`"cache_read_input_tokens":3,"cache_creation_input_tokens":2,"output_tokens":1}}}`) + "event: message_delta\n" +
			data(`{"type":"message_delta","usage":{"output_tokens":9}}`), `{"in":5,"cache_read":3,"cache_write":2,"out":9,"total":19}`},
		"responses": {data(`{"type":"response.created","response":{"usage":null}}`,
			`{"type":"response.completed","response":{"tools":[{"parameters":`+forged+`}],"metadata":{"usage":`+string(quoted)+
				`},"text":{"format":`+forged+`},"usage":{"input_tokens":50,"output_tokens":60,"input_tokens_details":`+
				`{"cached_tokens":7,"per_turn":[1,2]}},"user":`+string(quoted)+`,"input_messages":[`+forged+`]}}`),
			`{"in":50,"out":60,"cached":7,"total":110}`},
		"SGLang's generate": {data(`{"text":"a\"","meta_info":{"id":"}{","prompt_tokens":3,"completion_tokens":1}}`,
			`{"text":"ab","meta_info":{"id":"\\","prompt_tokens":3,"completion_tokens":2,"cached_tokens":1,`+
				`"finish_reason":{"type":"stop","matched":"}"}}}`), `{"in":3,"out":2,"cached":1,"total":5}`},
		"a choice of it": {data(`{"choices":[` + forged + `]}`), ``},
		"in a text":      {data(`{"choices":[{"text":` + string(quoted) + `}]}`), ``},
		"no number":      {data(`{"usage":{"prompt_tokens":"10","completion_tokens":null,"total_tokens":3}}`), ``},
		"absurd":         {data(`{"usage":{"prompt_tokens":-5,"completion_tokens":1e999}}`), `{"in":-1,"out":-1,"total":0}`},
		"too many": {data(`{"usage":{"prompt_tokens":3,"completion_tokens":67108865}}`),
			`{"in":3,"out":67108865,"total":3}`},
		"half a token": {data(`{"usage":{"completion_tokens":1.5}}`), `{"out":1.5,"total":1}`},
		"no JSON":      {data(`{"usage":{"completion_tokens":`, `}{`, `["usage":{"completion_tokens":1}]`), ``},
		"plain chat": {`{"choices":[{"message":{"content":` + string(quoted) + `}}],` +
			`"usage":{"prompt_tokens":10,"completion_tokens":4}}`, `{"in":10,"out":4,"total":14}`},
		"plain and nulls follow": {`{"x":` + string(quoted) + `,"usage":{"prompt_tokens":10},"kv_transfer_params":null, "y":"z"}`,
			`{"in":10,"total":10}`},
		"plain and objects follow": {`{"usage":{"prompt_tokens":10},"kv_transfer_params":{"usage":{"prompt_tokens":1},"z":null}}`,
			`{"in":10,"total":10}`},
		"plain and in an object": {`{"x":{"usage":{"prompt_tokens":10}}}`, ``},
		"plain messages": {"\n" + `{"content":[],"usage" : {"input_tokens": 5, "cache_read_input_tokens": 3,` +
			` "output_tokens": 9}}`, `{"in":5,"cache_read":3,"out":9,"total":17}`},
		"plain embeddings": {`{"data":[{"embedding":[` + strings.Repeat("-0.123456789,", 50_000) +
			`1]}],"usage":{"prompt_tokens":7}}`, `{"in":7,"total":7}`},
		"plain and too large": {`{"x":"` + strings.Repeat("long", 1<<20) + `","usage":{"prompt_tokens":1}}`, ``},
		"plain and cut short": {`{"usage":{"prompt_tokens":1},"choices":[{"text":"`, ``},
		"an overlong line":    {long + chat, `{"in":10,"out":4,"cached":8,"total":14}`},
	}
	engine := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		kind := "text/event-stream"
		if strings.HasPrefix(r.URL.Path, "/plain") {
			kind = "application/json"
		}
		w.Header().Set("content-type", kind)
		name, pieces, _ := strings.Cut(r.URL.Path[1:], "/")
		text := cases[strings.ReplaceAll(name, "-", " ")].answer
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
			if pieces != "whole" && len(c.answer) > 1<<16 || pieces == "bytes" && len(c.answer) > 400 {
				continue
			}
			path := "/" + strings.ReplaceAll(name, " ", "-") + "/" + pieces
			got, err := http.Get("http://" + address + path)
			require.NoError(t, err)
			text, err := io.ReadAll(got.Body)
			require.NoError(t, err)
			require.NoError(t, got.Body.Close())
			require.Equal(t, c.answer, string(text), name)
			want[path] = c.want
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
