package proposal

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"path"
	"regexp"
	"slices"
	"strings"
	"time"

	"tandem/extproc/kvtransfer"
	"tandem/kvstate/enginefacts"
	"tandem/status/words"
)

// Mark is the first line of a file that [Write] wrote.
const Mark = "# Written by tandem run, which writes it anew each time. Delete this line to keep what you change."

// Options are settings that the engines do not report.
type Options struct {
	Listen, ExtProc, Replan, Admin, EnvoyAdmin string // addresses
	KVTransfer                                 string // the dialect; "": as the engines say
	KeyFile                                    string // the engines' API key; "": none
	Split                                      string // of the pool; "": its default
	Inside                                     bool   // Envoy loads Tandem
}

// Write writes the configuration of the engines, which were asked: a pool for those that serve the same models.
func Write(engines []Engine, o Options) (string, error) {
	var b strings.Builder
	b.WriteString(Mark + "\n# The settings: docs/configuration.md, or /docs/configuration.md on the replica's page.\n")
	if o.Inside {
		fmt.Fprintf(&b, "envoy: {run: inside, listen: %q, admin: %q}\n", o.Listen, o.EnvoyAdmin)
	} else {
		fmt.Fprintf(&b, "envoy: {listen: %q, admin: %q}\nextProc: {listen: %q}\nreplan: {listen: %q}\n",
			o.Listen, o.EnvoyAdmin, o.ExtProc, o.Replan)
	}
	fmt.Fprintf(&b, "admin: {listen: %q}\npools:\n", o.Admin)
	groups, err := byModel(engines)
	if err != nil {
		return "", err
	}
	if len(groups) == 1 {
		err := writePool(&b, "default", nil, groups[0], o)
		return b.String(), err
	}
	names := map[string]bool{}
	for _, g := range groups {
		models := common(g)
		if len(models) == 0 {
			return "", noModel(g)
		}
		name := poolName(models[0])
		for n := 2; names[name]; n++ {
			name = fmt.Sprintf("%s-%d", poolName(models[0]), n)
		}
		names[name] = true
		if err := writePool(&b, name, models, g, o); err != nil {
			return "", fmt.Errorf("of the engines with %s: %w (%s)", words.Plain(models[0]), err, serving(engines))
		}
	}
	return b.String(), nil
}

// writePool writes a pool. models: that it takes; none: any.
func writePool(b *strings.Builder, name string, models []string, engines []Engine, o Options) error {
	d := dialect{o.KVTransfer, "as you said"}
	if d.name == "" {
		var err error
		if d, err = choose(engines); err != nil {
			return err
		}
	}
	if err := complete(engines, d.name); err != nil {
		return err
	}
	listed := slices.ContainsFunc(engines, func(e Engine) bool { return len(e.Info.Models) > 0 })
	if listed && len(common(engines)) == 0 {
		return noModel(engines)
	}
	fmt.Fprintf(b, "- name: %s\n", name)
	if len(models) > 0 {
		list, err := json.Marshal(models)
		if err != nil {
			return fmt.Errorf("writing names of models: %w", err) // not reached: they are strings
		}
		fmt.Fprintf(b, "  models: %s\n", list)
	}
	fmt.Fprintf(b, "  kvTransfer: %s # %s\n", d.name, words.Plain(d.why))
	if o.Split != "" {
		fmt.Fprintf(b, "  split: %s\n", o.Split)
	}
	if rolesFollow(engines, d.name) {
		b.WriteString("  roles: auto # who prefills and who decodes follows the traffic\n")
	}
	if o.KeyFile != "" {
		fmt.Fprintf(b, "  apiKeyFile: %q\n", o.KeyFile)
	}
	b.WriteString(leases(engines, d.name))
	b.WriteString("  endpoints:\n")
	for i := range engines {
		b.WriteString(engines[i].line(d.name))
	}
	return nil
}

// unnamed is what stands in no name of a pool.
var unnamed = regexp.MustCompile(`[^a-z0-9]+`)

// poolName makes the name of a pool of a model's: Qwen/Qwen3-8B: qwen3-8b.
func poolName(model string) string {
	name := strings.Trim(unnamed.ReplaceAllString(strings.ToLower(path.Base(model)), "-"), "-")
	return cmp.Or(name[:min(len(name), 40)], "pool")
}

// complete returns an error if a leg has no engine.
func complete(engines []Engine, dialect string) error {
	var prefill, decode bool
	for i := range engines {
		role := engines[i].role()
		prefill, decode = prefill || role != "decode", decode || role != "prefill"
	}
	switch {
	case !decode:
		return errors.New("no engine decodes: name one with --decode, or with --engine if it does both")
	case !prefill && dialect != "none":
		return errors.New("no engine prefills: name one with --prefill, or with --engine if it does both")
	}
	return nil
}

// byModel groups engines that share models, in the order in which they were named.
func byModel(engines []Engine) (groups [][]Engine, err error) {
	for _, e := range engines {
		joined := []Engine{e}
		var others [][]Engine
		at := len(groups)
		for i, g := range groups {
			if !slices.ContainsFunc(g, func(o Engine) bool { return shares(o.Info.Models, e.Info.Models) }) {
				others = append(others, g)
				continue
			}
			joined, at = append(slices.Clone(g), joined...), min(at, i)
		}
		groups = slices.Insert(others, min(at, len(others)), joined)
	}
	silent := slices.IndexFunc(engines, func(e Engine) bool { return len(e.Info.Models) == 0 })
	if silent < 0 || len(groups) <= 1 {
		return groups, nil
	}
	listed := slices.DeleteFunc(slices.Clone(groups), func(g []Engine) bool { return len(g[0].Info.Models) == 0 })
	if len(listed) > 1 {
		return nil, fmt.Errorf("%s does not say which models it serves, and the others serve different ones: write a "+
			"configuration with a pool for each model", engines[silent].Address)
	}
	return [][]Engine{engines}, nil
}

func shares(a, b []string) bool {
	return slices.ContainsFunc(a, func(model string) bool { return slices.Contains(b, model) })
}

// noModel is the error of engines that are connected by their models, and have none in common.
func noModel(engines []Engine) error {
	return fmt.Errorf("no model is served by all engines: %s; start them with the same --served-model-name, or write "+
		"a configuration with a pool for each model", serving(engines))
}

// serving says which models each engine serves.
func serving(engines []Engine) string {
	var serve []string
	for i := range engines {
		if models := engines[i].Info.Models; len(models) > 0 {
			serve = append(serve, engines[i].Address+" serves "+words.Plain(strings.Join(models, ", ")))
		}
	}
	return strings.Join(serve, ", ")
}

// common returns the models that all engines serve that list theirs.
func common(engines []Engine) []string {
	lists := make([][]string, len(engines))
	for i := range engines {
		lists[i] = engines[i].Info.Models
	}
	return enginefacts.Common(lists)
}

// rolesFollow reports whether all engines do both, with a dialect in which their roles are the router's alone.
func rolesFollow(engines []Engine, name string) bool {
	return kvtransfer.Named(name).Engines.EitherLeg && len(engines) > 1 &&
		!slices.ContainsFunc(engines, func(e Engine) bool { return e.role() != "both" })
}

// leases is the line nixl of a pool: the shortest lease that a prefill engine reports, and whether all decode engines
// decline KV that has expired. "": no engine reports anything else than the defaults.
func leases(engines []Engine, dialect string) string {
	if dialect != speak(usual)[0] {
		return ""
	}
	lease, declines := time.Duration(0), true
	for i := range engines {
		of := &engines[i].Info
		if engines[i].role() != "decode" && of.Told {
			own := of.Extra.LeaseTime()
			lease = min(cmp.Or(lease, own), own)
		}
		if engines[i].role() != "prefill" {
			declines = declines && of.Told && of.Extra.Bidirectional
		}
	}
	var set []string
	if lease > 0 && lease != enginefacts.Lease { // which is the configuration's default, too
		set = append(set, "lease: "+lease.String())
	}
	if declines {
		set = append(set, "declineExpired: true")
	}
	if len(set) == 0 {
		return ""
	}
	return "  nixl: {" + strings.Join(set, ", ") + "} # as the engines say\n"
}

// line is an engine's line among the endpoints.
func (e *Engine) line(dialect string) string {
	set := fmt.Sprintf("address: %q", e.Address)
	if e.Scheme != "http" {
		set += ", scheme: " + e.Scheme
	}
	if dialect != "none" {
		set += ", role: " + e.role()
	}
	var transfer []string
	port := e.Info.Bootstrap
	if dialect != "none" && e.role() == "prefill" && port > 0 && port != kvtransfer.DefaultBootstrapPort {
		transfer = append(transfer, fmt.Sprintf("bootstrapPort: %d", port))
	}
	if e.Info.TP > 1 && dialect != "none" {
		transfer = append(transfer, fmt.Sprintf("tensorParallelSize: %d", e.Info.TP))
	}
	if len(transfer) > 0 {
		set += ", transfer: {" + strings.Join(transfer, ", ") + "}"
	}
	return fmt.Sprintf("  - {%s} # %s\n", set, e.said())
}

// said is what an engine says of itself, for the reader of the file.
func (e *Engine) said() string {
	kind := cmp.Or(map[string]string{
		enginefacts.VLLM: "vLLM", enginefacts.SGLang: "SGLang", enginefacts.TRTLLM: "TensorRT-LLM",
	}[e.Info.Engine], "engine")
	text := strings.TrimSpace(kind + " " + e.Info.Version)
	if len(e.Info.Models) > 0 {
		text += ", serves " + strings.Join(e.Info.Models, ", ")
	}
	return words.Plain(text)
}
