package kvtransfer

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"

	"tandem/extproc/openai"
	"tandem/kvstate"
)

// sglang is SGLang's disaggregation (--disaggregation-mode prefill and decode), whatever moves the blocks (mooncake,
// nixl, mori, ascend). Both servers get the request and a room: D meets P in it at P's bootstrap server. Neither works
// without the other: a request without a room is a 400 on either.
//
// Read from SGLang 0.4.9.post6 to 0.5.23: srt/managers/io_struct.py, srt/entrypoints/openai/protocol.py,
// srt/disaggregation/{common/conn,prefill,decode}.py; srt/disaggregation/mini_lb.py (0.4.9.post6), and
// sgl-model-gateway's src/routers/http/pd_router.rs.
type sglang struct{ no []byte }

func newSGLang() sglang { return sglang{no: []byte("false")} }

// DefaultBootstrapPort is the default of --disaggregation-bootstrap-port and VLLM_MOONCAKE_BOOTSTRAP_PORT.
const DefaultBootstrapPort = 8998

func sglangDialect(*Options) (Dialect, error) {
	d := newSGLang()
	return Dialect{
		Name: "sglang", Engine: EngineSGLang, Engines: Engines{DataRanks: true},
		Ports: bootstrapPorts(), Validate: d.Validate,
		// disaggregation/common/conn.py of 0.5.23 refuses another page size or KV dtype (lines 1320 to 1335), and
		// asserts what it needs of the ranks of attention, which nobody reports (1452 to 1523). It compares neither
		// models nor weights.
		Reports: Reports{Alike: kvstate.FactsOf(kvstate.FactModel, kvstate.FactRevision, kvstate.FactQuantization,
			kvstate.FactDtype, kvstate.FactKVDtype, kvstate.FactBlockSize, kvstate.FactSpeculation,
			kvstate.FactBackend)},
		Concurrent: &Concurrent{
			CancelsPrefill: true, JoinsAnswers: true, OwnGenerate: true, Unpairable: d.Unpairable, Plan: d.Plan,
			ReadAnswer: d.ReadAnswer, StreamsLate: d.StreamsLate,
		},
	}, nil
}

// StreamsLate holds for the two APIs whose server takes the first event from the scheduler before it answers 200
// (openai/serving_chat.py:2426 and serving_completions.py:210 of 0.5.23; in 0.5.10 and newer, sglang#21900). In a
// batch, whose body begins with a list of hosts, that event belongs to only one of the prompts.
func (sglang) StreamsLate(api openai.API, release string, body []byte) bool {
	return (api == openai.Chat || api == openai.Completions) &&
		bytes.HasPrefix(body, []byte(`{"bootstrap_host":"`)) &&
		(release == "" || atLeast(release, 0, 5, 10))
}

// Validate requires one role for each endpoint: an engine is started for one leg, or for none, and neither leg works
// alone.
func (sglang) Validate(endpoints []Member) []Problem {
	has := func(role string) bool {
		return slices.ContainsFunc(endpoints, func(m Member) bool { return m.Role == role })
	}
	if has("both") || len(endpoints) == 0 || has("prefill") && has("decode") {
		return nil
	}
	return []Problem{{"endpoints", "an SGLang engine that decodes cannot prefill: " +
		"this needs endpoints of both roles, prefill and decode, or some with the role both (started without " +
		"--disaggregation-mode)"}}
}

// Unpairable refuses several choices of one prompt; a list of prompts can use two legs. For several choices the engine
// sends a warm-up request and then every choice with the room of the first (managers/tokenizer_manager.py,
// _handle_batch_request), so P answers and D waits until its timeout of 300 s, with one room as with a list of rooms
// (run on 0.5.23).
func (sglang) Unpairable(r *openai.Request) string {
	if r.API() == openai.Generate {
		return "other_engine"
	}
	if r.SeveralChoices() {
		return "several_choices"
	}
	if r.API() == openai.Responses {
		switch why := r.Unsplittable(); why {
		case "stored_response", "engine_tools":
			return why
		}
	}
	return ""
}

// maxRooms bounds the lists of a batch.
const maxRooms = 1 << 14

// Plan puts the room into both bodies; D's keeps the client's stream. P generates only one token by itself
// (disaggregation/prefill.py), and must not stream: the status of a streamed answer does not show later failures.
//
// A batch has a list of rooms, one for each prompt, as the gateway sends it.
func (d sglang) Plan(r *openai.Request, p *openai.Patch, l *Legs) (PairPlan, error) {
	rooms, list := r.Prompts()
	switch {
	case !list:
		rooms = 1
	case rooms == 0 || rooms > maxRooms:
		return PairPlan{}, openai.BadRequest("batch_too_large", "",
			fmt.Sprintf("a batch of %d; it may be of 1 to %d", rooms, maxRooms))
	}
	name, err := quote(nil, host(l.Prefill))
	if err != nil {
		return PairPlan{}, fmt.Errorf("bootstrap host of %s: %w", l.Prefill.Addr, err)
	}
	number := strconv.AppendUint(nil, uint64(port(l.Prefill.Transfer.BootstrapPort, DefaultBootstrapPort)), 10)
	random := rand.NewPCG(binary.LittleEndian.Uint64(l.ID[:8]), binary.LittleEndian.Uint64(l.ID[8:]))
	hosts, ports := repeated(name, rooms, list), repeated(number, rooms, list)
	own := appendRooms(nil, random, rooms, list, l.Prefill)
	p.Set("bootstrap_host", openai.FieldBootstrapHost, hosts)
	p.Set("bootstrap_port", openai.FieldBootstrapPort, ports)
	p.Set("bootstrap_room", openai.FieldBootstrapRoom, own)
	if r.True(openai.FieldStream) {
		p.Set("stream", openai.FieldStream, d.no)
	}
	p.Delete(openai.FieldStreamOptions)
	plan := PairPlan{Joined: r.API() == openai.SGLangGenerate && r.Wants(openai.FieldReturnLogprob)}
	if l.Decode.Ranks > 0 {
		plan.Decode = fmt.Appendf(nil, `"bootstrap_host":%s,"bootstrap_port":%s,"bootstrap_room":%s,%q:%d`,
			hosts, ports, own, rankMember(l.Decode.Transfer.Release), l.Decode.Rank)
	}
	return plan, nil
}

// repeated returns value, or a list of n copies of it.
func repeated(value []byte, n int, list bool) []byte {
	if !list {
		return value
	}
	out := make([]byte, 0, n*(len(value)+1)+2)
	for i := range n {
		out = append(append(out, "[,"[min(i, 1)]), value...)
	}
	return append(out, ']')
}

// rankMember returns the name of the member of D's body that selects D's own data-parallel rank. At first it was
// data_parallel_rank; 0.5.22 and 0.5.23 take that as another name of routed_dp_rank, and log that it is deprecated
// (entrypoints/openai/protocol.py).
func rankMember(release string) string {
	if atLeast(release, 0, 5, 22) {
		return "routed_dp_rank"
	}
	return "data_parallel_rank"
}

// atLeast reports whether a release such as 0.5.23 is known and not older.
func atLeast(release string, least ...int) bool {
	parts := strings.SplitN(release, ".", len(least)+1)
	for i, want := range least {
		if i >= len(parts) {
			return false
		}
		if n, err := strconv.Atoi(parts[i]); err != nil || n != want {
			return err == nil && n > want
		}
	}
	return true
}

// appendRooms appends n rooms of 63 bits, which no other attempt has: SGLang refuses a room that it saw within its
// timeouts. A room belongs to P's data-parallel rank room % dp_size, and D expects that (follow_bootstrap_room, P's
// default). If the decision has chosen a rank, all rooms belong to it, otherwise they are spread over all ranks.
func appendRooms(dst []byte, random *rand.PCG, n int, list bool, prefill *kvstate.Endpoint) []byte {
	for i := range n {
		if list {
			dst = append(dst, "[,"[min(i, 1)])
		}
		room := random.Uint64() >> 1
		if ranks := uint64(prefill.Ranks); ranks > 0 {
			room = room / ranks * ranks
			if room > math.MaxInt64-ranks {
				room -= ranks
			}
			room += uint64(prefill.Rank)
		}
		dst = strconv.AppendUint(dst, room, 10)
	}
	if list {
		dst = append(dst, ']')
	}
	return dst
}

// ReadAnswer reads P's token counts, and the prompt's log probabilities, which D does not have. The rest of the answer
// is not needed, but it arrives only when D has the blocks: the request stays with P until its transfer is done
// (disaggregation/prefill.py, process_disagg_prefill_inflight_queue).
func (sglang) ReadAnswer(body, _ []byte) (Answer, Peer, error) {
	joined := openai.ReadInputLogprobs(body)
	if why := brokenOff(body); why != "" {
		return Answer{}, Peer{}, fmt.Errorf("%w: P finished for %q, so D gets no KV", ErrParams, why)
	}
	if len(body) > 0 && body[0] == '[' && json.Valid(body) {
		return Answer{PromptTokens: -1, CachedTokens: -1, Joined: joined}, Peer{}, nil // /generate of a batch
	}
	scanned, err := openai.ScanAnswer(body)
	if err != nil {
		return Answer{}, Peer{}, errors.Join(ErrParams, err)
	}
	return Answer{PromptTokens: scanned.PromptTokens, CachedTokens: scanned.CachedTokens, Joined: joined}, Peer{}, nil
}
