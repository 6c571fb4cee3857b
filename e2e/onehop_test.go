package e2e

import (
	"fmt"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

// A request that is never split is asked of another endpoint if the first one answers 404, as one does that lacks the
// model, or cannot be reached. The answer is the client's once every endpoint has given it.
func TestOneHopAsksAnother(t *testing.T) {
	t.Parallel()
	for _, dialect := range []string{"nixl", "sglang"} {
		t.Run(dialect, func(t *testing.T) {
			t.Parallel() // mostly waits
			f := start(t, options{dialect: dialect, prefills: 1, decodes: 2})
			f.lenient = true
			ask := func(path, body, id string) (a answer, at [2]int) {
				a = f.post(path, body, "x-request-id", id)
				for i, d := range f.decodes {
					at[i] = len(f.requests(id, d))
				}
				return a, at
			}
			of := map[string]string{
				"/v1/embeddings": `{"model":"tiny","input":"x"}`, "/tokenize": `{"model":"tiny","prompt":"x"}`,
			}
			if dialect == "nixl" {
				of["/v1/responses"] = `{"model":"tiny","input":"x","store":true,"max_output_tokens":1}`
			}
			for path, body := range of {
				f.inject(f.decodes[0], `{"mode":"status","status":404}`)
				for i, met := 0, false; !met; i++ { // the one that has it, in the end
					require.Less(t, i, 50, "%s: the first endpoint got nothing", path)
					a, at := ask(path, body, strings.ReplaceAll(fmt.Sprint(path, i), "/", "-"))
					require.Equal(t, 200, a.status, "%s: %s", path, a.body)
					require.Equal(t, 1, at[1])
					met = at[0] == 1
				}
				f.inject(f.decodes[1], `{"mode":"status","status":404}`)
				a, at := ask(path, body, strings.ReplaceAll(path, "/", "-")+"nobody")
				require.Equal(t, 404, a.status, "%s: %s", path, a.body)
				require.Equal(t, 3, at[0]+at[1], "each, and once more for the client")
				f.clear(f.decodes[0])
				f.clear(f.decodes[1])
			}
			f.inject(f.decodes[0], `{"mode":"status","status":404}`)
			f.inject(f.decodes[1], `{"mode":"status","status":404}`)
			a, at := ask("/v1/embeddings", `{"input":"x"}`, "nothing-named")
			require.Equal(t, 404, a.status, a.body)
			require.Equal(t, 1, at[0]+at[1], "a 404 is about the path")
			f.clear(f.decodes[0])
			f.clear(f.decodes[1])
			f.decodes[0].stop(syscall.SIGKILL)
			for i := range 6 {
				a := f.post("/v1/embeddings", `{"model":"tiny","input":"x"}`)
				require.Equal(t, 200, a.status, "%d: %s", i, a.body)
			}
		})
	}
}
