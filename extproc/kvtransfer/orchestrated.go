package kvtransfer

import (
	"fmt"

	"tandem/extproc/openai"
	"tandem/kvstate/standstill"
)

// orchestrated is the scheme of vLLM on Neuron and of production-stack's proposal: the router passes P's answer to D
// unchanged, under one key, and the engines know its content. Two forms:
//
//   - the whole answer under key (disagg_prefill_resp: AIBrix pd/transfer/nixl.go for Neuron, production-stack PR
//     777); P's request differs only in its limits.
//   - P's kv_transfer_params under that name, unread except a remote_host that is valid only on P's machine
//     (production-stack as merged, disaggregated_prefill_orchestrated); P's request is that of NIXL. This dialect is
//     for engines whose parameters are not NIXL's. If they are, use nixl, which checks them.
//
// How an engine reacts to wrong parameters is not known, so D gets nothing that P did not answer.
type orchestrated struct {
	oneToken
	key    string // with quotes and colon
	params bool
	ask    []byte
}

// DefaultOrchestratedKey is the member of D's request that has P's whole answer.
const DefaultOrchestratedKey = "disagg_prefill_resp"

func newOrchestrated(key string, params bool) orchestrated {
	if key == "" {
		key = DefaultOrchestratedKey
	}
	if params {
		key = "kv_transfer_params"
	}
	return orchestrated{oneToken: newOneToken(), key: `"` + key + `":`, params: params,
		ask: []byte("{" + nixlAsk + "}")}
}

func orchestratedDialect(o *Options) (Dialect, error) {
	d := newOrchestrated(o.Key, o.Params)
	return Dialect{
		Name: "orchestrated", Engine: EngineAny, Engines: Engines{Experimental: true, Store: true},
		APIs:    []openai.API{openai.Chat, openai.Completions},
		Reports: Reports{Alike: vllmAlike()},
		Hold:    Hold{Lease: standstill.DefaultLease}, // nothing is known of the engine: it may be vLLM with NIXL
		Prefill: d.Prefill, ReadAnswer: d.ReadAnswer, DecodeMember: d.DecodeMember,
	}, nil
}

// Prefill adds max_tokens and stream, which every engine knows. It changes other limits only if the client's body has
// them, as the orchestrators do: an unknown engine may refuse members that it does not know.
func (d orchestrated) Prefill(r *openai.Request, p *openai.Patch, _ *Pair) {
	// whatever the client's value: an engine may take -1 for unlimited
	p.Set("max_tokens", openai.FieldMaxTokens, d.one)
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
		return Answer{}, fmt.Errorf("reading P's answer: %w: %d bytes, more than %d", ErrParams, len(a.Params),
			MaxParamsBytes)
	}
	return a, nil
}

// repairAnyHost is repairHost for an object whose other members are unknown.
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
	return p.repairHost(prefill)
}

// skipSpace returns the index at which a valid value starts.
func skipSpace(raw []byte) int {
	c := cursor{b: raw}
	c.space()
	return c.i
}

func (d orchestrated) DecodeMember(dst, params []byte) []byte {
	return append(append(dst, d.key...), params...)
}
