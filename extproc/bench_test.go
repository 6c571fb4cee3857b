package extproc

import (
	"bytes"
	"context"
	"encoding/base64"
	"io"
	"runtime/debug"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/encoding/protowire"

	"tandem/extproc/core"
	"tandem/extproc/ended"
	"tandem/extproc/envoywire"
	"tandem/extproc/envoywire/wiretest"
	"tandem/extproc/kvtransfer"
	"tandem/extproc/names"
	"tandem/extproc/openai"
	"tandem/extproc/pass"
	"tandem/extproc/plan"
	"tandem/extproc/telemetry"
	"tandem/internal/budget"
	"tandem/kvstate"
)

// wire is a gRPC stream without a network: messages go through the codec, and nothing else.
type wire struct {
	grpc.ServerStream // nothing of it is called

	ctx      context.Context
	codec    envoywire.Codec
	in       [][]byte // messages to receive
	replies  int
	bytes    int
	received []byte // the head of the reply that had a ticket in it
}

func (w *wire) Context() context.Context { return w.ctx }

func (w *wire) RecvMsg(m any) error {
	if len(w.in) == 0 {
		return io.EOF
	}
	data := mem.BufferSlice{mem.SliceBuffer(w.in[0])}
	w.in = w.in[1:]
	return w.codec.Unmarshal(data, m)
}

func (w *wire) SendMsg(m any) error {
	data, err := w.codec.Marshal(m)
	if err != nil {
		return err
	}
	w.replies++
	w.bytes += data.Len()
	if head := data[0].ReadOnlyData(); bytes.Contains(head, []byte(names.HeaderTicket)) {
		w.received = append(w.received[:0], head...)
	}
	data.Free()
	return nil
}

// ticket takes the sealed ticket out of what was received: HeaderValue{1: key, 3: raw_value}.
func (w *wire) ticket() []byte {
	at := bytes.Index(w.received, []byte(names.HeaderTicket)) + len(names.HeaderTicket) + 1
	n := 0
	for shift := 0; ; shift += 7 {
		b := w.received[at]
		at++
		if n |= int(b&0x7f) << shift; b < 0x80 {
			return w.received[at : at+n]
		}
	}
}

// course takes one request after the other through pass 1, the prefill leg and pass 2.
type course struct {
	s            *Server
	main, leg    wire
	mode         envoywire.BodyMode
	headers      []byte // of the request, as HeaderMap entries
	client, legs []byte // body messages of pass 1 and pass 2
	answer       []byte // P's
	carried      []byte // P's, as pass 2 is brought it; nil: it passes the leg's filter
	scratch      []byte
}

func newCourse(tb testing.TB, size int, mode envoywire.BodyMode, carried bool) *course {
	keys, err := kvtransfer.GenerateKeys()
	require.NoError(tb, err)
	dialect, err := kvtransfer.New(kvtransfer.Options{Name: "nixl"})
	require.NoError(tb, err)
	state := kvstate.New(kvstate.Options{})
	state.SetPool(kvstate.PoolSpec{Name: "chat", Models: []string{"*"}}, []kvstate.EndpointSpec{
		{Addr: "10.0.1.1:8000", Role: kvstate.RolePrefill}, {Addr: "10.0.1.2:8000", Role: kvstate.RolePrefill},
		{Addr: "10.0.2.1:8000", Role: kvstate.RoleDecode}, {Addr: "10.0.2.2:8000", Role: kvstate.RoleDecode},
	})
	policy := splitting()
	policy.Dialect = dialect
	c := &course{mode: mode}
	c.s = New(core.New(core.Options{State: state, Settings: pass.Settings{Keys: keys, Pools: map[string]pass.Policy{"chat": policy}}}, telemetry.NewMetrics(prometheus.NewRegistry(), state)))
	c.main = wire{ctx: metadata.NewIncomingContext(tb.Context(), metadata.Pairs(":authority", "tandem")), codec: envoywire.NewCodec()}
	c.leg = wire{ctx: metadata.NewIncomingContext(tb.Context(), metadata.Pairs(names.MetadataRole, names.RolePrefillLeg)), codec: envoywire.NewCodec()}
	for _, h := range [][2]string{
		{":method", "POST"}, {":path", "/v1/chat/completions"}, {":authority", "api.example"}, {":scheme", "http"},
		{"content-type", "application/json"}, {"user-agent", "OpenAI/Python 1.99"}, {"authorization", "Bearer " + filler(60)},
		{"x-request-id", "2f3e4d5c-0000-4000-8000-0123456789ab"}, {"accept", "*/*"},
	} {
		c.headers = appendHeader(c.headers, h[0], []byte(h[1]))
	}
	body := []byte(strings.Replace(chatBody, "hi", filler(size), 1))
	c.client = wiretest.Marshal(tb, requestBody(body, true))
	c.answer = appendBody(nil, envoywire.PhaseResponseBody, prefilled(params(256)))
	if carried {
		c.carried = []byte(base64.StdEncoding.EncodeToString(prefilled(params(256))))
	}
	require.NoError(tb, c.s.process(c.begin(nil, c.client)))

	var r plan.Request
	require.NoError(tb, r.Client.Scan(openai.Chat, body, openai.Limits{}))
	r.Patch.Reset(&r.Client)
	dialect.Prefill(&r.Client, &r.Patch, &r.Sides)
	c.legs = wiretest.Marshal(tb, requestBody(r.Patch.Edits().Apply(nil, body), true))
	settle(c.s, c.main.ticket())
	return c
}

// run is one whole request: three streams, or two, and the end of both hops.
func (c *course) run(tb testing.TB) {
	if err := c.s.process(c.begin(nil, c.client)); err != nil {
		tb.Fatal(err)
	}
	ticket := c.main.ticket()
	if c.carried == nil {
		c.scratch = appendLegHeaders(c.scratch[:0], ticket)
		c.leg.in = append(c.leg.in[:0:0], c.scratch, c.answer)
		if err := c.s.process(&c.leg); err != nil {
			tb.Fatal(err)
		}
		ticket = c.leg.ticket()
	}
	if err := c.s.process(c.begin(ticket, c.legs)); err != nil {
		tb.Fatal(err)
	}
	settle(c.s, c.main.ticket())
}

// settle is the access log entry at the end.
func settle(s *Server, ticket []byte) {
	s.hopEnded(&envoywire.LogEntry{
		Ticket: ticket, Ended: ended.Pass{RequestID: []byte("2f3e4d5c-0000-4000-8000-0123456789ab"), Status: 200},
	})
}

// begin makes the main stream bring the request's headers, with a ticket in pass 2, and a body message.
func (c *course) begin(ticket, body []byte) *wire {
	entries := len(c.headers)
	if ticket != nil {
		entries += headerLen(names.HeaderTicket, ticket)
		if c.carried != nil {
			entries += headerLen(names.HeaderPrefilled, c.carried)
		}
	}
	b := c.scratch[:0]
	b = openField(b, protowire.Number(envoywire.PhaseRequestHeaders), fieldLen(entries))
	b = append(openField(b, 1, entries), c.headers...)
	if ticket != nil {
		b = appendHeader(b, names.HeaderTicket, ticket)
		if c.carried != nil {
			b = appendHeader(b, names.HeaderPrefilled, c.carried)
		}
	}
	b = append(openField(b, 11, 2), 1<<3, byte(c.mode)) // ProtocolConfiguration{1: request_body_mode}
	c.scratch = b
	c.main.in = append(c.main.in[:0:0], b, body)
	return &c.main
}

func headerLen(name string, value []byte) int {
	return fieldLen(fieldLen(len(name)) + fieldLen(len(value)))
}

// appendHeader appends HeaderMap{1: HeaderValue{1: key, 3: raw_value}}.
func appendHeader(b []byte, name string, value []byte) []byte {
	b = openField(b, 1, fieldLen(len(name))+fieldLen(len(value)))
	return textField(textField(b, 1, name), 3, value)
}

func appendBody(b []byte, p envoywire.Phase, body []byte) []byte {
	b = openField(b, protowire.Number(p), fieldLen(len(body))+2)
	return append(textField(b, 1, body), 2<<3, 1)
}

// appendLegHeaders appends P's response headers with the attributes that the leg's filter sends along.
func appendLegHeaders(b, ticket []byte) []byte {
	status := appendHeader(nil, ":status", []byte("200"))
	b = openField(b, protowire.Number(envoywire.PhaseResponseHeaders), fieldLen(len(status)))
	b = append(openField(b, 1, len(status)), status...)
	var fields []byte
	for _, a := range [][2]string{
		{"request.headers['x-tandem-ticket']", string(ticket)}, {"request.headers['x-request-id']", "2f3e4d5c-0000-4000-8000-0123456789ab"},
		{"request.path", "/v1/chat/completions"}, {"upstream.address", "10.0.1.1:8000"},
	} {
		value := textField(nil, 3, a[1])
		field := textField(textField(nil, 1, a[0]), 2, value)
		fields = textField(fields, 1, field)
	}
	return textField(b, 9, textField(textField(nil, 1, "envoy.filters.http.ext_proc"), 2, fields))
}

var courses = []struct {
	name    string
	size    int
	mode    envoywire.BodyMode
	carried bool
	allocs  float64 // the budget; some 25 are the test's own
}{
	{"1KB", 1000, envoywire.ModeFullDuplex, true, 95},
	{"1KB, leg's filter", 1000, envoywire.ModeFullDuplex, false, 150},
	{"220KB", 220_000, envoywire.ModeBuffered, false, 150},
	{"220KB duplex", 220_000, envoywire.ModeFullDuplex, false, 190},
}

// BenchmarkRequest is what one split request costs the server, without gRPC's transport: pass 1, leg, pass 2, the end.
func BenchmarkRequest(b *testing.B) {
	for _, tt := range courses {
		b.Run(tt.name, func(b *testing.B) {
			c := newCourse(b, tt.size, tt.mode, tt.carried)
			b.SetBytes(int64(len(c.client)))
			b.ReportAllocs()
			for b.Loop() {
				c.run(b)
			}
		})
	}
}

func TestARequestKeepsItsAllocationBudget(t *testing.T) {
	defer debug.SetGCPercent(debug.SetGCPercent(-1)) // which empties pools
	for _, tt := range courses {
		t.Run(tt.name, func(t *testing.T) {
			c := newCourse(t, tt.size, tt.mode, tt.carried)
			budget.Allocs(t, 50, tt.allocs, func() { c.run(t) })
			require.Zero(t, c.s.State.Bookings.Reservations())
			require.Zero(t, c.s.Memory.Load())
		})
	}
}

// The messages of a bench are encoded by hand: its loop must not pay for more than the server's own work.

func fieldLen(n int) int { return 1 + protowire.SizeBytes(n) }

func openField(b []byte, number protowire.Number, n int) []byte {
	return protowire.AppendVarint(protowire.AppendTag(b, number, protowire.BytesType), uint64(n))
}

func textField[T string | []byte](b []byte, number protowire.Number, s T) []byte {
	return append(openField(b, number, len(s)), s...)
}
