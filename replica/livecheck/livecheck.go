// Package livecheck compares engines with their configuration: `tandem serve --check --live`, and the start of every
// server.
//
// [Check] asks every configured endpoint, all of a pool at once, and returns a [Report]: a row for each endpoint with
// the compared facts and those that its engine does not report, and the findings, in the configuration's order.
// facts.go reads engines' reports, report.go prints.
package livecheck

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"tandem/extproc/kvtransfer"
	"tandem/kvstate"
	"tandem/kvstate/enginefacts"
	"tandem/kvstate/enginehttp"
	configv1 "tandem/protos/config/v1"
	"tandem/replica/config"
	"tandem/status/words"
)

// timeout is the time limit of GET /health, and of a connection. [enginefacts] has the limits of other requests.
const timeout = 5 * time.Second

// Report is the result of a check.
type Report struct {
	Engines  []Engine
	NotAsked []string // what was not asked, and why: endpoints of the configuration without a row, clocks
	Advice   []string // recommended settings that pools lack
	findings []finding
}

// Engine is one endpoint that was asked.
type Engine struct {
	Pool, Address, Role string
	Engine, Release     string // "": it does not report them
	Down                bool   // it did not answer
	// facts compared with the configuration, or with the endpoints that it may be paired with
	Compared    []string
	NotReported []string // facts that could not be compared

	models     []string
	dialect    string
	connectors []string // those that the dialect takes
}

// finding is a difference between the configuration and an engine, with the path of the field and a remedy.
type finding struct {
	text string
	down bool // the engine did not answer at all
	note bool // a warning: requests are served nevertheless
}

// Check asks the engines of all configured endpoints. It takes half a minute at most for each pool, mostly less than
// one second: a vLLM with VLLM_SERVER_DEV_MODE=1 that is asked the first time takes longest. prompts: engines that
// prefill also compute a short prompt, where that shows what nothing else does.
func Check(ctx context.Context, cfg *configv1.Config, prompts bool) *Report {
	client := enginehttp.New(0, func(t *http.Transport) { t.DisableKeepAlives = true })
	out := &Report{}
	for i, p := range cfg.GetPools() {
		if p.GetDiscovery() != nil {
			out.NotAsked = append(out.NotAsked,
				fmt.Sprintf("pools[%d]: %s discovers its endpoints when the server runs", i, p.GetName()))
		}
		if p.GetNixl().GetDeclineExpired() {
			out.NotAsked = append(out.NotAsked, fmt.Sprintf("pools[%d]: the clocks of %s's prefill engines, which say "+
				"when KV expires. They are at the side channels that answers name; one that Tandem cannot reach "+
				"counts in tandem_kv_outdated_total (reason unknown)", i, p.GetName()))
		}
		if text := advice(p); text != "" {
			out.Advice = append(out.Advice, text)
		}
		path := fmt.Sprintf("pools[%d].endpoints", i)
		answers := make([]engineAnswer, len(p.GetEndpoints()))
		var asking sync.WaitGroup
		for j, e := range p.GetEndpoints() {
			asking.Go(func() { answers[j] = askEngine(ctx, client, fmt.Sprintf("%s[%d]", path, j), p, e, prompts) })
		}
		asking.Wait()
		for j := range answers {
			answers[j].findings = append(answers[j].findings, unlike(path, p, answers, j)...)
		}
		for j := range answers {
			fetch(ctx, client, path, p, answers, j)
		}
		for j := range answers {
			a := &answers[j]
			out.findings = append(out.findings, a.findings...)
			out.Engines = append(out.Engines, a.row(p, answers, j))
		}
		out.findings = append(out.findings, unserved(fmt.Sprintf("pools[%d]", i), p, answers)...)
	}
	for i := range out.Engines {
		out.Engines[i].Release = words.Plain(out.Engines[i].Release)
	}
	for i := range out.findings { // they name what engines report
		out.findings[i].text = words.Plain(out.findings[i].text)
	}
	return out
}

// Err joins all findings but the warnings, which Print writes; nil if there are none.
func (r *Report) Err() error {
	var errs []error
	for _, f := range r.findings {
		if !f.note {
			errs = append(errs, errors.New(f.text))
		}
	}
	return errors.Join(errs...)
}

// Models returns a model of each pool: the first that all of its engines serve that list theirs. Pools without one are
// left out.
func (r *Report) Models() (models []string) {
	lists := map[string][][]string{}
	var pools []string
	for _, e := range r.Engines {
		if !slices.Contains(pools, e.Pool) {
			pools = append(pools, e.Pool)
		}
		lists[e.Pool] = append(lists[e.Pool], e.models)
	}
	for _, pool := range pools {
		if common := enginefacts.Common(lists[pool]); len(common) > 0 {
			models = append(models, common[0])
		}
	}
	return models
}

// Warn checks the engines at a server's start and logs the findings. It does not report engines that do not answer: the
// server probes them all the time.
func Warn(ctx context.Context, cfg *configv1.Config, log *slog.Logger) {
	for _, f := range Check(ctx, cfg, false).findings {
		if !f.down && ctx.Err() == nil {
			log.Warn(f.text)
		}
	}
}

// engineAnswer is an engine's report about itself, with the results of the comparison.
type engineAnswer struct {
	version  string // "": not reported
	info     enginefacts.Info
	down     bool
	foreign  bool // another engine than the pool's: nothing else is compared
	compared []string
	unknown  []string
	findings []finding
	kept     *handedOver // nil: the engine was not asked for KV, or keeps none
}

// note records a comparison; known: the engine reports the fact.
func (a *engineAnswer) note(what string, known bool) {
	if known {
		a.compared = append(a.compared, what)
	} else {
		a.unknown = append(a.unknown, what)
	}
}

func (a *engineAnswer) report(path, format string, args ...any) {
	a.findings = append(a.findings, finding{text: path + ": " + fmt.Sprintf(format, args...)})
}

// endpointOf returns what it takes to ask an engine.
func endpointOf(p *configv1.Pool, e *configv1.Endpoint) *kvstate.Endpoint {
	return &kvstate.Endpoint{EndpointSpec: kvstate.EndpointSpec{Addr: e.GetAddress(), Scheme: e.GetScheme(),
		Access: kvstate.Access{ServerName: e.GetServerName(), KeyFile: cmp.Or(e.GetApiKeyFile(), p.GetApiKeyFile())}}}
}

// askEngine compares what one engine reports with its configuration.
func askEngine(
	ctx context.Context, client *enginehttp.Client, at string, p *configv1.Pool, e *configv1.Endpoint,
	prompts bool,
) (a engineAnswer) {
	engine := endpointOf(p, e)
	if why := Health(ctx, client, engine); why != "" {
		a.report(at+".address", "%s", why)
		a.findings[0].down, a.down = true, true
		return a
	}
	a.info = enginefacts.Read(ctx, client, engine, nil)
	for _, path := range a.info.Late {
		a.warn(at+".address", "GET %s was not answered in time: what the engine would say there is not known", path)
	}
	switch {
	case a.info.Refused == 0:
	case engine.KeyFile == "":
		a.report(at+".apiKeyFile", "is missing: GET /v1/models is %d (%s), so the engine wants an API key: name its "+
			"file (tandem run: --api-key-file); without it Tandem knows neither its models nor its adapters",
			a.info.Refused, http.StatusText(a.info.Refused))
	default:
		a.report(at+".apiKeyFile", "GET /v1/models is %d (%s) with the key in %s: put the engine's own key there",
			a.info.Refused, http.StatusText(a.info.Refused), engine.KeyFile)
	}
	a.version = release(a.info.Version)
	if r := release(e.GetRelease()); r != "" {
		a.note("release", a.version != "")
		if a.version != "" && r != a.version {
			a.report(at+".release", "is %s here, and the engine says %s: correct it", e.GetRelease(), a.info.Version)
		}
	}
	if a.info.NoModels && a.version == "" && a.info.Engine == "" && a.info.Mode == "" &&
		p.GetKvTransfer() != "none" {
		a.report(at+".address", "what answers at %s does not look like an engine: GET /v1/models is 404, and it "+
			"reports no release; correct the address", e.GetAddress())
		a.foreign = true
		return a
	}
	if a.foreign = !a.checkEngine(at, p); a.foreign {
		return a
	}
	a.checkSGLang(at, p, e)
	a.checkVLLM(at, p, e)
	a.checkRanks(at, p, e)
	a.checkLeases(at, p, e)
	for _, port := range transferPorts(p, e) {
		a.note("port "+port.number(), true)
		conn, err := (&net.Dialer{Timeout: timeout}).DialContext(ctx, "tcp", port.addr)
		if err != nil {
			a.report(at+port.field, "%s is not open: %v; other engines connect there%s", port.addr, err,
				a.otherDialect(p))
			continue
		}
		_ = conn.Close()
	}
	if prompts {
		a.checkSideChannel(ctx, client, engine, at, p, e)
	}
	return a
}

// Health asks whether an engine is up. It returns "" if it is, and else what it answers, with a remedy.
func Health(ctx context.Context, client *enginehttp.Client, e *kvstate.Endpoint) string {
	ctx, stop := context.WithTimeout(ctx, timeout)
	defer stop()
	status, _, err := client.GetAll(ctx, e, "/health", 64<<10)
	if err == nil && status < http.StatusInternalServerError {
		return ""
	}
	why := "status " + strconv.Itoa(status)
	if err != nil {
		why = err.Error()
		if of := (*url.Error)(nil); errors.As(err, &of) { // it repeats the address
			why = of.Err.Error()
		}
		if errors.Is(err, context.DeadlineExceeded) {
			why = fmt.Sprintf("no answer within %v", timeout)
		}
	}
	return fmt.Sprintf("GET %s://%s/health: %s; start the engine, or correct the address or the scheme",
		e.Scheme, e.Addr, why)
}

// otherDialect continues a finding about a port: an engine of another dialect does not open it, and if the engine does
// not report its connector, nobody knows.
func (a *engineAnswer) otherDialect(p *configv1.Pool) string {
	takes := config.DialectOf(p).Reports.Connectors
	if len(takes) == 0 || a.info.Connector != "" {
		return ""
	}
	return fmt.Sprintf(": correct it, or look at kv_connector of the engine's --kv-transfer-config, which it does not "+
		"report: kvTransfer %s needs %s", p.GetKvTransfer(), strings.Join(takes, " or "))
}

// release returns a version without a leading v and without the build (0.32.0+cu129).
func release(version string) string {
	version, _, _ = strings.Cut(strings.TrimPrefix(version, "v"), "+")
	return version
}

// checkSGLang compares a pool's dialect, and an endpoint's role and bootstrap port, with the report of an SGLang
// server.
func (a *engineAnswer) checkSGLang(at string, p *configv1.Pool, e *configv1.Endpoint) {
	d, info := config.DialectOf(p), &a.info
	if d.Engine == kvtransfer.EngineSGLang {
		a.note("role", info.Mode != "")
		if e.GetRole() == "prefill" {
			a.note("bootstrap port", info.Bootstrap > 0)
		}
	}
	if info.Mode == "" {
		return
	}
	port := cmp.Or(e.GetTransfer().GetBootstrapPort(), kvtransfer.DefaultBootstrapPort)
	switch sglang := d.Engine == kvtransfer.EngineSGLang; {
	case !sglang && info.Mode != "null":
		a.report(at+".address", "the engine is an SGLang of the mode %s, and the pool's kvTransfer is %s: "+
			"set that to sglang, or correct the address", info.Mode, p.GetKvTransfer())
	case !sglang:
	case e.GetRole() != map[string]string{"null": "both"}[info.Mode] && e.GetRole() != info.Mode:
		a.report(at+".role", "is %s here, and the engine runs with --disaggregation-mode %s: "+
			"correct the role, or start the engine otherwise", e.GetRole(), info.Mode)
	case info.Mode == "prefill" && info.Bootstrap > 0 && info.Bootstrap != port:
		a.report(at+".transfer.bootstrapPort", "is %d here, and the engine says %d: correct it", port, info.Bootstrap)
	}
}

// transferPort is the address at which other engines reach an endpoint for KV.
type transferPort struct{ field, addr string }

func (p *transferPort) number() string {
	_, number, _ := net.SplitHostPort(p.addr)
	return number
}

func transferPorts(p *configv1.Pool, e *configv1.Endpoint) (out []transferPort) {
	host, _, _ := net.SplitHostPort(e.GetAddress())
	if h := e.GetTransfer().GetHost(); h != "" {
		host = h
	}
	d := config.DialectOf(p)
	role, err := kvstate.ParseRole(e.GetRole())
	if err != nil {
		return nil
	}
	for _, port := range d.PortsOf(role) {
		first, n := cmp.Or(config.PortOf(e, port.Name), int32(port.Default)), int32(1)
		if port.Ranks {
			n = max(e.GetTransfer().GetTensorParallelSize(), 1)
		}
		for number := first; port.Open && first > 0 && number < first+n; number++ {
			out = append(out, transferPort{"." + port.Name, net.JoinHostPort(host, strconv.Itoa(int(number)))})
		}
	}
	return out
}
