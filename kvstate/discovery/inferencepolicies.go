package discovery

import (
	"cmp"
	"context"
	"log/slog"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"

	"tandem/kvstate"
	"tandem/kvstate/inferencepolicy"
)

// InferencePolicies watches the resources about the requests of an InferencePool: InferenceObjective and
// InferenceModelRewrite, of llm-d.ai/v1alpha2 (llm-d-router, config/crd) and of the older group
// inference.networking.x-k8s.io/v1alpha2. If both groups have a resource of one name, llm-d.ai's applies. While
// resources are not installed, it retries with growing pauses.
type InferencePolicies struct {
	state   *kvstate.State
	pool    string
	cluster dynamic.Interface
	ref     PoolRef
	log     *slog.Logger
}

// NewInferencePolicies returns the watch for one pool.
func NewInferencePolicies(state *kvstate.State, pool string, cluster dynamic.Interface, ref PoolRef,
	log *slog.Logger) *InferencePolicies {
	return &InferencePolicies{state, pool, cluster, ref, log}
}

// The API groups of the watched resources: llm-d's, and the one before.
const (
	llmdGroup  = "llm-d.ai"
	olderGroup = "inference.networking.x-k8s.io"
)

func objectives(group string) schema.GroupVersionResource {
	return schema.GroupVersionResource{Group: group, Version: "v1alpha2", Resource: "inferenceobjectives"}
}

func rewrites(group string) schema.GroupVersionResource {
	return schema.GroupVersionResource{Group: group, Version: "v1alpha2", Resource: "inferencemodelrewrites"}
}

// Run watches until ctx ends.
func (i *InferencePolicies) Run(ctx context.Context) {
	changed := make(chan struct{}, 1)
	var known [4]*watched
	for n, resource := range []schema.GroupVersionResource{objectives(llmdGroup), objectives(olderGroup),
		rewrites(llmdGroup), rewrites(olderGroup)} {
		w, err := watch(ctx, i.cluster, resource, i.ref.Namespace, watchOptions{},
			i.log.With("resource", resource.GroupResource().String()), changed)
		if err != nil {
			i.log.Error("watching inference objectives and model rewrites", "pool", i.pool, "err", err)
			return
		}
		defer w.stop()
		known[n] = w
	}
	for next(ctx, changed, 0) {
		i.state.Policies.SetInferencePolicy(i.pool, readInferencePolicy(i.ref.Name,
			merge(all(known[0]), all(known[1])), merge(all(known[2]), all(known[3]))))
	}
}

// merge returns the objects of first, and those of second with other names.
func merge(first, second []*unstructured.Unstructured) []*unstructured.Unstructured {
	names := map[string]bool{}
	for _, o := range first {
		names[o.GetName()] = true
	}
	for _, o := range second {
		if !names[o.GetName()] {
			first = append(first, o)
		}
	}
	return first
}

func all(w *watched) (out []*unstructured.Unstructured) {
	for _, o := range w.GetStore().List() {
		if u, ok := o.(*unstructured.Unstructured); ok {
			out = append(out, u)
		}
	}
	return out
}

// policyResource is the part of both resources that is read.
type policyResource struct {
	Metadata metav1.ObjectMeta `json:"metadata"`
	Spec     struct {
		PoolRef struct {
			Name string `json:"name"`
		} `json:"poolRef"`
		Priority int32 `json:"priority"`
		Rules    []struct {
			Matches []struct {
				Model struct {
					Value string `json:"value"`
				} `json:"model"`
			} `json:"matches"`
			Targets []struct {
				Weight       int    `json:"weight"`
				ModelRewrite string `json:"modelRewrite"`
			} `json:"targets"`
		} `json:"rules"`
	} `json:"spec"`
}

// readInferencePolicy returns the policy of one pool. Rewrites are ordered: the oldest resource first, and its
// rules as listed. Invalid resources are left out.
func readInferencePolicy(pool string, objectives, rewrites []*unstructured.Unstructured) *inferencepolicy.Policy {
	out := &inferencepolicy.Policy{Objectives: map[string]int32{}}
	for _, o := range ofPool(pool, objectives) {
		out.Objectives[o.Metadata.Name] = o.Spec.Priority
	}
	for _, r := range ofPool(pool, rewrites) {
		for _, rule := range r.Spec.Rules {
			var targets []inferencepolicy.Target
			for _, t := range rule.Targets {
				if t.ModelRewrite != "" && t.Weight >= 0 {
					targets = append(targets, inferencepolicy.Target{Model: t.ModelRewrite, Weight: t.Weight})
				}
			}
			if len(rule.Matches) == 0 {
				out.Rewrites = append(out.Rewrites, inferencepolicy.Rewrite{Targets: targets})
			}
			for _, m := range rule.Matches {
				out.Rewrites = append(out.Rewrites, inferencepolicy.Rewrite{Model: m.Model.Value, Targets: targets})
			}
		}
	}
	return out
}

func ofPool(pool string, objects []*unstructured.Unstructured) (out []policyResource) {
	for _, o := range objects {
		var in policyResource
		if runtime.DefaultUnstructuredConverter.FromUnstructured(o.Object, &in) == nil && in.Spec.PoolRef.Name == pool {
			out = append(out, in)
		}
	}
	slices.SortFunc(out, func(a, b policyResource) int {
		return cmp.Or(a.Metadata.CreationTimestamp.Compare(b.Metadata.CreationTimestamp.Time),
			cmp.Compare(a.Metadata.Name, b.Metadata.Name))
	})
	return out
}
