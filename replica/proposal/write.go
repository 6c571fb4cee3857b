package proposal

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"tandem/extproc/kvtransfer"
	"tandem/kvstate/enginefacts"
	"tandem/status/words"
)

// Mark is the first line of a file that [Write] wrote.
const Mark = "# Written by tandem run, which writes it anew each time. Delete this line to keep what you change."

// Options are what the engines do not say.
type Options struct {
	Listen, ExtProc, Replan, Admin, EnvoyAdmin string // addresses
	KVTransfer                                 string // the dialect; "": as the engines say
	KeyFile                                    string // the engines' API key; "": none
	Split                                      string // of the pool; "": its default
}

// Write writes the configuration of the engines, which were asked.
func Write(engines []Engine, o Options) (string, error) {
	d := dialect{o.KVTransfer, "as you said"}
	if d.name == "" {
		var err error
		if d, err = choose(engines); err != nil {
			return "", err
		}
	}
	if err := complete(engines, d.name); err != nil {
		return "", err
	}
	if err := commonModel(engines); err != nil {
		return "", err
	}
	var b strings.Builder
	b.WriteString(Mark + "\n# The settings: docs/configuration.md, or /docs/configuration.md on the replica's page.\n")
	fmt.Fprintf(&b, "envoy: {listen: %q, admin: %q}\n", o.Listen, o.EnvoyAdmin)
	fmt.Fprintf(&b, "extProc: {listen: %q}\nreplan: {listen: %q}\nadmin: {listen: %q}\n", o.ExtProc, o.Replan, o.Admin)
	fmt.Fprintf(&b, "pools:\n- name: default\n  kvTransfer: %s # %s\n", d.name, words.Plain(d.why))
	if o.Split != "" {
		fmt.Fprintf(&b, "  split: %s\n", o.Split)
	}
	if rolesFollow(engines, d.name) {
		b.WriteString("  roles: auto # who prefills and who decodes follows the traffic\n")
	}
	if o.KeyFile != "" {
		fmt.Fprintf(&b, "  apiKeyFile: %q\n", o.KeyFile)
	}
	b.WriteString(leases(engines, d.name))
	b.WriteString("  endpoints:\n")
	for i := range engines {
		b.WriteString(engines[i].line(d.name))
	}
	return b.String(), nil
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

// commonModel returns an error if the engines do not serve a common model, as far as they list theirs.
func commonModel(engines []Engine) error {
	if !slices.ContainsFunc(engines, func(e Engine) bool { return len(e.Info.Models) > 0 }) || Model(engines) != "" {
		return nil
	}
	var serve []string
	for i := range engines {
		if models := engines[i].Info.Models; len(models) > 0 {
			serve = append(serve, engines[i].Address+" serves "+words.Plain(strings.Join(models, ", ")))
		}
	}
	return fmt.Errorf("no model is served by all engines: %s; start them with the same --served-model-name, or write "+
		"a configuration with a pool for each model", strings.Join(serve, ", "))
}

// Model is the first model that all engines serve that list theirs; "": there is none.
func Model(engines []Engine) string {
	for i := range engines {
		for _, model := range engines[i].Info.Models {
			if !slices.ContainsFunc(engines, func(e Engine) bool {
				return len(e.Info.Models) > 0 && !slices.Contains(e.Info.Models, model)
			}) {
				return model
			}
		}
	}
	return ""
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
