package xds

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	listenerv3 "github.com/envoyproxy/go-control-plane/envoy/config/listener/v3"
	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"

	"tandem/e2e/loopback"
	envoyconfigs "tandem/envoy-configs"
	configv1 "tandem/protos/config/v1"
	"tandem/replica/config"
)

// patience is the maximum wait of a test.
const patience = time.Minute

// stand is a real Envoy with a bootstrap for xDS, and replicas that may serve it.
type stand struct {
	t             *testing.T
	listen, admin string
	extProcs      []string
	fields        string // of the configuration
	log           lines
	servers       []*Server
	grpc          []*grpc.Server
	envoy         *exec.Cmd
}

// lines are the servers' log lines.
type lines struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *lines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

func newStand(t *testing.T, replicas int) *stand {
	a := loopback.Addresses(t, 2+replicas)
	return &stand{t: t, listen: a[0], admin: a[1], extProcs: a[2:], servers: make([]*Server, replicas),
		grpc: make([]*grpc.Server, replicas)}
}

// config returns the stand's configuration with more fields of envoy's.
func (s *stand) config(more string) *configv1.Config {
	s.t.Helper()
	c, _, err := config.Parse(fmt.Appendf(nil, `{envoy: {listen: %q, admin: %q, extProcs: ["%s"]%s}, tickets: {keyFile: k},
pools: [{name: a, kvTransfer: nixl, endpoints: [{address: "127.0.0.1:1", role: prefill}, {address: "127.0.0.1:2", role: decode}]}]}`,
		s.listen, s.admin, strings.Join(s.extProcs, `", "`), more))
	require.NoError(s.t, err)
	return c
}

func (s *stand) resources(more string) *envoyconfigs.Resources {
	s.t.Helper()
	r, err := envoyconfigs.Dynamic(s.config(more))
	require.NoError(s.t, err)
	return r
}

// serve starts replica i.
func (s *stand) serve(i int, r *envoyconfigs.Resources) *Server {
	s.t.Helper()
	s.servers[i] = New(prometheus.NewRegistry(), slog.New(slog.NewTextHandler(&s.log, nil)))
	require.NoError(s.t, s.servers[i].Publish(r))
	l, err := net.Listen("tcp", s.extProcs[i])
	require.NoError(s.t, err)
	s.grpc[i] = grpc.NewServer()
	s.servers[i].Register(s.grpc[i])
	go func() { _ = s.grpc[i].Serve(l) }()
	s.t.Cleanup(s.grpc[i].Stop)
	return s.servers[i]
}

// start runs Envoy.
func (s *stand) start() {
	s.t.Helper()
	text, err := envoyconfigs.DynamicBootstrap(s.config(s.fields))
	require.NoError(s.t, err)
	dir := s.t.TempDir()
	file := filepath.Join(dir, "envoy.yaml")
	require.NoError(s.t, os.WriteFile(file, text, 0o600))
	log, err := os.Create(filepath.Join(dir, "log"))
	require.NoError(s.t, err)
	s.envoy = exec.Command(findEnvoy(s.t), "-c", file, "-l", "warning", "--disable-hot-restart", "--concurrency", "1",
		"--service-node", "edge-1")
	s.envoy.Stdout, s.envoy.Stderr = log, log
	require.NoError(s.t, s.envoy.Start())
	s.t.Cleanup(func() {
		_ = s.envoy.Process.Signal(syscall.SIGTERM)
		err := s.envoy.Wait()
		if s.t.Failed() || err != nil {
			text, _ := os.ReadFile(log.Name())
			s.t.Errorf("envoy: %v\n%s\n%s", err, text, s.log.String())
		}
	})
	s.soon("Envoy's admin port answers", func() bool { return s.status(s.admin, "/ready") != 0 })
}

// soon waits until is returns true.
func (s *stand) soon(what string, is func() bool) {
	s.t.Helper()
	require.Eventually(s.t, is, patience, 20*time.Millisecond, what)
}

// status returns the status of an answer; 0: there is none.
func (s *stand) status(address, path string) int {
	resp, err := http.Get("http://" + address + path)
	if err != nil {
		return 0
	}
	defer resp.Body.Close()
	return resp.StatusCode
}

// stat returns one of Envoy's counters.
func (s *stand) stat(name string) (n int) {
	s.t.Helper()
	text := s.get(s.admin, "/stats?format=json&filter=^"+name+"$")
	var stats struct {
		Stats []struct{ Value int }
	}
	require.NoError(s.t, json.Unmarshal([]byte(text), &stats))
	for _, stat := range stats.Stats {
		n += stat.Value
	}
	return n
}

// has waits until Envoy has a replica's configuration.
func (s *stand) has(server *Server) {
	s.t.Helper()
	s.soon("Envoy has the newest version", func() bool {
		e := server.Envoys()
		return len(e) == 1 && !e[0].Pending && e[0].Version == server.Version()
	})
}

// findEnvoy returns the path of a real Envoy. Without one the test is skipped, or fails if tools are required.
func findEnvoy(t *testing.T) string {
	t.Helper()
	if e := os.Getenv("ENVOY"); e != "" {
		return e
	}
	if e, err := exec.LookPath("envoy"); err == nil {
		return e
	}
	e, err := filepath.Abs("../../.tools/bin/envoy")
	require.NoError(t, err)
	if _, err := os.Stat(e); err == nil {
		return e
	}
	if os.Getenv("TANDEM_REQUIRE_TOOLS") != "" {
		t.Fatal("no Envoy: run scripts/tools.sh")
	}
	t.Skip("no Envoy: run scripts/tools.sh")
	return ""
}

// Envoy may start before any replica, and is not ready until it has its configuration.
func TestEnvoyWaitsForAReplica(t *testing.T) {
	t.Parallel()
	s := newStand(t, 1)
	s.start()
	require.Never(t, func() bool { return s.status(s.admin, "/ready") == 200 }, time.Second, 50*time.Millisecond)
	server := s.serve(0, s.resources(""))
	s.soon("Envoy is ready", func() bool { return s.status(s.admin, "/ready") == 200 })
	s.has(server)
	require.Equal(t, "edge-1", server.Envoys()[0].Name)
	require.Regexp(t, `^\d+\.\d+\.\d+$`, server.Envoys()[0].Build)
	require.Equal(t, 503, s.status(s.listen, "/v1/models"), "there is no external processor here")
	require.Empty(t, server.Left())
	s.grpc[0].Stop()
	s.soon("Envoy has left", func() bool { return len(server.Left()) == 1 })
	require.Equal(t, "edge-1", server.Left()[0].Name)
	require.WithinDuration(t, time.Now(), server.Left()[0].Left, time.Minute)
	require.Empty(t, server.Envoys())
	again := (*callbacks)(server)
	require.NoError(t, again.OnDeltaStreamOpen(t.Context(), 1<<20, ""))
	require.NoError(t, again.OnStreamDeltaRequest(1<<20, &discoveryv3.DeltaDiscoveryRequest{Node: &corev3.Node{Id: "edge-1"}}))
	require.Empty(t, server.Left())
}

// An Envoy's refusal is logged in its words and counted; it keeps the whole previous configuration, and accepts the
// next one.
func TestRefusedConfigurationChangesNothing(t *testing.T) {
	t.Parallel()
	s := newStand(t, 1)
	server := s.serve(0, s.resources(""))
	s.start()
	s.has(server)
	good := server.Version()

	bad := s.resources("")
	broken := proto.CloneOf(bad.Listeners[1])
	broken.FilterChains[0].Filters[0].ConfigType = &listenerv3.Filter_TypedConfig{
		TypedConfig: &anypb.Any{TypeUrl: "type.googleapis.com/envoy.no.such.Filter"},
	}
	bad.Listeners[1] = broken
	bad.Clusters = append(bad.Clusters, proto.CloneOf(bad.Clusters[len(bad.Clusters)-1]))
	bad.Clusters[len(bad.Clusters)-1].Name = "with-the-bad-listener"
	require.NoError(t, server.Publish(bad))
	refused := server.Version()
	require.NotEqual(t, good, refused)
	s.soon("Envoy refuses", func() bool { e := server.Envoys(); return len(e) == 1 && e[0].Refused == refused })
	s.soon("Envoy has the last good version", func() bool {
		e := server.Envoys()
		return len(e) == 1 && !e[0].Pending && e[0].Version == good
	})
	require.Contains(t, server.Envoys()[0].Why, "envoy.no.such.Filter")
	require.Contains(t, s.log.String(), "envoy.no.such.Filter")
	require.GreaterOrEqual(t, testutil.ToFloat64(server.answers.WithLabelValues("refused")), 1.0)
	s.soon("what came with it is gone again",
		func() bool { return s.stat("cluster.with-the-bad-listener.membership_total") == 0 })
	require.Equal(t, 503, s.status(s.listen, "/v1/models"))
	refusals := testutil.ToFloat64(server.answers.WithLabelValues("refused"))
	require.Never(t, func() bool { return testutil.ToFloat64(server.answers.WithLabelValues("refused")) != refusals },
		time.Second, 50*time.Millisecond, "it is not sent again")

	require.NoError(t, server.Publish(s.resources(", decodeIdleTimeout: 77s")))
	s.has(server)
	require.Empty(t, server.Envoys()[0].Refused, "that is over")
}

// Two replicas with the same configuration serve the same version: an Envoy that moves from one to the other is sent
// nothing new.
func TestReplicasServeTheSame(t *testing.T) {
	t.Parallel()
	s := newStand(t, 2)
	first := s.serve(0, s.resources(""))
	s.start()
	s.has(first)
	second := s.serve(1, s.resources(""))
	require.Equal(t, first.Version(), second.Version())
	first.Close()
	s.grpc[0].Stop()
	s.has(second)
	// Envoy subscribes to listeners after clusters, so a replica may say that Envoy has everything before it asks.
	s.soon("the listeners are there", func() bool { return s.stat("listener_manager.listener_added") == 6 })
	require.Zero(t, s.stat("listener_manager.listener_modified"))
	require.Zero(t, s.stat("cluster_manager.cluster_modified"))
}

// Certificates on Envoy's machine are read again when they change, as Kubernetes changes them: by another folder under
// the same name.
func TestCertificatesChange(t *testing.T) {
	t.Parallel()
	s := newStand(t, 1)
	dir := t.TempDir()
	put := func(serial int64) {
		next := filepath.Join(dir, "next")
		require.NoError(t, os.WriteFile(next, authority(t, serial), 0o600))
		require.NoError(t, os.Rename(next, filepath.Join(dir, "ca.pem")))
	}
	put(0x1111)
	s.fields = fmt.Sprintf(", endpointTls: {caFile: %q}", filepath.Join(dir, "ca.pem"))
	server := s.serve(0, s.resources(s.fields))
	s.start()
	s.has(server)
	loaded := func(serial string) bool { return strings.Contains(s.get(s.admin, "/certs"), serial) }
	s.soon("the first certificate is in use", func() bool { return loaded("1111") })
	put(0x2222)
	s.soon("the second certificate is in use", func() bool { return loaded("2222") && !loaded("1111") })
	require.Zero(t, s.stat("cluster_manager.cluster_modified"), "what is under way goes on")
}

// authority returns a self-signed certificate.
func authority(t *testing.T, serial int64) []byte {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	spec := &x509.Certificate{SerialNumber: big.NewInt(serial), NotAfter: time.Now().Add(time.Hour), IsCA: true,
		BasicConstraintsValid: true}
	der, err := x509.CreateCertificate(rand.Reader, spec, spec, &key.PublicKey, key)
	require.NoError(t, err)
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
}

// get returns the body of an answer; "": there is none.
func (s *stand) get(address, path string) string {
	resp, err := http.Get("http://" + address + path)
	if err != nil {
		return ""
	}
	defer resp.Body.Close()
	text, _ := io.ReadAll(resp.Body)
	return string(text)
}

// A resource that leaves the configuration is served for a while: requests in flight may still be routed to it.
func TestRemovedResourcesLinger(t *testing.T) {
	t.Parallel()
	s := newStand(t, 2)
	server := s.serve(0, s.resources(""))
	gone := "tandem-accesslog-" + s.extProcs[1]
	s.extProcs = s.extProcs[:1]
	require.NoError(t, server.Publish(s.resources("")))
	clusters := server.newest.snapshot.GetResources("type.googleapis.com/envoy.config.cluster.v3.Cluster")
	require.Contains(t, clusters, gone)
	server.mu.Lock()
	for name, l := range server.leaving {
		l.until = time.Now()
		server.leaving[name] = l
	}
	server.mu.Unlock()
	server.expire()
	clusters = server.newest.snapshot.GetResources("type.googleapis.com/envoy.config.cluster.v3.Cluster")
	require.NotContains(t, clusters, gone)
}
