package kvtransfer

import (
	"cmp"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"tandem/extproc/openai"
	"tandem/kvstate/standstill"
)

// nixl is vLLM's NixlConnector, pull (NixlPullConnector from 0.24): P computes the prompt, keeps its blocks under a
// lease and answers with their location; D reads them from P's memory. The engines handle different layouts of P and
// D: tp_size, pp_size and dcp_size travel in the object, and with data-parallel ranks behind one port the object names
// the rank that has the blocks (remote_port, remote_engine_id).
//
// Read from vllm/distributed/kv_transfer/kv_connector/v1/nixl* of vLLM 0.9.2 to 0.33.0; run against vLLM 0.32.0.
type nixl struct {
	oneToken
	ask, yes []byte
	reuseIDs bool // D receives the token ids of P's chat template
}

// nixlAsk is P's kv_transfer_params. P tests only do_remote_decode. remote_block_ids must be falsy, or P reads from D
// (bidirectional, 0.21). vLLM's own proxies send the nulls.
const nixlAsk = `"do_remote_decode":true,"do_remote_prefill":false,` +
	`"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null`

func newNIXL(reuseIDs bool) nixl {
	return nixl{oneToken: newOneToken(), ask: []byte("{" + nixlAsk + "}"), yes: []byte("true"), reuseIDs: reuseIDs}
}

func nixlDialect(o *Options) (Dialect, error) {
	d := newNIXL(o.ReuseTokenIDs)
	out := d.dialect()
	if o.ReuseTokenIDs {
		out.TokenIDs = []openai.API{openai.Chat}
	}
	if out.Lease = cmp.Or(o.Lease, standstill.DefaultLease); o.Clocks != nil {
		out.Expiry = &Expiry{Clocks: o.Clocks, Lease: out.Lease}
	}
	if o.Bidirectional {
		d := nixlTurns{d}
		out.Prefill, out.Turns = d.Prefill,
			&Turns{TTL: cmp.Or(max(o.TurnTTL, 0), DefaultTurnTTL), Takes: d.Takes, Read: d.ReadTurn}
	}
	return out, nil
}

func (d nixl) dialect() Dialect {
	return Dialect{
		Name: "nixl", Engine: EngineVLLM, VLLM: true, DataRanks: true,
		RankRule: RankMultiples, // vLLM 0.32.0, kv_connector/utils.py, tp_ratio
		Reports: Reports{
			Connectors: []string{"NixlConnector", "NixlPullConnector"}, Alike: nixlAlike(), Release: true,
		},
		Hold: Hold{Inline: true}, Prefill: d.Prefill, ReadAnswer: d.ReadAnswer, DecodeMember: d.DecodeMember,
	}
}

func (d nixl) Prefill(r *openai.Request, p *openai.Patch, _ *Pair) {
	d.plan(r, p)
	p.Set("kv_transfer_params", openai.FieldKVTransferParams, d.ask)
	if d.reuseIDs && r.API() == openai.Chat {
		p.Set("return_token_ids", openai.FieldReturnTokenIDs, d.yes)
	}
}

// ReadAnswer reads kv_transfer_params from P's answer. null or none is not an error: the prompt ended in a state that
// keeps no blocks, or P has no connector.
func (d nixl) ReadAnswer(body []byte, pair *Pair) (Answer, error) {
	scanned, err := openai.ScanAnswer(body)
	if err != nil {
		return Answer{}, fmt.Errorf("reading P's answer: %w", err)
	}
	a := counts(&scanned)
	a.PromptIDs = scanned.PromptIDs
	if err := a.readNIXL(scanned.Params, pair); err != nil {
		return Answer{}, err
	}
	if d.reuseIDs && a.Params != nil {
		a.addTokenIDs(scanned.PromptIDs)
	}
	return a, nil
}

// addTokenIDs puts P's prompt_token_ids into the object for D (from vLLM 0.32, chat alone): D then does not render
// messages again, so a template that prints the time makes no difference between P and D. Ids that do not fit are left
// out, and D tokenises by itself.
func (a *Answer) addTokenIDs(ids []byte) {
	if !tokenIDs(ids) || len(a.Params)+len(ids) > MaxParamsBytes-32 {
		return
	}
	open := a.Params[: len(a.Params)-1 : len(a.Params)-1]
	a.Params = append(append(append(open, `,"prompt_token_ids":`...), ids...), '}')
}

// readNIXL puts the object for D into the answer, if there is one.
func (a *Answer) readNIXL(params []byte, pair *Pair) error {
	if params == nil {
		return nil
	}
	pull, err := readPull(params)
	switch {
	case errors.Is(err, errNoRequestID) && olderThan013(pair.Prefill.Transfer.Release):
	case errors.Is(err, errNoRequestID), errors.Is(err, errNoBlocks):
		a.Unused = err.Error()
		return nil
	case err != nil:
		return fmt.Errorf("kv_transfer_params of P's answer: %w: %w", ErrParams, err)
	}
	a.Params = pull.repairHost(&pair.Prefill)
	// These two are optional in the usage: messages report input_tokens without the cached ones, and engines report
	// cached tokens only with an option (0.21 and 0.31).
	if n, ok := count(pull.numTokens); ok {
		a.PromptTokens = n
	}
	if n, ok := count(pull.cachedTokens); ok {
		a.CachedTokens = n
	}
	return nil
}

// These errors do not count against a prefill endpoint: another one of its release would answer the same.
var (
	// vLLM 0.9.2 counts full blocks only, so a prompt shorter than a block has none. Sending it on is harmless there,
	// but kills later releases.
	errNoBlocks = errors.New("remote_block_ids: not one block id in it")
	// Before 0.13 P did not send the request's name, and D did not need it. From 0.13 on D waits for ever without it.
	errNoRequestID = errors.New("remote_request_id is missing")
)

// olderThan013 reports whether an endpoint is known to run vLLM before 0.13.
func olderThan013(release string) bool {
	major, rest, _ := strings.Cut(strings.TrimPrefix(release, "v"), ".")
	minor, _, _ := strings.Cut(rest, ".")
	n, err := strconv.Atoi(minor)
	return major == "0" && err == nil && n < 13
}

// count reads an optional count; anything else is treated as absent.
func count(value []byte) (int64, bool) {
	n, err := strconv.ParseInt(string(value), 10, 64)
	return n, err == nil && n >= 0
}

// DecodeMember passes P's object on. Nothing else of the client's body changes on D.
func (nixl) DecodeMember(dst, params []byte) []byte { return appendKVTransferParams(dst, params) }

func appendKVTransferParams(dst, params []byte) []byte {
	return append(append(dst, `"kv_transfer_params":`...), params...)
}
