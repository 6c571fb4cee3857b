// Package envoyconfigs writes the Envoy configuration that belongs to a Tandem configuration.
//
// [Bootstrap] renders one complete, commented bootstrap from bootstrap.yaml.tmpl. The folders beside this file hold the
// same for the common shapes, ready to run: a tandem.yaml each, and the envoy.yaml rendered from it, which a test keeps
// equal and holds against the real `envoy --mode validate`.
//
// What Envoy has to do here, and why it is built this way (the main listener, the prefill leg behind an internal
// listener, composite clusters, the access log), is told in the template's own comments.
package envoyconfigs

import (
	"bytes"
	_ "embed"
	"fmt"
	"net"
	"net/netip"
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

// bufferedFrom is the body length from which BUFFERED is cheaper than FULL_DUPLEX_STREAMED (docs/benchmarks.md).
const bufferedFrom = 64 << 10

type address struct {
	Host string
	Port int
}

// Type is the cluster type that reaches the address.
func (a address) Type() string {
	if _, err := netip.ParseAddr(a.Host); err != nil {
		return "STRICT_DNS"
	}
	return "STATIC"
}

type bootstrap struct {
	Listen, Admin     address
	ExtProcs, Replans []address
	TLS               bool
	Schemes           []scheme // of engines; http first
	MaxBodyBytes      int64
	BufferBytes       int64
	MessageBytes      int64
	BufferedFrom      int64
	Mode              string
	IdleTimeout       string
	MaxRedirects      int
}

// scheme is how engines are spoken to; each has clusters of its own.
type scheme struct {
	Name, Suffix string
}

// LegSchemes are the schemes with http last, because its route takes what no other does.
func (b bootstrap) LegSchemes() []scheme { return append(slices.Clone(b.Schemes[1:]), b.Schemes[0]) }

// AfterMaxBody is the first length that is too long to be split (Envoy's ranges exclude their end).
func (b bootstrap) AfterMaxBody() int64 { return b.MaxBodyBytes + 1 }

// localReply is how one of Envoy's own answers reads.
type localReply struct {
	Status              int
	Type, Code, Message string
	RetryAfter          int // seconds; 0: none
}

// LocalReplies are the answers that Envoy gives by itself on this listener.
func (bootstrap) LocalReplies() []localReply {
	return []localReply{
		{400, "invalid_request_error", "bad_request", "the request is not valid HTTP", 0},
		{403, "invalid_request_error", "upgrade_not_supported", "protocol upgrades are not supported here", 0},
		{408, "invalid_request_error", "request_timeout", "the request did not arrive in time", 0},
		{413, "invalid_request_error", "body_too_large", "the request body is too large", 0},
		{431, "invalid_request_error", "headers_too_large", "the request headers are too large", 0},
		{500, "api_error", "router_unavailable", "the router cannot be reached; try again", 1},
		{502, "api_error", "bad_gateway", "the endpoint's answer was not valid HTTP", 1},
		{503, "api_error", "endpoint_unavailable", "the endpoint did not answer; try again", 1},
		{504, "api_error", "endpoint_timeout", "the endpoint did not answer in time; try again", 1},
	}
}

// Bootstrap renders the Envoy bootstrap for a configuration that was loaded by configv1.
func Bootstrap(c *configv1.Config) ([]byte, error) {
	e := c.GetEnvoy()
	b := bootstrap{
		TLS: c.GetExtProc().GetTls() != nil, MaxBodyBytes: e.GetMaxBodyBytes(), BufferBytes: e.GetMaxBodyBytes() + bufferMargin,
		MessageBytes: c.GetExtProc().GetMaxMessageBytes(), BufferedFrom: bufferedFrom, Mode: e.GetBodyMode(),
		IdleTimeout: seconds(e.GetDecodeIdleTimeout()), MaxRedirects: MaxRedirects, Schemes: schemes(c),
	}
	if b.Mode == "buffered" {
		b.BufferedFrom = 0
	}
	var err error
	if b.Listen, err = parse(e.GetListen()); err != nil {
		return nil, err
	}
	if b.Admin, err = parse(e.GetAdmin()); err != nil {
		return nil, err
	}
	if b.ExtProcs, err = reachable(e.GetExtProcs()); err != nil {
		return nil, err
	}
	if b.Replans, err = reachable(e.GetReplans()); err != nil {
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

func seconds(duration string) string {
	return strconv.FormatFloat(configv1.Duration(duration).Seconds(), 'f', -1, 64) + "s"
}

func schemes(c *configv1.Config) []scheme {
	out := []scheme{{"http", ""}}
	for _, p := range c.GetPools() {
		for _, e := range p.GetEndpoints() {
			if s := e.GetScheme(); s != "http" && !slices.Contains(out, scheme{s, "-" + s}) {
				out = append(out, scheme{s, "-" + s})
			}
		}
	}
	return out
}

func parse(hostPort string) (address, error) {
	host, port, err := net.SplitHostPort(hostPort)
	if err != nil {
		return address{}, fmt.Errorf("address %q: %w", hostPort, err)
	}
	n, err := strconv.Atoi(port)
	if err != nil {
		return address{}, fmt.Errorf("address %q: %w", hostPort, err)
	}
	return address{host, n}, nil
}

// reachable parses addresses to connect to: one that listens everywhere is reached on the loopback.
func reachable(hostPorts []string) ([]address, error) {
	var out []address
	for _, hp := range hostPorts {
		a, err := parse(hp)
		if err != nil {
			return nil, err
		}
		if ip, err := netip.ParseAddr(a.Host); err == nil && ip.IsUnspecified() {
			a.Host = "127.0.0.1"
			if ip.Is6() {
				a.Host = "::1"
			}
		}
		out = append(out, a)
	}
	return out, nil
}
