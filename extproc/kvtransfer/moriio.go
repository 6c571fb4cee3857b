package kvtransfer

import (
	"fmt"
	"slices"
	"strconv"

	"tandem/extproc/openai"
	"tandem/kvstate"
)

// moriio is vLLM's MoRIIOConnector (AMD, from 0.14) in its default mode, WRITE: P writes its blocks into D's memory
// layer by layer, so both legs run at once. Each leg's request names the other engine, and both carry one transfer id;
// P's answer is not needed. (The mode READ is pull, one leg after the other.)
//
// Read from vllm/distributed/kv_transfer/kv_connector/v1/moriio/ and docs/features/moriio_connector_usage.md of vLLM
// 0.33.0, and llm-d's connector_nixlv2.go. Not run: it needs ROCm.
type moriio struct{ nixl nixl }

func newMoRIIO() moriio { return moriio{newNIXL(false)} }

// Default ports of an engine (moriio_common.py). The notify port is the first of one for each rank; the engines add
// the rank themselves.
const (
	defaultHandshakePort = 6301
	defaultNotifyPort    = 61005
)

// moriioDialect does not cancel P's leg, like vLLM's other dialects in which P sends: D reserves blocks for P's
// writes, and frees them only after 60 to 120 s.
func moriioDialect(*Options) (Dialect, error) {
	d := newMoRIIO()
	return Dialect{
		Name: "moriio", Engine: EngineVLLM, Engines: Engines{VLLM: true, Experimental: true},
		Reports: Reports{Connectors: []string{"MoRIIOConnector"}, Alike: vllmAlike(), Ranks: true},
		Ports:   moriioPorts(), Validate: sameSizes,
		Concurrent: &Concurrent{DecodesAlone: true, Unpairable: vllmUnpairable, Plan: d.Plan, ReadAnswer: d.ReadAnswer},
	}, nil
}

func moriioPorts() []Port {
	return []Port{
		{Name: "transfer.handshakePort", Default: defaultHandshakePort, Roles: kvstate.RoleBoth},
		{Name: "transfer.notifyPort", Default: defaultNotifyPort, Roles: kvstate.RoleBoth},
	}
}

// sameSizes requires equal tensor-parallel sizes: rank n of prefill writes to rank n of decode.
func sameSizes(endpoints []Member) (problems []Problem) {
	size := func(m Member) int { return max(m.Transfer.TP, 1) }
	for i, e := range endpoints {
		other := slices.IndexFunc(endpoints[:i], func(o Member) bool {
			return o.Pairs == e.Pairs && size(o) != size(e)
		})
		if other >= 0 {
			problems = append(problems, Problem{
				fmt.Sprintf("endpoints[%d].transfer.tensorParallelSize", i),
				fmt.Sprintf("is %d, and that of endpoints[%d] is %d: MoRIIO maps ranks one to one, so give engines of "+
					"another size a group of their own", size(e), other, size(endpoints[other])),
			})
		}
	}
	return problems
}

// Plan names each leg's engine to the other. The sizes are the other leg's: without remote_tp_size every writer would
// take D's rank 0, and the text would be wrong. With data-parallel ranks both legs carry P's, as x-data-parallel-rank.
// The id begins with tx, by which 0.22.1 recognises its messages.
func (d moriio) Plan(r *openai.Request, p *openai.Patch, l *Legs) (PairPlan, error) {
	transfer := transferID("tx-", l.ID)
	toDecode, err := moriioAddress(l.Decode)
	if err != nil {
		return PairPlan{}, err
	}
	toPrefill, err := moriioAddress(l.Prefill)
	if err != nil {
		return PairPlan{}, err
	}
	rank := l.rankOf(l.Prefill.Transfer.DP)
	d.nixl.Prefill(r, p, nil)
	p.Set("kv_transfer_params", openai.FieldKVTransferParams, fmt.Appendf(nil,
		`{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,`+
			`"transfer_id":%q,%s}`, transfer, toDecode))
	name, err := quote(nil,
		bareHost(l.Prefill)+":"+strconv.Itoa(int(port(l.Prefill.Transfer.HandshakePort, defaultHandshakePort))))
	if err != nil {
		return PairPlan{}, err
	}
	plan := PairPlan{
		Decode: fmt.Appendf(nil,
			`"kv_transfer_params":{"do_remote_decode":false,"do_remote_prefill":true,"remote_engine_id":%s,`+
				`"remote_block_ids":[],"transfer_id":%q,"remote_dp_rank":%d,%s}`,
			name, transfer, rank, toPrefill),
		RequestID: l.RequestID + transferID(".", l.ID),
	}
	if l.Prefill.Transfer.DP > 1 {
		plan.PrefillRank = strconv.Itoa(rank)
		plan.DecodeRank = plan.PrefillRank
	}
	return plan, nil
}

// moriioAddress returns the address of an endpoint for the other leg's request.
func moriioAddress(e *kvstate.Endpoint) ([]byte, error) {
	name, err := quote(nil, bareHost(e))
	if err != nil {
		return nil, fmt.Errorf("host of %s: %w", e.Addr, err)
	}
	t := e.Transfer
	const members = `"remote_host":%s,"remote_handshake_port":%d,"remote_notify_port":%d,` +
		`"remote_dp_size":%d,"remote_tp_size":%d`
	return fmt.Appendf(nil, members, name, port(t.HandshakePort, defaultHandshakePort),
		port(t.NotifyPort, defaultNotifyPort), max(t.DP, 1), max(t.TP, 1)), nil
}

// ReadAnswer checks that P finished because of the length limit: otherwise it keeps no blocks.
func (moriio) ReadAnswer(body, sent []byte) (Answer, Peer, error) {
	return mooncake{}.ReadAnswer(body, sent)
}
