package discovery

import (
	"context"
	"errors"
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"tandem/kvstate"
	"tandem/kvstate/enginehttp"
)

// engineAnswers is a network of engines: their answers, by address and path. Others refuse connections.
type engineAnswers map[string]map[string]string

func (n engineAnswers) RoundTrip(r *http.Request) (*http.Response, error) {
	paths, there := n[r.URL.Host]
	if !there {
		return nil, errors.New("connection refused")
	}
	status, body := http.StatusNotFound, `{"detail":"Not Found"}`
	if text, known := paths[r.URL.Path]; known {
		status, body = http.StatusOK, text
	}
	return &http.Response{StatusCode: status, Body: io.NopCloser(strings.NewReader(body)), Request: r, Header: http.Header{}}, nil
}

// factsOf returns the facts of such a network.
func factsOf(n http.RoundTripper, sameRelease bool) *Facts {
	f := NewFacts(sameRelease, "", quiet())
	f.client = enginehttp.Over(n, modelsTimeout)
	return f
}

// watching runs discovery of pods with the label app=llm, whose engines are asked, while do runs.
func watching(t *testing.T, facts *Facts, convention string, do func(s *kvstate.State, pods func(...*corev1.Pod)), there ...*corev1.Pod) {
	synctest.Test(t, func(t *testing.T) {
		client := clusterOf()
		create := func(all ...*corev1.Pod) {
			for _, p := range all {
				if p.Labels == nil {
					p.Labels = map[string]string{}
				}
				p.Labels["app"] = "llm"
				_, err := client.Resource(podResource).Namespace("llm").Create(t.Context(), raw(p), metav1.CreateOptions{})
				require.NoError(t, err)
			}
		}
		create(there...)
		labels, err := Conventions(convention)
		require.NoError(t, err)
		s := kvstate.New(kvstate.Options{})
		k := NewKubernetes(s, kvstate.PoolSpec{Name: "p"}, client, Pods{Namespace: "llm", Selector: "app=llm", Ports: []int{80}, Labels: labels}, quiet())
		k.Ask(facts)
		ctx, stop := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() { k.Run(ctx); close(ended) }()
		<-k.Synced()
		time.Sleep(2 * settle)
		synctest.Wait()
		do(s, func(all ...*corev1.Pod) { create(all...); time.Sleep(3 * settle); synctest.Wait() })
		stop()
		<-ended
		synctest.Wait()
	})
}

// A pod without a role label has the role that its engine reports.
func TestReportedRoles(t *testing.T) {
	engines := engineAnswers{
		"10.0.0.1:80": {"/server_info": `{"version":"0.5.23","disaggregation_mode":"prefill","disaggregation_bootstrap_port":9001}`},
		"10.0.0.2:80": {"/server_info": `{"version":"0.5.23","disaggregation_mode":"decode"}`},
		"10.0.0.3:80": {"/server_info": `{"disaggregation_mode":"null"}`},
		"10.0.0.4:80": {"/version": `{"version":"0.32.0"}`, "/server_info": `{"disaggregation_mode":"prefill"}`}, // vLLM: the first answer is enough
		"10.0.0.5:80": {},                                                                                        // reports nothing
		"10.0.0.6:80": {"/server_info": `{"disaggregation_mode":"decode"}`},
	}
	pods := []*corev1.Pod{pod("1", "10.0.0.1", nil), pod("2", "10.0.0.2", nil), pod("3", "10.0.0.3", nil), pod("4", "10.0.0.4", nil), pod("5", "10.0.0.5", nil),
		pod("6", "10.0.0.6", map[string]string{"llm-d.ai/role": "prefill"}), pod("7", "10.0.0.7", nil)} // 7 does not answer
	watching(t, factsOf(engines, false), "llm-d", func(s *kvstate.State, _ func(...*corev1.Pod)) {
		require.Equal(t, []string{"prefill 10.0.0.1:80", "decode 10.0.0.2:80", "both 10.0.0.3:80", "decode 10.0.0.4:80", "decode 10.0.0.5:80", "prefill 10.0.0.6:80", "decode 10.0.0.7:80"}, shown(s))
		require.Equal(t, kvstate.Transfer{Release: "0.5.23", BootstrapPort: 9001}, s.Pool("p").Endpoint("10.0.0.1:80").Transfer)
		require.Empty(t, s.Pool("p").Endpoint("10.0.0.1:80").Engine, "they take each other's KV")
	}, pods...)
	watching(t, factsOf(engines, false), "aibrix", func(s *kvstate.State, _ func(...*corev1.Pod)) {
		require.Equal(t, []string{"prefill 10.0.0.1:80", "decode 10.0.0.2:80"}, shown(s), "what neither says is left out")
	}, pod("1", "10.0.0.1", nil), pod("2", "10.0.0.2", nil), pod("4", "10.0.0.4", nil), pod("5", "10.0.0.5", nil), pod("6", "10.0.0.6", map[string]string{"role-name": "router"}))
}

// A rolling update of the engines: engines of two releases do not pair if they refuse each other's KV.
func TestReportedReleases(t *testing.T) {
	role := func(r string) map[string]string { return map[string]string{"llm-d.ai/role": r} }
	engines := engineAnswers{"10.0.0.1:80": {"/version": `{"version":"0.31.0+cu129"}`}, "10.0.0.2:80": {"/version": `{"version":"0.32.0"}`}}
	watching(t, factsOf(engines, true), "llm-d", func(s *kvstate.State, create func(...*corev1.Pod)) {
		require.Equal(t, "0.31.0", s.Pool("p").Endpoint("10.0.0.1:80").Engine)
		create(pod("2", "10.0.0.2", role("decode")))
		require.Equal(t, "0.32.0", s.Pool("p").Endpoint("10.0.0.2:80").Engine)
		require.Equal(t, "0.31.0", s.Pool("p").Endpoint("10.0.0.1:80").Engine)
	}, pod("1", "10.0.0.1", role("prefill")))
}

// An engine that does not answer is asked until it does, each at most every ten seconds.
func TestEnginesAreAskedAgain(t *testing.T) {
	var asked atomic.Int32
	engines := engineAnswers{"10.0.0.1:80": {"/server_info": `{"disaggregation_mode":"prefill"}`}}
	network := roundTrips(func(r *http.Request) (*http.Response, error) {
		if asked.Add(1) < 3 {
			return nil, errors.New("connection refused")
		}
		return engines.RoundTrip(r)
	})
	watching(t, factsOf(network, false), "llm-d", func(s *kvstate.State, _ func(...*corev1.Pod)) {
		require.Equal(t, []string{"decode 10.0.0.1:80"}, shown(s), "as the convention has it")
		require.EqualValues(t, 1, asked.Load())
		time.Sleep(askAgainEvery + time.Second)
		require.EqualValues(t, 2, asked.Load())
		time.Sleep(askAgainEvery)
		require.Equal(t, []string{"prefill 10.0.0.1:80"}, shown(s))
		time.Sleep(time.Hour)
		require.EqualValues(t, 4, asked.Load(), "two paths; and then it is known")
	}, pod("1", "10.0.0.1", nil))
}

type roundTrips func(*http.Request) (*http.Response, error)

func (f roundTrips) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// FuzzFacts: any report of an engine is accepted or refused without panic.
func FuzzFacts(f *testing.F) {
	f.Add(`{"version":"0.32.0"}`)
	f.Add(`{"disaggregation_mode":null,"disaggregation_bootstrap_port":70000}`)
	f.Fuzz(func(t *testing.T, body string) {
		facts := factsOf(engineAnswers{"10.0.0.1:80": {"/version": body}}, true)
		reported, err := facts.question(t.Context(), &kvstate.Endpoint{EndpointSpec: kvstate.EndpointSpec{Addr: "10.0.0.1:80"}})
		if err != nil {
			require.Equal(t, fact{}, reported)
		}
		require.NotContains(t, reported.release, "+")
	})
}
