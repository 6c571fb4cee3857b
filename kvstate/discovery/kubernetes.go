package discovery

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/tools/cache"

	"tandem/kvstate"
)

// Pods selects the pods that are a pool's endpoints.
type Pods struct {
	Namespace string // required
	Selector  string // a label selector, as for kubectl -l; required
	Ports     []int  // 1 to MaxPorts
	Scheme    string
	Labels    Labels
}

// Kubernetes is a pool whose endpoints are the ready pods that labels select. It uses an informer (list and watch
// of pods only); a server that cannot be reached changes nothing.
type Kubernetes struct {
	target
	cluster dynamic.Interface
	pods    Pods
	facts   *Facts // nil: engines are not asked
	left    departures
	synced  chan struct{}
	once    sync.Once
}

// NewKubernetes returns the source of one pool, which exists and is empty until Run has seen the cluster.
func NewKubernetes(state *kvstate.State, spec kvstate.PoolSpec, cluster dynamic.Interface, pods Pods,
	log *slog.Logger) *Kubernetes {
	k := &Kubernetes{target: target{state: state, spec: spec, log: log}, cluster: cluster, pods: pods,
		left: departures{}, synced: make(chan struct{})}
	k.state.SetPool(spec, nil)
	return k
}

// Ask adds what engines report of themselves. Call it before Run.
func (k *Kubernetes) Ask(facts *Facts) { k.facts = facts }

// Synced returns a channel that is closed when the pool was first written from the cluster's state.
func (k *Kubernetes) Synced() <-chan struct{} { return k.synced }

// Run watches until ctx ends.
func (k *Kubernetes) Run(ctx context.Context) { k.watchPods(ctx, k.pods) }

// watchPods writes the pool whenever its pods change, until ctx ends.
func (k *Kubernetes) watchPods(ctx context.Context, pods Pods) {
	selector, err := labels.Parse(pods.Selector)
	if err != nil {
		k.log.Error("selector of pods", "pool", k.spec.Name, "selector", pods.Selector, "err", err)
		return
	}
	pool := podPool{ports: pods.Ports, scheme: pods.Scheme, labels: pods.Labels}
	changed := make(chan struct{}, 1)
	resources, err := watch(ctx, k.cluster, podResource, pods.Namespace, watchOptions{
		tweak: func(o *metav1.ListOptions) { o.LabelSelector = pods.Selector }, keep: essentials,
	}, k.log, changed)
	if err != nil {
		k.log.Error("watching pods", "pool", k.spec.Name, "err", err)
		return
	}
	defer resources.stop()
	if !cache.WaitForCacheSync(ctx.Done(), resources.HasSynced) {
		return
	}
	var warned map[string]string
	for {
		endpoints := k.facts.fill(ctx, pool.endpoints(podsIn(resources, selector)), pods.Labels.Default, changed)
		k.warnUnknown(pool.unknown, warned, pods.Labels.Role)
		warned = pool.unknown
		endpoints, again := k.left.keep(k.current, endpoints, time.Now())
		k.write(endpoints)
		k.once.Do(func() { close(k.synced) })
		if !next(ctx, changed, again) {
			return
		}
	}
}

// warnUnknown warns of pods with unknown roles that have appeared since before.
func (k *Kubernetes) warnUnknown(unknown, before map[string]string, label string) {
	for role, pod := range unknown {
		if _, warned := before[role]; !warned {
			k.log.Warn("a pod has a role that is not known: it gets no requests", "pool", k.spec.Name, "pod", pod,
				"label", label, "role", role)
		}
	}
}

// podResource is the watched resource.
var podResource = corev1.SchemeGroupVersion.WithResource("pods")

// podsIn returns the pods that are known now. A label that has changed takes a pod out before the server says so.
func podsIn(resources *watched, selector labels.Selector) (out []*corev1.Pod) {
	for _, o := range resources.GetStore().List() {
		if pod, ok := o.(*corev1.Pod); ok && selector.Matches(labels.Set(pod.Labels)) {
			out = append(out, pod)
		}
	}
	return out
}

// essentials keeps the parts of a pod that are read: a fleet's whole pods would take megabytes.
func essentials(object any) (any, error) {
	raw, ok := object.(*unstructured.Unstructured)
	if !ok {
		return object, nil
	}
	var pod corev1.Pod
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(raw.Object, &pod); err != nil {
		return nil, fmt.Errorf("pod %s/%s: %w", raw.GetNamespace(), raw.GetName(), err)
	}
	return &corev1.Pod{
		TypeMeta: pod.TypeMeta,
		ObjectMeta: metav1.ObjectMeta{
			Name: pod.Name, Namespace: pod.Namespace, UID: pod.UID, ResourceVersion: pod.ResourceVersion,
			Labels: pod.Labels, DeletionTimestamp: pod.DeletionTimestamp,
		},
		Spec:   corev1.PodSpec{NodeName: pod.Spec.NodeName},
		Status: corev1.PodStatus{Phase: pod.Status.Phase, PodIP: pod.Status.PodIP, Conditions: pod.Status.Conditions},
	}, nil
}
