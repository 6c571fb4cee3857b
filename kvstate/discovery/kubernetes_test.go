package discovery

import (
	"bytes"
	"context"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	dynamicfake "k8s.io/client-go/dynamic/fake"

	"tandem/kvstate"
)

// pod is a ready pod of the namespace llm.
func pod(name, ip string, labels map[string]string) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "llm", Labels: labels},
		Status: corev1.PodStatus{Phase: corev1.PodRunning, PodIP: ip, Conditions: []corev1.PodCondition{
			{Type: corev1.PodReady, Status: corev1.ConditionTrue},
		}},
	}
}

// raw is a pod as the dynamic client has it.
func raw(p *corev1.Pod) *unstructured.Unstructured {
	p.APIVersion, p.Kind = "v1", "Pod"
	o, err := runtime.DefaultUnstructuredConverter.ToUnstructured(p)
	if err != nil {
		panic(err)
	}
	return &unstructured.Unstructured{Object: o}
}

// clusterOf is an API server that has these pods.
func clusterOf(pods ...*corev1.Pod) *dynamicfake.FakeDynamicClient {
	client := dynamicfake.NewSimpleDynamicClientWithCustomListKinds(runtime.NewScheme(), map[schema.GroupVersionResource]string{
		podResource: "PodList", inferencePools: "InferencePoolList",
	})
	for _, p := range pods {
		if err := client.Tracker().Create(podResource, raw(p), p.Namespace); err != nil {
			panic(err)
		}
	}
	return client
}

func unready(p *corev1.Pod) *corev1.Pod {
	p.Status.Conditions[0].Status = corev1.ConditionFalse
	return p
}

// leaving is a pod that is being deleted, and so not ready any more.
func leaving(p *corev1.Pod) *corev1.Pod {
	p = unready(p)
	now := metav1.Now()
	p.DeletionTimestamp, p.Finalizers = &now, []string{"kubernetes"}
	return p
}

func phase(p *corev1.Pod, phase corev1.PodPhase) *corev1.Pod {
	p.Status.Phase = phase
	return p
}

// Which pods are endpoints, by convention.
func TestPodsBecomeEndpoints(t *testing.T) {
	type l = map[string]string
	for _, c := range []struct {
		convention string
		pods       []*corev1.Pod
		want       []string
	}{
		{"llm-d", []*corev1.Pod{
			pod("c", "10.0.0.3", l{"llm-d.ai/role": "both"}),
			pod("a", "10.0.0.1", l{"llm-d.ai/role": "prefill"}),
			pod("b", "10.0.0.2", l{"llm-d.ai/role": "decode"}),
			pod("d", "10.0.0.4", l{"llm-d.ai/role": "prefill-decode"}),
			pod("e", "10.0.0.5", nil),
			pod("k", "10.0.0.9", l{"llm-d.ai/role": "encode"}),
			pod("l", "10.0.0.10", l{"llm-d.ai/role": "encode-prefill"}),
			pod("m", "10.0.0.11", l{"llm-d.ai/role": "encode-prefill-decode"}),
			pod("n", "10.0.0.12", l{"llm-d.ai/role": "encode-decode"}),
			pod("o", "10.0.0.13", l{"llm-d.ai/role": "router"}),
			unready(pod("f", "10.0.0.6", l{"llm-d.ai/role": "decode"})),
			leaving(pod("g", "10.0.0.7", l{"llm-d.ai/role": "decode"})),
			phase(leaving(pod("h", "10.0.0.8", nil)), corev1.PodSucceeded),
			phase(pod("i", "", nil), corev1.PodPending),
			pod("j", "", nil),
		}, []string{"prefill 10.0.0.1:8000", "decode 10.0.0.2:8000", "both 10.0.0.3:8000", "both 10.0.0.4:8000", "decode 10.0.0.5:8000", "decode 10.0.0.7:8000 draining", "encode 10.0.0.9:8000",
			"prefill 10.0.0.10:8000", "both 10.0.0.11:8000", "decode 10.0.0.12:8000"}},
		{"aibrix", []*corev1.Pod{
			pod("a", "10.0.0.1", l{"role-name": "prefill", "roleset-name": "x", "model.aibrix.ai/port": "9000"}),
			pod("b", "10.0.0.2", l{"role-name": "decode", "roleset-name": "x", "model.aibrix.ai/port": "none"}),
			pod("c", "10.0.0.3", l{"role-name": "router"}),
			pod("d", "10.0.0.4", nil),
		}, []string{"prefill 10.0.0.1:9000 x", "decode 10.0.0.2:8000 x"}},
		{"production-stack", []*corev1.Pod{
			pod("a", "10.0.0.1", l{"model": "prefill"}), pod("b", "10.0.0.2", l{"model": "decode"}), pod("c", "10.0.0.3", l{"model": "other"}),
		}, []string{"prefill 10.0.0.1:8000", "decode 10.0.0.2:8000"}},
		{"kthena", []*corev1.Pod{
			pod("a", "2001:db8::1", l{"modelserving.volcano.sh/role": "prefill", "modelserving.volcano.sh/group-name": "g-0"}),
			pod("b", "::ffff:10.0.0.2", l{"modelserving.volcano.sh/role": "decode", "modelserving.volcano.sh/group-name": "g-0"}),
		}, []string{"prefill [2001:db8::1]:8000 g-0", "decode 10.0.0.2:8000 g-0"}},
	} {
		t.Run(c.convention, func(t *testing.T) {
			labels, err := Conventions(c.convention)
			require.NoError(t, err)
			p := podPool{ports: []int{8000}, labels: labels}
			require.Equal(t, c.want, lines((*Facts)(nil).fill(t.Context(), p.endpoints(c.pods), labels.Default, nil)))
		})
	}
	dp, err := Conventions("llm-d")
	require.NoError(t, err)
	dp.Ranks = "dp"
	ranked := podPool{ports: []int{8000}, labels: dp}
	pods := []*corev1.Pod{pod("a", "10.0.0.1", l{"dp": "2"}), pod("b", "10.0.0.2", l{"dp": "65"}), pod("c", "10.0.0.3", nil)}
	want := []string{"decode 10.0.0.1:8000#0", "decode 10.0.0.1:8000#1", "decode 10.0.0.2:8000", "decode 10.0.0.3:8000"}
	require.Equal(t, want,
		lines((*Facts)(nil).fill(t.Context(), ranked.endpoints(pods), dp.Default, nil)), "65 are more than a port may have")

	_, err = Conventions("dynamo")
	require.ErrorContains(t, err, "one of llm-d, aibrix, production-stack, kthena")
}

// A pod with an unknown role gets no requests, which is logged once. The node of a pod is known.
func TestUnknownRolesAndNodes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log bytes.Buffer
		labels, err := Conventions("llm-d")
		require.NoError(t, err)
		a := pod("a", "10.0.0.1", map[string]string{"llm-d.ai/role": "decode"})
		a.Spec.NodeName = "node-7"
		client := clusterOf(a, pod("b", "10.0.0.2", map[string]string{"llm-d.ai/role": "decoder"}))
		s := kvstate.New(kvstate.Options{})
		k := NewKubernetes(s, kvstate.PoolSpec{Name: "p"}, client, Pods{Namespace: "llm", Ports: []int{8000}, Labels: labels},
			slog.New(slog.NewTextHandler(&log, nil)))
		ctx, stop := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() { k.Run(ctx); close(ended) }()
		<-k.Synced()
		synctest.Wait()
		require.Equal(t, []string{"decode 10.0.0.1:8000"}, shown(s))
		require.Equal(t, "node-7", s.Pool("p").Endpoints()[0].Node)
		_, err = client.Resource(podResource).Namespace("llm").Create(ctx, raw(pod("c", "10.0.0.3", map[string]string{"llm-d.ai/role": "decoder"})), metav1.CreateOptions{})
		require.NoError(t, err)
		time.Sleep(time.Second)
		stop()
		<-ended
		require.Equal(t, 1, strings.Count(log.String(), "level=WARN"), log.String())
		require.Contains(t, log.String(), `role=decoder`)
	})
}

// lines are endpoints as a test reads them.
func lines(eps []kvstate.EndpointSpec) []string {
	var out []string
	for _, e := range eps {
		line := e.Role.String() + " " + e.Addr
		if e.Group != "" {
			line += " " + e.Group
		}
		if e.Draining {
			line += " draining"
		}
		out = append(out, line)
	}
	return out
}

func shown(s *kvstate.State) []string {
	var all []kvstate.EndpointSpec
	for _, e := range s.Pool("p").Endpoints() {
		all = append(all, e.EndpointSpec)
	}
	return lines(all)
}

func TestKubernetes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		app := map[string]string{"app": "vllm", "llm-d.ai/role": "prefill"}
		d := map[string]string{"app": "vllm", "llm-d.ai/role": "decode"}
		client := clusterOf(pod("a", "10.0.0.1", app), pod("b", "10.0.0.2", d), pod("z", "10.0.0.9", map[string]string{"app": "other"}))
		labels, err := Conventions("llm-d")
		require.NoError(t, err)
		s := kvstate.New(kvstate.Options{})
		k := NewKubernetes(s, kvstate.PoolSpec{Name: "p"}, client,
			Pods{Namespace: "llm", Selector: "app=vllm", Ports: []int{8000, 8001}, Labels: labels}, quiet())
		require.Empty(t, addrs(s, "p"), "there, and empty: 503 and not 404")
		ctx, stop := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() { k.Run(ctx); close(ended) }()
		<-k.Synced()
		synctest.Wait() // also until it watches: client-go's fake reports nothing that happened before
		require.Equal(t, []string{"prefill 10.0.0.1:8000", "prefill 10.0.0.1:8001", "decode 10.0.0.2:8000", "decode 10.0.0.2:8001"}, shown(s))

		pods := client.Resource(podResource).Namespace("llm")
		later := func() { time.Sleep(time.Second); synctest.Wait() }
		_, err = pods.Create(ctx, raw(pod("c", "10.0.0.3", d)), metav1.CreateOptions{})
		require.NoError(t, err)
		later()
		require.Len(t, addrs(s, "p"), 6)

		stays := s.Pool("p").Endpoint("10.0.0.2:8000")
		booked := s.Bookings.Reserve(stays, kvstate.Booking{For: kvstate.RoleDecode, PromptTokens: 10})
		_, err = pods.Update(ctx, raw(leaving(pod("b", "10.0.0.2", d))), metav1.UpdateOptions{})
		require.NoError(t, err)
		later()
		require.Contains(t, shown(s), "decode 10.0.0.2:8000 draining", "it answers still, and gets nothing new")
		var view kvstate.View
		s.View(s.Pool("p"), nil, &view)
		for _, c := range view.Endpoints {
			require.Equal(t, !c.Endpoint.Draining, c.Usable, c.Endpoint.Addr)
		}
		require.NoError(t, pods.Delete(ctx, "b", metav1.DeleteOptions{}))
		_, err = pods.Update(ctx, raw(unready(pod("c", "10.0.0.3", d))), metav1.UpdateOptions{})
		require.NoError(t, err)
		later()
		require.Equal(t, []string{"prefill 10.0.0.1:8000", "prefill 10.0.0.1:8001", "decode 10.0.0.3:8000 draining", "decode 10.0.0.3:8001 draining"}, shown(s),
			"one is gone for good, the other may still be fetched from")
		time.Sleep(drainFor - 2*time.Second)
		require.Len(t, shown(s), 4)
		time.Sleep(2 * time.Second)
		require.Equal(t, []string{"prefill 10.0.0.1:8000", "prefill 10.0.0.1:8001"}, shown(s))
		_, err = pods.Update(ctx, raw(pod("c", "10.0.0.3", d)), metav1.UpdateOptions{})
		require.NoError(t, err)
		later()
		require.Contains(t, shown(s), "decode 10.0.0.3:8000", "ready again")
		require.True(t, s.Bookings.Release(booked), "what runs on a pod that left ends as usual")
		stop()
		<-ended
	})
}

func inferencePoolObject(selector string, ports ...int64) *unstructured.Unstructured {
	var targets []any
	for _, p := range ports {
		targets = append(targets, map[string]any{"number": p})
	}
	return &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "inference.networking.k8s.io/v1", "kind": "InferencePool",
		"metadata": map[string]any{"name": "llm", "namespace": "llm"},
		"spec": map[string]any{
			"selector": map[string]any{"matchLabels": map[string]any{"app": selector}}, "targetPorts": targets, "appProtocol": "kubernetes.io/h2c",
		},
	}}
}

func TestInferencePool(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client := clusterOf(pod("a", "10.0.0.1", map[string]string{"app": "vllm"}), pod("b", "10.0.0.2", map[string]string{"app": "sglang"}))
		require.NoError(t, client.Tracker().Create(inferencePools, inferencePoolObject("vllm", 8000), "llm"))
		labels, err := Conventions("llm-d")
		require.NoError(t, err)
		s := kvstate.New(kvstate.Options{})
		source := NewInferencePool(s, kvstate.PoolSpec{Name: "p"}, client, PoolRef{Namespace: "llm", Name: "llm", Labels: labels}, quiet())
		ctx, stop := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() { source.Run(ctx); close(ended) }()
		<-source.Synced()
		synctest.Wait()
		require.Equal(t, []string{"decode 10.0.0.1:8000"}, shown(s))
		require.Equal(t, "h2c", s.Pool("p").Endpoints()[0].Scheme)

		pools := client.Resource(inferencePools).Namespace("llm")
		later := func() { time.Sleep(time.Second); synctest.Wait() }
		change := func(o *unstructured.Unstructured) {
			_, err := pools.Update(ctx, o, metav1.UpdateOptions{})
			require.NoError(t, err)
			later()
		}
		change(inferencePoolObject("vllm", 8000, 8001))
		require.Equal(t, []string{"decode 10.0.0.1:8000", "decode 10.0.0.1:8001"}, shown(s), "another rank")
		change(inferencePoolObject("sglang", 8000))
		require.Equal(t, []string{"decode 10.0.0.2:8000", "decode 10.0.0.1:8000 draining", "decode 10.0.0.1:8001 draining"}, shown(s), "another selector")
		time.Sleep(drainFor)
		require.Equal(t, []string{"decode 10.0.0.2:8000"}, shown(s))
		change(inferencePoolObject("sglang", 99999))
		require.Equal(t, []string{"decode 10.0.0.2:8000"}, shown(s), "what makes no sense changes nothing")
		require.NoError(t, pools.Delete(ctx, "llm", metav1.DeleteOptions{}))
		later()
		require.Empty(t, shown(s))
		_, err = pools.Create(ctx, inferencePoolObject("vllm", 8000), metav1.CreateOptions{})
		require.NoError(t, err)
		later()
		require.Equal(t, []string{"decode 10.0.0.1:8000"}, shown(s))
		stop()
		<-ended
	})
}

func TestInferencePoolsThatMakeNoSense(t *testing.T) {
	for want, o := range map[string]*unstructured.Unstructured{
		"every pod":    {Object: map[string]any{"spec": map[string]any{"targetPorts": []any{map[string]any{"number": int64(1)}}}}},
		"is empty":     inferencePoolObject("x"),
		"at most 8":    inferencePoolObject("x", 1, 2, 3, 4, 5, 6, 7, 8, 9),
		"1 to 65535":   inferencePoolObject("x", 0),
		"unrecognized": {Object: map[string]any{"spec": map[string]any{"targetPorts": "8000"}}},
	} {
		_, err := readInferencePool(o, PoolRef{})
		require.Error(t, err)
		if want != "unrecognized" {
			require.ErrorContains(t, err, want)
		}
	}
}
