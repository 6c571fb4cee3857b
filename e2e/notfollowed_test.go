package e2e

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// refuser returns a prefill endpoint that is too busy, and answers so before it has read a request. 429 does not
// exclude it.
func refuser(t *testing.T) string {
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodPost {
			w.Header().Set("connection", "close") // otherwise net/http reads on before it answers
			w.WriteHeader(http.StatusTooManyRequests)
		}
	}))
	t.Cleanup(s.Close)
	return s.Listener.Addr().String()
}

// An endpoint that fails before a long body has reached it costs the client nothing: Envoy follows redirects only of
// requests that were sent completely, so it must not get the redirect before.
func TestRefusalsBeforeTheBodyIsThere(t *testing.T) {
	t.Parallel()
	f := start(t, options{decodes: 1, engineArgs: []string{"--record=false"}, pools: fmt.Sprintf(`pools:
- {name: chat, models: ["*"], kvTransfer: nixl, split: always, decodeAlone: fallback, endpoints: [{address: %q, role: prefill}, {address: %%D, role: decode}]}
`, refuser(t))})
	for i := range 20 {
		got := f.post("/v1/chat/completions", question(strconv.Itoa(i), 1_000_000)) // 4 MB: one in ten failed before the leg waited
		require.Equal(t, 200, got.status, got.body)
	}
	require.Positive(t, metric(t, f.admins[0], "tandem_replans_total", `cause="prefill"`))
	require.Zero(t, metric(t, f.admins[0], "tandem_redirects_not_followed_total"))
}

// If Envoy cannot follow a redirect, the client is asked to come again, and the log and a metric have the reason: here
// Envoy's listener has a small buffer, which keeps no long body for the next hop.
func TestRedirectsNotFollowedHaveReasons(t *testing.T) {
	t.Parallel()
	f := start(t, options{prefills: 1, decodes: 1, bootstrap: func(f *fleet) string {
		bin, err := binaries()
		require.NoError(t, err)
		text, err := exec.Command(filepath.Join(bin, "tandem"), "envoy", "-f", f.config).Output()
		require.NoError(t, err)
		limit := regexp.MustCompile(`per_connection_buffer_limit_bytes: \d+`).FindString(string(text)) // the main listener's is the first
		return strings.Replace(string(text), limit, "per_connection_buffer_limit_bytes: 32768", 1)
	}})
	f.lenient = true // P keeps unfetched blocks
	require.Equal(t, 200, f.post("/v1/chat/completions", question("short", 500)).status)
	long := io.MultiReader(strings.NewReader(question("long", 50_000))) // without a length, or a filter would wait for it with a buffer of its own
	r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, f.url+"/v1/chat/completions", long)
	require.NoError(t, err)
	r.Header = http.Header{"Content-Type": {"application/json"}, "X-Request-Id": {"too-long"}}
	got, err := client.Do(r)
	require.NoError(t, err)
	defer got.Body.Close()
	body, err := io.ReadAll(got.Body)
	require.NoError(t, err)
	require.Equal(t, 503, got.StatusCode)
	require.Contains(t, string(body), `"code":"attempts_exhausted"`)
	require.Equal(t, "1", got.Header.Get("Retry-After"))
	soon(t, "it is counted", func() bool {
		return metric(t, f.admins[0], "tandem_redirects_not_followed_total", `reason="not_kept"`) == 1
	})
	log, err := os.ReadFile(f.tandems[0].log)
	require.NoError(t, err)
	require.Regexp(t, `level=WARN msg="Envoy did not follow a redirect" request_id=too-long reason=not_kept stage=\S+ prefill=`+f.prefills[0].addr, string(log))
}
