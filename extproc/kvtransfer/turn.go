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

// Turns is how a D keeps an answer's blocks, prompt and answer, for the conversation's next turn, and says where they are:
// P then fetches them ([Pair].Turn) and computes what lies behind.
//
// Engines read blocks by number and never ask what they hold. So P is told of them only where the ids of its own prompt are known
// and begin with those of the blocks ([Turn].Begins), and it is made to compute just these ids.
type Turns struct {
	// Read checks what D, which is decode, said beside its answer; tokens are the ids of prompt and answer.
	Read func(params []byte, tokens []uint32, decode *Side) (*Turn, error)
	TTL  time.Duration // how long a turn is good for. D keeps the blocks for longer
	// Takes reports whether a request to that API, whose prompt has come as token ids or not, may be a turn: P can be told of one before
	// it, and D says its tokens.
	Takes func(a openai.API, ids bool) bool
}

// Turn is what a conversation's last answer left on the decode endpoint that gave it.
type Turn struct {
	Decode string            // address of that endpoint
	Tokens int               // whose KV it is, of prompt and answer, from the first on
	Sum    [sha256.Size]byte // of their ids, four bytes each, little endian
	Params []byte            // D's object, checked

	// Expires says that the object tells P itself until when D keeps the blocks (remote_blocks_expiry_time, vLLM 0.26). A P that is not
	// told must have them before that.
	Expires bool
}

// turnText is a Turn where it is kept.
type turnText struct {
	Decode string          `json:"decode"`
	Tokens int             `json:"tokens"`
	Sum    []byte          `json:"sum"`
	Params json.RawMessage `json:"params"`
}

// Marshal writes the turn for where it is kept.
func (t *Turn) Marshal() ([]byte, error) {
	b, err := json.Marshal(turnText{t.Decode, t.Tokens, t.Sum[:], t.Params})
	if err != nil {
		return nil, fmt.Errorf("writing a turn: %w", err)
	}
	return b, nil
}

var errNotTurn = errors.New("not a turn that was kept")

// UnmarshalTurn reads what Marshal wrote, and checks it as if D had just said it: it may come from a store that others write to.
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

// Begins reports whether a prompt begins with the turn's tokens and goes on behind them.
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

// Takes: where ids take a chat's template's place (from 0.32) they are what P computes; before, nobody
// knows what it will. A completion of ids is those ids. The other APIs say no token ids.
func (d nixlTurns) Takes(a openai.API, ids bool) bool {
	return a == openai.Completions && ids || a == openai.Chat && d.reuseIDs
}

// Prefill tells P of the last turn in place of nothing: the object is D's own, which says do_remote_decode too.
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

// withTokenIDs is an object with prompt_token_ids at its end.
func withTokenIDs(params []byte, ids []byte) []byte {
	open := params[: len(params)-1 : len(params)-1]
	return append(append(append(open, `,"prompt_token_ids":`...), ids...), '}')
}

// ReadTurn checks the object that D answered.
func (nixlTurns) ReadTurn(params []byte, tokens []uint32, decode *Side) (*Turn, error) {
	kept, err := readKept(params)
	if err == nil && !json.Valid(params) { // members that nobody here asks for
		err = errNotJSON
	}
	if err != nil {
		return nil, fmt.Errorf("kv_transfer_params of D's answer: %w: %w", ErrParams, err)
	}
	if kept.tokens > int64(len(tokens)) {
		return nil, fmt.Errorf("kv_transfer_params of D's answer: %w: the KV of %d tokens, of which %d are known", ErrParams, kept.tokens, len(tokens))
	}
	n := int(kept.tokens)
	return &Turn{Decode: decode.Addr, Tokens: n, Sum: sumOf(tokens[:n]), Params: kept.repairHost(decode), Expires: kept.expires}, nil
}

// kept is a checked object of a D that keeps an answer's blocks.
type kept struct {
	pull
	tokens int64
}

// readKept checks what P depends on. vLLM 0.32.0 as read: P loads the KV of the first remote_num_tokens of its prompt, into as many
// blocks as these fill, from as many at the end of remote_block_ids. One block more or less at that end and it reads the wrong
// ones, so there must be just as many as a power of two of tokens in each makes, and one KV cache group.
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

// fills reports whether so many tokens fill so many blocks of some size that is a power of two.
func fills(tokens, blocks int64) bool {
	for size := int64(1); size <= tokens || size == 1; size *= 2 {
		if (tokens+size-1)/size == blocks {
			return true
		}
	}
	return blocks == 1
}
