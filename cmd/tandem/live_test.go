package main

import (
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	configv1 "tandem/protos/config/v1"
)

// engineOf is an engine that says which release it is; "" is one that does not.
func engineOf(t *testing.T, release string) (addr string) {
	t.Helper()
	mux := http.NewServeMux()
	mux.HandleFunc("/health", func(http.ResponseWriter, *http.Request) {})
	if release != "" {
		mux.HandleFunc("/version", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintf(w, `{"version":%q}`, release) })
	}
	s := httptest.NewServer(mux)
	t.Cleanup(s.Close)
	return strings.TrimPrefix(s.URL, "http://")
}

func live(t *testing.T, yaml string) (out []string) {
	t.Helper()
	c, _, err := configv1.Parse([]byte(yaml))
	require.NoError(t, err)
	for _, f := range checkLive(t.Context(), c) {
		out = append(out, f.text)
	}
	return out
}

func TestCheckLive(t *testing.T) {
	a, b, silent := engineOf(t, "0.32.0"), engineOf(t, "0.31.0"), engineOf(t, "")
	closed, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	gone := closed.Addr().String()
	require.NoError(t, closed.Close())
	pool := func(dialect, first, second string) string {
		return fmt.Sprintf("pools: [{name: x, kvTransfer: %s, endpoints: [{role: prefill, address: %q}, {role: decode, address: %q}]}]", dialect, first, second)
	}
	require.Empty(t, live(t, pool("nixl", a, silent)))
	require.Equal(t, []string{"pools[0].endpoints[1].release: the engine says 0.31.0 and that of pools[0].endpoints[0] says 0.32.0: they do not take each other's KV; " +
		"set release on all of the pool, so that only the same are paired"}, live(t, pool("nixl", a, b)))
	require.Empty(t, live(t, pool("shared", a, b)))
	require.Contains(t,
		live(t, fmt.Sprintf("pools: [{name: x, kvTransfer: nixl, endpoints: [{role: prefill, address: %q, release: v0.31.0}, {role: decode, address: %q, release: v0.31.0}]}]", a, b)),
		"pools[0].endpoints[0].release: is v0.31.0 here, and the engine says 0.32.0: correct it")

	down := live(t, pool("nixl", a, gone))
	require.Len(t, down, 1)
	require.Contains(t, down[0], "pools[0].endpoints[1].address: GET http://"+gone+"/health: ")
	require.Contains(t, down[0], "start the engine, or correct the address or the scheme")

	_, port, _ := net.SplitHostPort(gone)
	ports := live(t, fmt.Sprintf("pools: [{name: x, kvTransfer: lmcache, endpoints: [{role: prefill, address: %q}, {role: decode, address: %q, lmcache: {initPort: %s, allocPort: %s}}]}]",
		a, b, strings.TrimPrefix(a, "127.0.0.1:"), port))
	require.Len(t, ports, 1)
	require.Contains(t, ports[0], "pools[0].endpoints[1].lmcache.allocPort: "+gone+" is not open: ")
}
