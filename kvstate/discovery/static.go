package discovery

import (
	"context"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"time"

	"tandem/internal/guard"
	"tandem/internal/periodic"
	"tandem/kvstate"
)

// resolveEvery is the interval at which names are resolved again, resolveTimeout the timeout of one lookup.
const (
	resolveEvery   = 5 * time.Second
	resolveTimeout = 2 * time.Second
)

// Static is a pool whose endpoints are configured.
type Static struct {
	target
	configured []kvstate.EndpointSpec // Name set, Addr not
	known      map[string][]string    // by host: the last successful answer
	failing    map[string]bool        // hosts whose last lookup failed
	lookup     func(ctx context.Context, host string) ([]netip.Addr, error)
}

// NewStatic returns the source of one pool. It writes nothing until Resolve or Run.
func NewStatic(state *kvstate.State, spec kvstate.PoolSpec, configured []kvstate.EndpointSpec,
	log *slog.Logger) *Static {
	return &Static{
		target:     target{state: state, spec: spec, log: log},
		configured: configured, known: map[string][]string{}, failing: map[string]bool{},
		lookup: func(ctx context.Context, host string) ([]netip.Addr, error) {
			return net.DefaultResolver.LookupNetIP(ctx, "ip", host)
		},
	}
}

// Run resolves until ctx ends.
func (s *Static) Run(ctx context.Context) {
	if !s.hasNames() {
		<-ctx.Done()
		return
	}
	periodic.Run(ctx, resolveEvery, func(time.Time) { s.Resolve(ctx) })
}

func (s *Static) hasNames() bool {
	return slices.ContainsFunc(s.configured, func(e kvstate.EndpointSpec) bool {
		host, _, _ := net.SplitHostPort(e.Name)
		_, err := netip.ParseAddr(host)
		return err != nil
	})
}

// Resolve resolves every name once and writes the pool if anything changed. A name with several addresses is
// several endpoints; one that cannot be resolved keeps its addresses.
func (s *Static) Resolve(ctx context.Context) {
	s.lookUp(ctx)
	var next []kvstate.EndpointSpec
	for _, e := range s.configured {
		host, port, err := net.SplitHostPort(e.Name)
		if err != nil {
			s.log.Error("endpoint address", "pool", s.spec.Name, "address", e.Name, "err", err)
			continue
		}
		addresses := s.known[host]
		if ip, err := netip.ParseAddr(host); err == nil {
			addresses = []string{ip.Unmap().String()}
		}
		e.Several = len(addresses) > 1
		for _, ip := range addresses {
			e.Addr = net.JoinHostPort(ip, port)
			next = append(next, e.ByRank()...)
		}
	}
	s.write(next)
}

// answer is the result of one lookup.
type answer struct {
	host string
	ips  []netip.Addr
	err  error
}

// lookUp resolves all hosts concurrently, so that it takes no longer than the slowest, and stores good answers in
// known.
func (s *Static) lookUp(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, resolveTimeout)
	defer cancel()
	asked := map[string]bool{}
	answers := make(chan answer, len(s.configured))
	for _, e := range s.configured {
		host, _, err := net.SplitHostPort(e.Name)
		if _, notName := netip.ParseAddr(host); err != nil || notName == nil || asked[host] {
			continue
		}
		asked[host] = true
		go func() {
			ips, err := guard.Try(ctx, "DNS", func() ([]netip.Addr, error) { return s.lookup(ctx, host) })
			answers <- answer{host, ips, err}
		}()
	}
	for range asked {
		s.note(<-answers)
	}
}

// note stores a good answer. A failure is logged once, until the next good answer.
func (s *Static) note(a answer) {
	if a.err != nil || len(a.ips) == 0 {
		if !s.failing[a.host] {
			s.failing[a.host] = true
			s.log.Warn("name not resolved, going on with what is known", "pool", s.spec.Name, "host", a.host, "known",
				len(s.known[a.host]), "err", a.err)
		}
		return
	}
	if s.failing[a.host] {
		delete(s.failing, a.host)
		s.log.Info("name resolved again", "pool", s.spec.Name, "host", a.host)
	}
	s.known[a.host] = addresses(a.ips)
}

// maxAddresses bounds the addresses of one name.
const maxAddresses = 1024

// addresses returns the addresses of an answer, in order. A name with addresses of both families has each engine
// twice (localhost, dual-stack pods), so only the IPv4 ones count.
func addresses(ips []netip.Addr) []string {
	var v4, v6 []string
	for _, ip := range ips {
		if ip = ip.Unmap(); ip.Is4() {
			v4 = append(v4, ip.String())
		} else {
			v6 = append(v6, ip.WithZone("").String())
		}
	}
	out := v4
	if len(out) == 0 {
		out = v6
	}
	slices.Sort(out)
	out = slices.Compact(out)
	return out[:min(len(out), maxAddresses)]
}

// Replace returns the source that replaces s, with other endpoints or another spec. It keeps the answers of s, so
// that a name which cannot be resolved now keeps its addresses. s must not be running.
func (s *Static) Replace(spec kvstate.PoolSpec, configured []kvstate.EndpointSpec) *Static {
	next := *s
	next.spec, next.configured, next.renewed = spec, configured, true
	return &next
}
