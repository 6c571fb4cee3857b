package kvtransfer

import (
	"cmp"
	"fmt"
	"time"

	"tandem/extproc/openai"
)

// Two more dialects in which D pulls from P, one leg after the other, with parameters from P's answer. They differ
// from nixl in the members: those of P's request, and those that D requires.

// How long P keeps blocks by default. Nothing renews that while D waits for its turn: MoRIIO's heartbeat is for
// registration alone.
const (
	mooncakeAbort = 480 * time.Second // VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT (0.13.0, envs.py)
	moriioDefer   = 60 * time.Second  // defer_timeout (0.33.0, moriio/moriio_connector.py:1499)
)

// mooncakePull is vLLM's MooncakeConnector of 0.13 and 0.14: P answers with its address, and finds the blocks by the
// request id, so both legs need one x-request-id and one path, which they have. 0.14 adds a random tail to request ids
// on each engine, which defeats that.
//
// Read from vllm/distributed/kv_transfer/kv_connector/v1/mooncake_connector.py of vLLM 0.13.0 and 0.14.1.
type mooncakePull struct{ nixl nixl }

// mooncakePullDialect leaves out responses: the engine's id of a response is not derived from x-request-id.
func mooncakePullDialect(o *Options) (Dialect, error) {
	d := mooncakePull{newNIXL(false)}
	return Dialect{
		Name: "mooncake-0.13", Engine: EngineVLLM, Engines: Engines{VLLM: true, Experimental: true},
		RankRule: RankToRank, // group_kv_pull asks at P's port + D's rank; _send_blocks takes block_len of P for both
		Reports:  Reports{Connectors: []string{"MooncakeConnector"}, Alike: vllmAlike()},
		APIs:     []openai.API{openai.Chat, openai.Completions, openai.Messages, openai.Generate},
		Hold:     Hold{Inline: true, Lease: cmp.Or(o.Lease, mooncakeAbort), Final: true},
		Prefill:  d.nixl.Prefill, ReadAnswer: d.ReadAnswer, DecodeMember: d.nixl.DecodeMember,
	}, nil
}

func (mooncakePull) ReadAnswer(body []byte, pair *Pair) (Answer, error) {
	return readPullAnswer(body, &pair.Prefill,
		[]pullMember{{"do_remote_prefill", isTrue}, {"remote_host", isText}, {"remote_port", isPort}})
}

// moriioRead is vLLM's MoRIIOConnector in the mode READ. P's request has the number of D's ranks; D gets P's object
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

func isTrue(value []byte) bool { return string(value) == "true" }
func isText(value []byte) bool { return checkText(nil, value) == nil }
func isBlockIDs(value []byte) bool {
	_, _, err := checkBlockIDs(value)
	return err == nil
}

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
	a.Params = found.repairHost(prefill)
	return a, nil
}
