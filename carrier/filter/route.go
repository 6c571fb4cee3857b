package filter

import (
	"cmp"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"tandem/extproc/faults"
	"tandem/extproc/names"
	"tandem/extproc/openai"
	"tandem/kvstate"
)

// Route is how legs get to their endpoints where the request's route is another's, such as Envoy Gateway's: D's leg
// stays on that route, and its endpoint is chosen in the route's own cluster. Nil: routes and clusters are Tandem's own
// (envoy-configs, inside.go), whose ORIGINAL_DST clusters know no endpoint before it was used, so that none can be
// chosen in them.
type Route struct {
	// Cluster is that of the legs that the filter calls: P's, that of an endpoint that encodes, and D's of a stream
	// that shall outlive its engine. "": that of rule Rule of the request's HTTPRoute or, without one, the request's
	// own.
	Cluster string
	Rule    string // a number
	// Strict: that cluster connects to the endpoint that a call names, or not at all (Envoy's dynamic forward proxy).
	// Any other one may choose another endpoint if it lacks that one, since a call's choice is only a header for its
	// load balancer (Envoy 1.40 has no override for calls).
	Strict bool
	// Holds: the cluster of D's leg has the filter that holds D's answer until P's leg has ended ([Answers]).
	Holds bool

	keepsNothing atomic.Bool            // a request's body was not kept: the route has no retry policy
	denied       atomic.Pointer[denial] // the last request that a filter behind this one should not have refused

	mu      sync.Mutex
	reached map[string]time.Time // when a call last went to an endpoint of a cluster, with both names
}

// A dynamic forward proxy looks an endpoint up with the first call to it, and Envoy's client breaks a call off that has
// a body and has to wait for that (1.40, async_client_impl.cc). So a call without a body goes first to an endpoint that
// the proxy may have forgotten: it remembers one for 5 minutes after its last use.
const (
	knownFor    = 4 * time.Minute
	firstLimit  = 5 * time.Second
	mostReached = 4096
)

// reach runs then, which makes a call with a body to an endpoint, as soon as Envoy can make one.
func (f *Filter) reach(e *kvstate.Endpoint, then func()) {
	r := f.route
	if r == nil || !r.Strict {
		then()
		return
	}
	cluster := f.callCluster(e)
	name := cluster + " " + e.HostPort()
	if r.knows(name) {
		then()
		return
	}
	f.hop.first = func() {
		r.note(name)
		then()
	}
	first := &Call{Cluster: cluster, Timeout: firstLimit, Set: []Header{
		{":method", "GET"}, {":path", "/health"}, {":authority", f.callHost(e)}, {"accept", names.ContentTypeJSON},
	}}
	if !f.envoy.Call(first) {
		f.hop.first = nil
		then()
	}
}

// knows reports whether an endpoint of a cluster was called a while ago at most.
func (r *Route) knows(name string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return time.Since(r.reached[name]) < knownFor
}

func (r *Route) note(name string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.reached == nil || len(r.reached) >= mostReached {
		r.reached = map[string]time.Time{}
	}
	r.reached[name] = time.Now()
}

// callCluster returns the cluster of a leg that the filter calls.
func (f *Filter) callCluster(e *kvstate.Endpoint) string {
	r := f.route
	switch {
	case r == nil:
		return cluster(e)
	case r.Cluster != "" || r.Rule == "":
		return cmp.Or(r.Cluster, f.cluster)
	}
	// Envoy Gateway names clusters httproute/NAMESPACE/NAME/rule/NUMBER (1.9.1, internal/gatewayapi)
	return f.cluster[:strings.LastIndexByte(f.cluster, '/')+1] + r.Rule
}

// callHost returns the Host of such a leg. A dynamic forward proxy connects to where it says.
func (f *Filter) callHost(e *kvstate.Endpoint) string {
	if f.route != nil {
		return e.HostPort()
	}
	return cmp.Or(e.ServerNameSent(), string(f.m.pass.Head.Authority))
}

// arrives prepares a request that comes on another's route: nothing that steers Tandem or Envoy is the client's to set,
// and Envoy keeps a body of any size that is read.
func (f *Filter) arrives() {
	f.cluster = f.envoy.Cluster()
	f.envoy.KeepUpTo(4*f.s.MaxBodyBytes + bodyMargin)
	for _, at := range f.head.list {
		name := f.head.memory[at.name:at.value]
		if string(name) != headerAttempt && steers(string(name)) {
			f.envoy.RemoveHeader(string(name))
		}
	}
}

// asItCame undoes what the route has made of the request on its way to D: of its path and host (HTTPRoute's URLRewrite,
// the name of an https engine), and of its headers (RequestHeaderModifier). Envoy looks the route up again for a
// request that begins again: it would find another one, and the route would add its headers once more.
func (f *Filter) asItCame() {
	if f.route == nil {
		return
	}
	now, came := map[string]string{}, map[string]string{}
	f.envoy.EachHeader(func(name, value []byte) { addValue(now, name, value) })
	for _, at := range f.head.list {
		addValue(came, f.head.memory[at.name:at.value], f.head.memory[at.value:at.end])
	}
	for name := range now {
		if _, ok := came[name]; !ok {
			f.envoy.RemoveHeader(name)
		}
	}
	for name, value := range came {
		if now[name] != value {
			f.envoy.SetHeader(name, value)
		}
	}
}

// addValue adds a value of a header to headers, without those that stay for the next attempt: the length of the body as
// it was sent on, and what attempts tell each other. [Filter.sendOn] sets all others again.
func addValue(headers map[string]string, name, value []byte) {
	switch s := string(name); {
	case s == "content-length", s == names.HeaderExplain, steers(s):
	case headers[s] != "": // several values are a list
		headers[s] += "," + string(value)
	default:
		headers[s] = string(value)
	}
}

// bodyMargin is what a body may grow by on its way, in bytes.
const bodyMargin = 1 << 20

// steers reports whether a header is Tandem's own, or names an endpoint. In a bootstrap of Tandem's Envoy removes them
// before the filter sees a request (early_header_mutation).
func steers(name string) bool {
	return strings.HasPrefix(name, "x-tandem-") || name == names.HeaderEndpoint
}

// unsure reports whether the answer to a call may be another endpoint's than the one that was called.
func (f *Filter) unsure() bool { return f.route != nil && !f.route.Strict }

// notStrict is why a leg whose answer does not name its engine is not called on such a route.
func notStrict() *openai.Error {
	return openai.Unavailable("route_not_strict", "this request needs a call that reaches one engine and no other, "+
		"and the cluster for calls of this route may choose another: give its rule a Backend of type "+
		"DynamicResolver, and say strict: true (docs/howto/envoy-gateway-module.md)", 0)
}

// kept reports whether Envoy still has the body that was sent on: for a retry policy it keeps it, and before its router
// has taken it. Otherwise a request that begins again would wait for its body until the client leaves.
func (f *Filter) kept() bool { return f.route == nil || f.sent == 0 || f.envoy.BodySize() > 0 }

// noteKept notes whether the route keeps bodies, by an answer of an endpoint: it has got the body, as it has not where
// a filter behind this one has refused the request, or the cluster lacks the endpoint.
func (f *Filter) noteKept(o *Outcome) {
	if f.route == nil || f.sent == 0 || !faults.Answered(o.Details) {
		return
	}
	if f.kept() {
		if f.route.keepsNothing.Load() {
			f.route.keepsNothing.Store(false)
		}
		return
	}
	f.keepsNothing()
}

func (f *Filter) keepsNothing() {
	if !f.route.keepsNothing.Swap(true) {
		f.s.Passes.Log.Error(noRetries, "cluster", f.cluster)
	}
}

// noRetries is what is wrong with a route without a retry policy, and what mends it.
const noRetries = "this route keeps no request's body, so a request whose engine fails cannot be planned again: give " +
	"it a retry policy (BackendTrafficPolicy: retry: {numRetries: 1, retryOn: {triggers: [retriable-status-codes], " +
	"httpStatusCodes: [599]}})"

// denial is a request that a filter behind this one has refused although its prompt had been computed.
type denial struct {
	why string
	at  time.Time
}

// deniedFor is how long one shows: a change of the order makes another [Route], while this one may live on with its
// connections.
const deniedFor = time.Hour

// deniedBehind notes that a filter behind this one has refused a request. If its prompt had been computed by then, the
// filters stand in the wrong order, which is logged once.
func (f *Filter) deniedBehind(o *Outcome) {
	if f.route == nil || f.hop.ticket.Prefills == 0 {
		return
	}
	d := &denial{fmt.Sprintf(wrongOrder, o.Status, o.Details), time.Now()}
	if f.route.denied.Swap(d) == nil {
		f.s.Passes.Log.Error(d.why, "cluster", f.cluster)
	}
}

// wrongOrder is what is wrong with such an order, and what mends it. Envoy's details name the filter.
const wrongOrder = "a filter behind Tandem has refused a request (%d, %.100s) whose prompt had been computed: put " +
	"Tandem behind what refuses requests (EnvoyProxy: filterOrder: [{name: envoy.filters.http.dynamic_modules, " +
	"after: THAT FILTER}], docs/howto/envoy-gateway-module.md)"

// Problems are what is wrong with the route, as its requests have shown.
func (r *Route) Problems() (out []string) {
	if r == nil {
		return nil
	}
	if r.keepsNothing.Load() {
		out = append(out, noRetries)
	}
	if d := r.denied.Load(); d != nil && time.Since(d.at) < deniedFor {
		out = append(out, d.why)
	}
	return out
}
