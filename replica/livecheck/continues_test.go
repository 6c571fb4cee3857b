package livecheck

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"tandem/replica/config"
)

// An engine is asked to continue some token ids, and the check says before any stream needs it that it does not.
func TestAskContinuing(t *testing.T) {
	for name, tt := range map[string]struct {
		status        int
		answer        string
		warns, unsure string
	}{
		"it continues":         {200, `{"prompt_token_ids":[1, 2, 3, 4, 5]}`, "", ""},
		"it ignores the ids":   {200, `{"prompt_token_ids":[7,8]}`, "computes another prompt", ""},
		"it answers no ids":    {200, `{"choices":[]}`, "answers no token ids", ""},
		"it refuses the ids":   {400, `{}`, "it answers 400", ""},
		"it cannot answer now": {503, `{}`, "", "status 503"},
	} {
		t.Run(name, func(t *testing.T) {
			mux := http.NewServeMux()
			mux.HandleFunc("/v1/models", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, `{"data":[{"id":"m"}]}`) })
			mux.HandleFunc("POST /v1/chat/completions", func(w http.ResponseWriter, _ *http.Request) {
				w.WriteHeader(tt.status)
				fmt.Fprint(w, tt.answer)
			})
			s := httptest.NewServer(mux)
			t.Cleanup(s.Close)
			cfg, _, err := config.Parse([]byte(fmt.Sprintf("envoy: {run: inside}\npools:\n- name: chat\n  kvTransfer: nixl\n  engine: vllm\n"+
				"  continueStreams: {}\n  endpoints:\n  - {address: %q, role: both}\n", strings.TrimPrefix(s.URL, "http://"))))
			require.NoError(t, err)
			var r Report
			r.AskContinuing(t.Context(), cfg)
			require.Equal(t, tt.warns != "", len(r.findings) == 1)
			require.Equal(t, tt.unsure != "", len(r.NotAsked) == 1)
			for _, f := range r.findings {
				require.Contains(t, f.text, tt.warns)
			}
			require.NoError(t, r.Err(), "its requests are served")
			require.Contains(t, strings.Join(r.NotAsked, ""), tt.unsure)
		})
	}
}
