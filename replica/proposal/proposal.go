// Package proposal makes the configuration of a fleet of which only the addresses are known, for `tandem run`.
//
// [Ask] asks engines what they are, with the questions of `serve --check --live` ([enginefacts.Read]), and [Write]
// writes a pool of them. What engines do not report is assumed to be as in most fleets, and a comment in the text marks
// it: the live check of the finished configuration finds out whether it is right.
package proposal

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"

	"tandem/extproc/kvtransfer"
	"tandem/kvstate"
	"tandem/kvstate/enginefacts"
	"tandem/kvstate/enginehttp"
	"tandem/replica/livecheck"
	"tandem/status/words"
)

// Engine is one engine.
type Engine struct {
	Address, Scheme string // host:port; http, https or h2c
	Role            string // prefill, decode or both; "": as the engine says, or both
	Info            enginefacts.Info
}

// Parse reads an engine's address: a URL, such as http://10.0.0.1:8000, or host:port.
func Parse(text, role string) (Engine, error) {
	at := text
	if !strings.Contains(at, "://") {
		at = "http://" + at
	}
	u, err := url.Parse(at)
	if err != nil || u.Host == "" {
		return Engine{}, fmt.Errorf("%q is not an engine's address, such as http://10.0.0.1:8000", text)
	}
	if path := strings.TrimSuffix(u.Path, "/"); path != "" && path != "/v1" || u.RawQuery != "" || u.User != nil {
		return Engine{}, fmt.Errorf("%q: an engine has a scheme, a host and a port, and nothing else: %s://%s",
			text, u.Scheme, u.Host)
	}
	ports := map[string]string{"http": "80", "https": "443", "h2c": "80"}
	if ports[u.Scheme] == "" {
		return Engine{}, fmt.Errorf("%q: the scheme is not one of http, https, h2c", text)
	}
	if u.Port() == "" {
		u.Host = net.JoinHostPort(u.Hostname(), ports[u.Scheme])
	}
	return Engine{Address: u.Host, Scheme: u.Scheme, Role: role}, nil
}

// Merge returns the engines without repetitions. One that is named for both legs does both.
func Merge(engines []Engine) (out []Engine) {
	for _, e := range engines {
		i := slices.IndexFunc(out, func(o Engine) bool { return o.Address == e.Address })
		switch {
		case i < 0:
			out = append(out, e)
		case out[i].Role != e.Role:
			out[i].Role = "both"
		}
	}
	return out
}

// Ask asks all engines at once what they are. An error names each that does not answer, and why. keyFile has their API
// key; "": they want none.
func Ask(ctx context.Context, engines []Engine, keyFile string) error {
	client := enginehttp.New(0, func(t *http.Transport) { t.DisableKeepAlives = true })
	failed := make([]error, len(engines))
	var asking sync.WaitGroup
	for i := range engines {
		e := &engines[i]
		asking.Go(func() {
			at := &kvstate.Endpoint{EndpointSpec: kvstate.EndpointSpec{Addr: e.Address, Scheme: e.Scheme,
				Access: kvstate.Access{KeyFile: keyFile}}}
			if why := livecheck.Health(ctx, client, at); why != "" {
				failed[i] = errors.New(words.Plain(why))
				return
			}
			e.Info = enginefacts.Read(ctx, client, at, nil)
		})
	}
	asking.Wait()
	return errors.Join(failed...)
}

// role is an engine's role: as the user said, or else as the engine says.
func (e *Engine) role() string {
	if e.Role != "" {
		return e.Role
	}
	switch {
	case e.Info.Mode == "prefill" || e.Info.KVRole == "kv_producer":
		return "prefill"
	case e.Info.Mode == "decode" || e.Info.KVRole == "kv_consumer":
		return "decode"
	}
	return "both"
}

// dialect returns the pool's kvTransfer, and the engines' report from which it follows.
type dialect struct{ name, why string }

// choose finds the dialect that all engines speak.
func choose(engines []Engine) (dialect, error) {
	found := dialect{}
	from := ""
	for i := range engines {
		e := &engines[i]
		of, err := e.dialect()
		switch {
		case err != nil:
			return dialect{}, err
		case of.name == "":
		case found.name != "" && found.name != of.name:
			return dialect{}, fmt.Errorf("%s needs kvTransfer %s (%s), and %s needs %s (%s): engines of one pool "+
				"speak one dialect; name those of one kind", from, found.name, found.why, e.Address, of.name, of.why)
		case found.name == "":
			found, from = of, e.Address
		}
	}
	switch {
	case found.name != "":
		return found, nil
	case !slices.ContainsFunc(engines, func(e Engine) bool { return e.role() != "both" }):
		return dialect{"none", "no engine reports a KV connector, and none has a role of its own"}, nil
	}
	return dialect{speak(usual)[0], "no engine says so: it is what most vLLMs run with"}, nil
}

// usual is the connector of most vLLMs, which do not report it.
const usual = "NixlConnector"

// speak returns the dialects whose engines run with a connector.
func speak(connector string) (names []string) {
	for _, d := range kvtransfer.All() {
		if slices.Contains(d.Reports.Connectors, connector) {
			names = append(names, d.Name)
		}
	}
	return names
}

// spoken is the first dialect of a kind of engine.
func spoken(engine string) string {
	for _, d := range kvtransfer.All() {
		if d.Engine == engine {
			return d.Name
		}
	}
	return ""
}

// dialect is what one engine reports about its dialect; without a name it reports nothing.
func (e *Engine) dialect() (dialect, error) {
	i := &e.Info
	switch {
	case i.Engine == enginefacts.SGLang || i.Mode != "":
		if i.Mode == "null" || i.Mode == "" && e.Role == "" {
			return dialect{"none", "SGLang without --disaggregation-mode"}, nil
		}
		return dialect{spoken(enginefacts.SGLang), "SGLang"}, nil
	case i.Engine == enginefacts.TRTLLM:
		return dialect{spoken(enginefacts.TRTLLM), "TensorRT-LLM"}, nil
	case i.Told && i.Connector == "" && e.Role == "":
		return dialect{"none", "vLLM without --kv-transfer-config"}, nil
	case i.Told && i.Connector == "":
		return dialect{}, fmt.Errorf("%s runs without a KV connector, so it can neither hand KV over nor fetch it: "+
			"start it with --kv-transfer-config (docs/howto/choose-a-dialect.md), or name it with --engine", e.Address)
	case i.Connector == "" && i.NIXL:
		return dialect{speak(usual)[0], "the metrics of " + e.Address + " have NIXL's"}, nil
	case i.Connector == "":
		return dialect{}, nil
	}
	return e.byConnector()
}

// byConnector is the dialect of a vLLM that reports its connector.
func (e *Engine) byConnector() (dialect, error) {
	switch names := speak(e.Info.Connector); len(names) {
	case 1:
		return dialect{names[0], e.Info.Connector}, nil
	case 0:
		return dialect{}, fmt.Errorf("%s runs with the connector %s, which no dialect is known for: see "+
			"docs/howto/choose-a-dialect.md, and name one with --kv-transfer", e.Address, words.Plain(e.Info.Connector))
	default:
		return dialect{}, fmt.Errorf("%s runs with the connector %s, which may be %s: name one with --kv-transfer",
			e.Address, e.Info.Connector, strings.Join(names, " or "))
	}
}
