package replica

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"

	"tandem/kvstate"
	"tandem/kvstate/discovery"
	configv1 "tandem/protos/config/v1"
	"tandem/replica/config"
)

// source keeps a pool's endpoints up to date until ctx ends.
type source interface{ Run(ctx context.Context) }

// newSource returns the source of a pool's endpoints, which writes the endpoints that it knows at once. Those of a
// cluster are unknown until Run has seen it.
func (f *fleet) newSource(ctx context.Context, p *configv1.Pool, log *slog.Logger) (source, error) {
	spec := config.Spec(p)
	d := p.GetDiscovery()
	switch {
	case d.GetFile() != nil:
		file := d.GetFile()
		s := discovery.NewFile(f.state, spec, file.GetPath(), file.GetScheme(), config.RankLimit(p), log)
		s.Resolve(ctx)
		return s, nil
	case len(d.GetDns()) > 0:
		names, err := config.DNSNames(d.GetDns())
		if err != nil {
			return nil, err
		}
		s := discovery.NewDNS(f.state, spec, names, log)
		s.Resolve(ctx)
		return s, nil
	case d.GetKubernetes() != nil:
		return f.kubernetes(spec, d.GetKubernetes(), factsOf(p, log), log)
	case d.GetInferencePool() != nil:
		return f.inferencePool(spec, d.GetInferencePool(), factsOf(p, log), log)
	}
	return nil, errors.New("discovery names no source")
}

// factsOf asks a pool's engines for facts that the cluster does not have.
func factsOf(p *configv1.Pool, log *slog.Logger) *discovery.Facts {
	return discovery.NewFacts(config.DialectOf(p).Reports.Release, p.GetApiKeyFile(), log)
}

func (f *fleet) kubernetes(spec kvstate.PoolSpec, k *configv1.KubernetesDiscovery, facts *discovery.Facts, log *slog.Logger) (source, error) {
	cluster, err := discovery.Connect()
	if err != nil {
		return nil, fmt.Errorf("the cluster: %w", err)
	}
	labels, err := config.PodLabels(k.GetLabels())
	if err != nil {
		return nil, err
	}
	pods := discovery.Pods{Namespace: cmp.Or(k.GetNamespace(), ownNamespace()), Selector: k.GetSelector(), Scheme: k.GetScheme(), Labels: labels}
	for _, port := range k.GetPorts() {
		pods.Ports = append(pods.Ports, int(port))
	}
	s := discovery.NewKubernetes(f.state, spec, cluster, pods, log)
	s.Ask(facts)
	f.synced = append(f.synced, s.Synced())
	return s, nil
}

func (f *fleet) inferencePool(spec kvstate.PoolSpec, i *configv1.InferencePoolDiscovery, facts *discovery.Facts, log *slog.Logger) (source, error) {
	cluster, err := discovery.Connect()
	if err != nil {
		return nil, fmt.Errorf("the cluster: %w", err)
	}
	labels, err := config.PodLabels(i.GetLabels())
	if err != nil {
		return nil, err
	}
	ref := discovery.PoolRef{Namespace: cmp.Or(i.GetNamespace(), ownNamespace()), Name: i.GetName(), Labels: labels}
	s := discovery.NewInferencePool(f.state, spec, cluster, ref, log)
	s.Ask(facts)
	f.synced = append(f.synced, s.Synced())
	if i.GetIntents() == "watch" {
		f.sources = append(f.sources, discovery.NewInferencePolicies(f.state, spec.Name, cluster, ref, log))
	}
	return s, nil
}

// ownNamespace is that of the pod this runs in; default outside of a cluster.
func ownNamespace() string {
	if ns := os.Getenv("POD_NAMESPACE"); ns != "" {
		return ns
	}
	if text, err := os.ReadFile("/var/run/secrets/kubernetes.io/serviceaccount/namespace"); err == nil && len(text) > 0 {
		return strings.TrimSpace(string(text))
	}
	return "default"
}

// waitSynced waits until every source that watches a cluster has seen it; false when ctx ends before.
func (f *fleet) waitSynced(ctx context.Context) bool {
	for _, synced := range f.synced {
		select {
		case <-synced:
		case <-ctx.Done():
			return false
		}
	}
	return true
}
