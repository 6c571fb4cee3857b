package e2e

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
)

// P's answer is cut, before its headers or after: decode alone answers, and what P may hold is accounted for. After its
// headers it has finished, and nobody can name the blocks that it keeps. Beside Envoy and inside it is the same.
func TestPrefillIsCut(t *testing.T) {
	t.Parallel()
	for _, dialect := range []string{"nixl", "sglang"} {
		t.Run(dialect, func(t *testing.T) {
			t.Parallel()
			f := start(t, options{dialect: dialect, prefills: 2, decodes: 1})
			f.lenient = true // P keeps unfetched blocks
			for i, mode := range []string{"reset-before-headers", "reset-mid-body"} {
				for _, e := range f.prefills {
					f.inject(e, fmt.Sprintf(`{"mode":%q,"leg":"prefill","count":1}`, mode))
				}
				id := fmt.Sprint("cut-", i)
				got := f.post("/v1/chat/completions", pairBody, "x-request-id", id)
				require.Equal(t, 200, got.status, "%s: %s", mode, got.body)
				require.NotEmpty(t, f.requests(id, f.prefills...), "P was asked")
				if dialect == "nixl" && mode == "reset-mid-body" {
					soon(t, "what P holds is accounted for", func() bool {
						cut := metric(t, f.admins[0], "tandem_handovers_orphaned_total", `reason="answer_cut"`)
						return int(cut) == len(f.requests(id, f.prefills...))
					})
				}
				for _, e := range f.prefills {
					f.clear(e)
				}
			}
			soon(t, "all is released", func() bool { return metric(t, f.admins[0], "tandem_reservations") == 0 })
		})
	}
}

// P says with a 200 that it has given its leg up, as SGLang does: D, which waits for its KV, is not waited for.
func TestPrefillAborts(t *testing.T) {
	t.Parallel()
	for _, dialect := range []string{"sglang", "mooncake"} {
		t.Run(dialect, func(t *testing.T) {
			t.Parallel()
			f := start(t, options{dialect: dialect, prefills: 2, decodes: 1})
			f.lenient = true // D waited for blocks that did not come
			f.inject(f.prefills[0], `{"mode":"abort","leg":"prefill","path":"/v1/chat/completions"}`)
			soon(t, "a request meets it, and is answered all the same", func() bool {
				got := f.post("/v1/chat/completions", pairBody)
				require.Equal(t, 200, got.status, got.body)
				return metric(t, f.admins[0], "tandem_replans_total", `cause="prefill"`) > 0
			})
		})
	}
}
