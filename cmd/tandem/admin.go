package main

import (
	"cmp"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/http/pprof"
	"net/netip"
	"os"
	"strconv"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"tandem/docs"
	"tandem/extproc"
	"tandem/internal/orders"
	"tandem/kvstate/redisstore"
	configv1 "tandem/protos/config/v1"
	"tandem/status"
	"tandem/status/words"
)

// newAdmin is the operator's port: health, metrics and profiles, orders, and the page that shows what the replica does.
// It is for the inside; put no client near it.
func newAdmin(
	registry *prometheus.Registry, health *extproc.Health, server *extproc.Server, fleet *fleet,
	operator *orders.Orders, page, words http.Handler,
) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("ok\n")) })
	mux.HandleFunc("GET /readyz", ready(health, fleet.store, fleet.keyCheck))
	mux.Handle("GET /metrics", promhttp.HandlerFor(registry, promhttp.HandlerOpts{EnableOpenMetrics: true}))
	mux.HandleFunc("GET /debug/pprof/", pprof.Index)
	mux.HandleFunc("GET /debug/pprof/profile", pprof.Profile)
	mux.HandleFunc("GET /debug/pprof/trace", pprof.Trace)
	mux.HandleFunc("GET /debug/state", func(w http.ResponseWriter, _ *http.Request) { writeJSON(w, status.State(fleet.state)) })
	mux.Handle("GET /debug/requests", page)
	mux.Handle("GET /debug/roles", words)
	mux.HandleFunc("GET /debug/explain", func(w http.ResponseWriter, r *http.Request) {
		tokens, err := strconv.ParseInt(cmp.Or(r.URL.Query().Get("tokens"), "1000"), 10, 64)
		if err != nil || tokens < 1 {
			http.Error(w, "tokens is the length of the prompt: 1 or more", http.StatusBadRequest)
			return
		}
		e, err := server.Explain(r.URL.Query().Get("pool"), tokens)
		if err != nil {
			http.Error(w, err.Error(), http.StatusNotFound)
			return
		}
		writeJSON(w, e)
	})
	operator.Register(mux)
	mux.Handle("GET /docs/", status.Secured(docs.Handler()))
	mux.Handle("GET /status.json", page)
	mux.Handle("GET /", page)
	return mux
}

// ready is readiness, in words too; store may be nil.
func ready(health *extproc.Health, store *redisstore.Store, keys func() redisstore.KeyCheck) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		text, check := "", keys()
		if n := len(check.Differ); n > 0 {
			text = fmt.Sprintf("tickets: the keys are not those of %d other replicas: give all of them the same tickets.keyFile\n", n)
		}
		if !health.Ready() {
			http.Error(w, "not ready\n"+text, http.StatusServiceUnavailable)
			return
		}
		text = "ok\n" + text
		if store != nil { // for people: a replica without Redis is as ready as one with
			status, _ := store.Status()
			text += status + "\n"
		}
		_, _ = w.Write([]byte(text))
	}
}

func writeJSON(w http.ResponseWriter, v any) {
	w.Header().Set("content-type", contentJSON)
	enc := json.NewEncoder(words.Escaped(w))
	enc.SetIndent("", "  ")
	_ = enc.Encode(v)
}

const contentJSON = "application/json"

// hostCheck refuses requests to the admin port under a name that is not its own. A page of a stranger can have a name
// of his resolve to this machine's address (DNS rebinding); the browser then lets the page read what the port answers.
// Such an attack needs a name that the stranger can register, so addresses need no check.
type hostCheck struct {
	names map[string]bool // lower case, without a dot at the end
	below []string        // ".example.com": all names that end so
}

// newHostCheck allows what admin.hosts lists, and the names by which the configuration, --advertise and the system know
// this machine.
func newHostCheck(cfg *configv1.Config, advertise string) *hostCheck {
	c := &hostCheck{names: map[string]bool{}}
	addresses := append([]string{cfg.GetAdmin().GetListen(), advertise}, cfg.GetEnvoy().GetExtProcs()...)
	for _, address := range append(addresses, cfg.GetEnvoy().GetReplans()...) {
		if host := hostOf(address); host != "" {
			c.names[host] = true
		}
	}
	if name, err := os.Hostname(); err == nil {
		c.names[hostOf(name)] = true
	}
	for _, name := range cfg.GetAdmin().GetHosts() {
		if below, found := strings.CutPrefix(name, "*"); found {
			c.below = append(c.below, hostOf(below))
		} else {
			c.names[hostOf(name)] = true
		}
	}
	return c
}

// hostOf returns the host of host:port, host, [ip] or [ip]:port, lower case.
func hostOf(address string) string {
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		host = strings.TrimSuffix(strings.TrimPrefix(address, "["), "]")
	}
	return strings.ToLower(strings.TrimSuffix(host, "."))
}

// allows reports whether a Host header names this port. Nobody can register a name without a dot, nor one below
// localhost, svc or cluster.local. Browsers always send a Host; HTTP/1.0 clients may send none.
func (c *hostCheck) allows(header string) bool {
	host := hostOf(header)
	if _, err := netip.ParseAddr(host); err == nil || c.names[host] || !strings.Contains(host, ".") {
		return true
	}
	for _, end := range append([]string{".localhost", ".svc", ".svc.cluster.local"}, c.below...) {
		if strings.HasSuffix(host, end) {
			return true
		}
	}
	return false
}

// around answers 421 instead of next where the Host is another's.
func (c *hostCheck) around(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !c.allows(r.Host) {
			http.Error(w, "This port does not answer under the name in the Host header. Use an IP address or localhost, "+
				"or list the name in admin.hosts (docs/security.md#ports).", http.StatusMisdirectedRequest)
			return
		}
		next.ServeHTTP(w, r)
	})
}
