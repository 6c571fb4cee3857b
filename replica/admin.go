package replica

import (
	"fmt"
	"net/http"
	"net/http/pprof"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"tandem/docs"
	"tandem/kvstate/redisstore"
	"tandem/replica/orders"
	"tandem/status"
	"tandem/status/words"
)

// newAdmin is the operator's port: health, metrics and profiles, orders, and the page that shows what the replica does.
// It is for the inside; put no client near it.
func newAdmin(registry *prometheus.Registry, isReady func() bool, fleet *fleet,
	operator *orders.Orders, page, assigned http.Handler,
	recording func(*http.ServeMux, func(http.HandlerFunc) http.HandlerFunc)) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("ok\n")) })
	mux.HandleFunc("GET /readyz", ready(isReady, fleet.store, fleet.keyCheck))
	mux.Handle("GET /metrics", promhttp.HandlerFor(registry, promhttp.HandlerOpts{EnableOpenMetrics: true}))
	mux.HandleFunc("GET /debug/pprof/", pprof.Index)
	mux.HandleFunc("GET /debug/pprof/profile", pprof.Profile)
	mux.HandleFunc("GET /debug/pprof/trace", pprof.Trace)
	mux.HandleFunc("GET /debug/state", func(w http.ResponseWriter, _ *http.Request) { words.WriteJSON(w, status.State(fleet.state)) })
	mux.Handle("GET /debug/requests", page)
	mux.Handle("GET /debug/roles", assigned)
	mux.Handle("GET /debug/explain", page)
	operator.Register(mux)
	recording(mux, operator.Allowed)
	mux.Handle("GET /docs/", status.Secured(docs.Handler()))
	mux.Handle("GET /status.json", page)
	mux.Handle("GET /", page)
	return mux
}

// ready is readiness, in words too; store may be nil.
func ready(isReady func() bool, store *redisstore.Store, keys func() redisstore.KeyCheck) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		text, check := "", keys()
		if n := len(check.Differ); n > 0 {
			text = fmt.Sprintf("tickets: the keys are not those of %d other replicas: give all of them the same tickets.keyFile\n", n)
		}
		if !isReady() {
			http.Error(w, "not ready\n"+text, http.StatusServiceUnavailable)
			return
		}
		text = "ok\n" + text
		if store != nil { // for people: a replica without Redis is as ready as one with
			status, _ := store.Status()
			text += status + "\n"
			if refused := store.Refused(); refused != "" {
				text += "redis refuses a command: " + refused + "\n"
			}
		}
		_, _ = w.Write([]byte(text))
	}
}
