package e2e

import (
	"fmt"
	"net"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/stretchr/testify/require"

	"tandem/e2e/loopback"
)

// kubelet plays the node of a cluster: its pods are engines on loopback addresses, and it reports them to the API
// server as a kubelet would.
type kubelet struct {
	*cluster
	fleet *fleet
	ports []string // of every pod, each an engine: its data-parallel ranks
	args  []string // more of every engine
	next  int
}

// pod is one pod and its engines, which are also in the fleet's lists.
type pod struct {
	name, role, ip string
	ranks          []*engine
}

const podsPath = "/api/v1/namespaces/" + namespace + "/pods"

// newKubelet makes a node whose pods serve on n ports, which are free on this machine.
func newKubelet(c *cluster, n int) *kubelet {
	k := &kubelet{cluster: c, args: []string{"--model", "tiny", "--decode-step", "1ms"}}
	for _, addr := range ports(c.t, n) {
		k.ports = append(k.ports, portOf(addr))
	}
	return k
}

// run creates a pod, starts its engines and reports it as ready.
func (k *kubelet) run(name, role string, labels ...string) *pod {
	k.t.Helper()
	p := k.prepare(name, role, labels...)
	k.ready(p, true)
	return p
}

// prepare makes a pod whose engines run, and which is not ready yet. labels are name: value.
func (k *kubelet) prepare(name, role string, labels ...string) *pod {
	k.t.Helper()
	k.next++
	p := &pod{name: name, role: role, ip: fmt.Sprintf("127.0.1.%d", k.next)}
	bin, err := binaries()
	require.NoError(k.t, err)
	for _, port := range k.ports {
		side := net.JoinHostPort(p.ip, portOf(ports(k.t, 1)[0]))
		e := &engine{addr: net.JoinHostPort(p.ip, port), role: role, dialect: "nixl"}
		e.args = append([]string{"--listen", e.addr, "--side-channel", side, "--role", role}, k.args...)
		e.process = startProcess(k.t, k.fleet.dir, name+"-"+port, filepath.Join(bin, "enginesim"), e.args...)
		p.ranks = append(p.ranks, e)
		if role == "prefill" {
			k.fleet.prefills = append(k.fleet.prefills, e)
		} else {
			k.fleet.decodes = append(k.fleet.decodes, e)
		}
	}
	for _, e := range p.ranks {
		k.fleet.waitFor(e.process, "http://"+e.addr+"/health")
	}
	k.must(http.MethodPost, podsPath, "application/yaml", fmt.Sprintf(`{apiVersion: v1, kind: Pod, metadata: {name: %s, labels: {%s}},
spec: {nodeName: node, terminationGracePeriodSeconds: 300, containers: [{name: engine, image: enginesim}]}}`,
		name, strings.Join(append(labels, "app: llm", "llm-d.ai/role: "+role), ", ")))
	return p
}

// ready reports a pod's readiness and address to the API server.
func (k *kubelet) ready(p *pod, ready bool) {
	k.t.Helper()
	status := map[bool]string{true: "True", false: "False"}[ready]
	k.must(http.MethodPatch, podsPath+"/"+p.name+"/status", "application/merge-patch+json", fmt.Sprintf(
		`{"status":{"phase":"Running","podIP":%q,"podIPs":[{"ip":%q}],"conditions":[{"type":"Ready","status":%q,"lastTransitionTime":%q}]}}`,
		p.ip, p.ip, status, time.Now().UTC().Format(time.RFC3339)))
}

// remove deletes a pod: from here on it is terminating, and still runs.
func (k *kubelet) remove(p *pod) {
	k.t.Helper()
	text := k.must(http.MethodDelete, podsPath+"/"+p.name, "application/json", `{"kind":"DeleteOptions","apiVersion":"v1","gracePeriodSeconds":300}`)
	require.Contains(k.t, text, "deletionTimestamp")
}

// finish does a kubelet's work on a terminating pod after the preStop hook: it stops the engines, waits until they
// have ended, and reports the pod gone.
func (k *kubelet) finish(p *pod) {
	k.t.Helper()
	for _, e := range p.ranks {
		require.Eventually(k.t, func() bool {
			url := "http://" + e.addr
			return metric(k.t, url, "enginesim_blocks_held") == 0 && metric(k.t, url, "vllm:num_requests_running") == 0
		}, 20*time.Second, 10*time.Millisecond, "what runs on %s does not end", p.name)
		require.Zero(k.t, metric(k.t, "http://"+e.addr, "enginesim_violations_total"), "violations on %s", p.name)
	}
	for _, e := range p.ranks {
		e.stop(syscall.SIGTERM)
	}
	k.must(http.MethodDelete, podsPath+"/"+p.name, "application/json", `{"kind":"DeleteOptions","apiVersion":"v1","gracePeriodSeconds":0}`)
	gone := func(e *engine) bool { return slices.Contains(p.ranks, e) }
	k.fleet.prefills, k.fleet.decodes = slices.DeleteFunc(k.fleet.prefills, gone), slices.DeleteFunc(k.fleet.decodes, gone)
}

// asked returns the number of requests that engines received.
func (k *kubelet) asked(of ...*engine) (n int) {
	k.t.Helper()
	for _, e := range of {
		n += int(metric(k.t, "http://"+e.addr, "enginesim_requests_total", `path="/v1/chat/completions"`))
	}
	return n
}

// comes checks engines whose endpoints the cluster has just named: every one of them gets a request within a second.
func (k *kubelet) comes(what string, of ...*engine) {
	k.t.Helper()
	began, before := time.Now(), map[*engine]int{}
	for _, e := range of {
		before[e] = k.asked(e)
	}
	require.Eventually(k.t, func() bool {
		return !slices.ContainsFunc(of, func(e *engine) bool { return k.asked(e) == before[e] })
	}, within, 2*time.Millisecond, "%s: not asked within %v", what, within)
	k.t.Logf("%s: asked after %v", what, time.Since(began).Round(time.Millisecond))
}

// goes checks engines whose endpoints the cluster has just removed: they get no new request a second later.
func (k *kubelet) goes(load *wholeTraffic, what string, of ...*engine) {
	k.t.Helper()
	began := time.Now()
	require.Eventually(k.t, func() bool {
		state := k.fleet.state(0)
		return !slices.ContainsFunc(of, func(e *engine) bool { s, there := state[e.addr]; return there && !s.Draining })
	}, within, 2*time.Millisecond, "%s: not known within %v", what, within)
	k.t.Logf("%s: known after %v", what, time.Since(began).Round(time.Millisecond))
	for time.Since(began) < within {
		load.more(k.t, 1)
	}
	before := k.asked(of...)
	load.more(k.t, 40)
	require.Equal(k.t, before, k.asked(of...), "%s: asked after %v", what, within)
}

// end ends the load and checks its results, before the fleet's own account.
func (k *kubelet) end(load *wholeTraffic) {
	k.t.Helper()
	load.end(k.t)
	k.fleet.account()
	k.fleet.lenient = true
}

// within is the time in which traffic must follow the cluster.
const within = time.Second

// thinPod is a pod whose address leads to an engine that other pods share.
type thinPod struct {
	name, addr string
	listener   net.Listener
}

// thin makes a ready pod: one prefill pod after four decode pods.
func (k *kubelet) thin(i int) *thinPod {
	role, engines := "decode", k.fleet.decodes
	if i%5 == 0 {
		role, engines = "prefill", k.fleet.prefills
	}
	ip := fmt.Sprintf("127.2.%d.%d", i/250, i%250+1)
	p := &thinPod{name: fmt.Sprintf("thin-%d", i), addr: net.JoinHostPort(ip, k.ports[0])}
	var err error
	p.listener, err = net.Listen("tcp", p.addr)
	require.NoError(k.t, err)
	k.t.Cleanup(func() { _ = p.listener.Close() })
	go loopback.Forward(p.listener, engines[i%len(engines)].addr)
	k.must(http.MethodPost, podsPath, "application/yaml", fmt.Sprintf(`{apiVersion: v1, kind: Pod, `+
		`metadata: {name: %s, labels: {app: llm, llm-d.ai/role: %s}}, `+
		`spec: {nodeName: node, terminationGracePeriodSeconds: 300, containers: [{name: engine, image: enginesim}]}}`,
		p.name, role))
	k.ready(&pod{name: p.name, ip: ip}, true)
	return p
}

// gone ends a pod that is terminating. Its connections end by themselves.
func (k *kubelet) gone(p *thinPod) {
	k.must(http.MethodDelete, podsPath+"/"+p.name, "application/json",
		`{"kind":"DeleteOptions","apiVersion":"v1","gracePeriodSeconds":0}`)
	_ = p.listener.Close()
}

// knows waits until Tandem has these endpoints, and no other.
func (k *kubelet) knows(pods map[string]*thinPod) {
	k.t.Helper()
	soon(k.t, "Tandem knows the pods that live", func() bool {
		state := k.fleet.state(0)
		for addr := range pods {
			if _, there := state[addr]; !there {
				return false
			}
		}
		return len(state) == len(pods)
	})
}
