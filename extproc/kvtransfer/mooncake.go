package kvtransfer

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"

	"tandem/extproc/openai"
	"tandem/kvstate"
)

// mooncake is vLLM's MooncakeConnector from 0.16 on: both legs carry one transfer id, D learns from P's bootstrap
// server where P's workers are, and requests the transfer from them. P keeps the blocks until D has taken them, or 480
// s. P's answer has no parameters. (0.13 and 0.14 had another protocol.)
//
// Read from vllm/distributed/kv_transfer/kv_connector/v1/mooncake/ of vLLM 0.16.0 to 0.33.0 and
// examples/disaggregated/mooncake_connector/mooncake_connector_proxy.py of 0.33.0; run against vLLM 0.32.0.
type mooncake struct{ nixl nixl }

func newMooncake() mooncake { return mooncake{newNIXL(false)} }

// mooncakeDialect does not cancel P's leg: if a client leaves, D frees its blocks only when P has sent them. When P's
// legs were cancelled, 488 of D's 511 blocks stayed allocated for ever (10 aborts, vLLM 0.32.0).
func mooncakeDialect(*Options) (Dialect, error) {
	d := newMooncake()
	return Dialect{
		Name: "mooncake", Engine: EngineVLLM, Engines: Engines{VLLM: true, DataRanks: true}, Ports: bootstrapPorts(),
		RankRule: RankMultiples, // vLLM 0.32.0, mooncake_connector.py, _get_tp_ratio
		Reports:  Reports{Connectors: []string{"MooncakeConnector"}, Alike: vllmAlike()},
		Concurrent: &Concurrent{
			DecodesAlone: true, Unpairable: vllmUnpairable, Plan: d.Plan, ReadAnswer: d.ReadAnswer,
			Peers: &PeerSource{Ask: queryBootstrap},
		},
	}, nil
}

// bootstrapPorts returns the bootstrap port of SGLang and Mooncake: HTTP, on prefill endpoints.
func bootstrapPorts() []Port {
	return []Port{{Name: "transfer.bootstrapPort", Default: DefaultBootstrapPort, Roles: kvstate.RolePrefill,
		Open: true}}
}

// vllmUnpairable returns the reason why a vLLM engine has to answer a request alone, or that its API is not vLLM's.
func vllmUnpairable(r *openai.Request) string {
	if r.API() == openai.SGLangGenerate {
		return "other_engine"
	}
	return r.Unsplittable()
}

// Plan asks P for one token, as nixl does. The finish reason has to be "length": for any other one P cancels the
// transfer (still in 0.33.0), and D would wait in vain.
func (d mooncake) Plan(r *openai.Request, p *openai.Patch, l *Legs) (PairPlan, error) {
	rank, ok := l.rank()
	if !ok {
		return PairPlan{}, ErrUnknownPeer
	}
	engine, err := json.Marshal(rank.EngineID)
	if err != nil {
		return PairPlan{}, fmt.Errorf("engine id of %s: %w", l.Prefill.Addr, err)
	}
	transfer := transferID("xfer-", l.ID)
	d.nixl.Prefill(r, p, nil)
	p.Set("kv_transfer_params", openai.FieldKVTransferParams,
		fmt.Appendf(nil, `{"do_remote_decode":true,"do_remote_prefill":false,"transfer_id":%q}`, transfer))
	return PairPlan{
		Decode: fmt.Appendf(nil,
			`"kv_transfer_params":{"do_remote_decode":false,"do_remote_prefill":true,"remote_bootstrap_addr":%q,`+
				`"remote_engine_id":%s,"transfer_id":%q}`,
			bootstrapURL(l.Prefill), engine, transfer),
		PrefillRank: l.rankHeader(),
	}, nil
}

// transferID names an attempt.
func transferID(prefix string, id [16]byte) string { return prefix + hex.EncodeToString(id[:]) }

// rankIndex returns the data-parallel rank that an attempt uses, of the known ones.
func (l *Legs) rankIndex() int {
	if len(l.Peer.Ranks) == 0 {
		return -1
	}
	if l.Prefill.Ranks > 0 { // the decision has chosen one
		if l.Prefill.Rank >= len(l.Peer.Ranks) {
			return -1
		}
		return l.Prefill.Rank
	}
	return l.rankOf(len(l.Peer.Ranks))
}

func (l *Legs) rank() (Rank, bool) {
	i := l.rankIndex()
	if i < 0 || l.Peer.Ranks[i].EngineID == "" {
		return Rank{}, false
	}
	return l.Peer.Ranks[i], true
}

// rankHeader returns the x-data-parallel-rank of P's leg: the router chooses it only if there are several.
func (l *Legs) rankHeader() string {
	if l.Prefill.Ranks > 0 {
		return l.Prefill.RankName()
	}
	if len(l.Peer.Ranks) < 2 {
		return ""
	}
	return strconv.Itoa(l.rankIndex())
}

// bootstrapURL returns the URL of P's bootstrap server, with the scheme: D appends /query.
func bootstrapURL(e *kvstate.Endpoint) string {
	return "http://" + host(e) + ":" + strconv.Itoa(int(port(e.Transfer.BootstrapPort, DefaultBootstrapPort)))
}

// ReadAnswer checks that P will send: a choice that ended for anything but its length means that the transfer was
// cancelled.
func (mooncake) ReadAnswer(body, _ []byte) (Answer, Peer, error) {
	scanned, err := openai.ScanAnswer(body)
	if err != nil {
		return Answer{}, Peer{}, errors.Join(ErrParams, err)
	}
	if why := stoppedEarly(body); why != "" {
		return Answer{}, Peer{},
			fmt.Errorf("%w: P finished for %q, not for length, and has cancelled the transfer", ErrParams, why)
	}
	if why := brokenOff(body); why != "" {
		return Answer{}, Peer{}, fmt.Errorf("%w: P finished for %q, so D gets no KV", ErrParams, why)
	}
	return Answer{PromptTokens: scanned.PromptTokens, CachedTokens: scanned.CachedTokens}, Peer{}, nil
}

// stoppedEarly returns why an answer's choice ended, unless its limit of one token was the reason: "length", in
// messages "max_tokens", in responses "incomplete".
func stoppedEarly(body []byte) string {
	var answer struct {
		Choices []struct {
			FinishReason string `json:"finish_reason"`
		}
		StopReason string `json:"stop_reason"`
	}
	if json.Unmarshal(body, &answer) != nil {
		return ""
	}
	for _, c := range answer.Choices {
		if c.FinishReason != "" && c.FinishReason != "length" {
			return c.FinishReason
		}
	}
	if answer.StopReason != "" && answer.StopReason != "max_tokens" {
		return answer.StopReason
	}
	return ""
}

// queryBootstrap asks P's bootstrap server for its engine ids, one for each data-parallel rank.
func queryBootstrap(ctx context.Context, e *kvstate.Endpoint) (Peer, error) {
	body, err := get(ctx, bootstrapURL(e)+"/query")
	if err != nil {
		return Peer{}, err
	}
	return readQuery(body)
}

// maxRanks bounds the answer of a bootstrap server.
const maxRanks = 4096

// readQuery reads {"<dp rank>":{"engine_id":...,"worker_addr":{...}}}.
func readQuery(body []byte) (Peer, error) {
	var reported map[string]struct {
		EngineID string `json:"engine_id"`
	}
	if err := json.Unmarshal(body, &reported); err != nil {
		return Peer{}, fmt.Errorf("a bootstrap server's /query: %w", err)
	}
	if len(reported) == 0 || len(reported) > maxRanks {
		return Peer{}, fmt.Errorf("a bootstrap server that knows of %d engines", len(reported))
	}
	peer := Peer{make([]Rank, len(reported))}
	for key, engine := range reported {
		i, err := strconv.Atoi(key)
		if err != nil || i < 0 || i >= len(reported) || engine.EngineID == "" {
			return Peer{}, fmt.Errorf("a bootstrap server with the data-parallel rank %.20q of %d, engine id %.80q",
				key, len(reported), engine.EngineID)
		}
		peer.Ranks[i].EngineID = engine.EngineID
	}
	return peer, nil
}
