package livecheck

import (
	"context"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"tandem/e2e/redisserver"
	"tandem/replica/config"
)

// What `tandem serve --check --live` says of a real Redis: nothing of one that grants what docs/security.md lists, and
// what is wrong with another one.
func TestCheckRedis(t *testing.T) {
	page, err := os.ReadFile("../../docs/security.md")
	require.NoError(t, err)
	var rights []string
	for line := range strings.Lines(string(page)) {
		if rule, found := strings.CutPrefix(strings.TrimSpace(line), "ACL SETUSER tandem "); found {
			rights = append(rights, strings.Fields(strings.ReplaceAll(rule, ">PASSWORD", ">s3cret"))...)
		}
	}
	require.NotEmpty(t, rights)
	r := redisserver.New(t, slices.Concat([]string{"--user", "tandem"}, rights, []string{"--user", "less"}, rights, []string{"-hvals", "-mget"})...)
	check := func(user, password string) string {
		file := filepath.Join(t.TempDir(), "password")
		require.NoError(t, os.WriteFile(file, []byte(password), 0o600))
		cfg, _, err := config.Parse(fmt.Appendf(nil, `
pools: [{name: a, kvTransfer: none, endpoints: [{address: "10.0.0.3:1"}]}]
state: {redis: {url: %q, passwordFile: %q}}
`, (&url.URL{Scheme: "redis", User: url.User(user), Host: r.Addr}).String(), file))
		require.NoError(t, err)
		if err := CheckRedis(context.WithoutCancel(t.Context()), cfg); err != nil {
			return err.Error()
		}
		return ""
	}
	require.Empty(t, check("tandem", "s3cret"))
	wrong := check("tandem", "wrong")
	require.Contains(t, wrong, "state.redis")
	require.Contains(t, wrong, "WRONGPASS")
	require.Contains(t, wrong, "replicas would go on by themselves")

	missing := check("less", "s3cret")
	for _, command := range []string{"HVALS", "MGET"} {
		require.Regexp(t, command+` is refused by Redis: NOPERM.*\(docs/security\.md, Redis, has the rights\)`, missing)
	}
	require.NotContains(t, missing, "go on by themselves")

	r.Kill()
	down := check("tandem", "s3cret")
	require.Contains(t, down, "connection refused")
	require.Contains(t, down, "replicas would go on by themselves")
}
