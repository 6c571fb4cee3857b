package main

import (
	"encoding/json"
	"net/http"
	"net/http/pprof"
	"strconv"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"tandem/extproc"
)

// newAdmin is the operator's port: health, metrics, profiles, and the page that shows what the replica does. It is for the inside; put no client near it.
func newAdmin(registry *prometheus.Registry, health *extproc.Health, server *extproc.Server, fleet *fleet, page http.Handler) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("ok\n")) })
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		if !health.Ready() {
			http.Error(w, "not ready", http.StatusServiceUnavailable)
			return
		}
		_, _ = w.Write([]byte("ok\n"))
		if fleet.store != nil { // for people: a replica without Redis is as ready as one with
			text, _ := fleet.store.Status()
			_, _ = w.Write([]byte(text + "\n"))
		}
	})
	mux.Handle("GET /metrics", promhttp.HandlerFor(registry, promhttp.HandlerOpts{}))
	mux.HandleFunc("GET /debug/pprof/", pprof.Index)
	mux.HandleFunc("GET /debug/pprof/profile", pprof.Profile)
	mux.HandleFunc("GET /debug/state", func(w http.ResponseWriter, _ *http.Request) { writeState(w, fleet.state) })
	mux.HandleFunc("GET /debug/requests", func(w http.ResponseWriter, r *http.Request) {
		n, err := strconv.Atoi(r.URL.Query().Get("n"))
		if err != nil {
			n = 20
		}
		writeJSON(w, server.Recent(n))
	})
	mux.Handle("GET /status.json", page)
	mux.Handle("GET /", page)
	return mux
}

func writeJSON(w http.ResponseWriter, v any) {
	w.Header().Set("content-type", contentJSON)
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	_ = enc.Encode(v)
}

const contentJSON = "application/json"
