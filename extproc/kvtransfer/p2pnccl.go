package kvtransfer

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"strconv"

	"tandem/extproc/openai"
	"tandem/kvstate"
)

// p2pNCCL is vLLM's P2pNcclConnector (0.9.2 to 0.23; gone in 0.24). The engines read each other's address from the
// request id: ___prefill_addr_<P's zmq>___decode_addr_<D's zmq>_<32 hex>. P sends its blocks to D when it has them. D
// waits for them within a step of its engine, which blocks all its requests. So D's leg is sent when P has answered.
// There are no kv_transfer_params, and P's answer has no parameters.
//
// D expects KV for every prompt, and raises for a request id without addresses: no request goes to D alone.
//
// Read from vllm/distributed/kv_transfer/kv_connector/v1/p2p/ of vLLM 0.9.2 to 0.22.1 and
// examples/disaggregated/p2p_nccl_xpyd/disagg_proxy_p2p_nccl_xpyd.py of 0.22.1. Not run: it needs NCCL.
//
// KV is stored under the engine's own request id. From 0.14 that has a random tail of its own on each engine, so those
// need VLLM_DISABLE_REQUEST_ID_RANDOMIZATION=1 (which exists from 0.17).
type p2pNCCL struct{ oneToken }

func newP2PNCCL() p2pNCCL { return p2pNCCL{newOneToken()} }

// p2pNCCLDialect cancels P's leg: D has not begun.
func p2pNCCLDialect(*Options) (Dialect, error) {
	d := newP2PNCCL()
	return Dialect{
		Name: "p2p-nccl", Engine: EngineVLLM, Engines: Engines{VLLM: true, Experimental: true},
		RankRule: RankToRank, // save_kv_layer sends to D's port + P's rank, and D's rank waits for its own part
		Reports:  Reports{Connectors: []string{"P2pNcclConnector"}, Alike: vllmAlike()},
		Ports:    []Port{{Name: "transfer.kvPort", Roles: kvstate.RoleBoth}}, Validate: d.Validate,
		Concurrent: &Concurrent{
			CancelsPrefill: true, PrefillFirst: true, Unpairable: d.Unpairable, Plan: d.Plan, ReadAnswer: d.ReadAnswer,
			Peers: &PeerSource{Registers: true},
		},
	}, nil
}

// Validate requires addresses by which the engines find each other: configured, or registered.
func (p2pNCCL) Validate(f *Fleet) (problems []Problem) {
	if f.Registered {
		return nil
	}
	if f.Discovered {
		problems = append(problems, Problem{"registration",
			"is missing: the kv_port of discovered endpoints is unknown; set registration.listen to the engines' " +
				"proxy_ip and proxy_port"})
	}
	for i, e := range f.Endpoints {
		if e.Role != "both" && e.Transfer.KVPort == 0 {
			problems = append(problems, Problem{fmt.Sprintf("endpoints[%d].transfer.kvPort", i),
				"is missing: the engine's kv_port, or set registration.listen of the pool to the engines' proxy_ip " +
					"and proxy_port"})
		}
	}
	return problems
}

// Unpairable refuses responses: their id is the body's own, which has no addresses in it.
func (p2pNCCL) Unpairable(r *openai.Request) string {
	if r.API() == openai.Responses {
		return "own_request_id"
	}
	return vllmUnpairable(r)
}

// Plan gives both legs their name. The engines take the text before the last :<digits> for the address, so nothing
// behind it may look like a port.
func (d p2pNCCL) Plan(r *openai.Request, p *openai.Patch, l *Legs) (PairPlan, error) {
	from, err := zmqAddress(l.Prefill, l.Peer)
	if err != nil {
		return PairPlan{}, err
	}
	to, err := zmqAddress(l.Decode, l.DecodePeer)
	if err != nil {
		return PairPlan{}, err
	}
	d.plan(r, p)
	return PairPlan{Decode: []byte{},
		RequestID: "___prefill_addr_" + from + "___decode_addr_" + to + transferID("_", l.ID)}, nil
}

// zmqAddress returns the address of an engine's KV socket: the registered one, else the configured one.
func zmqAddress(e *kvstate.Endpoint, registered Peer) (string, error) {
	if len(registered.Ranks) > 0 && registered.Ranks[0].Host != "" {
		r := registered.Ranks[0]
		return net.JoinHostPort(r.Host, strconv.Itoa(r.Port)), nil
	}
	if e.Transfer.KVPort == 0 {
		return "", ErrUnknownPeer
	}
	return net.JoinHostPort(bareHost(e), strconv.Itoa(int(e.Transfer.KVPort))), nil
}

// ReadAnswer ignores P's answer: P has sent, or is sending.
func (p2pNCCL) ReadAnswer(body, _ []byte) (Answer, Peer, error) {
	if !json.Valid(body) {
		return Answer{}, Peer{}, fmt.Errorf("%w: P's answer is not JSON", ErrParams)
	}
	scanned, err := openai.ScanAnswer(body)
	if err != nil {
		return Answer{}, Peer{}, errors.Join(ErrParams, err)
	}
	if why := brokenOff(body); why != "" {
		return Answer{}, Peer{}, fmt.Errorf("%w: P finished for %q, so D gets no KV", ErrParams, why)
	}
	return Answer{PromptTokens: scanned.PromptTokens, CachedTokens: scanned.CachedTokens}, Peer{}, nil
}
