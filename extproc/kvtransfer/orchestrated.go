package kvtransfer

import (
	"fmt"

	"tandem/extproc/openai"
)

// orchestrated is the scheme of vLLM on Neuron and of production-stack's proposal: the router hands P's answer to D as it
// came, under one key, and the engines know what is in it. Two forms:
//
//   - the whole answer under key (disagg_prefill_resp: AIBrix pd/transfer/nixl.go for Neuron, production-stack PR 777);
//     P is told nothing but its limits.
//   - P's kv_transfer_params under that name, unread but for a remote_host that is good on P's machine alone
//     (production-stack as merged, disaggregated_prefill_orchestrated): P is asked as by NIXL. This is for engines whose parameters are not NIXL's; where they are, nixl checks them.
//
// What an engine makes of wrong parameters is not known, so nothing is sent that P did not answer.
type orchestrated struct {
	oneToken
	key    string // with quotes and colon
	params bool
	ask    []byte
}

// DefaultOrchestratedKey is the member under which D is sent P's whole answer.
const DefaultOrchestratedKey = "disagg_prefill_resp"

func newOrchestrated(key string, params bool) orchestrated {
	if key == "" {
		key = DefaultOrchestratedKey
	}
	if params {
		key = "kv_transfer_params"
	}
	return orchestrated{oneToken: newOneToken(), key: `"` + key + `":`, params: params, ask: []byte("{" + nixlAsk + "}")}
}

func orchestratedDialect(o *Options) (Dialect, error) {
	d := newOrchestrated(o.Key, o.Params)
	return Dialect{
		Name: "orchestrated", Engine: EngineAny, APIs: []openai.API{openai.Chat, openai.Completions}, // by which those engines are asked
		Prefill: d.Prefill, ReadAnswer: d.ReadAnswer, DecodeMember: d.DecodeMember,
	}, nil
}

// Prefill adds max_tokens and stream, which every engine knows; other limits are changed only where the client has them, as
// the orchestrators do it: an engine that is not known here may refuse what it does not know.
func (d orchestrated) Prefill(r *openai.Request, p *openai.Patch, _ *Pair) {
	p.Set("max_tokens", openai.FieldMaxTokens, d.one) // whatever the client's is: some engine may take -1 for endless
	d.limitOwn(r, p, "max_completion_tokens", openai.FieldMaxCompletionTokens)
	d.limitOwn(r, p, "min_tokens", openai.FieldMinTokens)
	d.limitOwn(r, p, "n", openai.FieldN)
	d.unstream(r, p)
	if d.params {
		p.Set("kv_transfer_params", openai.FieldKVTransferParams, d.ask)
	}
}

func (d orchestrated) ReadAnswer(body []byte, pair *Pair) (Answer, error) {
	a, params, err := usage(body)
	if err != nil {
		return Answer{}, fmt.Errorf("reading P's answer: %w", err)
	}
	if a.Params = params; !d.params {
		a.Params = body
	}
	if d.params && a.Params != nil {
		if a.Params, err = repairAnyHost(a.Params, &pair.Prefill); err != nil {
			return Answer{}, fmt.Errorf("kv_transfer_params of P's answer: %w: %w", ErrParams, err)
		}
	}
	switch {
	case a.Params == nil || emptyObject(a.Params):
		a.Params = nil
	case a.Params[skipSpace(a.Params)] != '{':
		return Answer{}, fmt.Errorf("%s of P's answer: %w: not an object", d.key, ErrParams)
	case len(a.Params) > MaxParamsBytes:
		return Answer{}, fmt.Errorf("reading P's answer: %w: %d bytes, more than %d", ErrParams, len(a.Params), MaxParamsBytes)
	}
	return a, nil
}

// repairAnyHost is repairHost for an object of which nothing else is known.
func repairAnyHost(params []byte, prefill *Side) ([]byte, error) {
	p := pull{raw: params}
	c := cursor{b: params}
	err := c.object(func(key, value []byte, at int) error {
		if string(key) == "remote_host" && value[0] == '"' {
			p.host, p.hostAt = value, at
		}
		return nil
	})
	if err != nil || p.host == nil {
		return params, err
	}
	return p.repairHost(prefill), nil
}

// skipSpace is where a valid value starts.
func skipSpace(raw []byte) int {
	c := cursor{b: raw}
	c.space()
	return c.i
}

func (d orchestrated) DecodeMember(dst, params []byte) []byte {
	return append(append(dst, d.key...), params...)
}
