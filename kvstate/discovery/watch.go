package discovery

import (
	"context"
	"log/slog"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	apiwatch "k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/clientcmd"
)

// Connect returns a client of the Kubernetes API server with the pod's own service account if there is one, else with
// $KUBECONFIG or ~/.kube/config. It does not contact the server. It is the dynamic client, because the typed one and
// client-go's informers link every API group, which made a quarter of the program.
func Connect() (dynamic.Interface, error) {
	config, err := rest.InClusterConfig()
	if err != nil {
		loading := clientcmd.NewDefaultClientConfigLoadingRules()
		config, err = clientcmd.NewNonInteractiveDeferredLoadingClientConfig(loading, nil).ClientConfig()
	}
	if err != nil {
		return nil, err
	}
	config.UserAgent = "tandem"
	return dynamic.NewForConfig(config)
}

// watchOptions say which resources of a namespace are watched, and what of them is kept.
type watchOptions struct {
	tweak func(*metav1.ListOptions) // nil: all
	keep  cache.TransformFunc       // nil: all of it
}

// watched are the resources of one kind in one namespace, as the cluster last said.
type watched struct {
	cache.SharedIndexInformer
	stop func() // ends the watch, and waits for its end
}

// watch lists and watches resources until ctx ends or stop is called, and signals their changes to changed. A resource
// that is not installed is logged once: the informer keeps asking for it, with growing pauses.
func watch(ctx context.Context, cluster dynamic.Interface, resource schema.GroupVersionResource, namespace string,
	o watchOptions, log *slog.Logger, changed chan<- struct{}) (*watched, error) {
	client := cluster.Resource(resource).Namespace(namespace)
	selected := func(all metav1.ListOptions) metav1.ListOptions {
		if o.tweak != nil {
			o.tweak(&all)
		}
		return all
	}
	w := &watched{SharedIndexInformer: cache.NewSharedIndexInformer(
		cache.ToListWatcherWithWatchListSemantics(&cache.ListWatch{
			ListWithContextFunc: func(ctx context.Context, all metav1.ListOptions) (runtime.Object, error) {
				return client.List(ctx, selected(all))
			},
			WatchFuncWithContext: func(ctx context.Context, all metav1.ListOptions) (apiwatch.Interface, error) {
				return client.Watch(ctx, selected(all))
			},
		}, cluster), &unstructured.Unstructured{}, 0, cache.Indexers{})}
	if err := w.SetTransform(o.keep); err != nil {
		return nil, err
	}
	if err := w.signal(log, changed); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	var running sync.WaitGroup
	running.Go(func() { w.RunWithContext(ctx) })
	w.stop = func() { cancel(); running.Wait() }
	return w, nil
}

// signal makes the informer signal changes to changed.
func (w *watched) signal(log *slog.Logger, changed chan<- struct{}) error {
	warn := func() {
		select {
		case changed <- struct{}{}:
		default: // signalled already
		}
	}
	var missing sync.Once
	if err := w.SetWatchErrorHandler(func(_ *cache.Reflector, err error) {
		if apierrors.IsNotFound(err) {
			missing.Do(func() { log.Info("not installed in the cluster", "err", err) })
			return
		}
		log.Warn("watching the cluster, going on with what is known", "err", err)
	}); err != nil {
		return err
	}
	_, err := w.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: func(any) { warn() }, UpdateFunc: func(any, any) { warn() }, DeleteFunc: func(any) { warn() },
	})
	return err
}

// settle is how long a change may wait for others: a rollout is hundreds of events.
const settle = 20 * time.Millisecond

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
