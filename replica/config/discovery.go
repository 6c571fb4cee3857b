package config

import (
	"fmt"
	"slices"

	"tandem/kvstate/discovery"
	configv1 "tandem/protos/config/v1"
)

// maxPorts is the maximum number of targetPorts of an InferencePool (inference.networking.k8s.io/v1).
const maxPorts = 8

func setDiscoveryDefaults(d *configv1.Discovery) {
	if k := d.GetKubernetes(); k != nil {
		sub(&k.Labels)
	}
	if i := d.GetInferencePool(); i != nil {
		sub(&i.Labels)
	}
}

// schemesOf returns the schemes of the endpoints that discovery may find. The scheme of an InferencePool's pods is not
// known beforehand.
func schemesOf(x *configv1.Discovery) []string {
	var out []string
	if f := x.GetFile(); f != nil {
		out = append(out, f.Scheme)
	}
	for _, n := range x.GetDns() {
		out = append(out, n.Scheme)
	}
	if k := x.GetKubernetes(); k != nil {
		out = append(out, k.Scheme)
	}
	if x.GetInferencePool() != nil {
		out = append(out, "http", "h2c")
	}
	return out
}

func checkDiscovery(v *validator, path string, p *configv1.Pool) {
	if len(p.Endpoints) > 0 {
		v.m.add(path+".endpoints", "stand beside discovery: list endpoints or have them found")
	}
	pool := path
	path += ".discovery"
	d := p.Discovery
	kinds := 0
	for _, there := range []bool{d.File != nil, len(d.Dns) > 0, d.Kubernetes != nil, d.InferencePool != nil} {
		if there {
			kinds++
		}
	}
	if kinds != 1 {
		v.m.add(path, "holds %d of file, dns, kubernetes, inferencePool: one is needed", kinds)
	}
	if f := d.File; f != nil {
		checkNeeded(v, path+".file.path", f.Path, "a file that lists endpoints")
	}
	for i, n := range d.Dns {
		checkNameDiscovery(v, fmt.Sprintf("%s.dns[%d]", path, i), n)
	}
	if k := d.Kubernetes; k != nil {
		checkKubernetes(v, path+".kubernetes", k)
		if k.Labels.RanksLabel != "" {
			checkRanksNamed(v, path+".kubernetes.labels.ranksLabel", pool, p)
		}
	}
	if i := d.InferencePool; i != nil {
		checkNeeded(v, path+".inferencePool.name", i.Name, "an InferencePool of the cluster")
		checkClusterNames(v, path+".inferencePool", i.Labels, clusterName{"name", i.Name},
			clusterName{"namespace", i.Namespace})
		if i.Labels.RanksLabel != "" {
			checkRanksNamed(v, path+".inferencePool.labels.ranksLabel", pool, p)
		}
	}
}

func checkNeeded(v *validator, path, value, what string) {
	if value == "" {
		v.m.add(path, "is missing: %s", what)
	}
}

func checkNameDiscovery(v *validator, path string, n *configv1.NameDiscovery) {
	checkNeeded(v, path+".name", n.Name, "a DNS name")
	if n.Name != "" && !isName(n.Name) {
		v.m.add(path+".name", "%.100q is not a DNS name", n.Name)
	}
}

func checkKubernetes(v *validator, path string, k *configv1.KubernetesDiscovery) {
	checkNeeded(v, path+".selector", k.Selector, "labels of the engines' pods, as kubectl -l takes them")
	if err := discovery.CheckSelector(k.Selector); err != nil {
		v.m.add(path+".selector", "%.100q cannot be read as labels, as kubectl -l takes them: %v", k.Selector, err)
	}
	checkClusterNames(v, path, k.Labels, clusterName{"namespace", k.Namespace})
	if len(k.Ports) == 0 && k.Labels.PortLabel == "" && k.Labels.Convention != "aibrix" {
		v.m.add(path+".ports", "is missing: the ports of the engines, or labels.portLabel")
	}
	if len(k.Ports) > maxPorts {
		v.m.add(path+".ports", "has %d, at most %d are possible", len(k.Ports), maxPorts)
	}
	for i, port := range k.Ports {
		if port < 1 || port > 65535 || slices.Contains(k.Ports[:i], port) {
			v.m.add(fmt.Sprintf("%s.ports[%d]", path, i), "%d is not between 1 and 65535, or is there twice", port)
		}
	}
}

// PoolSchemes returns the schemes of a pool's engines; "http" may be missing, and some may be there twice.
func PoolSchemes(p *configv1.Pool) []string {
	all := schemesOf(p.GetDiscovery())
	for _, e := range p.GetEndpoints() {
		all = append(all, e.GetScheme())
	}
	return all
}

// clusterName is a field with the name of something in the cluster; empty: its default.
type clusterName struct{ field, name string }

// checkClusterNames refuses names and labels that nothing in a cluster can have: the pool would stay empty.
func checkClusterNames(v *validator, path string, l *configv1.PodLabels, names ...clusterName) {
	check := func(field, value string, valid func(string) error) {
		if err := valid(value); value != "" && err != nil {
			v.m.add(path+"."+field, "nothing in a cluster can be called %.100q: %v", value, err)
		}
	}
	for _, n := range names {
		check(n.field, n.name, discovery.CheckName)
	}
	for _, n := range []clusterName{
		{"roleLabel", l.GetRoleLabel()}, {"groupLabel", l.GetGroupLabel()}, {"portLabel", l.GetPortLabel()},
		{"zoneLabel", l.GetZoneLabel()}, {"ranksLabel", l.GetRanksLabel()},
	} {
		check("labels."+n.field, n.name, discovery.CheckLabel)
	}
	for i, name := range l.GetKeep() {
		check(fmt.Sprintf("labels.keep[%d]", i), name, discovery.CheckLabel)
	}
	for _, values := range []struct {
		field string
		list  []string
	}{{"prefill", l.GetPrefill()}, {"decode", l.GetDecode()}, {"both", l.GetBoth()}} {
		for i, value := range values.list {
			check(fmt.Sprintf("labels.%s[%d]", values.field, i), value, discovery.CheckLabelValue)
		}
	}
}
