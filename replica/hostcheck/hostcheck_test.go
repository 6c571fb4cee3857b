package hostcheck

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	configv1 "tandem/protos/config/v1"
)

// The admin port answers under its own names alone: a stranger's name that leads here is refused (DNS rebinding). Bytes
// of real connections, because clients write Host headers as they like.
func TestAdminAnswersUnderItsOwnNames(t *testing.T) {
	machine, err := os.Hostname()
	require.NoError(t, err)
	check := New(&configv1.Config{
		Admin: &configv1.Admin{Listen: "ops.example.net:9090", Hosts: []string{"Tandem.Example.com", "*.corp.example"}},
		Envoy: &configv1.Envoy{ExtProcs: []string{"replica-1.example.org:9002"}, Replans: []string{"10.0.0.1:9003", "replans.example.org:9003"}},
	}, "advertised.example.org:9002")
	s := httptest.NewServer(check.Around(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "secret") })))
	defer s.Close()
	ask := func(request string) (int, string) {
		conn, err := net.Dial("tcp", s.Listener.Addr().String())
		require.NoError(t, err)
		defer conn.Close()
		_, err = io.WriteString(conn, request)
		require.NoError(t, err)
		resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
		require.NoError(t, err)
		defer resp.Body.Close()
		body, err := io.ReadAll(resp.Body)
		require.NoError(t, err)
		return resp.StatusCode, string(body)
	}
	for _, host := range []string{
		"127.0.0.1:9090", "10.1.2.3", "[::1]:9090", "[2001:db8::1]", "localhost", "LOCALHOST:1", "localhost.", "tandem.localhost",
		"tandem", "tandem:9090", "tandem.serving.svc:9090", "tandem.serving.svc.cluster.local", "tandem-0.tandem.serving.svc.cluster.local.:9090",
		machine, "ops.example.net:9090", "replica-1.example.org", "replans.example.org", "advertised.example.org",
		"tandem.example.com", "TANDEM.example.com.:80", "a.corp.example", "a.b.corp.example:9090", "",
	} {
		code, body := ask(fmt.Sprintf("GET / HTTP/1.1\r\nHost: %s\r\nConnection: close\r\n\r\n", host))
		require.Equal(t, 200, code, host)
		require.Equal(t, "secret", body, host)
	}
	code, _ := ask("GET / HTTP/1.0\r\n\r\n")
	require.Equal(t, 200, code, "no Host: no browser")

	for _, host := range []string{
		"evil.example", "evil.example:9090", "127.0.0.1.evil.example", "localhost.evil.example", "svc.evil.example", "evil.svc.example",
		"tandem.example.com.evil.example", "evilcorp.example", "corp.example", "xn--lcalhost-54a.com", "127.0.0.1.nip.io:9090", "evil.cluster.local", "evil.example..",
	} {
		for _, request := range []string{
			"GET / HTTP/1.1\r\nHost: %s\r\nConnection: close\r\n\r\n", "GET /metrics HTTP/1.0\r\nHost: %s\r\n\r\n",
			"GET http://%s/status.json HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
			"POST /api/reload HTTP/1.1\r\nHost: %s\r\nContent-Length: 0\r\nX-Forwarded-Host: localhost\r\nConnection: close\r\n\r\n",
		} {
			code, body := ask(fmt.Sprintf(request, host))
			require.Equal(t, 421, code, host)
			require.True(t, strings.HasPrefix(body, "This port does not answer under"), body)
		}
	}
}
