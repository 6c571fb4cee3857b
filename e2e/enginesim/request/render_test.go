package request

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"tandem/e2e/enginesim/connector"
	"tandem/internal/budget"
)

func TestRenderAllocates(t *testing.T) {
	body := fmt.Appendf(nil, `{"model":"tiny","messages":[{"role":"user","content":%q}]}`, strings.Repeat("Some ordinary text. ", 11000))
	q, bad := Parse(Chat, body, nil, connector.NIXL, false)
	require.Nil(t, bad)
	budget.Allocs(t, 10, 12, func() { _, _ = q.Render(16) })
}

func BenchmarkRender(b *testing.B) {
	body := fmt.Appendf(nil, `{"model":"tiny","messages":[{"role":"user","content":%q}]}`, strings.Repeat("Some ordinary text, with a quote here and there. ", 4500))
	q, bad := Parse(Chat, body, nil, connector.NIXL, false)
	if bad != nil {
		b.Fatal(bad)
	}
	b.SetBytes(int64(len(body)))
	b.ReportAllocs()
	for b.Loop() {
		if _, bad := q.Render(16); bad != nil {
			b.Fatal(bad)
		}
	}
}
