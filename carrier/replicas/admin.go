package replicas

import (
	"context"
	"fmt"
	"html"
	"log/slog"
	"maps"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	dto "github.com/prometheus/client_model/go"

	configv1 "tandem/protos/config/v1"
	"tandem/replica"
	"tandem/replica/config"
	"tandem/replica/hostcheck"
)

// admin is the one operator's port of a process, for all replicas on others' routes: a replica is below /NAME/, as
// `tandem status --admin http://ADDRESS/NAME` finds it. With one replica, it is also at the root.
type admin struct {
	all    *All
	log    *slog.Logger
	served bool // the port is open, or cannot be opened. Guarded by all.mu
}

// serve opens the port, once. If it cannot be opened, requests are served all the same.
func (a *admin) serve() {
	if a.served {
		return
	}
	a.served = true
	address := a.all.operator.Admin
	l, err := a.all.set.Listen(context.Background(), address)
	if err != nil {
		a.log.Error("the operator's port cannot be opened: there are no metrics, no page and no orders", "err", err)
		return
	}
	check := hostcheck.New(&configv1.Config{Admin: &configv1.Admin{Listen: address}}, "")
	s := &http.Server{Handler: check.Around(a), ReadHeaderTimeout: 10 * time.Second}
	go func() {
		if err := replica.ServeHTTP(s, l); err != nil {
			a.log.Error("the operator's port", "err", err)
		}
	}()
}

// ServeHTTP implements [http.Handler].
func (a *admin) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	running, refused := a.all.shown()
	switch r.URL.Path {
	case "/healthz":
		_, _ = w.Write([]byte("ok\n"))
		return
	case "/readyz":
		ready(w, running, refused)
		return
	case "/metrics":
		gather := prometheus.GathererFunc(func() ([]*dto.MetricFamily, error) { return gatherAll(running, refused) })
		promhttp.HandlerFor(gather, promhttp.HandlerOpts{EnableOpenMetrics: true}).ServeHTTP(w, r)
		return
	}
	name, _, found := strings.Cut(strings.TrimPrefix(r.URL.Path, "/"), "/")
	if one := running[name]; one != nil {
		if !found {
			http.Redirect(w, r, "/"+name+"/", http.StatusFound) //nolint:gosec // the name of a replica
			return
		}
		http.StripPrefix("/"+name, one.replica.Admin).ServeHTTP(w, r)
		return
	}
	if len(running) == 1 && len(refused) == 0 {
		for _, one := range running {
			one.replica.Admin.ServeHTTP(w, r)
		}
		return
	}
	if r.URL.Path != "/" {
		http.Error(w, "no replica of this process has that name", http.StatusNotFound)
		return
	}
	index(w, running, refused)
}

// shown returns the replicas by their names in paths, and a sentence for each configuration or route that has a
// problem.
func (a *All) shown() (map[string]*running, []string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	out, wrong := map[string]*running{}, map[string]bool{}
	for key, r := range a.running {
		if r.shared {
			out[strings.ReplaceAll(strings.Trim(key, "/"), "/", "_")] = r
		}
	}
	newest := map[string]int{} // a listener's old configuration stays until its connections have ended
	for id, c := range a.open {
		newest[keyOf(&c.set)] = max(newest[keyOf(&c.set)], id)
	}
	for id, c := range a.open {
		if why := c.refused.Load(); why != nil && id == newest[keyOf(&c.set)] {
			wrong[keyOf(&c.set)+": "+*why] = true
		}
		for _, why := range c.route.Problems() {
			wrong[keyOf(&c.set)+": "+why] = true
		}
	}
	return out, slices.Sorted(maps.Keys(wrong))
}

// ready reports whether all configurations are in force, and what is wrong with the others.
func ready(w http.ResponseWriter, running map[string]*running, refused []string) {
	status, text := http.StatusOK, "ok\n"
	for _, name := range slices.Sorted(maps.Keys(running)) {
		if !running[name].replica.Ready() {
			status, text = http.StatusServiceUnavailable, text+name+": not ready\n"
		}
	}
	if len(refused) > 0 {
		status, text = http.StatusServiceUnavailable, text+strings.Join(refused, "\n")+"\n"
	}
	if status != http.StatusOK {
		http.Error(w, strings.TrimPrefix(text, "ok\n"), status)
		return
	}
	_, _ = w.Write([]byte(text))
}

func index(w http.ResponseWriter, running map[string]*running, refused []string) {
	var b strings.Builder
	b.WriteString("<!doctype html><title>Tandem</title><h1>Tandem in this Envoy</h1><ul>")
	for _, name := range slices.Sorted(maps.Keys(running)) {
		fmt.Fprintf(&b, `<li><a href="%[1]s/">%[1]s</a>`, html.EscapeString(name))
	}
	b.WriteString("</ul>")
	for _, why := range refused {
		fmt.Fprintf(&b, "<p>Not in force: <pre>%s</pre>", html.EscapeString(why))
	}
	w.Header().Set("content-type", "text/html; charset=utf-8")
	_, _ = w.Write([]byte(b.String()))
}

// replicaLabel is the label that names a metric's replica.
const replicaLabel = "replica_name"

// gatherAll has the metrics of all replicas, with their names. Metrics of the process appear once.
func gatherAll(running map[string]*running, refused []string) ([]*dto.MetricFamily, error) {
	families := map[string]*dto.MetricFamily{}
	for _, name := range slices.Sorted(maps.Keys(running)) {
		of, err := running[name].replica.Metrics.Gather()
		if err != nil {
			return nil, fmt.Errorf("replica %s: %w", name, err)
		}
		for _, f := range of {
			process := strings.HasPrefix(f.GetName(), "go_") || strings.HasPrefix(f.GetName(), "process_")
			known := families[f.GetName()]
			if process && known != nil {
				continue
			}
			for _, m := range f.Metric {
				if !process {
					m.Label = append(m.Label, &dto.LabelPair{Name: new(replicaLabel), Value: new(name)})
				}
			}
			if known == nil {
				families[f.GetName()] = f
			} else {
				known.Metric = append(known.Metric, f.Metric...)
			}
		}
	}
	const name = "tandem_configurations_refused"
	families[name] = &dto.MetricFamily{
		Name: new(name), Type: dto.MetricType_GAUGE.Enum(),
		Help:   new("Configurations of routes, and routes, that are not in order (/readyz says why)."),
		Metric: []*dto.Metric{{Gauge: &dto.Gauge{Value: new(float64(len(refused)))}}},
	}
	return slices.SortedFunc(maps.Values(families), func(a, b *dto.MetricFamily) int {
		return strings.Compare(a.GetName(), b.GetName())
	}), nil
}

// allows reports whether an engine that a policy names, or that its names resolve to, is in the networks for that.
func (a *All) allows(log *slog.Logger) func(pool, address string) bool {
	return func(pool, address string) bool {
		host, _, _ := strings.Cut(address, "#") // a data-parallel rank
		at, err := netip.ParseAddrPort(host)
		if err == nil && config.Contains(a.operator.Engines, at.Addr()) {
			return true
		}
		log.Warn("an endpoint is left out: it is in none of the networks of engines (engines in operator.yaml)",
			"pool", pool, "endpoint", address)
		return false
	}
}
