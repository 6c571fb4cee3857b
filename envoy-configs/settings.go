package envoyconfigs

import (
	"math"
	"net"
	"slices"
	"strconv"
	"time"

	configv1 "tandem/protos/config/v1"
	"tandem/replica/config"
)

// bufferMargin is what a body may grow by on its way, in bytes: the prefill leg's edits, and the KV parameters on the
// decode leg.
const bufferMargin = 8 << 20

// bufferedFrom is the body length in bytes from which bodyMode auto means BUFFERED (docs/adr/0005). With several
// replicas it is less: Envoy (1.40) keeps 64 KiB of a gRPC stream for a retry, headers and ticket included.
const (
	bufferedFrom        = 64 << 10
	bufferedFromSeveral = 24 << 10
)

// settings are what the model is built from: a Tandem configuration as far as Envoy needs it.
type settings struct {
	Dynamic       bool // over xDS, in pieces that can change
	Late          bool // clusters may come after the listeners that lead to them
	Listen, Admin address
	Stats         *address // nil: none
	Servers       servers
	Engines       engines
	Bodies        bodies
	IdleTimeout   time.Duration  // the longest pause within an answer
	TicketTTL     time.Duration  // no prefill takes longer
	Pairs         bool           // there is a pool whose legs run at once
	Encodes       bool           // there is a pool with an encode stage
	Answers       bool           // there is a pool with answers that are rewritten
	Leases        bool           // there is a pool whose prefill endpoints free KV that is fetched late
	Forms         bool           // there are several pools, so uploads come to ext_proc, which reads their model
	CORS          *configv1.Cors // nil: none
	Explains      string         // where decisions are explained to operators, as Envoy's formats name it; "": nowhere
	Metadata      bool           // decisions are written into dynamic metadata
	Tracing       *tracing       // nil: no spans

	Usage *configv1.Usage // nil: tokens are not counted
}

// servers are Tandem's replicas.
type servers struct {
	ExtProcs   hosts      // all replicas, as one cluster
	AccessLogs []hosts    // each replica, as a cluster of its own
	Slots      bool       // AccessLogs are MaxReplicas slots, of which some are empty
	Replans    hosts      // their replan ports
	TLS        *clientTLS // nil: plaintext
}

// engines has how Envoy connects to endpoints.
type engines struct {
	Schemes []scheme   // http first
	TLS     *clientTLS // of https endpoints
}

// bodies are the sizes of request bodies, in bytes, and how they come to ext_proc.
type bodies struct {
	Mode         string // envoy.bodyMode
	Max          int64  // the server splits none that is longer
	Buffer       int64  // how much of one Envoy keeps
	BufferedFrom int64  // from here on BUFFERED, unless Mode is duplex
}

// tracing is where Envoy's spans go.
type tracing struct {
	Collector  hosts
	PerMillion uint32 // percentage of the requests without a traceparent that are traced
}

// scheme is a protocol of engines. Each has clusters of its own, whose names end in Suffix.
type scheme struct {
	Name, Suffix string
}

// legSchemes are the schemes with http last, because its route takes what no other does.
func (s *settings) legSchemes() []scheme {
	return append(slices.Clone(s.Engines.Schemes[1:]), s.Engines.Schemes[0])
}

// loop is a cluster that leads to an internal listener.
type loop struct{ Cluster, Listener string }

// loops are the ways to the legs' listeners, except the prefill leg's, which is always there.
func (s *settings) loops() (out []loop) {
	if s.Pairs {
		out = append(out, loop{"tandem-decode-loop", "decode-leg"}, loop{"tandem-mirror-loop", "prefill-mirror"})
	}
	if s.Encodes {
		out = append(out, loop{"tandem-encode-loop", "encode-leg"})
	}
	if s.Answers {
		out = append(out, loop{"tandem-answer-loop", "answer-leg"})
	}
	return out
}

// several reports whether there may be more than one replica, so that one can stand in for another: a name may stand
// for many.
func (s *settings) several() bool {
	return s.Dynamic || len(s.Servers.ExtProcs.Hosts) > 1 || s.Servers.ExtProcs.ByName()
}

// gather takes the replicas from living, or from the configuration if there are none.
func gather(c *configv1.Config, dynamic bool, living ...Replica) (*settings, error) {
	e := c.GetEnvoy()
	s := &settings{
		Dynamic: dynamic, Late: dynamic,
		Bodies: bodies{
			Mode: e.GetBodyMode(), Max: e.GetMaxBodyBytes(), Buffer: e.GetMaxBodyBytes() + bufferMargin,
			BufferedFrom: bufferedFrom,
		},
		Engines:     engines{TLS: newClientTLS(e.GetEndpointTls(), false)},
		IdleTimeout: config.Duration(e.GetDecodeIdleTimeout()), TicketTTL: config.Duration(c.GetTickets().GetTtl()),
		CORS: e.GetCors(), Metadata: c.GetExtProc().GetDecisionMetadata(),
		Usage: c.GetUsage(),
	}
	s.serve(c.GetPools())
	if c.GetAdmin().GetTokenFile() != "" {
		s.Explains = "%REQ(x-tandem-explain)%"
	}
	if dynamic {
		s.serveAll()
	}
	var err error
	if s.Listen, err = parse(e.GetListen()); err != nil {
		return nil, err
	}
	if s.Admin, err = parse(e.GetAdmin()); err != nil {
		return nil, err
	}
	if e.GetStats() != "" {
		s.Stats = new(address)
		if *s.Stats, err = parse(e.GetStats()); err != nil {
			return nil, err
		}
	}
	if s.Servers, err = gatherServers(c, dynamic, living); err != nil {
		return nil, err
	}
	switch {
	case s.Bodies.Mode == "buffered":
		s.Bodies.BufferedFrom = 0
	case s.several():
		s.Bodies.BufferedFrom = bufferedFromSeveral
	}
	if t := c.GetTracing(); t != nil {
		s.Tracing = &tracing{PerMillion: uint32(math.Round(t.GetSampleRatio() * 1e6))}
		if s.Tracing.Collector, err = reachable("tandem-otlp", []string{t.GetEndpoint()}); err != nil {
			return nil, err
		}
	}
	return s, nil
}

func gatherServers(c *configv1.Config, dynamic bool, living []Replica) (out servers, err error) {
	e := c.GetEnvoy()
	extProcs, replans := e.GetExtProcs(), e.GetReplans()
	if len(living) > 0 {
		extProcs, replans = addresses(living)
	}
	if config.Encrypted(c.GetExtProc()) || e.GetExtProcTls() != nil {
		out.TLS = newClientTLS(e.GetExtProcTls(), true)
	}
	if out.ExtProcs, err = reachable("tandem-extproc", extProcs); err != nil {
		return servers{}, err
	}
	if out.Replans, err = reachable("tandem-replan", replans); err != nil {
		return servers{}, err
	}
	if len(living) > 0 {
		out.Slots = true
		out.AccessLogs = slots(living, out.ExtProcs.Hosts)
		return out, nil
	}
	for i, a := range out.ExtProcs.Hosts {
		name := strconv.Itoa(i)
		if dynamic { // one name for one replica: what is logged to others goes on when one comes or goes
			name = net.JoinHostPort(a.Host, strconv.Itoa(a.Port))
		}
		out.AccessLogs = append(out.AccessLogs, hosts{"tandem-accesslog-" + name, []address{a}})
	}
	return out, nil
}

// serve sets what depends on the pools.
func (s *settings) serve(pools []*configv1.Pool) {
	s.Engines.Schemes = schemes(pools)
	s.Pairs = slices.ContainsFunc(pools, config.Concurrent)
	s.Encodes = slices.ContainsFunc(pools, config.Encodes)
	s.Answers = slices.ContainsFunc(pools, config.RewritesAnswers)
	s.Leases = slices.ContainsFunc(pools, func(p *configv1.Pool) bool { return config.DialectOf(p).Lease > 0 })
	s.Forms = len(pools) > 1
}

// serveAll sets what any pool may need, so that a change of pools changes nothing.
func (s *settings) serveAll() {
	s.Engines.Schemes = []scheme{{"http", ""}, {"https", "-https"}, {"h2c", "-h2c"}}
	s.Pairs, s.Encodes, s.Answers, s.Leases = true, true, true, true
}

// Parts names what pools need of the bootstrap beyond what every bootstrap has: clusters for a scheme, listeners of
// legs. An Envoy whose bootstrap was made for other pools may lack some.
func Parts(pools []*configv1.Pool) (out []string) {
	var s settings
	s.serve(pools)
	for _, scheme := range s.Engines.Schemes[1:] {
		out = append(out, "clusters for "+scheme.Name)
	}
	for _, l := range s.loops() {
		out = append(out, "listener "+l.Listener)
	}
	if s.Forms {
		out = append(out, "routes by which uploads reach the pool of their model")
	}
	return out
}

func schemes(pools []*configv1.Pool) []scheme {
	out := []scheme{{"http", ""}}
	for _, p := range pools {
		for _, s := range config.PoolSchemes(p) {
			if s != "http" && !slices.Contains(out, scheme{s, "-" + s}) {
				out = append(out, scheme{s, "-" + s})
			}
		}
	}
	return out
}
