// Package envoyconfigs writes the Envoy configuration that belongs to a Tandem configuration.
//
// [Bootstrap] renders one complete, commented bootstrap from bootstrap.yaml.tmpl. The folders beside this file hold the
// same for the common shapes, ready to run: a tandem.yaml each, and the envoy.yaml rendered from it, which a test keeps
// equal and holds against the real `envoy --mode validate`.
//
// What Envoy has to do here, and why it is built this way (the main listener, the prefill leg behind an internal
// listener, composite clusters, the access log), is told in the template's own comments. bootstrap.go gathers what the
// template is filled with, hosts.go how servers are reached, replies.go what Envoy says by itself.
package envoyconfigs

import (
	"bytes"
	_ "embed"
	"fmt"
	"math"
	"slices"
	"strconv"
	"text/template"

	configv1 "tandem/protos/config/v1"
)

//go:embed bootstrap.yaml.tmpl
var bootstrapTemplate string

// MaxRedirects is Envoy's max_internal_redirects on the legs' routes. The server's own budget ends below it.
const MaxRedirects = 8

// bufferMargin is what a body may grow by on its way: the prefill leg's edits, and the KV parameters on the decode leg.
const bufferMargin = 8 << 20

// bufferedFrom is the body length from which bodyMode auto means BUFFERED (docs/adr/0005). With several replicas it is less: Envoy
// (1.40) keeps 64 KiB of a gRPC stream for a retry, headers and ticket included.
const (
	bufferedFrom        = 64 << 10
	bufferedFromSeveral = 24 << 10
)

// bootstrap is what the template is filled with.
type bootstrap struct {
	Listen, Admin address
	ExtProcs      hosts   // all replicas, as one cluster
	AccessLogs    []hosts // each replica, as a cluster of its own
	Replans       hosts
	TLS           *clientTLS // to the external processor; nil: plaintext
	EndpointTLS   *clientTLS // to https endpoints
	Schemes       []scheme   // of engines; http first
	MaxBodyBytes  int64
	BufferBytes   int64
	BufferedFrom  int64
	Mode          string
	IdleTimeout   string
	MaxRedirects  int
	Pairs         bool     // there is a pool whose legs run at once
	Encodes       bool     // there is a pool with an encode stage
	Answers       bool     // there is a pool with answers that are rewritten
	TicketTTL     string   // no prefill takes longer
	Explains      bool     // decisions, to operators
	Metadata      bool     // decisions are said in dynamic metadata
	Tracing       *tracing // nil: no spans
}

// tracing is where Envoy's spans go.
type tracing struct {
	Collector  hosts
	PerMillion int // requests traced that no client's traceparent decides
}

// scheme is how engines are spoken to; each has clusters of its own.
type scheme struct {
	Name, Suffix string
}

// Protocol is the field of Envoy's explicit_http_config.
func (s scheme) Protocol() string {
	if s.Name == "h2c" {
		return "http2_protocol_options"
	}
	return "http_protocol_options"
}

// LegSchemes are the schemes with http last, because its route takes what no other does.
func (b bootstrap) LegSchemes() []scheme { return append(slices.Clone(b.Schemes[1:]), b.Schemes[0]) }

// loop is a cluster that leads to an internal listener.
type loop struct{ Cluster, Listener string }

// Loops are the ways to the legs' listeners, beside the prefill leg's, which is always there.
func (b bootstrap) Loops() (out []loop) {
	if b.Pairs {
		out = append(out, loop{"tandem-decode-loop", "decode-leg"}, loop{"tandem-mirror-loop", "prefill-mirror"})
	}
	if b.Encodes {
		out = append(out, loop{"tandem-encode-loop", "encode-leg"})
	}
	if b.Answers {
		out = append(out, loop{"tandem-answer-loop", "answer-leg"})
	}
	return out
}

// AfterMaxBody is the first length that is too long to be split (Envoy's ranges exclude their end).
func (b bootstrap) AfterMaxBody() int64 { return b.MaxBodyBytes + 1 }

// Several reports whether there may be more than one replica, so that one can stand in for another: a name may stand for
// many.
func (b bootstrap) Several() bool { return len(b.ExtProcs.Hosts) > 1 || b.ExtProcs.ByName() }

// Bootstrap renders the Envoy bootstrap for a configuration that was loaded by configv1.
func Bootstrap(c *configv1.Config) ([]byte, error) {
	b, err := gather(c)
	if err != nil {
		return nil, err
	}
	t, err := template.New("bootstrap").Delims("<<", ">>").Parse(bootstrapTemplate)
	if err != nil {
		return nil, fmt.Errorf("reading the bootstrap template: %w", err)
	}
	var out bytes.Buffer
	if err := t.Execute(&out, b); err != nil {
		return nil, fmt.Errorf("rendering the bootstrap: %w", err)
	}
	return out.Bytes(), nil
}

func gather(c *configv1.Config) (*bootstrap, error) {
	e := c.GetEnvoy()
	b := &bootstrap{
		MaxBodyBytes: e.GetMaxBodyBytes(), BufferBytes: e.GetMaxBodyBytes() + bufferMargin,
		BufferedFrom: bufferedFrom, Mode: e.GetBodyMode(), MaxRedirects: MaxRedirects,
		IdleTimeout: seconds(e.GetDecodeIdleTimeout()),
		EndpointTLS: newClientTLS(e.GetEndpointTls(), false),
		Explains:    c.GetAdmin().GetTokenFile() != "", Metadata: c.GetExtProc().GetDecisionMetadata(),
		TicketTTL: seconds(c.GetTickets().GetTtl()),
	}
	b.serve(c.GetPools())
	if c.GetExtProc().Encrypted() || e.GetExtProcTls() != nil {
		b.TLS = newClientTLS(e.GetExtProcTls(), true)
	}
	var err error
	if b.Listen, err = parse(e.GetListen()); err != nil {
		return nil, err
	}
	if b.Admin, err = parse(e.GetAdmin()); err != nil {
		return nil, err
	}
	if b.ExtProcs, err = reachable("tandem-extproc", e.GetExtProcs()); err != nil {
		return nil, err
	}
	switch {
	case b.Mode == "buffered":
		b.BufferedFrom = 0
	case b.Several():
		b.BufferedFrom = bufferedFromSeveral
	}
	if b.Replans, err = reachable("tandem-replan", e.GetReplans()); err != nil {
		return nil, err
	}
	if t := c.GetTracing(); t != nil {
		b.Tracing = &tracing{PerMillion: int(math.Round(t.GetSampleRatio() * 1e6))}
		if b.Tracing.Collector, err = reachable("tandem-otlp", []string{t.GetEndpoint()}); err != nil {
			return nil, err
		}
	}
	for i, a := range b.ExtProcs.Hosts {
		b.AccessLogs = append(b.AccessLogs, hosts{"tandem-accesslog-" + strconv.Itoa(i), []address{a}})
	}
	return b, nil
}

// serve sets what depends on the pools.
func (b *bootstrap) serve(pools []*configv1.Pool) {
	b.Schemes = schemes(pools)
	b.Pairs = slices.ContainsFunc(pools, configv1.Concurrent)
	b.Encodes = slices.ContainsFunc(pools, configv1.Encodes)
	b.Answers = slices.ContainsFunc(pools, configv1.RewritesAnswers)
}

// Parts names what pools need of the bootstrap beyond what every bootstrap has: clusters for a scheme, listeners of legs. An Envoy
// whose bootstrap was made for other pools may lack some.
func Parts(pools []*configv1.Pool) (out []string) {
	var b bootstrap
	b.serve(pools)
	for _, s := range b.Schemes[1:] {
		out = append(out, "clusters for "+s.Name)
	}
	for _, l := range b.Loops() {
		out = append(out, "listener "+l.Listener)
	}
	return out
}

func seconds(duration string) string {
	return strconv.FormatFloat(configv1.Duration(duration).Seconds(), 'f', -1, 64) + "s"
}

func schemes(pools []*configv1.Pool) []scheme {
	out := []scheme{{"http", ""}}
	for _, p := range pools {
		all := p.GetDiscovery().Schemes()
		for _, e := range p.GetEndpoints() {
			all = append(all, e.GetScheme())
		}
		for _, s := range all {
			if s != "http" && !slices.Contains(out, scheme{s, "-" + s}) {
				out = append(out, scheme{s, "-" + s})
			}
		}
	}
	return out
}
