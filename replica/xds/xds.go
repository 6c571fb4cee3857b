// Package xds serves Envoy's configuration to Envoys (ADS, incremental) and records which version each of them has
// accepted or refused.
//
// Every Envoy is served the newest configuration that it has not refused. When an Envoy refuses a version (NACK), it
// is served the newest one before that again: an Envoy keeps the old version of a resource that it refuses, but it may
// have accepted others of the same version, which would not fit. An Envoy that reconnects with the current resources
// is sent nothing.
//
// A resource that leaves the configuration is served for another [Linger]: requests in flight may still be routed to
// it.
//
// Files: xds.go the server, envoy.go one Envoy.
package xds

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strconv"
	"sync"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"github.com/envoyproxy/go-control-plane/pkg/cache/types"
	"github.com/envoyproxy/go-control-plane/pkg/cache/v3"
	"github.com/envoyproxy/go-control-plane/pkg/server/delta/v3"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	envoyconfigs "tandem/envoy-configs"
)

// Method is the streaming method, so that its streams can be limited separately.
const Method = "/envoy.service.discovery.v3.AggregatedDiscoveryService/DeltaAggregatedResources"

// Linger is the time for which a resource is served after it left the configuration.
const Linger = time.Minute

// maxNames bounds the resource names that one Envoy may request over the life of its stream. There are fewer than a
// hundred.
const maxNames = 4096

// Server serves the latest published configuration.
type Server struct {
	discoveryv3.UnimplementedAggregatedDiscoveryServiceServer

	log      *slog.Logger
	cache    cache.SnapshotCache
	delta    delta.Server
	stop     context.CancelFunc
	answers  *prometheus.CounterVec // result
	versions prometheus.Counter

	mu      sync.Mutex
	config  *envoyconfigs.Resources
	leaving map[string]leaving // by type and name
	newest  *version
	timer   *time.Timer
	envoys  map[int64]*envoy // by stream
	left    map[string]Envoy // by name, those whose last stream ended
}

// leaving is a resource that has left the configuration.
type leaving struct {
	kind     string
	resource types.Resource
	until    time.Time
}

// version is a configuration in the form in which it is served.
type version struct {
	name     string // a hash of its content
	snapshot *cache.Snapshot
}

// New returns a server without a configuration: Envoys wait until there is one.
func New(r prometheus.Registerer, log *slog.Logger) *Server {
	ctx, stop := context.WithCancel(context.Background())
	s := &Server{
		log: log, cache: cache.NewSnapshotCache(true, byStream{}, nil), stop: stop, leaving: map[string]leaving{},
		envoys: map[int64]*envoy{}, left: map[string]Envoy{},
		answers: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "tandem_xds_answers_total",
			Help: "Answers of Envoys to configuration that they were sent (xDS), by result (applied, refused).",
		}, []string{"result"}),
		versions: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "tandem_xds_versions_total", Help: "Versions of Envoy's configuration that were published (xDS).",
		}),
	}
	s.delta = delta.NewServer(ctx, s.cache, (*callbacks)(s))
	s.answers.WithLabelValues("applied")
	s.answers.WithLabelValues("refused")
	connected := prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "tandem_xds_envoys", Help: "Envoys that this replica serves their configuration (xDS).",
	}, func() float64 { return float64(len(s.Envoys())) })
	r.MustRegister(s.answers, s.versions, connected)
	return s
}

// Register adds the service to a gRPC server.
func (s *Server) Register(r grpc.ServiceRegistrar) {
	discoveryv3.RegisterAggregatedDiscoveryServiceServer(r, s)
}

// Close ends all streams: Envoys keep their configuration and ask another replica.
func (s *Server) Close() { s.stop() }

// DeltaAggregatedResources implements ADS. The variant that sends everything at each change is not implemented.
func (s *Server) DeltaAggregatedResources(
	stream discoveryv3.AggregatedDiscoveryService_DeltaAggregatedResourcesServer,
) error {
	return s.delta.DeltaStreamHandler(stream, "")
}

// byStream keeps streams apart: two Envoys may have the same node id.
type byStream struct{}

func (byStream) ID(node *corev3.Node) string { return node.GetId() }

// Publish serves a configuration from now on.
func (s *Server) Publish(config *envoyconfigs.Resources) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.config != nil {
		s.part(s.config, config)
	}
	s.config = config
	return s.publish()
}

// part records the resources of a configuration that are missing in the next.
func (s *Server) part(before, next *envoyconfigs.Resources) {
	stays := map[string]bool{}
	for kind, resource := range next.All() {
		stays[kind+" "+cache.GetResourceName(resource)] = true
	}
	for kind, resource := range before.All() {
		if name := kind + " " + cache.GetResourceName(resource); !stays[name] {
			s.leaving[name] = leaving{kind, resource, time.Now().Add(Linger)}
		}
	}
	maps.DeleteFunc(s.leaving, func(name string, _ leaving) bool { return stays[name] })
}

// publish builds a version of the configuration and of the leaving resources.
func (s *Server) publish() error {
	now, kinds := time.Now(), map[string][]types.Resource{}
	for kind, resource := range s.config.All() {
		kinds[kind] = append(kinds[kind], resource)
	}
	maps.DeleteFunc(s.leaving, func(_ string, l leaving) bool { return !now.Before(l.until) })
	next := time.Time{}
	for _, name := range slices.Sorted(maps.Keys(s.leaving)) {
		l := s.leaving[name]
		kinds[l.kind] = append(kinds[l.kind], l.resource)
		if next.IsZero() || l.until.Before(next) {
			next = l.until
		}
	}
	name, err := hash(kinds)
	if err != nil {
		return err
	}
	if s.timer != nil {
		s.timer.Stop()
	}
	if !next.IsZero() {
		s.timer = time.AfterFunc(next.Sub(now), s.expire)
	}
	if s.newest != nil && s.newest.name == name {
		return nil
	}
	snapshot, err := cache.NewSnapshot(name, kinds)
	if err != nil {
		return fmt.Errorf("making a version of Envoy's configuration: %w", err)
	}
	s.newest = &version{name, snapshot}
	s.versions.Inc()
	for id, e := range s.envoys {
		if err := s.serve(id, e, s.newest); err != nil {
			return err
		}
	}
	return nil
}

// expire drops resources whose Linger is over.
func (s *Server) expire() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.publish(); err != nil {
		s.log.Error("Envoy's configuration not published", "err", err)
	}
}

// serve sets the version of a stream.
func (s *Server) serve(id int64, e *envoy, v *version) error {
	if !e.take(v) {
		return nil
	}
	if err := s.cache.SetSnapshot(context.Background(), key(id), v.snapshot); err != nil {
		return fmt.Errorf("serving Envoy's configuration: %w", err)
	}
	return nil
}

// Left returns the Envoys that left this replica within [Remembered] and are not connected to it, by name.
func (s *Server) Left() []Envoy {
	s.mu.Lock()
	defer s.mu.Unlock()
	maps.DeleteFunc(s.left, func(_ string, e Envoy) bool { return time.Since(e.Left) > Remembered })
	return slices.SortedFunc(maps.Values(s.left), func(a, b Envoy) int { return cmp.Compare(a.Name, b.Name) })
}

// Remembered is how long an Envoy that left is named.
const Remembered = time.Hour

// maxLeft bounds the number of Envoys that left and are named.
const maxLeft = 64

// key returns a stream's name in the cache.
func key(id int64) string { return strconv.FormatInt(id, 10) }

// Envoys returns the Envoys that are connected to this replica, by name.
func (s *Server) Envoys() []Envoy {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := []Envoy{}
	for _, e := range s.envoys {
		if e.node != nil {
			out = append(out, e.report(s.newest))
		}
	}
	slices.SortFunc(out, func(a, b Envoy) int {
		return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.Version,
			b.Version))
	})
	return out
}

// Version returns the version that is served, "" if nothing was published.
func (s *Server) Version() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.newest == nil {
		return ""
	}
	return s.newest.name
}

// callbacks implements go-control-plane's callbacks; it is a separate type, so that they are not methods of Server.
type callbacks Server

// OnDeltaStreamOpen implements delta.Callbacks.
func (c *callbacks) OnDeltaStreamOpen(_ context.Context, id int64, _ string) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.envoys[id] = newEnvoy()
	return nil
}

// OnDeltaStreamClosed implements delta.Callbacks.
func (c *callbacks) OnDeltaStreamClosed(id int64, _ *corev3.Node) {
	c.mu.Lock()
	defer c.mu.Unlock()
	e := c.envoys[id]
	delete(c.envoys, id)
	if e != nil && e.node != nil && len(c.left) < maxLeft && !c.connected(e.name()) {
		left := e.report(nil)
		left.Left = time.Now()
		c.left[left.Name] = left
	}
	c.cache.ClearSnapshot(key(id))
}

// connected reports whether an Envoy of that name is. c.mu is held.
func (c *callbacks) connected(name string) bool {
	for _, e := range c.envoys {
		if e.node != nil && e.name() == name {
			return true
		}
	}
	return false
}

// OnStreamDeltaRequest implements delta.Callbacks: an Envoy requests resources, or acknowledges those that it was
// sent.
func (c *callbacks) OnStreamDeltaRequest(id int64, r *discoveryv3.DeltaDiscoveryRequest) error {
	s := (*Server)(c)
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.envoys[id]
	if e.names += len(r.GetResourceNamesSubscribe()) + len(r.GetInitialResourceVersions()); e.names > maxNames {
		return status.Errorf(codes.ResourceExhausted, "more than %d names of resources", maxNames)
	}
	if r.GetNode() != nil && e.node == nil {
		e.node = r.GetNode()
		delete(s.left, e.name())
		s.log.Info("Envoy connected for its configuration", "envoy", e.name(), "node_version", e.build())
		if text := e.risk(); text != "" {
			s.log.Warn(text, "envoy", e.name())
		}
	}
	r.Node = &corev3.Node{Id: key(id)}
	switch refused, answered := e.answer(r); {
	case !answered:
	case refused == "":
		s.answers.WithLabelValues("applied").Inc()
	default:
		s.answers.WithLabelValues("refused").Inc()
		s.log.Error("an Envoy refused its configuration and keeps the one before", "envoy", e.name(), "version",
			refused,
			"type", bounded(r.GetTypeUrl(), 128), "why", e.refused[refused])
	}
	v := s.newest
	if v != nil && e.refuses(v) {
		v = e.lastGood()
	}
	if v == nil {
		return nil // nothing is published yet, or all of it was refused
	}
	return s.serve(id, e, v)
}

// OnStreamDeltaResponse implements delta.Callbacks: resources are about to be sent.
func (c *callbacks) OnStreamDeltaResponse(id int64, _ *discoveryv3.DeltaDiscoveryRequest,
	r *discoveryv3.DeltaDiscoveryResponse) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.envoys[id].sent(r)
}
