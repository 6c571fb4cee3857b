package extproc

import (
	"context"
	"testing"
	"testing/synctest"

	"tandem/extproc/envoywire"
	"tandem/extproc/envoywire/wiretest"
	"tandem/extproc/names"
	"tandem/extproc/telemetry"
	"tandem/internal/budget"

	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"google.golang.org/grpc/metadata"
)

const (
	traceID     = "0af7651916cd43dd8448eb211c80319c"
	clientsSpan = "00-" + traceID + "-b7ad6b7169203331-01"
	envoysSpan  = "00-" + traceID + "-00f067aa0ba902b7-01"
	notSampled  = "00-" + traceID + "-00f067aa0ba902b7-00"
)

// traced is a server with a tracer, and the spans that it made.
func traced(t *testing.T) (*course, *tracetest.InMemoryExporter) {
	spans := tracetest.NewInMemoryExporter()
	provider := sdktrace.NewTracerProvider(sdktrace.WithSyncer(spans))
	c := newCourse(t, 100, envoywire.ModeFullDuplex, false)
	c.s.Tracer = provider.Tracer("test")
	return c, spans
}

func attributesIn(s tracetest.SpanStub) map[string]attribute.Value {
	out := map[string]attribute.Value{}
	for _, a := range s.Attributes {
		out[string(a.Key)] = a.Value
	}
	return out
}

// If Envoy traces, the parent is in the stream's metadata.
func TestSpansJoinEnvoys(t *testing.T) {
	c, spans := traced(t)
	md := metadata.Pairs(names.HeaderTraceparent, envoysSpan)
	c.main.ctx = metadata.NewIncomingContext(t.Context(), md) //nolint:fatcontext // a stream has its context
	c.leg.ctx = metadata.NewIncomingContext(t.Context(), metadata.Join(md, metadata.Pairs(names.MetadataRole, names.RolePrefillLeg)))
	c.headers = appendHeader(c.headers, names.HeaderTraceparent, []byte(clientsSpan))
	c.run(t)

	got := spans.GetSpans()
	require.Len(t, got, 3)
	for i, name := range []string{telemetry.SpanDecide, telemetry.SpanPrefillAnswer, telemetry.SpanHandOver} {
		require.Equal(t, name, got[i].Name)
		require.Equal(t, traceID, got[i].SpanContext.TraceID().String())
	}
	require.Equal(t, "00f067aa0ba902b7", got[0].Parent.SpanID().String())
	require.Equal(t, "00f067aa0ba902b7", got[1].Parent.SpanID().String())
	require.Equal(t, "b7ad6b7169203331", got[2].Parent.SpanID().String(), "in pass 2 it is the header, which pass 1 wrote: here still the client's")
	decided := attributesIn(got[0])
	require.Equal(t, "split", decided["tandem.route"].AsString())
	require.Contains(t, decided["tandem.prefill.endpoint"].AsString(), "10.0.1.")
	require.Contains(t, decided, "tandem.prefill.cost.work")
	require.Contains(t, decided, "tandem.decode.cost.step")
	require.Contains(t, string(c.main.received), got[2].SpanContext.SpanID().String()+"-01", "what the second hop is to join")
	require.True(t, attributesIn(got[2])["tandem.kv_params"].AsBool())
}

// Where Envoy does not, the client's traceparent is, and engines and pass 2 get the span's own.
func TestSpansJoinTheClients(t *testing.T) {
	c, spans := traced(t)
	c.headers = appendHeader(c.headers, names.HeaderTraceparent, []byte(clientsSpan))
	require.NoError(t, c.s.process(c.begin(nil, c.client)))
	got := spans.GetSpans()
	require.Len(t, got, 1)
	require.Equal(t, "b7ad6b7169203331", got[0].Parent.SpanID().String())
	require.Contains(t, string(c.main.received), "00-"+traceID+"-"+got[0].SpanContext.SpanID().String()+"-01")
}

func TestATraceBeginsHereWhereNobodyBeganOne(t *testing.T) {
	c, spans := traced(t)
	require.NoError(t, c.s.process(c.begin(nil, c.client)))
	got := spans.GetSpans()
	require.Len(t, got, 1)
	require.False(t, got[0].Parent.IsValid())
	require.Contains(t, string(c.main.received), got[0].SpanContext.TraceID().String())
}

// A trace that somebody decided against is not begun anew.
func TestNotSampledStaysSo(t *testing.T) {
	c, spans := traced(t)
	c.main.ctx = metadata.NewIncomingContext(t.Context(), metadata.Pairs(names.HeaderTraceparent, notSampled)) //nolint:fatcontext // a stream has its context
	c.run(t)
	require.Empty(t, spans.GetSpans(), "and the prefill leg begins none by itself")
}

func TestARefusalIsAnErrorOfTheSpan(t *testing.T) {
	c, spans := traced(t)
	secret := "not for logs"
	require.NoError(t, c.s.process(c.begin(nil, wiretest.Marshal(t, requestBody([]byte(`{"prompt": "`+secret+`", `), true)))))
	got := spans.GetSpans()
	require.Len(t, got, 1)
	require.Equal(t, "invalid_json", attributesIn(got[0])["error.type"].AsString())
	for _, a := range got[0].Attributes {
		require.NotContains(t, a.Value.String(), secret)
	}
	require.NotContains(t, got[0].Status.Description, secret)
}

// Without a tracer a traceparent costs nothing but its bytes in the arena.
func TestTracingOffAllocatesNothing(t *testing.T) {
	x := handler{&stream{grpc: &wire{ctx: context.Background()}}, &telemetry.Meter{}, nil}
	x.stream.msg.Headers.Traceparent = []byte(clientsSpan)
	budget.Allocs(t, 100, 0, func() {
		x.startSpan(telemetry.SpanDecide, true)
		x.meter.SpanTicket(nil)
		x.meter.SpanLegEnded("ok", 200)
		x.meter.EndSpan("")
	})
	require.Empty(t, x.meter.Next.Traceparent)
	require.False(t, x.meter.Recording())
}

// tracedPairs is a server with a tracer and a pool whose legs run at once.
func tracedPairs(t *testing.T, dialect string) (*stand, *tracetest.InMemoryExporter) {
	spans := tracetest.NewInMemoryExporter()
	s := pairStand(t, dialect, "p1", "d1")
	s.server.Tracer = sdktrace.NewTracerProvider(sdktrace.WithSyncer(spans)).Tracer("test")
	return s, spans
}

// Legs that run at once are of one trace too: below the decision, whose prices it shows, by the header that it wrote.
func TestSpansOfLegsAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, spans := tracedPairs(t, "sglang")
		q, v := pass1(s, "traced")
		q.headers[names.HeaderTraceparent] = v.set[names.HeaderTraceparent]
		d, _ := q.decode(s)
		p := q.mirror(s)
		d.streams()
		d.receive()
		d.receive()
		d.ended()
		p.answer(200, goodPrefill)
		p.receive()
		s.log(q.entry(200, "via_upstream"))
		synctest.Wait()

		by := map[string]tracetest.SpanStub{}
		for _, span := range spans.GetSpans() {
			by[span.Name] = span
		}
		require.Len(t, by, 3)
		decide := by[telemetry.SpanDecide]
		attributes := attributesIn(decide)
		require.Equal(t, "pair", attributes["tandem.route"].AsString())
		require.Contains(t, attributes, "tandem.prefill.cost.work")
		require.Contains(t, attributes, "tandem.decode.cost.step")
		for _, name := range []string{telemetry.SpanPrefillAnswer, telemetry.SpanDecodeLeg} {
			require.Equal(t, decide.SpanContext.SpanID(), by[name].Parent.SpanID(), name)
			require.Equal(t, "ok", attributesIn(by[name])["tandem.result"].AsString(), name)
			require.Equal(t, addressOf("d1"), attributesIn(by[name])["tandem.decode.endpoint"].AsString(), name)
		}
		require.EqualValues(t, 12, attributesIn(by[telemetry.SpanPrefillAnswer])["gen_ai.usage.input_tokens"].AsInt64())
	})
}

// A prefill leg that fails ends both spans as errors, and pass 2 is one more, with the cause.
func TestSpansOfLegsThatFail(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, spans := tracedPairs(t, "sglang")
		q, v := pass1(s, "traced")
		q.headers[names.HeaderTraceparent] = v.set[names.HeaderTraceparent]
		d, _ := q.decode(s)
		q.mirror(s).answer(500, "oops")
		d.redirected(q)
		q.pass()
		s.log(q.entry(0, "downstream_remote_disconnect"))
		synctest.Wait()
		var failed, all []string
		for _, span := range spans.GetSpans() {
			all = append(all, span.Name)
			require.Equal(t, spans.GetSpans()[0].SpanContext.TraceID(), span.SpanContext.TraceID(), span.Name)
			if span.Status.Code == codes.Error {
				failed = append(failed, span.Name)
			}
			if span.Name == telemetry.SpanReplan || span.Name == telemetry.SpanDecodeLeg {
				require.Equal(t, "prefill", attributesIn(span)["tandem.cause"].AsString(), span.Name)
			}
		}
		require.ElementsMatch(t, []string{telemetry.SpanPrefillAnswer, telemetry.SpanDecodeLeg}, failed)
		require.Contains(t, all, telemetry.SpanReplan)
	})
}
