package discovery

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"reflect"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/tools/cache"

	"tandem/internal/guard"
	"tandem/kvstate"
)

// PoolRef names an InferencePool and adds what the resource does not contain.
type PoolRef struct {
	Namespace, Name string
	Labels          Labels
}

// InferencePool is a pool whose endpoints an InferencePool of the Gateway API Inference Extension selects
// (inference.networking.k8s.io/v1: selector.matchLabels of the same namespace; up to eight targetPorts, each of
// which is an endpoint of every pod; appProtocol). When the resource is deleted its pool is empty.
type InferencePool struct {
	*Kubernetes
	ref PoolRef
}

// inferencePools is the watched resource.
var inferencePools = schema.GroupVersionResource{Group: "inference.networking.k8s.io", Version: "v1",
	Resource: "inferencepools"}

// NewInferencePool returns the source of one pool, which exists and is empty until Run has seen the cluster.
func NewInferencePool(state *kvstate.State, spec kvstate.PoolSpec, cluster dynamic.Interface, ref PoolRef,
	log *slog.Logger) *InferencePool {
	return &InferencePool{Kubernetes: NewKubernetes(state, spec, cluster, Pods{}, log), ref: ref}
}

// Run watches until ctx ends.
func (i *InferencePool) Run(ctx context.Context) {
	changed := make(chan struct{}, 1)
	one := watchOptions{tweak: func(o *metav1.ListOptions) {
		o.FieldSelector = fields.OneTermEqualSelector("metadata.name", i.ref.Name).String()
	}}
	pools, err := watch(ctx, i.cluster, inferencePools, i.ref.Namespace, one, i.log, changed)
	if err != nil {
		i.log.Error("watching an InferencePool", "pool", i.spec.Name, "err", err)
		return
	}
	defer pools.stop()
	if !cache.WaitForCacheSync(ctx.Done(), pools.HasSynced) {
		return
	}
	pods := podWatch{source: i.Kubernetes}
	defer pods.stop()
	for {
		i.follow(ctx, pools, &pods)
		if !next(ctx, changed, 0) {
			return
		}
	}
}

// follow watches the pods that the resource selects now.
func (i *InferencePool) follow(ctx context.Context, pools *watched, podWatch *podWatch) {
	object, exists, _ := pools.GetStore().GetByKey(i.ref.Namespace + "/" + i.ref.Name) // in memory, which cannot fail
	if !exists {
		i.log.Warn("no such InferencePool", "pool", i.spec.Name, "name", i.ref.Namespace+"/"+i.ref.Name)
		podWatch.stop()
		clear(i.left)
		i.write(nil)
		i.once.Do(func() { close(i.synced) })
		return
	}
	pods, err := readInferencePool(object, i.ref)
	if err != nil {
		i.log.Error("InferencePool not taken, going on with what is known", "pool", i.spec.Name, "err", err)
		return
	}
	podWatch.follow(ctx, pods)
}

// podWatch is the current watch of pods, if any.
type podWatch struct {
	source *Kubernetes
	pods   Pods
	end    func() // nil: none runs
}

// follow replaces the watch if other pods are selected. The pool keeps its endpoints until the new watch has seen
// the cluster.
func (w *podWatch) follow(ctx context.Context, pods Pods) {
	if w.end != nil && reflect.DeepEqual(w.pods, pods) {
		return
	}
	w.stop()
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() { guard.Keep(ctx, "pods", func() { w.source.watchPods(ctx, pods) }); close(done) }()
	w.pods, w.end = pods, func() { cancel(); <-done }
}

func (w *podWatch) stop() {
	if w.end != nil {
		w.end()
		w.end = nil
	}
}

// inferencePool is the part of the resource that is read.
type inferencePool struct {
	Spec struct {
		Selector struct {
			MatchLabels map[string]string `json:"matchLabels"`
		} `json:"selector"`
		TargetPorts []struct {
			Number int `json:"number"`
		} `json:"targetPorts"`
		AppProtocol string `json:"appProtocol"`
	} `json:"spec"`
}

// readInferencePool returns the pods that the resource selects.
func readInferencePool(object any, ref PoolRef) (Pods, error) {
	raw, ok := object.(*unstructured.Unstructured)
	if !ok {
		return Pods{}, fmt.Errorf("unexpected object %T", object)
	}
	var pool inferencePool
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(raw.Object, &pool); err != nil {
		return Pods{}, err
	}
	if len(pool.Spec.Selector.MatchLabels) == 0 {
		return Pods{}, errors.New("spec.selector.matchLabels is empty, which would select every pod")
	}
	out := Pods{Namespace: ref.Namespace, Selector: labels.Set(pool.Spec.Selector.MatchLabels).String(), Scheme: "http",
		Labels: ref.Labels}
	if pool.Spec.AppProtocol == "kubernetes.io/h2c" {
		out.Scheme = "h2c"
	}
	for n, p := range pool.Spec.TargetPorts {
		if p.Number < 1 || p.Number > 65535 || n >= MaxPorts {
			return Pods{}, fmt.Errorf("spec.targetPorts[%d] is %d: ports are 1 to 65535, and at most %d", n, p.Number,
				MaxPorts)
		}
		out.Ports = append(out.Ports, p.Number)
	}
	if len(out.Ports) == 0 {
		return Pods{}, errors.New("spec.targetPorts is empty")
	}
	return out, nil
}
