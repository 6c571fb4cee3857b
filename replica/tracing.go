package replica

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracegrpc"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"

	configv1 "tandem/protos/config/v1"
)

// spans sends what the server traces to a collector, in batches, in the background. nil: nothing is traced.
type spans struct {
	provider *sdktrace.TracerProvider
}

// Bounds of the sender: spans that find no room are dropped, and a collector that is gone holds up the end no longer
// than that.
const (
	spanQueue     = 8192
	spansShutdown = 2 * time.Second
)

// newSpans begins to send, if the configuration says where. It succeeds even if the collector does not answer.
// OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES take precedence over the attributes that are set here.
func newSpans(t *configv1.Tracing, release string, log *slog.Logger) (*spans, error) {
	if t == nil {
		return nil, nil
	}
	exporter, err := otlptracegrpc.New(context.Background(), otlptracegrpc.WithEndpoint(t.GetEndpoint()), otlptracegrpc.WithInsecure(),
		otlptracegrpc.WithTimeout(5*time.Second))
	if err != nil {
		return nil, fmt.Errorf("tracing: %w", err)
	}
	host, _ := os.Hostname()
	r, err := resource.New(context.Background(), resource.WithAttributes(attribute.String("service.name", "tandem"),
		attribute.String("service.version", release), attribute.String("service.instance.id", host)), resource.WithFromEnv())
	if err != nil {
		return nil, fmt.Errorf("tracing: %w", err)
	}
	otel.SetErrorHandler(complaints(log))
	return &spans{sdktrace.NewTracerProvider(
		sdktrace.WithResource(r), sdktrace.WithSampler(sdktrace.ParentBased(sdktrace.TraceIDRatioBased(t.GetSampleRatio()))),
		sdktrace.WithBatcher(exporter, sdktrace.WithMaxQueueSize(spanQueue), sdktrace.WithBatchTimeout(time.Second)),
	)}, nil
}

// complaints logs the exporter's errors, at most one in ten seconds: if a collector is down, there is one each second.
func complaints(log *slog.Logger) otel.ErrorHandler {
	var last atomic.Int64
	return otel.ErrorHandlerFunc(func(err error) {
		now := time.Now().UnixNano()
		if before := last.Load(); now-before > int64(10*time.Second) && last.CompareAndSwap(before, now) {
			log.Warn("spans not sent", "err", err)
		}
	})
}

// tracer makes the server's spans; nil where nothing is traced.
func (s *spans) tracer() trace.Tracer {
	if s == nil {
		return nil
	}
	return s.provider.Tracer("tandem/extproc")
}

// close sends what is left.
func (s *spans) close() {
	if s == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), spansShutdown)
	defer cancel()
	_ = s.provider.Shutdown(ctx)
}
