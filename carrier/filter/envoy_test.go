package filter

import (
	"bytes"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"tandem/extproc"
	"tandem/extproc/kvtransfer"
	"tandem/extproc/pass"
	"tandem/extproc/plan"
	"tandem/extproc/telemetry"
	"tandem/kvstate"
)

// fleet is what the requests of a test share: a replica with endpoints p1, p2, d1, d2 (10.0.1.1:8000 and so on).
type fleet struct {
	*Shared
	state *kvstate.State
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
	state.SetPool(kvstate.PoolSpec{Name: "chat", Models: []string{"*"}}, []kvstate.EndpointSpec{
		{Addr: "10.0.1.1:8000", Role: kvstate.RolePrefill}, {Addr: "10.0.1.2:8000", Role: kvstate.RolePrefill},
		{Addr: "10.0.2.1:8000", Role: kvstate.RoleDecode}, {Addr: "10.0.2.2:8000", Role: kvstate.RoleDecode},
	})
	s, passes := extproc.NewInside(extproc.Options{
		State: state, SplitBodyBytes: 1 << 20, MaxBodyBytes: 2 << 20,
		Settings: pass.Settings{Pools: map[string]pass.Policy{"chat": policy}},
	}, telemetry.NewMetrics(prometheus.NewRegistry(), state))
	return &fleet{New(Options{
		Passes: passes, Memory: s.Memory, MaxBodyBytes: s.MaxBodyBytes, Started: time.Now(),
	}), state}
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

	filter  *Filter
	woken   chan struct{}
	calls   []Call
	sent    []string // endpoints that the request went on to
	got     []byte   // the last body that one of them got
	answer  engineAnswer
	hold    bool
	closed  int // wakers
	wakers  int
	started int // filters
	streams

	status  int // of the client's answer
	reply   string
	details string
}

func newClient(tb testing.TB, f *fleet, e engines, body string) *client {
	return &client{tb: tb, fleet: f, engines: e, body: []byte(body), woken: make(chan struct{}, 100), headers: []Header{
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

func (c *client) BodySize() int                { return len(c.body) }
func (c *client) AppendBody(dst []byte) []byte { return append(dst, c.body...) }
func (c *client) ReplaceBody(parts ...[]byte)  { c.body = bytes.Join(parts, nil) }

func (c *client) Call(call *Call) bool {
	copied := *call
	copied.Body = slices.Clone(call.Body)
	c.calls = append(c.calls, copied)
	return true
}

func (c *client) Continue() {
	at := c.header("x-gateway-destination-endpoint")
	c.sent, c.got = append(c.sent, at), slices.Clone(c.body)
	require.Equal(c.tb, strconv.Itoa(len(c.body)), c.header("content-length"))
	c.answer = c.engines(at, c.body)
	if c.answer.never {
		return
	}
	filter := c.filter
	if filter.ResponseHeaders(false) != Continue {
		if c.filter != filter || !c.hold { // it begins again, or was answered
			return
		}
		if filter.ResponseBody(true) != Continue {
			return
		}
	}
	c.status, c.reply = c.answer.status, c.answer.body
}

func (c *client) Respond(status int, _ []Header, body []byte, details string) {
	c.status, c.reply, c.details = status, string(body), details
}

func (c *client) Answer(headers []Header, body []byte) {
	for _, h := range headers {
		if h.Name == ":status" {
			c.status, _ = strconv.Atoi(h.Value)
		}
	}
	c.reply = string(body)
}

// Restart replaces the filter, as Envoy does before recreate_stream returns.
func (c *client) Restart() bool {
	old := c.filter
	c.begin()
	old.Complete()
	old.Destroy()
	return true
}

func (c *client) HoldAnswer(hold bool) { c.hold = hold }

func (c *client) ResponseHeader(name string) []byte {
	if name == "content-type" && bytes.Contains(c.got, []byte(`"stream":true`)) {
		return []byte("text/event-stream")
	}
	return nil
}

func (c *client) Outcome() Outcome {
	o := Outcome{Status: c.answer.status, Details: "via_upstream", Bytes: uint64(len(c.answer.body))}
	if c.answer.local != "" {
		o.Details = c.answer.local
	}
	if c.status != 0 {
		o.Status = c.status
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
	c.filter = c.fleet.NewFilter(c)
	if c.filter.RequestHeaders(len(c.body) == 0) == Stop && len(c.body) > 0 {
		c.filter.RequestBody(true)
	}
}

// run runs the request to its end.
func (c *client) run() {
	c.begin()
	for c.status == 0 && !c.answer.never {
		c.step()
	}
	c.end()
}

// step does what Envoy's worker does next.
func (c *client) step() {
	if len(c.calls) > 0 {
		call := c.calls[0]
		c.calls = c.calls[1:]
		c.finishCall(&call)
		return
	}
	select {
	case <-c.woken:
		c.filter.Woken()
	case <-time.After(time.Minute):
		require.FailNow(c.tb, "the filter does not wake")
	}
}

// finishCall answers a call of the filter's.
func (c *client) finishCall(call *Call) {
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
	require.Equal(c.tb, "r-1", all["x-request-id"])
	require.Equal(c.tb, "POST", all[":method"])
	require.Equal(c.tb, "application/json", all["accept"], "Tandem reads the answer")
	require.Equal(c.tb, strconv.Itoa(len(call.Body)), all["content-length"])
	at := all["x-gateway-destination-endpoint"]
	a := c.engines(at, call.Body)
	c.filter.CallDone(&Answer{
		OK: true, Body: [][]byte{[]byte(a.body[:len(a.body)/2]), []byte(a.body[len(a.body)/2:])},
		Headers: func(do func(name, value []byte)) {
			do([]byte(":status"), []byte(strconv.Itoa(a.status)))
			do([]byte("content-type"), []byte("application/json"))
			if a.local == "" {
				do([]byte("x-envoy-upstream-service-time"), []byte("3"))
			}
		},
	})
}

// end ends the request, as when all is sent or the client has left.
func (c *client) end() {
	c.filter.Complete()
	c.filter.Destroy()
}
