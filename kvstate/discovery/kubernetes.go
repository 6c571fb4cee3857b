package discovery

import (
	"context"
	"log/slog"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
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

// Cluster is a way into a Kubernetes API server.
type Cluster struct {
	Typed   kubernetes.Interface
	Dynamic dynamic.Interface
}

// Connect makes a Cluster: of the pod's own service account where there is one, else of $KUBECONFIG or ~/.kube/config. It
// does not talk to the server yet.
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

// Pods says which pods of a cluster are a pool's endpoints.
type Pods struct {
	Namespace string // required
	Selector  string // of labels, as kubectl -l takes it; required
	Ports     []int  // 1 to MaxPorts
	Scheme    string
	Labels    Labels
}

// settle is how long a change may wait for others that come with it: a rollout is hundreds of events.
const settle = 20 * time.Millisecond

// Kubernetes is a pool whose endpoints are the ready pods that labels select. It watches (an informer with list and watch on
// pods, nothing else); a server that cannot be reached changes nothing.
type Kubernetes struct {
	target
	cluster Cluster
	pods    Pods
	facts   *Facts // nil: engines are not asked
	left    departures
	synced  chan struct{}
	once    sync.Once
}

// NewKubernetes makes the source of one pool, which is there and empty until Run has seen the cluster.
func NewKubernetes(state *kvstate.State, spec kvstate.PoolSpec, cluster Cluster, pods Pods, log *slog.Logger) *Kubernetes {
	k := &Kubernetes{target: target{state: state, spec: spec, log: log}, cluster: cluster, pods: pods, left: departures{}, synced: make(chan struct{})}
	k.state.SetPool(spec, nil)
	return k
}

// Ask takes from engines what labels do not say of them. Before Run.
func (k *Kubernetes) Ask(facts *Facts) { k.facts = facts }

// Synced is closed when the pool was first written from what the cluster says.
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
	factory := informers.NewSharedInformerFactoryWithOptions(k.cluster.Typed, 0, informers.WithNamespace(pods.Namespace),
		informers.WithTransform(essentials),
		informers.WithTweakListOptions(func(o *metav1.ListOptions) { o.LabelSelector = pods.Selector }))
	defer factory.Shutdown()
	informer := factory.Core().V1().Pods()
	changed := make(chan struct{}, 1)
	if err := watchChanges(ctx, informer.Informer(), k.log, changed); err != nil {
		k.log.Error("watching pods", "pool", k.spec.Name, "err", err)
		return
	}
	factory.Start(ctx.Done())
	if !cache.WaitForCacheSync(ctx.Done(), informer.Informer().HasSynced) {
		return
	}
	for {
		all, err := informer.Lister().Pods(pods.Namespace).List(selector)
		var again time.Duration
		if err == nil {
			endpoints := k.facts.fill(ctx, pool.endpoints(all), pods.Labels.Default, changed)
			endpoints, again = k.left.keep(k.current, endpoints, time.Now())
			k.write(endpoints)
			k.once.Do(func() { close(k.synced) })
		}
		if !next(ctx, changed, again) {
			return
		}
	}
}

// watchChanges makes an informer say in changed that something did.
func watchChanges(_ context.Context, informer cache.SharedIndexInformer, log *slog.Logger, changed chan<- struct{}) error {
	tell := func() {
		select {
		case changed <- struct{}{}:
		default: // it is said already
		}
	}
	if err := informer.SetWatchErrorHandler(func(_ *cache.Reflector, err error) {
		log.Warn("watching the cluster, going on with what is known", "err", err)
	}); err != nil {
		return err
	}
	_, err := informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: func(any) { tell() }, UpdateFunc: func(any, any) { tell() }, DeleteFunc: func(any) { tell() },
	})
	return err
}

// next waits for a change, and a little longer for those that come with it, or until so long has passed, if that is not 0;
// false when ctx ends.
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

// essentials keeps of a pod what is read here: a fleet's pods are megabytes otherwise.
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
		Status: corev1.PodStatus{Phase: pod.Status.Phase, PodIP: pod.Status.PodIP, Conditions: pod.Status.Conditions},
	}, nil
}
