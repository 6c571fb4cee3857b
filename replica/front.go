package replica

import (
	"context"
	"log/slog"
	"net"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"

	"tandem/extproc/core"
	"tandem/internal/guard"
	"tandem/kvstate/redisstore"
	configv1 "tandem/protos/config/v1"
	"tandem/replica/config"
	"tandem/status"
)

// Front is how requests reach a replica's core, and who gives Envoys their configuration: gRPC and xDS for Envoys
// beside it (package beside), and nothing for the Envoy that has it loaded.
type Front interface {
	// Parts names what pools need of a printed bootstrap beyond what every bootstrap has. An Envoy whose bootstrap was
	// made for other pools may lack some.
	Parts(pools []*configv1.Pool) []string
	// Check returns an error if Envoys, or Envoy Gateway, could not be given a configuration.
	Check(cfg *configv1.Config) error
	// Publish gives Envoys a configuration from now on.
	Publish(cfg *configv1.Config) error
	// Envoys are those that ask for their configuration, and those that did until lately.
	Envoys() []status.Envoy
	// Serves returns how many Envoys ask for their configuration now.
	Serves() int
	// AccessLogs returns how many streams report the ends of requests, when the last one came or went, and what an Envoy
	// with one risks ("": nothing that is known).
	AccessLogs() (open int, last time.Time, risk string)
	// SetReady tells who asks whether the replica takes requests.
	SetReady(ready bool)
	// Ports are those that the front serves.
	Ports() []Port
	// Serve serves the ports, which are open, and does the front's work, until ctx ends or [Front.Drain].
	Serve(ctx context.Context, group *errgroup.Group)
	// Drain lets running streams end, but not for longer than deadline.
	Drain(deadline time.Duration)
}

// Port is a port that a replica opens when it starts.
type Port struct {
	Listener *net.Listener // set when it is open
	Address  string
	Setting  string // that has the address, for errors
}

// Behind is what a front stands before.
type Behind struct {
	Config   *configv1.Config
	Settings Settings
	Core     *core.Core
	Store    *redisstore.Store // nil: there is no Redis
	Joined   <-chan struct{}   // closed when what other replicas know was taken in
	Ready    func() bool
	NoSlot   func(full bool) (before bool) // notes whether Envoys get as many replicas as they can, and not this one

	Guard    *guard.Guard
	Registry prometheus.Registerer
	Log      *slog.Logger
}

// loaded is the front of a replica that an Envoy has loaded, which is not asked for anything.
type loaded struct{}

// Parts are the clusters for the schemes of engines: who begins requests anew has no listeners for legs.
func (loaded) Parts(pools []*configv1.Pool) (out []string) {
	for _, p := range pools {
		for _, scheme := range config.PoolSchemes(p) {
			if part := "clusters for " + scheme; scheme != "http" && !slices.Contains(out, part) {
				out = append(out, part)
			}
		}
	}
	return out
}

func (loaded) Check(*configv1.Config) error           { return nil }
func (loaded) Publish(*configv1.Config) error         { return nil }
func (loaded) Envoys() []status.Envoy                 { return []status.Envoy{} }
func (loaded) Serves() int                            { return 0 }
func (loaded) AccessLogs() (int, time.Time, string)   { return 0, time.Time{}, "" }
func (loaded) SetReady(bool)                          {}
func (loaded) Ports() []Port                          { return nil }
func (loaded) Serve(context.Context, *errgroup.Group) {}
func (loaded) Drain(time.Duration)                    {}
