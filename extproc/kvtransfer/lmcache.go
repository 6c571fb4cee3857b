package kvtransfer

import (
	"cmp"
	"context"
	"encoding/hex"
	"fmt"
	"strconv"
	"time"

	"tandem/extproc/openai"
	"tandem/kvstate"
)

// lmcache is LMCache's PD backend (LMCacheConnectorV1, enable_pd, over NIXL): P pushes the prompt's KV into the buffer
// of the D that disagg_spec names, while it computes, and notifies the router when it has arrived. D gets the client's
// own body and finds the chunks by the hashes of their tokens; it computes missing ones. So D's answer is complete,
// with tool calls and reasoning parsed, and a lost notification costs only time.
//
// LMCache's own proxy sends both legs token ids by /v1/completions, and D the first token that P sampled
// (ret_first_tok). That saves D one step, but loses everything that /v1/chat/completions does beyond text:
// lmcacheFirst does it for pools that want it.
//
// Read from examples/disagg_prefill/disagg_proxy_server.py, lmcache/v1/storage_backend/pd_backend.py and
// lmcache/integration/vllm/vllm_v1_adapter.py of LMCache 0.5.6, and nixl_connector_v3.py of 0.3.5 (disagg_spec is new
// there).
type lmcache struct {
	oneToken
	arrivals Arrivals
	patience time.Duration
}

// Arrivals reports the arrival of P's transfer notifications (package notices).
type Arrivals interface {
	// Wait waits until n notifications for id have arrived or ctx ends, and reports whether they have.
	Wait(ctx context.Context, id string, n int) bool
}

// The receiver's ports in LMCache's examples; tensor-parallel rank n listens n above them.
const (
	lmcacheInitPort  = 7300
	lmcacheAllocPort = 7400
)

// lmcacheChunk is LMCache's default chunk_size (v1/config.py:90).
const lmcacheChunk = 256

// DefaultNoticeTimeout is the maximum wait for a notification: production-stack's 10 s.
const DefaultNoticeTimeout = 10 * time.Second

// newLMCache returns the dialect. arrivals nil: the engines send no notifications (pd_skip_proxy_notification, LMCache
// 0.4), and D starts when P has answered.
func newLMCache(arrivals Arrivals, patience time.Duration) lmcache {
	if patience <= 0 {
		patience = DefaultNoticeTimeout
	}
	return lmcache{newOneToken(), arrivals, patience}
}

func lmcacheDialect(o *Options) (Dialect, error) {
	d := newLMCache(o.Arrivals, o.NoticeTimeout)
	decodes := func(name string, byDefault uint16) Port {
		return Port{Name: "lmcache." + name, Default: byDefault, Roles: kvstate.RoleDecode, Ranks: true, Open: true}
	}
	out := Dialect{
		Name: "lmcache", Engine: EngineVLLM, RankRule: RankToRank,
		Engines: Engines{VLLM: true, Experimental: true, Store: true},
		Reports: Reports{Connectors: []string{"LMCacheConnectorV1"}, Alike: vllmAlike(), Ranks: true},
		Ports: []Port{decodes("initPort", lmcacheInitPort), decodes("allocPort", lmcacheAllocPort),
			decodes("queryPort", 0)},
		Prefill: d.Prefill, ReadAnswer: d.ReadAnswer,
		Push: &Push{Await: d.Await, Patience: d.Patience(), ChunkTokens: cmp.Or(o.ChunkTokens, lmcacheChunk)},
	}
	if o.RetFirstToken {
		first := lmcacheFirst{d}
		out.Prefill, out.ReadAnswer, out.Continue = first.Prefill, first.ReadAnswer, first.Continue
	}
	return out, nil
}

// Prefill names D's receiver. P's scheduler reads all four members without a default and raises if one is missing.
// ret_first_tok must be absent: any value enables it.
func (d lmcache) Prefill(r *openai.Request, p *openai.Patch, pair *Pair) {
	d.plan(r, p)
	var room [256]byte
	spec := d.spec(append(room[:0], `{"disagg_spec":`...), pair)
	p.Set("kv_transfer_params", openai.FieldKVTransferParams, append(spec, '}'))
}

// spec appends disagg_spec.
func (lmcache) spec(spec []byte, pair *Pair) []byte {
	to := &pair.Decode.Transfer
	spec = append(spec, `{"req_id":"`...)
	spec = hex.AppendEncode(spec, pair.Attempt[:])
	spec = strconv.AppendQuote(append(spec, `","receiver_host":`...), pair.Decode.host())
	spec = appendPorts(append(spec, `,"receiver_init_port":`...), to.LMCacheInitPort, lmcacheInitPort, to.TP)
	spec = appendPorts(append(spec, `,"receiver_alloc_port":`...), to.LMCacheAllocPort, lmcacheAllocPort, to.TP)
	if to.LMCacheQueryPort != 0 { // read only with pd_bidirectional (0.4)
		spec = appendPorts(append(spec, `,"receiver_query_port":`...), to.LMCacheQueryPort, 0, to.TP)
	}
	return append(spec, '}')
}

// appendPorts appends a list with one port for each rank.
func appendPorts(dst []byte, first, byDefault, ranks int) []byte {
	if first == 0 {
		first = byDefault
	}
	dst = append(dst, '[')
	for rank := range max(ranks, 1) {
		if rank > 0 {
			dst = append(dst, ',')
		}
		dst = strconv.AppendInt(dst, int64(first+rank), 10)
	}
	return append(dst, ']')
}

// ReadAnswer reads no parameters: P's answer only confirms that it has computed. num_lmcache_cached_tokens and the
// like are not for D.
func (lmcache) ReadAnswer(body []byte, _ *Pair) (Answer, error) {
	a, _, err := usage(body)
	if err != nil {
		return Answer{}, fmt.Errorf("reading P's answer: %w", err)
	}
	return a, nil
}

// Await waits for the notification of each of P's ranks. Newer releases (async backend) still write after P's answer,
// or may have finished before it.
func (d lmcache) Await(ctx context.Context, pair *Pair) bool {
	if d.arrivals == nil {
		return true
	}
	ctx, cancel := context.WithTimeout(ctx, d.patience)
	defer cancel()
	return d.arrivals.Wait(ctx, hex.EncodeToString(pair.Attempt[:]), max(pair.Decode.Transfer.TP, 1))
}

func (d lmcache) Patience() time.Duration {
	if d.arrivals == nil {
		return 0
	}
	return d.patience
}
