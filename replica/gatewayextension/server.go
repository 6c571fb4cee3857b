package gatewayextension

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sync"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	typev3 "github.com/envoyproxy/go-control-plane/envoy/type/v3"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"

	envoyconfigs "tandem/envoy-configs"
	"tandem/internal/guard"
	configv1 "tandem/protos/config/v1"
	egv1 "tandem/protos/envoygateway/v1"
)

// serviceName is Envoy Gateway's name of the protocol.
const serviceName = "envoygateway.extension.EnvoyGatewayExtension"

// maxTranslations bounds concurrent translations. Envoy Gateway sends one after the other.
const maxTranslations = 4

// Server extends translations. It also refuses requests on routes that were not extended, as their external processor:
// such a route would send a prefill request to its endpoint, and that answer of one token to the client.
type Server struct {
	extprocv3.UnimplementedExternalProcessorServer

	log          *slog.Logger
	keep         *guard.Guard
	translations *prometheus.CounterVec // result
	routes       prometheus.Gauge
	slots        chan struct{}

	mu       sync.Mutex
	own      *envoyconfigs.Behind
	services []string
	seen     []string // routes of the last translation
}

// New returns a server for a configuration from package config. A translation that panics counts with keep.
func New(c *configv1.Config, keep *guard.Guard, r prometheus.Registerer, log *slog.Logger) (*Server, error) {
	s := &Server{
		log: log, keep: keep, slots: make(chan struct{}, maxTranslations),
		translations: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "tandem_gateway_translations_total",
			Help: "Translations of Envoy Gateway that passed Tandem, by result (extended, unchanged, failed).",
		}, []string{"result"}),
		routes: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "tandem_gateway_routes", Help: "Routes to Tandem in Envoy Gateway's last translation.",
		}),
	}
	for _, result := range []string{"extended", "unchanged", "failed"} {
		s.translations.WithLabelValues(result)
	}
	if err := s.Set(c); err != nil {
		return nil, err
	}
	r.MustRegister(s.translations, s.routes)
	return s, nil
}

// Set changes the configuration for later translations. Envoy Gateway translates when its own objects change, so
// Envoys get it then. A configuration without envoyGateway changes nothing.
func (s *Server) Set(c *configv1.Config) error {
	if c.GetEnvoyGateway() == nil {
		return nil
	}
	own, err := envoyconfigs.NewBehind(c)
	if err != nil {
		return fmt.Errorf("making what Envoy Gateway is to send to Envoys: %w", err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.own, s.services = own, c.GetEnvoyGateway().GetServices()
	return nil
}

// Register adds the extension, and the external processor that refuses, to a gRPC server.
func (s *Server) Register(r grpc.ServiceRegistrar) {
	r.RegisterService(&grpc.ServiceDesc{
		ServiceName: serviceName,
		HandlerType: (*any)(nil),
		Methods:     []grpc.MethodDesc{{MethodName: "PostTranslateModify", Handler: s.serve}},
		Metadata:    "envoygateway/v1/extension.proto",
	}, nil)
	extprocv3.RegisterExternalProcessorServer(r, s)
}

// serve is PostTranslateModify, the only hook of Tandem's.
//
//nolint:revive // gRPC's order of arguments
func (s *Server) serve(_ any, ctx context.Context, decode func(any) error, _ grpc.UnaryServerInterceptor) (any, error) {
	in := &egv1.PostTranslateModifyRequest{}
	if err := decode(in); err != nil {
		return nil, fmt.Errorf("reading a translation: %w", err)
	}
	return s.postTranslate(ctx, in)
}

// postTranslate extends a translation. If that fails, Envoys get the translation unchanged: then Process refuses
// requests on routes to Tandem, and all others work.
func (s *Server) postTranslate(
	ctx context.Context, in *egv1.PostTranslateModifyRequest,
) (*egv1.PostTranslateModifyResponse, error) {
	select {
	case s.slots <- struct{}{}:
		defer func() { <-s.slots }()
	case <-ctx.Done():
		return nil, ctx.Err() //nolint:wrapcheck // gRPC makes a status of it
	}
	s.mu.Lock()
	own, services := s.own, s.services
	s.mu.Unlock()
	var routes []string
	work := func() (out *egv1.PostTranslateModifyResponse, err error) {
		out, routes, err = Extend(in, own, services)
		return out, err
	}
	out, err := guard.Try(guard.With(ctx, s.keep), "gateway extension", work)
	if err != nil {
		s.log.Error("Envoy Gateway's translation goes on as it is: routes to Tandem are refused", "err", err)
		s.translations.WithLabelValues("failed").Inc()
		return unchanged(in), nil
	}
	s.report(routes)
	return out, nil
}

func unchanged(in *egv1.PostTranslateModifyRequest) *egv1.PostTranslateModifyResponse {
	return &egv1.PostTranslateModifyResponse{
		Clusters: in.GetClusters(), Secrets: in.GetSecrets(), Listeners: in.GetListeners(), Routes: in.GetRoutes(),
	}
}

// report counts a translation, and logs new and removed routes.
func (s *Server) report(routes []string) {
	result := "extended"
	if len(routes) == 0 {
		result = "unchanged"
	}
	s.translations.WithLabelValues(result).Inc()
	s.routes.Set(float64(len(routes)))
	s.mu.Lock()
	defer s.mu.Unlock()
	if !slices.Equal(s.seen, routes) {
		s.log.Info("Envoy Gateway's routes to Tandem", "routes", routes)
		s.seen = routes
	}
}

// notExtended is the answer to a request on a route that was not extended.
const notExtended = `{"error":{"message":"this gateway has not taken up Tandem's extension for the route; ` +
	`see docs/kubernetes.md","type":"api_error","param":null,"code":"route_not_extended"}}`

// Process implements the external processor for routes that were not extended: it refuses the request.
func (s *Server) Process(stream extprocv3.ExternalProcessor_ProcessServer) error {
	if _, err := stream.Recv(); err != nil {
		return err //nolint:wrapcheck // the peer left
	}
	s.log.Warn("a request came on a route that was not extended: is Tandem an extension of this Envoy Gateway?")
	return stream.Send(&extprocv3.ProcessingResponse{ //nolint:wrapcheck // the peer left
		Response: &extprocv3.ProcessingResponse_ImmediateResponse{ImmediateResponse: &extprocv3.ImmediateResponse{
			Status: &typev3.HttpStatus{Code: typev3.StatusCode_ServiceUnavailable},
			Headers: &extprocv3.HeaderMutation{SetHeaders: []*corev3.HeaderValueOption{{
				Header: &corev3.HeaderValue{Key: "content-type", RawValue: []byte("application/json")},
			}}},
			Body: []byte(notExtended), Details: "route_not_extended",
		}},
	})
}
