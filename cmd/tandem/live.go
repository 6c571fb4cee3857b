package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	"tandem/extproc/kvtransfer"
	"tandem/internal/config"
	"tandem/kvstate"
	"tandem/kvstate/enginehttp"
	configv1 "tandem/protos/config/v1"
)

// How long one engine may take to answer one question of a live check.
const liveTimeout = 3 * time.Second

// finding is what is wrong between the configuration and an engine, with the path of the field and a remedy.
type finding struct {
	text string
	down bool // the engine did not answer at all
}

// checkLive asks the engines for what the configuration says of them: whether they are there, which release they are, and
// whether the ports are open that other engines will connect to. Findings come in the configuration's order.
func checkLive(ctx context.Context, cfg *configv1.Config) []finding {
	client := enginehttp.New(liveTimeout, func(t *http.Transport) { t.DisableKeepAlives = true })
	var out []finding
	for i, p := range cfg.GetPools() {
		path := fmt.Sprintf("pools[%d].endpoints", i)
		answers := make([]engineAnswer, len(p.GetEndpoints()))
		var asking sync.WaitGroup
		for j, e := range p.GetEndpoints() {
			asking.Go(func() { answers[j] = askEngine(ctx, client, fmt.Sprintf("%s[%d]", path, j), p, e) })
		}
		asking.Wait()
		for j, a := range answers {
			out = append(out, a.findings...)
			out = append(out, disagreement(path, p, answers, j)...)
			out = append(out, unlike(path, p, answers, j)...)
		}
	}
	return out
}

// reportLive makes one error of all findings.
func reportLive(ctx context.Context, cfg *configv1.Config) error {
	var errs []error
	for _, f := range checkLive(ctx, cfg) {
		errs = append(errs, errors.New(f.text))
	}
	return errors.Join(errs...)
}

// warnLive logs the findings of a start. Engines that are not there yet are no news: they are probed all the time.
func warnLive(ctx context.Context, cfg *configv1.Config, log *slog.Logger) {
	for _, f := range checkLive(ctx, cfg) {
		if !f.down && ctx.Err() == nil {
			log.Warn(f.text)
		}
	}
}

// engineAnswer is what an engine says of itself.
type engineAnswer struct {
	version  string // "": it does not say
	info     engineInfo
	findings []finding
}

func askEngine(ctx context.Context, client *enginehttp.Client, at string, p *configv1.Pool, e *configv1.Endpoint) (a engineAnswer) {
	say := func(field, format string, args ...any) {
		a.findings = append(a.findings, finding{text: at + field + ": " + fmt.Sprintf(format, args...)})
	}
	engine := &kvstate.Endpoint{EndpointSpec: kvstate.EndpointSpec{Addr: e.GetAddress(), Scheme: e.GetScheme()}}
	if status, _, err := getSmall(ctx, client, engine, "/health"); err != nil || status >= http.StatusInternalServerError {
		why := "status " + strconv.Itoa(status)
		if err != nil {
			why = err.Error()
		}
		say(".address", "GET %s://%s/health: %s; start the engine, or correct the address or the scheme", e.GetScheme(), e.GetAddress(), why)
		a.findings[0].down = true
		return a
	}
	info := readInfo(ctx, client, engine)
	a.info, a.version = info, release(info.Version)
	if r := release(e.GetRelease()); r != "" && a.version != "" && r != a.version {
		say(".release", "is %s here, and the engine says %s: correct it", e.GetRelease(), info.Version)
	}
	checkSGLang(p, e, info, say)
	checkVLLM(p, e, info, say)
	checkRanks(p, e, info, say)
	for _, port := range transferPorts(p, e) {
		conn, err := (&net.Dialer{Timeout: liveTimeout}).DialContext(ctx, "tcp", port.addr)
		if err != nil {
			say(port.field, "%s is not open: %v; other engines connect there", port.addr, err)
			continue
		}
		_ = conn.Close()
	}
	return a
}

// release is a version without what does not count: a v before it, and the build behind it (0.32.0+cu129).
func release(version string) string {
	version, _, _ = strings.Cut(strings.TrimPrefix(version, "v"), "+")
	return version
}

// checkSGLang holds a pool's dialect, and an endpoint's role and bootstrap port, to what an SGLang server says of itself.
func checkSGLang(p *configv1.Pool, e *configv1.Endpoint, info engineInfo, say func(field, format string, args ...any)) {
	if info.Mode == "" {
		return
	}
	d := config.DialectOf(p)
	switch sglang := d.Engine == kvtransfer.EngineSGLang; {
	case !sglang && info.Mode != "null":
		say(".address", "the engine is an SGLang of the mode %s, and the pool's kvTransfer is %s: set that to sglang, or correct the address", info.Mode, p.GetKvTransfer())
	case !sglang:
	case e.GetRole() != map[string]string{"null": "both"}[info.Mode] && e.GetRole() != info.Mode:
		say(".role", "is %s here, and the engine runs with --disaggregation-mode %s: correct the role, or start the engine otherwise", e.GetRole(), info.Mode)
	case info.Mode == "prefill" && info.Bootstrap > 0 && info.Bootstrap != cmp.Or(e.GetTransfer().GetBootstrapPort(), kvtransfer.DefaultBootstrapPort):
		say(".transfer.bootstrapPort", "is %d here, and the engine says %d: correct it", cmp.Or(e.GetTransfer().GetBootstrapPort(), kvtransfer.DefaultBootstrapPort), info.Bootstrap)
	}
}

// transferPort is where other engines reach an endpoint for KV.
type transferPort struct{ field, addr string }

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

// disagreement says that endpoint j runs another release than one before it that it may be paired with.
func disagreement(path string, p *configv1.Pool, answers []engineAnswer, j int) []finding {
	e, mine := p.GetEndpoints()[j], answers[j].version
	if !config.DialectOf(p).SameRelease || mine == "" {
		return nil
	}
	for i, other := range p.GetEndpoints()[:j] {
		theirs := answers[i].version
		if theirs != "" && theirs != mine && config.PairsAs(p, other) == config.PairsAs(p, e) {
			return []finding{{text: fmt.Sprintf("%s[%d].release: the engine says %s and that of %s[%d] says %s: they do not take each other's KV; "+
				"set release on all of the pool, so that only the same are paired", path, j, mine, path, i, theirs)}}
		}
	}
	return nil
}

// getSmall reads an answer of at most 64 KiB.
func getSmall(ctx context.Context, client *enginehttp.Client, e *kvstate.Endpoint, path string) (status int, body []byte, err error) {
	return getUpTo(ctx, client, e, path, 64<<10)
}

func getUpTo(
	ctx context.Context, client *enginehttp.Client, e *kvstate.Endpoint, path string, limit int64,
) (status int, body []byte, err error) {
	resp, err := client.Get(ctx, e, path)
	if err != nil {
		return 0, nil, err
	}
	defer resp.Body.Close()
	body, err = enginehttp.ReadAll(resp, limit)
	return resp.StatusCode, body, err
}
