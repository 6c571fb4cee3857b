package kvtransfer

import (
	"encoding/hex"
	"fmt"
	"strconv"

	"tandem/extproc/openai"
	"tandem/kvstate"
)

// offload is vLLM's OffloadingConnector with the P2P tier (TieringOffloadingSpec, 0.25 and later): P offers the
// prompt's blocks under a name that both legs carry, and D fetches them from P's side channel. P waits 60 s for D and
// then frees them. D computes what it does not find. The engine that computes may also be given an endpoint that has
// computed the prompt's beginning before (remote_kv_source), and fetches what is left there.
//
// Read from docs/features/kv_offloading_usage.md and vllm/v1/kv_offload/tiering/p2p/manager.py of vLLM 0.33.0.
type offload struct{ oneToken }

// p2pPort is VLLM_P2P_SIDE_CHANNEL_PORT's default; data-parallel rank n listens n above it, so an endpoint is one
// rank.
const p2pPort = 5710

func newOffload() offload { return offload{newOneToken()} }

// p2pPorts returns the port of the tier.
func p2pPorts() []Port {
	return []Port{{Name: "transfer.p2pPort", Default: p2pPort, Roles: kvstate.RolePrefill, Open: true}}
}

func offloadDialect(*Options) (Dialect, error) {
	d := newOffload()
	return Dialect{
		Name: "offload", Engine: EngineAny,
		Engines: Engines{VLLM: true, Experimental: true, EitherLeg: true, Store: true},
		Reports: Reports{Connectors: []string{"OffloadingConnector"}, Alike: storeAlike(), Release: true},
		Ports:   p2pPorts(),
		Hold:    Hold{Inline: true},
		Prefill: d.Prefill, ReadAnswer: d.ReadAnswer, DecodeMember: d.DecodeMember, Pull: d.Pull,
	}, nil
}

func (d offload) Prefill(r *openai.Request, p *openai.Patch, pair *Pair) {
	d.plan(r, p)
	var room [288]byte
	ask := appendRemoteDecoder(append(room[:0], '{'), pair)
	if pair.Source != nil { // the only combination of keys that is allowed
		ask = appendRemoteSource(append(ask, ','), pair)
	}
	p.Set("kv_transfer_params", openai.FieldKVTransferParams, append(ask, '}'))
}

// Pull lets an engine that computes alone fetch the beginning.
func (offload) Pull(p *openai.Patch, pair *Pair) {
	var room [192]byte
	p.Set("kv_transfer_params", openai.FieldKVTransferParams,
		append(appendRemoteSource(append(room[:0], '{'), pair), '}'))
}

// appendRemoteSource names the endpoint to fetch from. The name of this fetch differs from the hand-over's.
func appendRemoteSource(dst []byte, pair *Pair) []byte {
	id := pair.Attempt
	id[0] ^= 0xff
	dst = appendUUID(append(dst, `"remote_kv_source":{"kv_request_id":"`...), id)
	return appendTier(dst, pair.Source)
}

func appendRemoteDecoder(dst []byte, pair *Pair) []byte {
	return append(appendUUID(append(dst, `"remote_decoder":{"kv_request_id":"`...), pair.Attempt), `"}`...)
}

// ReadAnswer names P to D. P's own answer has no parameters for it.
func (offload) ReadAnswer(body []byte, pair *Pair) (Answer, error) {
	a, _, err := usage(body)
	if err != nil {
		return Answer{}, fmt.Errorf("reading P's answer: %w", err)
	}
	a.Params = append(appendRemotePrefiller([]byte{'{'}, pair), '}')
	return a, nil
}

func appendRemotePrefiller(dst []byte, pair *Pair) []byte {
	dst = appendUUID(append(dst, `"remote_prefiller":{"kv_request_id":"`...), pair.Attempt)
	return appendTier(dst, &pair.Prefill)
}

// appendTier ends an object with the address of a peer's tier.
func appendTier(dst []byte, peer *Side) []byte {
	dst = strconv.AppendQuote(append(dst, `","remote_host":`...), peer.host())
	port := peer.Transfer.P2PPort
	if port == 0 {
		port = p2pPort
	}
	return append(strconv.AppendInt(append(dst, `,"remote_port":`...), int64(port), 10), '}')
}

func (offload) DecodeMember(dst, params []byte) []byte { return appendKVTransferParams(dst, params) }

// appendUUID appends a name in the form of a UUID.
func appendUUID(dst []byte, id [16]byte) []byte {
	for i, n := 0, 0; i < len(id); i = n {
		if n = i + 2; i == 0 {
			n = 4
		} else {
			dst = append(dst, '-')
			if i == 10 {
				n = 16
			}
		}
		dst = hex.AppendEncode(dst, id[i:n])
	}
	return dst
}
