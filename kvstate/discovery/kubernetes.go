package discovery

import (
	"context"
	"log/slog"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/clientcmd"

	"tandem/kvstate"
)

// Cluster is a client of a Kubernetes API server.
type Cluster struct {
	Typed   kubernetes.Interface
	Dynamic dynamic.Interface
}

// Connect returns a Cluster with the pod's own service account if there is one, else with $KUBECONFIG or
// ~/.kube/config. It does not contact the server.
func Connect() (Cluster, error) {
	config, err := rest.InClusterConfig()
	if err != nil {
		loading := clientcmd.NewDefaultClientConfigLoadingRules()
		config, err = clientcmd.NewNonInteractiveDeferredLoadingClientConfig(loading, nil).ClientConfig()
	}
	if err != nil {
		return Cluster{}, err
	}
	config.UserAgent = "tandem"
	typed, err := kubernetes.NewForConfig(config)
	if err != nil {
		return Cluster{}, err
	}
	dyn, err := dynamic.NewForConfig(config)
	return Cluster{typed, dyn}, err
}

// Pods selects the pods that are a pool's endpoints.
type Pods struct {
	Namespace string // required
	Selector  string // a label selector, as for kubectl -l; required
	Ports     []int  // 1 to MaxPorts
	Scheme    string
	Labels    Labels
}

// settle is how long a change may wait for others: a rollout is hundreds of events.
const settle = 20 * time.Millisecond

// Kubernetes is a pool whose endpoints are the ready pods that labels select. It uses an informer (list and watch
// of pods only); a server that cannot be reached changes nothing.
type Kubernetes struct {
	target
	cluster Cluster
	pods    Pods
	facts   *Facts // nil: engines are not asked
	left    departures
	synced  chan struct{}
	once    sync.Once
}

// NewKubernetes returns the source of one pool, which exists and is empty until Run has seen the cluster.
func NewKubernetes(state *kvstate.State, spec kvstate.PoolSpec, cluster Cluster, pods Pods,
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
	factory := informers.NewSharedInformerFactoryWithOptions(k.cluster.Typed, 0,
		informers.WithNamespace(pods.Namespace),
		informers.WithTransform(essentials),
		informers.WithTweakListOptions(func(o *metav1.ListOptions) { o.LabelSelector = pods.Selector }))
	defer factory.Shutdown()
	informer := factory.Core().V1().Pods()
	changed := make(chan struct{}, 1)
	if err := watchChanges(informer.Informer(), k.log, changed); err != nil {
		k.log.Error("watching pods", "pool", k.spec.Name, "err", err)
		return
	}
	factory.Start(ctx.Done())
	if !cache.WaitForCacheSync(ctx.Done(), informer.Informer().HasSynced) {
		return
	}
	var warned map[string]string
	for {
		all, err := informer.Lister().Pods(pods.Namespace).List(selector)
		var again time.Duration
		if err == nil {
			endpoints := k.facts.fill(ctx, pool.endpoints(all), pods.Labels.Default, changed)
			k.warnUnknown(pool.unknown, warned, pods.Labels.Role)
			warned = pool.unknown
			endpoints, again = k.left.keep(k.current, endpoints, time.Now())
			k.write(endpoints)
			k.once.Do(func() { close(k.synced) })
		}
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

// watchChanges makes an informer signal its changes to changed. A resource that is not installed is logged once: the
// informer keeps asking for it, with growing pauses.
func watchChanges(informer cache.SharedIndexInformer, log *slog.Logger, changed chan<- struct{}) error {
	warn := func() {
		select {
		case changed <- struct{}{}:
		default: // signalled already
		}
	}
	var missing sync.Once
	if err := informer.SetWatchErrorHandler(func(_ *cache.Reflector, err error) {
		if apierrors.IsNotFound(err) {
			missing.Do(func() { log.Info("not installed in the cluster", "err", err) })
			return
		}
		log.Warn("watching the cluster, going on with what is known", "err", err)
	}); err != nil {
		return err
	}
	_, err := informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: func(any) { warn() }, UpdateFunc: func(any, any) { warn() }, DeleteFunc: func(any) { warn() },
	})
	return err
}

// next waits for a change, plus a little for those that follow immediately, or until the time at (if not 0); false
// when ctx ends.
func next(ctx context.Context, changed <-chan struct{}, at time.Duration) bool {
	var passed <-chan time.Time
	if at > 0 {
		passed = time.After(at)
	}
	select {
	case <-ctx.Done():
		return false
	case <-passed:
		return true
	case <-changed:
	}
	select {
	case <-ctx.Done():
		return false
	case <-time.After(settle):
		return true
	}
}

// essentials drops the parts of a pod that are not read: a fleet's pods would take megabytes.
func essentials(object any) (any, error) {
	pod, ok := object.(*corev1.Pod)
	if !ok {
		return object, nil
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
