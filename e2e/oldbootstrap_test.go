package e2e

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// printedFor is the bootstrap that tandem envoy prints for a fleet's configuration, after a change of that.
func printedFor(change func(config string) string) func(f *fleet) string {
	return func(f *fleet) string {
		bin, err := binaries()
		require.NoError(f.t, err)
		text, err := os.ReadFile(f.config)
		require.NoError(f.t, err)
		file := filepath.Join(f.t.TempDir(), "earlier.yaml")
		require.NoError(f.t, os.WriteFile(file, []byte(change(string(text))), 0o600))
		out, err := exec.Command(filepath.Join(bin, "tandem"), "envoy", "-f", file).Output()
		require.NoError(f.t, err)
		return string(out)
	}
}

// An Envoy with a bootstrap of an earlier release, without the route for requests of one hop that are tried elsewhere:
// they are served as they were then.
func TestBootstrapWithoutTheRouteOther(t *testing.T) {
	t.Parallel()
	f := start(t, options{prefills: 1, decodes: 1, bootstrap: func(f *fleet) string {
		text := printedFor(func(config string) string { return config })(f)
		route := regexp.MustCompile(`(?s)\n *- name: other\n *match:.{0,600}?x-tandem-other.*?(\n *- name: pass\n)`)
		require.Len(t, route.FindAllString(text, -1), 1)
		return strings.Replace(route.ReplaceAllString(text, "$1"), "- x-tandem-other\n", "- x-nothing\n", 1)
	}})
	got := f.post("/v1/embeddings", `{"model":"tiny","input":"x"}`)
	require.Equal(t, 200, got.status, got.body)
}

// Tandem is started with a configuration that Envoy's bootstrap cannot serve: status names that, and no engine.
func TestBootstrapOfAnotherConfiguration(t *testing.T) {
	t.Parallel()
	f := start(t, options{dialect: "sglang", prefills: 1, decodes: 1, bootstrap: printedFor(func(config string) string {
		require.Contains(t, config, "kvTransfer: sglang")
		return strings.ReplaceAll(config, "kvTransfer: sglang", "kvTransfer: nixl")
	})})
	f.lenient = true
	got := f.post("/v1/chat/completions", pairBody)
	require.Equal(t, 503, got.status, got.body)
	require.Contains(t, got.body, "router_undecided")
	soon(t, "status names the cause", func() bool {
		var s struct {
			Attention []struct{ Text string }
		}
		require.NoError(t, getJSON(f.admins[0]+"/status.json", &s))
		all := fmt.Sprint(s.Attention)
		return strings.Contains(all, "An Envoy has no route for what was decided") && !strings.Contains(all, "decode at")
	})
}
