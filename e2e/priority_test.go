package e2e

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestOperatorsPriority: with enginePriority both engines of a request get the same priority, and no engine gets a
// client's, in every API and on every path that is never split.
func TestOperatorsPriority(t *testing.T) {
	t.Parallel()
	f := start(t, options{poolOf: map[string]string{"nixl": "  enginePriority: sglang\n"}})
	of := func(s seen) string {
		var body struct {
			Priority json.RawMessage `json:"priority"`
		}
		require.NoError(t, json.Unmarshal([]byte(s.Body), &body), s.Body)
		return string(body.Priority)
	}
	for _, api := range apis {
		for name, own := range map[string]string{"silent": "", "greedy": `"priority":-1000000,`} {
			id := fmt.Sprintf("%s-%s", api.name, name)
			got := f.post(api.path, strings.Replace(api.body, "{", "{"+own, 1), "x-request-id", id)
			require.Equal(t, 200, got.status, got.body)
			p, d := f.hops(id)
			require.Equal(t, []string{"0", "0"}, []string{of(p), of(d)}, id)
		}
	}
	for path, body := range map[string]string{
		"/tokenize": `{"model":"tiny","prompt":"a","priority":-1000000}`,
	} {
		got := f.post(path, body, "x-request-id", "other")
		require.Equal(t, 200, got.status, got.body)
		for _, s := range f.requests("other", f.engines()...) {
			require.Equal(t, "0", of(s), path)
		}
	}
}
