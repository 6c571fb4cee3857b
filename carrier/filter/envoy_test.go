package filter

import (
	"bytes"
	"cmp"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"tandem/extproc/answer"
	"tandem/extproc/core"
	"tandem/extproc/kvtransfer"
	"tandem/extproc/names"
	"tandem/extproc/pass"
	"tandem/extproc/plan"
	"tandem/extproc/telemetry"
	"tandem/extproc/usage"
	"tandem/kvstate"
)

// fleet is what the requests of a test share: a replica with endpoints p1, p2, d1, d2 (10.0.1.1:8000 and so on).
type fleet struct {
	*Shared
	state   *kvstate.State
	metrics *prometheus.Registry
}

// orphaned returns how many hand-overs of P were counted as orphaned, for a reason.
func (f *fleet) orphaned(why string) (n float64) {
	families, _ := f.metrics.Gather()
	for _, family := range families {
		if family.GetName() != "tandem_handovers_orphaned_total" {
			continue
		}
		for _, m := range family.GetMetric() {
			for _, l := range m.GetLabel() {
				if l.GetName() == "reason" && l.GetValue() == why {
					n += m.GetCounter().GetValue()
				}
			}
		}
	}
	return n
}

func newFleet(tb testing.TB, change func(*pass.Policy)) *fleet {
	tb.Helper()
	dialect, err := kvtransfer.New(kvtransfer.Options{Name: "nixl"})
	require.NoError(tb, err)
	policy := pass.Policy{Policy: plan.Policy{Split: true, PrefillTimeout: 30 * time.Second}}.WithDefaults()
	policy.Dialect = dialect
	if change != nil {
		change(&policy)
	}
	state := kvstate.New(kvstate.Options{})
	state.SetPool(kvstate.PoolSpec{Name: "chat", Models: []string{"*"}}, fleetEndpoints())
	registry := prometheus.NewRegistry()
	metrics := telemetry.NewMetrics(registry, state)
	metrics.Usage, err = usage.New(usage.Options{TenantHeader: "x-tenant", Tenants: 5}, prometheus.NewRegistry(), nil)
	require.NoError(tb, err)
	return &fleet{New(core.New(core.Options{
		State: state, Inside: true, SplitBodyBytes: 1 << 20, MaxBodyBytes: 2 << 20,
		Settings: pass.Settings{Pools: map[string]pass.Policy{"chat": policy}},
	}, metrics)), state, registry}
}

func fleetEndpoints() []kvstate.EndpointSpec {
	return []kvstate.EndpointSpec{
		{Addr: "10.0.1.1:8000", Role: kvstate.RolePrefill}, {Addr: "10.0.1.2:8000", Role: kvstate.RolePrefill},
		{Addr: "10.0.2.1:8000", Role: kvstate.RoleDecode}, {Addr: "10.0.2.2:8000", Role: kvstate.RoleDecode},
	}
}

// encoder adds an endpoint that encodes media.
func (f *fleet) encoder() {
	f.state.SetPool(kvstate.PoolSpec{Name: "chat", Models: []string{"*"}}, append(fleetEndpoints(),
		kvstate.EndpointSpec{Addr: "10.0.3.1:8000", Role: kvstate.RoleEncode}))
}

// reserved returns how many requests are reserved on all endpoints.
func (f *fleet) reserved() (n int64) {
	for _, e := range f.state.Pool("chat").Endpoints() {
		requests, _ := e.Load()
		n += requests
	}
	return n
}

// engineAnswer is what an endpoint answers. local: Envoy answers in its place.
type engineAnswer struct {
	status int
	body   string
	local  string // response code details
	never  bool   // it does not
	breaks bool   // it breaks off after its headers
	load   string // the report of its load, if it is asked for one
}

// engines answers a request to an endpoint.
type engines func(endpoint string, body []byte) engineAnswer

// client is a request as Envoy has it, with everything that a filter may ask: a fake of Envoy's ABI, without its threads.
type client struct {
	tb      testing.TB
	fleet   *fleet
	engines engines
	headers []Header
	body    []byte

	filter     *Filter
	woken      chan struct{}
	calls      []Call
	sent       []string // endpoints that the request went on to
	got        []byte   // the last body that one of them got
	answer     engineAnswer
	hold       bool
	passes     bool   // of what is held, whole events without a mark
	passed     int    // pieces that passed so
	length     string // of the answer, as a header; "": none
	coded      string // the answer's content-encoding
	stopped    bool   // the answer, before its body
	piece      []byte // of the answer, in a hook
	kept       []byte // of the answer
	out        []byte // of the answer, that went on
	reset      bool
	gone       bool     // the client has left
	patient    bool     // it waits for an answer that does not come
	unsent     int      // calls that Envoy does not make, of the next
	overloaded bool     // Envoy answers by itself what begins again
	told       []string // names of metadata
	counts     bool     // pieces of the answer are counted
	tokens     map[string]float64
	pieces     int       // size of the answer's, bytes; default 40
	kind       string    // content-type of the answer; "": JSON
	outside    []sending // calls that do not end with the request
	mu         sync.Mutex
	closed     int // wakers
	wakers     int
	started    int                          // filters
	asked      func(at string, body []byte) // is told of each request to an endpoint; nil: nobody
	routed
	streams

	status  int // of the client's answer
	reply   string
	details string
}

func newClient(tb testing.TB, f *fleet, e engines, body string) *client {
	return &client{tb: tb, fleet: f, engines: e, body: []byte(body), woken: make(chan struct{}, 100), tokens: map[string]float64{}, headers: []Header{
		{":method", "POST"}, {":path", "/v1/chat/completions"}, {":authority", "api.example"}, {":scheme", "http"},
		{"content-type", "application/json"}, {"content-length", strconv.Itoa(len(body))}, {"x-request-id", "r-1"},
	}}
}

func (c *client) EachHeader(do func(name, value []byte)) {
	for _, h := range c.headers {
		do([]byte(h.Name), []byte(h.Value))
	}
}

func (c *client) SetHeader(name, value string) {
	c.RemoveHeader(name)
	c.headers = append(c.headers, Header{name, value})
}

func (c *client) RemoveHeader(name string) {
	c.headers = slices.DeleteFunc(c.headers, func(h Header) bool { return h.Name == name })
}

func (c *client) header(name string) string {
	for _, h := range c.headers {
		if h.Name == name {
			return h.Value
		}
	}
	return ""
}

// routed is what Envoy does where the request's route is another's.
type routed struct {
	route   *Route
	to      string   // the endpoint in the route's cluster
	lacks   []string // endpoints that this cluster lacks
	instead string   // where a call goes that names one of them
	forgets bool     // no body is kept: the route has no retry policy
	rewrite string   // the path that the route makes of any; "": as it came
	adds    []Header // to each request that goes on
	called  []string // clusters
	firsts  []string // endpoints of calls that only have them looked up

	explained string // the answer's header with the decision
	named     string // its header with the request's id
}

func valueOf(h Header, name string) string {
	if h.Name == name {
		return h.Value
	}
	return ""
}

func (r *routed) Cluster() string { return "httproute/ns/chat/rule/0" }
func (r *routed) KeepUpTo(int)    {}

func (r *routed) SendTo(endpoint string) bool {
	r.to = endpoint
	return true
}

// reached is where a call goes that names an endpoint.
func (r *routed) reached(at string) string {
	if r.route != nil && !r.route.Strict && slices.Contains(r.lacks, at) {
		return r.instead
	}
	return at
}

func (c *client) BodySize() int                { return len(c.body) }
func (c *client) AppendBody(dst []byte) []byte { return append(dst, c.body...) }
func (c *client) ReplaceBody(parts ...[]byte)  { c.body = bytes.Join(parts, nil) }

func (c *client) Call(call *Call) bool {
	if c.unsent > 0 {
		c.unsent--
		return false
	}
	copied := *call
	copied.Body = slices.Clone(call.Body)
	c.calls, c.called = append(c.calls, copied), append(c.called, call.Cluster)
	c.tells(call)
	return true
}

// tells tells of a call.
func (c *client) tells(call *Call) {
	if i := slices.IndexFunc(call.Set, func(h Header) bool { return h.Name == names.HeaderEndpoint }); c.asked != nil {
		c.asked(call.Set[i].Value, call.Body)
	}
}

func (c *client) Continue(anew bool) {
	at := c.to
	if require.Equal(c.tb, c.route == nil, anew); anew {
		at = c.header("x-gateway-destination-endpoint")
	}
	if c.rewrite != "" {
		c.SetHeader(":path", c.rewrite)
	}
	c.headers = append(c.headers, c.adds...)
	c.sent, c.got = append(c.sent, at), slices.Clone(c.body)
	require.Equal(c.tb, strconv.Itoa(len(c.body)), c.header("content-length"))
	if c.forgets {
		c.body = nil
	}
	if slices.Contains(c.lacks, at) {
		c.arrives(engineAnswer{status: 503, body: "no healthy upstream", local: "no_healthy_upstream"})
		return
	}
	if c.asked != nil {
		c.asked(at, c.body)
	}
	c.arrives(c.engines(at, c.body))
}

// arrives is the answer of the endpoint to which the request went on.
func (c *client) arrives(a engineAnswer) {
	c.answer = a
	if c.answer.never {
		return
	}
	if key := c.header("x-tandem-pair"); key != "" { // as the filter behind the router
		c.RemoveHeader("x-tandem-pair")
		waits := Answers(key, c.answer.status, upstream{c}) == Pause
		if c.answer.breaks {
			AnswerGone(key)
			c.answer = engineAnswer{status: 503, local: "upstream_reset_before_response_started{connection_termination}"}
		} else if waits {
			return
		}
	}
	c.answers()
}

// upstream is an answer that waits behind the router.
type upstream struct{ c *client }

func (u upstream) ContinueAnswer() { u.c.answers() }

// answers begins the answer.
func (c *client) answers() {
	filter := c.filter
	c.stopped, c.kept, c.out, c.hold, c.passes, c.counts = false, nil, nil, false, false, false
	c.length = strconv.Itoa(len(c.answer.body))
	switch filter.ResponseHeaders(false) {
	case Pause:
		if c.stopped = c.filter == filter && c.status == 0; c.stopped {
			return
		}
	case Stop:
		if !c.hold { // it begins again, or was answered
			return
		}
	}
	if c.filter == filter && c.status == 0 {
		c.answered()
	}
}

// deliver gives the filter the body of the answer, in pieces.
func (c *client) answered() {
	filter, body := c.filter, []byte(c.answer.body)
	for len(body) > 0 {
		c.piece = slices.Clone(body[:min(len(body), cmp.Or(c.pieces, 40))])
		body = body[len(c.piece):]
		if c.hold && c.passes && c.unmarked() {
			c.passed++
		}
		if !c.hold || c.passes && c.unmarked() || filter.ResponseBody(len(body) == 0) == Continue {
			if c.counts {
				Counted(filter)
			}
			c.out, c.kept = append(append(c.out, c.kept...), c.piece...), nil
		} else {
			c.kept = append(c.kept, c.piece...)
		}
		if c.piece = nil; c.filter != filter || c.status != 0 || c.reset {
			return // it begins again, or was answered
		}
	}
	if len(c.kept) == 0 {
		c.status, c.reply = c.answer.status, string(c.out)
		require.Contains(c.tb, []string{"", strconv.Itoa(len(c.reply))}, c.length, "content-length")
	}
}

func (c *client) SetMetadata(_, name, value string) {
	require.NotEmpty(c.tb, value)
	c.told = append(c.told, name)
}

func (c *client) SetMetadataNumber(namespace, name string, value float64) {
	if namespace == "tandem.usage" {
		c.tokens[name] = value
		return
	}
	require.NotZero(c.tb, value)
	c.told = append(c.told, name)
}

func (c *client) Count(bool) { c.counts = true }

func (c *client) EachPiece(do func(part []byte)) {
	do(c.piece[:len(c.piece)/2])
	do(c.piece[len(c.piece)/2:])
}

func (c *client) AppendPiece(dst []byte) []byte  { return append(dst, c.piece...) }
func (c *client) ReplacePiece(b []byte)          { c.piece = slices.Clone(b) }
func (c *client) AnswerSize() int                { return len(c.kept) + len(c.piece) }
func (c *client) AppendAnswer(dst []byte) []byte { return append(append(dst, c.kept...), c.piece...) }
func (c *client) ReplaceAnswer(b []byte)         { c.kept = slices.Clone(b) }

func (c *client) Reset() {
	if c.headSent {
		c.breakOff()
	} else {
		c.reset, c.status = true, -1
	}
}

func (c *client) SetResponseHeader(name, value string) {
	if name == names.HeaderExplanation {
		require.NotNil(c.tb, c.route)
		c.explained = value
		return
	}
	if name == names.HeaderRequestID {
		require.NotNil(c.tb, c.route)
		c.named = value
		return
	}
	require.Equal(c.tb, "content-length", name)
	c.length = value
}

func (c *client) ContinueAnswer() {
	if c.stopped {
		c.stopped = false
		c.answered()
		return
	}
	c.status, c.reply = c.answer.status, string(append(c.out, c.kept...))
}

// sending is a call that does not end with the request.
type sending struct {
	client *client
	call   *Call
	done   func(*Answer)
}

func (c *client) Detach(call *Call) Detached {
	copied := *call
	copied.Body = slices.Clone(call.Body)
	return &sending{client: c, call: &copied}
}

// Send has the call answered in the next step.
func (s *sending) Send(done func(*Answer)) {
	s.client.tells(s.call)
	s.client.mu.Lock()
	s.client.outside = append(s.client.outside, sending{s.client, s.call, done})
	s.client.mu.Unlock()
	s.client.woken <- struct{}{}
}

func (c *client) Respond(status int, headers []Header, body []byte, details string) {
	for _, h := range headers {
		c.named += valueOf(h, names.HeaderRequestID)
	}
	c.status, c.reply, c.details = status, string(body), details
}

func (c *client) Answer(headers []Header, body []byte) {
	for _, h := range headers {
		if h.Name == ":status" {
			c.status, _ = strconv.Atoi(h.Value)
		}
		c.explained += valueOf(h, names.HeaderExplanation)
		c.named += valueOf(h, names.HeaderRequestID)
	}
	c.reply = string(body)
}

// Restart replaces the filter, as Envoy does before recreate_stream returns.
func (c *client) Restart() bool {
	old := c.filter
	c.calls = nil // they end with it
	require.NotEqual(c.tb, cmp.Or(c.rewrite, "none"), c.header(":path"), "Envoy looks the route up again")
	if c.overloaded {
		c.status, c.details = 503, "overload"
		old.Complete()
		old.Destroy()
		return true
	}
	c.begin()
	old.Complete()
	old.Destroy()
	return true
}

func (c *client) HoldAnswer(hold bool) { c.hold, c.passes = hold, false }
func (c *client) PassEvents(pass bool) { c.passes = pass }

// unmarked is what hooks.c asks of a piece before it calls the filter.
func (c *client) unmarked() bool {
	return (bytes.HasSuffix(c.piece, []byte("\n\n")) || bytes.HasSuffix(c.piece, []byte("\r\n\r\n"))) &&
		!slices.ContainsFunc(answer.Marks(), func(mark string) bool { return bytes.Contains(c.piece, []byte(mark)) })
}

func (c *client) ResponseHeader(name string) []byte {
	if name == ":status" {
		return []byte(strconv.Itoa(c.answer.status))
	}
	if name == "content-length" {
		return []byte(c.length)
	}
	if name == "content-encoding" && c.coded != "" {
		return []byte(c.coded)
	}
	if name == "content-type" && c.kind != "" {
		return []byte(c.kind)
	}
	if name == "content-type" && bytes.Contains(c.got, []byte(`"stream":true`)) {
		return []byte("text/event-stream")
	}
	return nil
}

func (c *client) Outcome() Outcome {
	o := Outcome{Status: c.answer.status, Details: "via_upstream", Bytes: uint64(len(c.answer.body) + c.gets.Len())}
	if c.answer.local != "" {
		o.Details = c.answer.local
	}
	if c.status != 0 {
		o.Status = c.status
	}
	if c.gone {
		o.Flags = flagClientGone
	}
	return o
}

func (c *client) Waker() Waker {
	c.wakers++
	return c
}
func (c *client) Wake()  { c.woken <- struct{}{} }
func (c *client) Close() { c.closed++ }

// begin gives the request to a new filter.
func (c *client) begin() {
	c.started++
	c.filter = c.fleet.NewFilter(c, c.route)
	if c.filter.RequestHeaders(len(c.body) == 0) == Stop && len(c.body) > 0 {
		c.filter.RequestBody(true)
	}
}

// run runs the request to its end.
func (c *client) run() {
	c.begin()
	for c.status == 0 && (c.patient || !c.answer.never) {
		c.step()
	}
	c.end()
}

// step does what Envoy's worker does next.
func (c *client) step() {
	if len(c.calls) > 0 {
		call := c.calls[0]
		c.calls = c.calls[1:]
		c.finishCall(&call, c.filter.CallDone)
		return
	}
	select {
	case <-c.woken:
		c.mu.Lock()
		var next *sending
		if len(c.outside) > 0 {
			next, c.outside = &c.outside[0], c.outside[1:]
		}
		c.mu.Unlock()
		if next != nil {
			c.finishCall(next.call, next.done)
			return
		}
		c.filter.Woken()
	case <-time.After(time.Minute):
		require.FailNow(c.tb, "the filter does not wake")
	}
}

// finishCall answers a call of the filter's.
func (c *client) finishCall(call *Call, done func(*Answer)) {
	all := map[string]string{}
	for _, h := range call.Set {
		require.NotContains(c.tb, all, h.Name)
		all[h.Name] = h.Value
	}
	for _, h := range c.headers {
		if !call.Drops([]byte(h.Name)) {
			require.NotContains(c.tb, all, h.Name)
			all[h.Name] = h.Value
		}
	}
	if all[":path"] == "/health" {
		require.Equal(c.tb, "GET", all[":method"])
		require.Empty(c.tb, call.Body)
		c.firsts = append(c.firsts, all[":authority"])
		done(&Answer{OK: true, Headers: func(do func(name, value []byte)) { do([]byte(":status"), []byte("200")) }})
		return
	}
	require.Contains(c.tb, all["x-request-id"], "r-1")
	require.Equal(c.tb, "POST", all[":method"])
	require.Equal(c.tb, "application/json", all["accept"], "Tandem reads the answer")
	require.Equal(c.tb, strconv.Itoa(len(call.Body)), all["content-length"])
	at := c.reached(all["x-gateway-destination-endpoint"])
	if c.route != nil {
		require.Equal(c.tb, all["x-gateway-destination-endpoint"], all[":authority"], "a dynamic forward proxy goes there")
	}
	a := c.engines(at, call.Body)
	if a.breaks {
		done(&Answer{})
		return
	}
	done(&Answer{
		OK: true, Body: [][]byte{[]byte(a.body[:len(a.body)/2]), []byte(a.body[len(a.body)/2:])},
		Headers: func(do func(name, value []byte)) {
			do([]byte(":status"), []byte(strconv.Itoa(a.status)))
			do([]byte("content-type"), []byte("application/json"))
			if a.local == "" {
				do([]byte("x-envoy-upstream-service-time"), []byte("3"))
			}
			if all["endpoint-load-metrics-format"] == "JSON" && a.load != "" {
				do([]byte("endpoint-load-metrics"), []byte(a.load))
			}
		},
	})
}

// end ends the request, as when all is sent or the client has left.
func (c *client) end() {
	c.filter.Complete()
	c.filter.Destroy()
}
