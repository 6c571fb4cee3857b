package livecheck

import (
	"cmp"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"text/tabwriter"

	"tandem/kvstate"
	configv1 "tandem/protos/config/v1"
	"tandem/replica/config"
)

// Print writes a table of the compared facts, followed by those that could not be compared.
func (r *Report) Print(w io.Writer) {
	if len(r.Engines) > 0 {
		t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
		fmt.Fprintln(t, "pool\tendpoint\trole\tengine\trelease\tcompared")
		for i := range r.Engines {
			e := &r.Engines[i]
			engine := cmp.Or(engineName(e.Engine), "not reported")
			if e.Down {
				engine = "NO ANSWER"
			}
			fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%s\n", e.Pool, e.Address, e.Role, engine, cmp.Or(e.Release, "-"),
				cmp.Or(strings.Join(e.Compared, ", "), "-"))
		}
		_ = t.Flush()
	}
	var unknown []string // what the dialects need of engines that do not report it
	for i := range r.Engines {
		e := &r.Engines[i]
		if host, _, err := net.SplitHostPort(e.Address); err == nil && net.ParseIP(host) == nil && host != "localhost" {
			fmt.Fprintf(w, "asked at %s: one of the addresses of that name\n", e.Address)
		}
		if needs := e.needs(); slices.Contains(e.NotReported, "connector") && !slices.Contains(unknown, needs) {
			unknown = append(unknown, needs)
		}
	}
	r.printMissing(w)
	for _, needs := range unknown {
		fmt.Fprintln(w, needs)
	}
	if len(unknown) > 0 {
		fmt.Fprintln(w, "vLLM reports its connector and role only if it runs with VLLM_SERVER_DEV_MODE=1")
	}
	for _, f := range r.findings {
		if f.note {
			fmt.Fprintf(w, "warning: %s\n", f.text)
		}
	}
	for _, line := range r.Advice {
		fmt.Fprintf(w, "recommended: %s\n", line)
	}
	for _, line := range r.NotAsked {
		fmt.Fprintf(w, "not asked: %s\n", line)
	}
}

// printMissing writes what engines do not report, with the engines that do not.
func (r *Report) printMissing(w io.Writer) {
	var facts []string
	at := map[string][]string{}
	for i := range r.Engines {
		if e := &r.Engines[i]; len(e.NotReported) > 0 {
			what := strings.Join(e.NotReported, ", ")
			if at[what] == nil {
				facts = append(facts, what)
			}
			at[what] = append(at[what], e.Address)
		}
	}
	for _, what := range facts {
		engines := strings.Join(at[what], ", ")
		if len(at[what]) == len(r.Engines) && len(r.Engines) > 1 {
			engines = "any of them"
		}
		fmt.Fprintf(w, "not compared at %s, since it is not reported: %s\n", engines, what)
	}
}

// needs names the connector that a pool's engines need, if that could not be compared.
func (e *Engine) needs() string {
	return fmt.Sprintf("%s: kvTransfer %s needs %s: "+
		"compare that with kv_connector in --kv-transfer-config of the engines that do not report it",
		e.Pool, e.dialect, strings.Join(e.connectors, " or "))
}

// row returns the report's row for endpoint j of a pool.
func (a *engineAnswer) row(p *configv1.Pool, answers []engineAnswer, j int) Engine {
	e := p.GetEndpoints()[j]
	out := Engine{
		Pool: p.GetName(), Address: e.GetAddress(), Role: e.GetRole(),
		Engine: a.info.Engine, Release: a.info.Version, Down: a.down, models: a.info.Models,
		dialect: p.GetKvTransfer(), connectors: config.DialectOf(p).Reports.Connectors,
	}
	if a.down {
		return out
	}
	out.Compared, out.NotReported = append([]string{"health"}, a.compared...), a.unknown
	if a.foreign {
		return out
	}
	// Facts that a pair must share are compared if both engines report them.
	add := func(what string, reported func(*engineAnswer) bool, partner func(other *configv1.Endpoint) bool) {
		if !reported(a) {
			out.NotReported = append(out.NotReported, what)
			return
		}
		for i, other := range p.GetEndpoints() {
			if i != j && partner(other) && reported(&answers[i]) {
				out.Compared = append(out.Compared, what)
				return
			}
		}
	}
	d := config.DialectOf(p)
	for fact := range kvstate.Facts {
		if d.Alike().Has(fact) && !slices.Contains(out.Compared, fact.String()) &&
			!slices.Contains(out.NotReported, fact.String()) {
			add(fact.String(), func(of *engineAnswer) bool { return of.info.Report[fact] != "" },
				func(other *configv1.Endpoint) bool { return paired(p, e, other) })
		}
	}
	return out
}

// paired reports whether two endpoints of a pool may serve one request together, as far as the file says.
func paired(p *configv1.Pool, a, b *configv1.Endpoint) bool {
	legs := func(prefill, decode *configv1.Endpoint) bool {
		return slices.Contains([]string{"prefill", "both"}, prefill.GetRole()) &&
			slices.Contains([]string{"decode", "both"}, decode.GetRole())
	}
	return config.PairsAs(p, a) == config.PairsAs(p, b) && (legs(a, b) || legs(b, a))
}
