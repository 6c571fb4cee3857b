package e2e

import (
	"context"
	"encoding/hex"
	"net"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	collectorv1 "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	tracev1 "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/grpc"
)

// span is a span that reached the collector.
type span struct {
	service, name, trace, id, parent string
	attributes                       map[string]string
}

// collector is an OTLP collector that stores its input.
type collector struct {
	collectorv1.UnimplementedTraceServiceServer
	addr  string
	mu    sync.Mutex
	spans []span
}

func startCollector(t *testing.T) *collector {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	c := &collector{addr: l.Addr().String()}
	s := grpc.NewServer()
	collectorv1.RegisterTraceServiceServer(s, c)
	go func() { _ = s.Serve(l) }()
	t.Cleanup(s.Stop)
	return c
}

func (c *collector) Export(_ context.Context, r *collectorv1.ExportTraceServiceRequest) (*collectorv1.ExportTraceServiceResponse, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, resource := range r.GetResourceSpans() {
		service := ""
		for _, a := range resource.GetResource().GetAttributes() {
			if a.GetKey() == "service.name" {
				service = a.GetValue().GetStringValue()
			}
		}
		for _, scope := range resource.GetScopeSpans() {
			for _, s := range scope.GetSpans() {
				c.spans = append(c.spans, spanOf(service, s))
			}
		}
	}
	return &collectorv1.ExportTraceServiceResponse{}, nil
}

func spanOf(service string, s *tracev1.Span) span {
	out := span{service, s.GetName(), hex.EncodeToString(s.GetTraceId()), hex.EncodeToString(s.GetSpanId()), hex.EncodeToString(s.GetParentSpanId()), map[string]string{}}
	for _, a := range s.GetAttributes() {
		out.attributes[a.GetKey()] = a.GetValue().String()
	}
	return out
}

// of returns the spans of one trace so far.
func (c *collector) of(trace string) (out []span) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, s := range c.spans {
		if s.trace == trace {
			out = append(out, s)
		}
	}
	return out
}
