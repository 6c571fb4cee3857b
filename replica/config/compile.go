package config

import (
	"cmp"
	"fmt"
	"log/slog"
	"slices"

	"tandem/extproc/core"
	"tandem/extproc/plan"
	"tandem/kvstate"
	"tandem/kvstate/discovery"
	"tandem/kvstate/kvevents"
	"tandem/kvstate/redisstore"
	"tandem/kvstate/standstill"
	configv1 "tandem/protos/config/v1"
)

// MaxRedirects is Envoy's max_internal_redirects on the legs' routes. The core's own budget ends below it.
const MaxRedirects = 8

// CoreOptions returns the core's options that the configuration determines. The caller adds the running parts.
func CoreOptions(c *configv1.Config) core.Options {
	o := core.Options{
		Inside:           Inside(c),
		PathPrefixes:     c.GetEnvoy().GetPathPrefixes(),
		SplitBodyBytes:   int(c.GetEnvoy().GetMaxBodyBytes()),
		MaxBodyBytes:     int(4 * c.GetEnvoy().GetMaxBodyBytes()),
		TicketTTL:        Duration(c.GetTickets().GetTtl()),
		DecisionMetadata: c.GetExtProc().GetDecisionMetadata(),
	}
	if e := c.GetExtProc(); e.GetProtocol() == ProtocolEndpointPicker {
		o.Picker = &plan.GatewayOptions{
			Fallbacks:    int(e.GetEndpointPicker().GetFallbacks()),
			WatchBody:    e.GetEndpointPicker().GetResponses() == "body",
			ShedRequests: int(e.GetEndpointPicker().GetShedRequests()),
		}
	}
	return o
}

// EventSources returns how each pool publishes KV events.
func EventSources(cfg *configv1.Config) map[string]kvevents.Source {
	sources := map[string]kvevents.Source{}
	for _, p := range cfg.GetPools() {
		if e := p.GetKvEvents(); e != nil {
			sources[p.GetName()] = kvevents.Source{
				Port: int(e.GetPort()), ReplayPort: int(e.GetReplayPort()), Ranks: int(e.GetRanks()),
				Topic: e.GetTopic(), Listen: e.GetListen(),
			}
		}
	}
	return sources
}

// PoolSpec is a pool as configured.
type PoolSpec struct {
	Spec      kvstate.PoolSpec
	Endpoints []kvstate.EndpointSpec
}

// Equal reports whether two pools are configured alike.
func (p PoolSpec) Equal(o PoolSpec) bool {
	return p.Spec.Name == o.Spec.Name && p.Spec.KeyFile == o.Spec.KeyFile && p.Spec.HandOver == o.Spec.HandOver &&
		p.Spec.Facts == o.Spec.Facts && p.Spec.Alike == o.Spec.Alike && p.Spec.Store == o.Spec.Store &&
		slices.Equal(p.Spec.Models, o.Spec.Models) && slices.Equal(p.Endpoints, o.Endpoints)
}

// Spec returns a pool without its endpoints.
func Spec(p *configv1.Pool) kvstate.PoolSpec {
	d := DialectOf(p)
	partners := d.Concurrent != nil || d.Push != nil || p.GetHandoff() != "envoy"
	return kvstate.PoolSpec{Name: p.GetName(), Models: p.GetModels(), KeyFile: p.GetApiKeyFile(), Facts: d.Alike(),
		Alike: Alike(p), Store: d.Name == "" || d.Engines.Store,
		HandOver: standstill.HandOver{Lease: d.Lease, Final: d.Final, Partners: partners,
			KeepsAnswers: p.GetNixl().GetDeclineExpired()}}
}

// PoolSpecs returns the pools of a configuration that lists their endpoints.
func PoolSpecs(cfg *configv1.Config) (out []PoolSpec, err error) {
	for _, p := range cfg.GetPools() {
		if p.GetDiscovery() != nil {
			continue
		}
		next := PoolSpec{Spec: Spec(p)}
		for _, e := range p.GetEndpoints() {
			role, err := kvstate.ParseRole(e.GetRole())
			if err != nil {
				return nil, fmt.Errorf("pool %s: %w", p.GetName(), err)
			}
			next.Endpoints = append(next.Endpoints, kvstate.EndpointSpec{
				Name: e.GetAddress(), Scheme: e.GetScheme(), Role: role, Group: PairsAs(p, e), Transfer: TransferOf(e),
				Ranks:  int(e.GetDataParallelRanks()),
				Events: kvstate.EventPorts{Port: int(e.GetKvEventsPort()), Replay: int(e.GetKvReplayPort())},
				Weight: int(e.GetWeight()), Drained: e.GetWeight() == 0, Zone: e.GetZone(), Node: e.GetNode(),
				Access: kvstate.Access{ServerName: e.GetServerName(), KeyFile: e.GetApiKeyFile()},
				LoRAs:  commas(e.GetLoras()), Labels: commas(e.GetLabels()),
			})
		}
		out = append(out, next)
	}
	return out, nil
}

// DNSNames returns the names by which a pool is discovered.
func DNSNames(configured []*configv1.NameDiscovery) ([]discovery.Name, error) {
	var names []discovery.Name
	for _, n := range configured {
		role, err := kvstate.ParseRole(n.GetRole())
		if err != nil {
			return nil, err
		}
		names = append(names, discovery.Name{Host: n.GetName(), Port: int(n.GetPort()), Role: role,
			Scheme: n.GetScheme(), Group: n.GetGroup(), Zone: n.GetZone()})
	}
	return names, nil
}

// PodLabels returns the labels of a convention, with the configured ones in their place.
func PodLabels(c *configv1.PodLabels) (discovery.Labels, error) {
	l, err := discovery.Conventions(c.GetConvention())
	if err != nil {
		return l, err
	}
	l.Role, l.Group, l.Port = cmp.Or(c.GetRoleLabel(), l.Role), cmp.Or(c.GetGroupLabel(), l.Group),
		cmp.Or(c.GetPortLabel(), l.Port)
	l.Zone, l.Keep, l.Ranks = c.GetZoneLabel(), c.GetKeep(), c.GetRanksLabel()
	for _, values := range []struct {
		configured []string
		values     *[]string
	}{{c.GetPrefill(), &l.Prefill}, {c.GetDecode(), &l.Decode}, {c.GetBoth(), &l.Both}} {
		if len(values.configured) > 0 {
			*values.values = values.configured
		}
	}
	switch role := c.GetDefaultRole(); role {
	case "":
	case "none":
		l.Default = 0
	default:
		l.Default, err = kvstate.ParseRole(role)
	}
	return l, err
}

// RedisOptions returns the store's options without TLS, whose files are read at run time.
func RedisOptions(r *configv1.Redis, log *slog.Logger) redisstore.Options {
	return redisstore.Options{
		URL: r.GetUrl(), Nodes: r.GetNodes(), Cluster: r.GetMode() == "cluster", SentinelMaster: r.GetSentinelMaster(),
		PasswordFile: r.GetPasswordFile(), KeyPrefix: r.GetKeyPrefix(), Lease: Duration(r.GetLease()), Log: log,
	}
}

// ReplicasFromRedis reports whether Envoys are served the replicas that live, as Redis knows them.
func ReplicasFromRedis(c *configv1.Config) bool { return c.GetEnvoy().GetReplicas() == "redis" }
