package discovery

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	dynamicfake "k8s.io/client-go/dynamic/fake"
	"sigs.k8s.io/yaml"

	"tandem/kvstate"
)

func policyObject(t *testing.T, text string) *unstructured.Unstructured {
	raw, err := yaml.YAMLToJSON([]byte(text))
	require.NoError(t, err)
	u := &unstructured.Unstructured{}
	require.NoError(t, u.UnmarshalJSON(raw))
	return u
}

const (
	batch   = `{apiVersion: inference.networking.x-k8s.io/v1alpha2, kind: InferenceObjective, metadata: {name: batch, namespace: llm}, spec: {priority: -1, poolRef: {name: llm}}}`
	llmd    = `{apiVersion: llm-d.ai/v1alpha2, kind: InferenceObjective, metadata: {name: batch, namespace: llm}, spec: {priority: 3, poolRef: {group: llm-d.ai, kind: InferencePool, name: llm}}}`
	foreign = `{apiVersion: inference.networking.x-k8s.io/v1alpha2, kind: InferenceObjective, metadata: {name: gold, namespace: llm}, spec: {priority: 5, poolRef: {name: other}}}`
	unset   = `{apiVersion: inference.networking.x-k8s.io/v1alpha2, kind: InferenceObjective, metadata: {name: plain, namespace: llm}, spec: {poolRef: {name: llm}}}`
	younger = `{apiVersion: inference.networking.x-k8s.io/v1alpha2, kind: InferenceModelRewrite, metadata: {name: a, namespace: llm, creationTimestamp: "2026-02-01T00:00:00Z"},
		spec: {poolRef: {name: llm}, rules: [{matches: [{model: {type: Exact, value: m}}], targets: [{weight: 1, modelRewrite: late}]}, {targets: [{modelRewrite: any}]}]}}`
	older = `{apiVersion: inference.networking.x-k8s.io/v1alpha2, kind: InferenceModelRewrite, metadata: {name: b, namespace: llm, creationTimestamp: "2026-01-01T00:00:00Z"},
		spec: {poolRef: {name: llm}, rules: [{matches: [{model: {type: Exact, value: m}}], targets: [{weight: 3, modelRewrite: m-1}, {weight: 1, modelRewrite: m-2}]}]}}`
)

// An exact match precedes a generic one, the oldest resource precedes others, weights are shares.
func TestReadInferencePolicy(t *testing.T) {
	s := kvstate.New(kvstate.Options{})
	s.Policies.SetInferencePolicy("p", readInferencePolicy("llm",
		[]*unstructured.Unstructured{policyObject(t, batch), policyObject(t, foreign), policyObject(t, unset)},
		[]*unstructured.Unstructured{policyObject(t, younger), policyObject(t, older)}))
	require.EqualValues(t, -1, priorityOf(s, "batch"))
	require.Zero(t, priorityOf(s, "gold"), "another pool's")
	require.Zero(t, priorityOf(s, "plain"))
	shares := map[string]int{}
	for i := range uint64(100) {
		shares[s.Policies.Rewritten("p", "m", i)]++
	}
	require.Equal(t, map[string]int{"m-1": 75, "m-2": 25}, shares)
	require.Equal(t, "any", s.Policies.Rewritten("p", "x", 7))
	require.Empty(t, s.Policies.Rewritten("q", "m", 0), "a pool of which nothing is wanted")
}

func priorityOf(s *kvstate.State, objective string) int32 {
	p, _ := s.Policies.Priority("p", objective)
	return p
}

func TestInferencePoliciesAreWatched(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client := dynamicfake.NewSimpleDynamicClientWithCustomListKinds(runtime.NewScheme(), map[schema.GroupVersionResource]string{
			objectives(llmdGroup): "InferenceObjectiveList", rewrites(llmdGroup): "InferenceModelRewriteList",
			objectives(olderGroup): "InferenceObjectiveList", rewrites(olderGroup): "InferenceModelRewriteList",
		}, policyObject(t, batch))
		s := kvstate.New(kvstate.Options{})
		ctx, stop := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() {
			NewInferencePolicies(s, "p", client, PoolRef{Namespace: "llm", Name: "llm"}, quiet()).Run(ctx)
			close(ended)
		}()
		later := func() { time.Sleep(time.Second); synctest.Wait() }
		later()
		require.EqualValues(t, -1, priorityOf(s, "batch"))
		_, err := client.Resource(objectives(llmdGroup)).Namespace("llm").Create(ctx, policyObject(t, llmd), metav1.CreateOptions{})
		require.NoError(t, err)
		later()
		require.EqualValues(t, 3, priorityOf(s, "batch"), "llm-d.ai comes first")
		require.NoError(t, client.Resource(objectives(llmdGroup)).Namespace("llm").Delete(ctx, "batch", metav1.DeleteOptions{}))
		later()
		require.EqualValues(t, -1, priorityOf(s, "batch"))
		require.NoError(t, client.Resource(objectives(olderGroup)).Namespace("llm").Delete(ctx, "batch", metav1.DeleteOptions{}))
		later()
		require.Zero(t, priorityOf(s, "batch"))
		stop()
		<-ended
	})
}
