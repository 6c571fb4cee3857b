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

// prefillTime is how long an engine may take for one token of a short prompt: the first request of its life may
// compile.
const prefillTime = 30 * time.Second

// checkSideChannel has vLLM's NIXL connector compute a short prompt for a decode engine, as requests do, and looks
// whether the side channel that it names is open. No configuration has that address, and an engine without one names
// localhost. The engine keeps the prompt's block until its lease ends.
func (a *engineAnswer) checkSideChannel(
	ctx context.Context, client *enginehttp.Client, engine *kvstate.Endpoint, at string, p *configv1.Pool,
	e *configv1.Endpoint,
) {
	d := config.DialectOf(p)
	if !pulls(&d) || e.GetRole() == "decode" || e.GetRole() == "encode" || len(a.info.Models) == 0 ||
		len(a.findings) > 0 {
		return
	}
	answer, err := prefill(ctx, client, engine, a.info.Models[0])
	if err != nil {
		a.warn(at+".address", "a prompt of one token did not show the side channel: %v", err)
		return
	}
	read, err := d.ReadAnswer(answer, &kvtransfer.Pair{
		Prefill: kvtransfer.Side{Addr: e.GetAddress(), Transfer: config.TransferOf(e)}})
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

// prefill sends the prefill leg of a short prompt.
func prefill(ctx context.Context, client *enginehttp.Client, engine *kvstate.Endpoint, model string) ([]byte, error) {
	ctx, stop := context.WithTimeout(ctx, prefillTime)
	defer stop()
	body, err := json.Marshal(map[string]any{
		"model": model, "prompt": strings.Repeat("Is the side channel open? ", 8), "max_tokens": 1, "stream": false,
		"kv_transfer_params": map[string]any{"do_remote_decode": true, "do_remote_prefill": false},
	})
	if err != nil {
		return nil, fmt.Errorf("writing a prompt: %w", err)
	}
	id := http.Header{"X-Request-Id": {"tandem-check-" + rand.Text()}} // each leg has one
	resp, err := client.Post(ctx, engine, "/v1/completions", body, id) //nolint:bodyclose // ReadAll does
	if err != nil {
		return nil, err //nolint:wrapcheck // it names the engine
	}
	answer, err := enginehttp.ReadAll(resp, maxPrefill)
	switch {
	case err != nil:
		return nil, fmt.Errorf("reading the answer: %w", err)
	case resp.StatusCode != http.StatusOK:
		return nil, fmt.Errorf("POST /v1/completions is %d", resp.StatusCode)
	}
	return answer, nil
}

const maxPrefill = 1 << 20 // bytes of the answer that are read
