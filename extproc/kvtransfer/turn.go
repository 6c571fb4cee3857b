package kvtransfer

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"tandem/extproc/openai"
)

// Turns describes how a D keeps an answer's blocks, prompt and answer, for the conversation's next turn, and names
// their location: P then fetches them ([Pair].Turn) and computes the rest.
//
// Engines read blocks by number and never check their content. So P's request names them only if the ids of its own
// prompt are known and begin with those of the blocks ([Turn].Begins), and P computes exactly these ids.
type Turns struct {
	// Read checks the parameters in D's answer. decode is D; tokens are the ids of prompt and answer.
	Read func(params []byte, tokens []uint32, decode *Side) (*Turn, error)
	TTL  time.Duration // validity of a turn. D keeps the blocks for longer
	// Takes reports whether a request of that API can be a turn: P can be given the turn before it, and D's answer has
	// its tokens. ids: the prompt is given as token ids.
	Takes func(a openai.API, ids bool) bool
}

// Turn describes a conversation's last answer, whose blocks a decode endpoint keeps.
type Turn struct {
	Decode string            // address of that endpoint
	Tokens int               // number of leading tokens of prompt and answer whose KV it is
	Sum    [sha256.Size]byte // of their ids, four bytes each, little endian
	Params []byte            // D's object, checked

	// Expires means that the object itself has the time until which D keeps the blocks (remote_blocks_expiry_time,
	// vLLM 0.26). A P without it must fetch them before that.
	Expires bool
}

// turnText is the stored form of a Turn.
type turnText struct {
	Decode string          `json:"decode"`
	Tokens int             `json:"tokens"`
	Sum    []byte          `json:"sum"`
	Params json.RawMessage `json:"params"`
}

// Marshal encodes the turn for storage.
func (t *Turn) Marshal() ([]byte, error) {
	b, err := json.Marshal(turnText{t.Decode, t.Tokens, t.Sum[:], t.Params})
	if err != nil {
		return nil, fmt.Errorf("writing a turn: %w", err)
	}
	return b, nil
}

var errNotTurn = errors.New("not a turn that was kept")

// UnmarshalTurn decodes what Marshal wrote, and checks it as if D had just sent it: it may come from a store to which
// others write.
func UnmarshalTurn(b []byte) (*Turn, error) {
	var text turnText
	if err := json.Unmarshal(b, &text); err != nil {
		return nil, fmt.Errorf("%w: %w", errNotTurn, err)
	}
	kept, err := readKept(text.Params)
	switch {
	case err != nil:
		return nil, fmt.Errorf("%w: %w", errNotTurn, err)
	case len(text.Sum) != sha256.Size || text.Decode == "" || int64(text.Tokens) != kept.tokens:
		return nil, errNotTurn
	}
	return &Turn{text.Decode, text.Tokens, [sha256.Size]byte(text.Sum), text.Params, kept.expires}, nil
}

// Begins reports whether a prompt begins with the turn's tokens and is longer.
func (t *Turn) Begins(prompt []uint32) bool {
	return len(prompt) > t.Tokens && sumOf(prompt[:t.Tokens]) == t.Sum
}

func sumOf(ids []uint32) (sum [sha256.Size]byte) {
	h := sha256.New()
	var buffer [4096]byte
	for len(ids) > 0 {
		n := min(len(ids), len(buffer)/4)
		for i, id := range ids[:n] {
			binary.LittleEndian.PutUint32(buffer[4*i:], id)
		}
		_, _ = h.Write(buffer[:4*n])
		ids = ids[n:]
	}
	h.Sum(sum[:0])
	return sum
}

// DefaultTurnTTL is below vLLM's decoder_kv_blocks_ttl, 480 s, as in its own proxy (disagg_proxy_multiturn.py, 0.33.0).
const DefaultTurnTTL = 450 * time.Second

// nixlTurns is nixl with engines that were started with bidirectional_kv_xfer (vLLM 0.21; nixl/pull_scheduler.py).
type nixlTurns struct{ nixl }

// Takes: if P accepts ids in place of a chat's template (from 0.32), they are what it computes; before that, P's
// tokens are unknown. A completion of ids has those ids. The answers of other APIs have no token ids.
func (d nixlTurns) Takes(a openai.API, ids bool) bool {
	return a == openai.Completions && ids || a == openai.Chat && d.reuseIDs
}

// Prefill names the last turn in P's parameters, in place of nulls: the object is D's own, which has do_remote_decode
// too.
func (d nixlTurns) Prefill(r *openai.Request, p *openai.Patch, pair *Pair) {
	d.nixl.Prefill(r, p, pair)
	if pair.Turn == nil {
		return
	}
	params := pair.Turn.Params
	if pair.TurnIDs != nil && r.API() == openai.Chat {
		params = withTokenIDs(params, pair.TurnIDs)
	}
	p.Set("kv_transfer_params", openai.FieldKVTransferParams, params)
}

// withTokenIDs returns an object with prompt_token_ids appended.
func withTokenIDs(params []byte, ids []byte) []byte {
	open := params[: len(params)-1 : len(params)-1]
	return append(append(append(open, `,"prompt_token_ids":`...), ids...), '}')
}

// ReadTurn checks the object of D's answer.
func (nixlTurns) ReadTurn(params []byte, tokens []uint32, decode *Side) (*Turn, error) {
	kept, err := readKept(params)
	if err == nil && !json.Valid(params) { // members that are not read here
		err = errNotJSON
	}
	if err != nil {
		return nil, fmt.Errorf("kv_transfer_params of D's answer: %w: %w", ErrParams, err)
	}
	if kept.tokens > int64(len(tokens)) {
		return nil, fmt.Errorf("kv_transfer_params of D's answer: %w: the KV of %d tokens, of which %d are known",
			ErrParams, kept.tokens, len(tokens))
	}
	repaired, err := kept.repairHost(decode)
	if err != nil {
		return nil, err
	}
	n := int(kept.tokens)
	return &Turn{Decode: decode.Addr, Tokens: n, Sum: sumOf(tokens[:n]), Params: repaired,
		Expires: kept.expires}, nil
}

// kept is a checked object of a D that keeps an answer's blocks.
type kept struct {
	pull
	tokens int64
}

// readKept checks the members that P depends on. vLLM 0.32.0 as read: P loads the KV of the first remote_num_tokens of
// its prompt, into as many blocks as these fill, from equally many at the end of remote_block_ids. One block more or
// less there, and it reads the wrong ones. So the number of blocks must fit the tokens for a block size that is a
// power of two, and there must be one KV cache group.
func readKept(raw []byte) (kept, error) {
	p, err := readParams(raw, true)
	if err != nil {
		return kept{}, err
	}
	k := kept{pull: p}
	n, end := digits(p.numTokens, 0)
	if end != len(p.numTokens) || n < 1 {
		return k, refuse([]byte("remote_num_tokens"), p.numTokens, "a count of tokens")
	}
	k.tokens = n
	switch {
	case p.groups != 1:
		return k, fmt.Errorf("remote_block_ids: %d KV cache groups, of which each may hold another part", p.groups)
	case !fills(n, int64(p.blocks)):
		return k, fmt.Errorf("remote_block_ids: %d blocks do not hold %d tokens in any size of block", p.blocks, n)
	}
	return k, nil
}

// fills reports whether that many tokens fill that many blocks of some size that is a power of two.
func fills(tokens, blocks int64) bool {
	for size := int64(1); size <= tokens || size == 1; size *= 2 {
		if (tokens+size-1)/size == blocks {
			return true
		}
	}
	return blocks == 1
}
