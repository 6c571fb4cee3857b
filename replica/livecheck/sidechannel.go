package livecheck

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"strconv"
	"strings"
	"time"

	"tandem/extproc/kvtransfer"
	"tandem/kvstate"
	"tandem/kvstate/enginehttp"
	configv1 "tandem/protos/config/v1"
	"tandem/replica/config"
)

// legTime is how long an engine may take for one token of a short prompt: the first request of its life may
// compile.
const legTime = 30 * time.Second

// handedOver is the KV of a short prompt that an engine keeps for a decode engine, until its lease ends.
type handedOver struct {
	id   string // X-Request-Id of both legs
	body []byte // of the decode leg
}

// checkSideChannel has vLLM's NIXL connector compute a short prompt for a decode engine, as requests do, and looks
// whether the side channel that it names is open. No configuration has that address, and an engine without one names
// localhost. [fetch] has a decode engine fetch the KV.
func (a *engineAnswer) checkSideChannel(
	ctx context.Context, client *enginehttp.Client, engine *kvstate.Endpoint, at string, p *configv1.Pool,
	e *configv1.Endpoint,
) {
	d := config.DialectOf(p)
	if !pulls(&d) || e.GetRole() == "decode" || e.GetRole() == "encode" || len(a.info.Models) == 0 ||
		len(a.findings) > 0 {
		return
	}
	kept := &handedOver{id: "tandem-check-" + rand.Text()}
	pair := &kvtransfer.Pair{RequestID: kept.id,
		Prefill: kvtransfer.Side{Addr: e.GetAddress(), Transfer: config.TransferOf(e)}}
	body, err := json.Marshal(map[string]any{
		"model": a.info.Models[0], "prompt": strings.Repeat("Is the side channel open? ", 8), "max_tokens": 1,
		"stream": false,
	})
	var prefill, answer []byte
	if err == nil {
		prefill, err = d.PrefillBody(body, pair)
	}
	if err == nil {
		answer, err = kept.post(ctx, client, engine, prefill)
	}
	if err != nil {
		a.warn(at+".address", "a prompt of one token did not show the side channel: %v", err)
		return
	}
	read, err := d.ReadAnswer(answer, pair)
	switch {
	case err != nil:
		a.report(at+".address", "what the engine says of the KV that it keeps is not understood: %v", err)
		return
	case read.Params == nil && read.Unused == "":
		a.report(at+".address",
			"the engine kept no KV for decode, so it runs without a KV connector, and the pool's kvTransfer "+
				"is %s, which needs %s: start it with --kv-transfer-config, or correct the address", p.GetKvTransfer(),
			connectorsOf(&d))
		return
	case read.Params == nil:
		return
	}
	a.note("side channel", true)
	kept.body = d.DecodeBody(body, read.Params)
	a.kept = kept
	var where struct {
		Host string `json:"remote_host"`
		Port int    `json:"remote_port"`
	}
	if json.Unmarshal(read.Params, &where) != nil {
		return
	}
	addr := net.JoinHostPort(where.Host, strconv.Itoa(where.Port))
	conn, err := (&net.Dialer{Timeout: timeout}).DialContext(ctx, "tcp", addr)
	if err != nil {
		a.report(at+".address", "the engine's side channel %s is not open: %v; decode engines fetch KV there: set "+
			"VLLM_NIXL_SIDE_CHANNEL_HOST and _PORT of the engine, or transfer.host here", addr, err)
		return
	}
	_ = conn.Close()
}

// post sends a leg of the request.
func (h *handedOver) post(
	ctx context.Context, client *enginehttp.Client, engine *kvstate.Endpoint, body []byte,
) ([]byte, error) {
	ctx, stop := context.WithTimeout(ctx, legTime)
	defer stop()
	id := http.Header{"X-Request-Id": {h.id}}
	resp, err := client.Post(ctx, engine, "/v1/completions", body, id) //nolint:bodyclose // ReadAll does
	if err != nil {
		return nil, err //nolint:wrapcheck // it names the engine
	}
	answer, err := enginehttp.ReadAll(resp, maxAnswer)
	switch {
	case err != nil:
		return nil, fmt.Errorf("reading the answer: %w", err)
	case resp.StatusCode != http.StatusOK:
		return nil, fmt.Errorf("POST /v1/completions is %d", resp.StatusCode)
	}
	return answer, nil
}

// fetch has a decode engine fetch the KV that endpoint j keeps, as the second leg of a request does. KV that nobody
// fetches would count as expired when its lease ends, and answers that are under way then may be refused
// (docs/security.md, Wrong text). Engines that a finding is about are not asked: their KV stays until then.
func fetch(
	ctx context.Context, client *enginehttp.Client, path string, p *configv1.Pool, answers []engineAnswer, j int,
) {
	prefill := &answers[j]
	if prefill.kept == nil || len(prefill.findings) > 0 {
		return
	}
	for i, e := range p.GetEndpoints() {
		a := &answers[i]
		if i == j || !paired(p, p.GetEndpoints()[j], e) || e.GetRole() == "prefill" || a.down || a.foreign ||
			len(a.findings) > 0 {
			continue
		}
		if _, err := prefill.kept.post(ctx, client, endpointOf(p, e), prefill.kept.body); err != nil {
			a.report(fmt.Sprintf("%s[%d].address", path, i), "the engine did not answer a prompt whose KV %s keeps "+
				"for it: %v; the reason is in its log", p.GetEndpoints()[j].GetAddress(), err)
		}
		return
	}
}

const maxAnswer = 1 << 20 // bytes of an answer that are read
