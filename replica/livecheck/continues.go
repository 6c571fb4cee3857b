package livecheck

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	"tandem/kvstate"
	"tandem/kvstate/enginehttp"
	configv1 "tandem/protos/config/v1"
	"tandem/status/words"
)

// asked are the token ids of a continuation that tries an engine: any tokenizer has them.
const asked = "[1,2,3,4,5]"

// AskContinuing asks every configured engine of pools with continueStreams for one token behind some token ids, and
// warns of those that do not take these: they are not asked to continue streams.
func (r *Report) AskContinuing(ctx context.Context, cfg *configv1.Config) {
	// it may compile first
	client := enginehttp.New(30*time.Second, func(t *http.Transport) { t.DisableKeepAlives = true })
	for i, p := range cfg.GetPools() {
		if p.GetContinueStreams() == nil {
			continue
		}
		for j, e := range p.GetEndpoints() {
			down := func(of Engine) bool { return of.Pool == p.GetName() && of.Address == e.GetAddress() && of.Down }
			if slices.ContainsFunc(r.Engines, down) || e.GetRole() == "encode" {
				continue
			}
			engine := &kvstate.Endpoint{EndpointSpec: kvstate.EndpointSpec{Addr: e.GetAddress(), Scheme: e.GetScheme(),
				Access: kvstate.Access{ServerName: e.GetServerName(), KeyFile: cmp.Or(e.GetApiKeyFile(),
					p.GetApiKeyFile())}}}
			at := fmt.Sprintf("pools[%d].endpoints[%d]", i, j)
			switch why, known := continues(ctx, client, engine); {
			case !known:
				r.NotAsked = append(r.NotAsked, words.Plain(
					fmt.Sprintf("%s: whether it continues streams: %s", at, why)))
			case why != "":
				r.findings = append(r.findings, finding{note: true,
					text: words.Plain(fmt.Sprintf("%s.address: the engine at %s "+
						"does not continue streams: %s; it serves everything else, and continueStreams uses the "+
						"others (vLLM 0.32 and later do)", at, e.GetAddress(), why))})
			}
		}
	}
}

// continues asks an engine. why describes how it fails or, if known is false, why nothing was learned.
func continues(ctx context.Context, client *enginehttp.Client, e *kvstate.Endpoint) (why string, known bool) {
	var models struct {
		Data []struct{ ID string }
	}
	status, body, err := client.GetAll(ctx, e, "/v1/models", 1<<20)
	if err != nil || status != http.StatusOK || json.Unmarshal(body, &models) != nil || len(models.Data) == 0 {
		return "it lists no models", false
	}
	model, _ := json.Marshal(models.Data[0].ID)
	resp, err := client.Post(ctx, e, "/v1/chat/completions", fmt.Appendf( //nolint:bodyclose // ReadAll closes it
		nil, `{"model":%s,"messages":[{"role":"user",`+
			`"content":"a"}],"max_tokens":1,"temperature":0,"return_token_ids":true,`+
			`"kv_transfer_params":{"prompt_token_ids":%s}}`,
		model, asked), nil)
	if err != nil {
		return err.Error(), false
	}
	body, err = enginehttp.ReadAll(resp, 1<<20)
	var answer struct {
		Prompt json.RawMessage `json:"prompt_token_ids"`
	}
	switch {
	case err != nil:
		return err.Error(), false
	case resp.StatusCode >= http.StatusInternalServerError:
		return fmt.Sprintf("status %d", resp.StatusCode), false
	case resp.StatusCode != http.StatusOK:
		return fmt.Sprintf("asked with token ids, it answers %d", resp.StatusCode), true
	case json.Unmarshal(body, &answer) != nil, len(answer.Prompt) == 0, string(answer.Prompt) == "null":
		return "it answers no token ids", true
	case strings.Join(strings.Fields(string(answer.Prompt)), "") != asked:
		return "asked with token ids, it computes another prompt", true
	}
	return "", true
}
