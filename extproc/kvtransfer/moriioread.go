package kvtransfer

import (
	"cmp"
	"fmt"
	"time"

	"tandem/extproc/openai"
)

// moriioDefer is how long P keeps blocks by default: defer_timeout (0.33.0, moriio/moriio_connector.py:1499). Nothing
// renews that while D waits for its turn: MoRIIO's heartbeat is for registration alone.
const moriioDefer = 60 * time.Second

// moriioRead is vLLM's MoRIIOConnector in the mode READ: D pulls from P, one leg after the other, with parameters from
// P's answer. It differs from nixl in the members: P's request has the number of D's ranks, and D gets P's object
// unchanged.
//
// Read from vllm/distributed/kv_transfer/kv_connector/v1/moriio/ of vLLM 0.33.0. Not run: it needs ROCm.
type moriioRead struct {
	nixl   nixl
	tp, dp int // of the decode engines
}

func moriioReadDialect(o *Options) (Dialect, error) {
	d := moriioRead{newNIXL(false), max(o.DecodeTP, 1), max(o.DecodeDP, 1)}
	return Dialect{
		Name: "moriio-read", Engine: EngineVLLM, Engines: Engines{VLLM: true, Experimental: true},
		Reports: Reports{Connectors: []string{"MoRIIOConnector"}, Alike: vllmAlike(), Ranks: true},
		Ports:   moriioPorts(), Validate: sameSizes,
		Hold:    Hold{Inline: true, Lease: cmp.Or(o.Lease, moriioDefer), Final: true},
		Prefill: d.Prefill, ReadAnswer: d.ReadAnswer, DecodeMember: d.nixl.DecodeMember,
	}, nil
}

func (d moriioRead) Prefill(r *openai.Request, p *openai.Patch, pair *Pair) {
	d.nixl.Prefill(r, p, pair)
	p.Set("kv_transfer_params", openai.FieldKVTransferParams,
		fmt.Appendf(nil, `{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,`+
			`"remote_block_ids":null,"transfer_id":%q,"remote_dp_size":%d,"remote_tp_size":%d}`,
			transferID("tx-", pair.Attempt), d.dp, d.tp))
}

func (moriioRead) ReadAnswer(body []byte, pair *Pair) (Answer, error) {
	return readPullAnswer(body, &pair.Prefill, []pullMember{
		{"do_remote_prefill", isTrue}, {"remote_block_ids", isBlockIDs}, {"remote_engine_id", isText},
		{"remote_host", isText},
		{"remote_handshake_port", isPort}, {"remote_notify_port", isPort}, {"transfer_id", isText},
	})
}

// pullMember is a member that D requires, and its kind.
type pullMember struct {
	name string
	is   func(value []byte) bool
}

func isTrue(value []byte) bool     { return string(value) == "true" }
func isText(value []byte) bool     { return checkText(nil, value) == nil }
func isBlockIDs(value []byte) bool { return checkBlockIDs(value) == nil }

// readPullAnswer reads P's answer with status 200 and returns its object, checked and verbatim except an address that
// is only valid on P's machine.
func readPullAnswer(body []byte, prefill *Side, needed []pullMember) (Answer, error) {
	scanned, err := openai.ScanAnswer(body)
	if err != nil {
		return Answer{}, fmt.Errorf("reading P's answer: %w", err)
	}
	a := counts(&scanned)
	if scanned.Params == nil {
		return a, nil
	}
	if len(scanned.Params) > MaxParamsBytes {
		return Answer{}, fmt.Errorf("kv_transfer_params of P's answer: %w: %d bytes", ErrParams, len(scanned.Params))
	}
	found := pull{raw: scanned.Params}
	seen := make([]bool, len(needed))
	c := cursor{b: scanned.Params}
	err = c.object(func(key, value []byte, at int) error {
		for i, m := range needed {
			if m.name != string(key) {
				continue
			}
			if seen[i] || !m.is(value) {
				return refuse(key, value, "what decode needs, once")
			}
			seen[i] = true
		}
		if string(key) == "remote_host" {
			found.host, found.hostAt = value, at
		}
		return nil
	})
	for i, m := range needed {
		if err == nil && !seen[i] {
			err = fmt.Errorf("%s is missing", m.name)
		}
	}
	if err != nil {
		return Answer{}, fmt.Errorf("kv_transfer_params of P's answer: %w: %w", ErrParams, err)
	}
	a.Params, err = found.repairHost(prefill)
	return a, err
}
