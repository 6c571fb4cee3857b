package discovery

import (
	"cmp"
	"net"
	"net/netip"
	"slices"
	"strconv"

	corev1 "k8s.io/api/core/v1"

	"tandem/kvstate"
)

// MaxPorts is the largest number of engine ports of a pod: the limit of an InferencePool's targetPorts.
const MaxPorts = 8

// podPool turns pods into endpoints.
type podPool struct {
	ports   []int // each is an endpoint: data-parallel ranks of one pod may have a port each
	scheme  string
	labels  Labels
	unknown map[string]string // role labels that are not known, and a pod that has each
}

// endpoints returns the endpoints of the pods that are ready, and of terminating ones that still answer, in the
// order of the pods' names, so that equal states of the cluster yield equal lists. An engine is one endpoint here, and
// one for each data-parallel rank after [Facts.fill]. Role is 0 for pods without a role label. Pods with an unknown
// role are left out, and noted in p.unknown.
func (p *podPool) endpoints(pods []*corev1.Pod) []kvstate.EndpointSpec {
	slices.SortFunc(pods, func(a, b *corev1.Pod) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
	})
	var out []kvstate.EndpointSpec
	p.unknown = map[string]string{}
	for _, pod := range pods {
		ip, err := netip.ParseAddr(pod.Status.PodIP)
		if err != nil || !serves(pod) {
			continue
		}
		role, labelled := p.labels.role(pod.Labels)
		if labelled && role == 0 {
			p.unknown[pod.Labels[p.labels.Role]] = pod.Name
			continue
		}
		for _, port := range p.portsOf(pod) {
			out = append(out, kvstate.EndpointSpec{
				Name: pod.Namespace + "/" + pod.Name, Addr: net.JoinHostPort(ip.Unmap().String(), strconv.Itoa(port)),
				Scheme: p.scheme, Role: role, Group: pod.Labels[p.labels.Group], Zone: pod.Labels[p.labels.Zone],
				Node: pod.Spec.NodeName, Labels: p.labels.kept(pod.Labels), Draining: pod.DeletionTimestamp != nil,
				Ranks: p.labels.ranks(pod.Labels),
			})
		}
	}
	return out
}

// portsOf returns the ports of a pod's engines: the one in its label, else the configured ones.
func (p *podPool) portsOf(pod *corev1.Pod) []int {
	if p.labels.Port != "" {
		if n, err := strconv.ParseUint(pod.Labels[p.labels.Port], 10, 16); err == nil && n > 0 {
			return []int{int(n)}
		}
	}
	return p.ports
}

// serves reports whether a pod answers: it is ready, or it is terminating and its engine still runs. A pod that is
// being deleted loses its readiness before its work is done.
func serves(pod *corev1.Pod) bool {
	if pod.Status.Phase != corev1.PodRunning {
		return false
	}
	if pod.DeletionTimestamp != nil {
		return true
	}
	return slices.ContainsFunc(pod.Status.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
	})
}
