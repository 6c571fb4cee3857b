package discovery

import (
	"cmp"
	"context"
	"log/slog"
	"net"
	"slices"
	"strconv"
	"strings"
	"time"

	"tandem/internal/periodic"
	"tandem/kvstate"
)

// Name is one DNS name of engines.
type Name struct {
	// with Port: a name with addresses (A, AAAA); without: an SRV record, such as
	// _http._tcp.decode.llm.svc.cluster.local
	Host   string
	Port   int
	Role   kvstate.Role
	Scheme string
	Group  string
	Zone   string
}

// DNS is a pool whose endpoints come from DNS names, mostly of headless services. Names are resolved every five
// seconds; a name that cannot be resolved keeps its last addresses.
type DNS struct {
	Static
	names   []Name
	records map[string][]*net.SRV // the last successful answer, by name
	srv     func(ctx context.Context, name string) ([]*net.SRV, error)
}

// NewDNS returns the source of one pool. It writes nothing until Resolve or Run.
func NewDNS(state *kvstate.State, spec kvstate.PoolSpec, names []Name, log *slog.Logger) *DNS {
	return &DNS{
		Static: *NewStatic(state, spec, nil, log), names: names, records: map[string][]*net.SRV{},
		srv: func(ctx context.Context, name string) ([]*net.SRV, error) {
			_, records, err := net.DefaultResolver.LookupSRV(ctx, "", "", name)
			return records, err
		},
	}
}

// Run resolves names until ctx ends.
func (d *DNS) Run(ctx context.Context) {
	periodic.Run(ctx, resolveEvery, func(time.Time) { d.Resolve(ctx) })
}

// Resolve resolves every name once and writes the pool if anything changed.
func (d *DNS) Resolve(ctx context.Context) {
	d.configured = nil
	for _, n := range d.names {
		e := kvstate.EndpointSpec{Role: n.Role, Scheme: n.Scheme, Group: n.Group, Zone: n.Zone}
		if n.Port != 0 {
			e.Name = net.JoinHostPort(n.Host, strconv.Itoa(n.Port))
			d.configured = append(d.configured, e)
			continue
		}
		for _, r := range d.lookUpSRV(ctx, n.Host) {
			e.Name = net.JoinHostPort(strings.TrimSuffix(r.Target, "."), strconv.Itoa(int(r.Port)))
			d.configured = append(d.configured, e)
		}
	}
	d.Static.Resolve(ctx)
	d.forget()
}

// lookUpSRV returns the targets of a record, or the last known ones. It ignores priorities and weights, because the
// picker knows the load.
func (d *DNS) lookUpSRV(ctx context.Context, name string) []*net.SRV {
	ctx, cancel := context.WithTimeout(ctx, resolveTimeout)
	defer cancel()
	records, err := d.srv(ctx, name)
	if err != nil || len(records) == 0 {
		if !d.failing[name] {
			d.failing[name] = true
			d.log.Warn("name not resolved, going on with what is known", "pool", d.spec.Name, "name", name, "known",
				len(d.records[name]), "err", err)
		}
		return d.records[name]
	}
	delete(d.failing, name)
	slices.SortFunc(records, func(a, b *net.SRV) int {
		return cmp.Or(cmp.Compare(a.Target, b.Target), cmp.Compare(a.Port, b.Port))
	})
	d.records[name] = records[:min(len(records), maxAddresses)]
	return d.records[name]
}

// forget drops the addresses of targets that no record names any more: pods have names of their own, and come and
// go.
func (d *DNS) forget() {
	named := map[string]bool{}
	for _, e := range d.configured {
		host, _, _ := net.SplitHostPort(e.Name)
		named[host] = true
	}
	for host := range d.known {
		if !named[host] {
			delete(d.known, host)
			delete(d.failing, host)
		}
	}
}
