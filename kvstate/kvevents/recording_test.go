package kvevents

import (
	"bufio"
	"encoding/hex"
	"encoding/json"
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"tandem/kvstate"
	"tandem/kvstate/prefixindex"
)

// recording reads the messages of testdata/name, from a real engine, frame by frame.
func recording(t testing.TB, name string) (messages [][][]byte) {
	t.Helper()
	f, err := os.Open("testdata/" + name)
	require.NoError(t, err)
	defer f.Close()
	lines := bufio.NewScanner(f)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var line struct {
			Frames []string `json:"frames_hex"`
		}
		require.NoError(t, json.Unmarshal(lines.Bytes(), &line))
		var frames [][]byte
		for _, text := range line.Frames {
			frame, err := hex.DecodeString(text)
			require.NoError(t, err)
			frames = append(frames, frame)
		}
		messages = append(messages, frames)
	}
	require.NoError(t, lines.Err())
	return messages
}

// prompt reads the token ids of a recorded request: from the engine's answer, or from the request itself.
func prompt(t *testing.T, name string) prefixindex.TokenPrompt {
	t.Helper()
	text, err := os.ReadFile("testdata/" + name)
	require.NoError(t, err)
	var r struct {
		Request struct {
			Body struct {
				Prompt json.RawMessage `json:"prompt"`
				Salt   string          `json:"cache_salt"`
			} `json:"body"`
		} `json:"request"`
		Response struct {
			Tokens []uint32 `json:"tokens"`
		} `json:"response"`
	}
	require.NoError(t, json.Unmarshal(text, &r))
	if len(r.Response.Tokens) == 0 {
		require.NoError(t, json.Unmarshal(r.Request.Body.Prompt, &r.Response.Tokens))
	}
	return prefixindex.TokenPrompt{IDs: r.Response.Tokens, Salt: prefixindex.SaltKey(r.Request.Body.Salt)}
}

// engineIndex is a pool with one engine, for tests.
type engineIndex struct {
	state *kvstate.State
	pool  *kvstate.Pool
	feed  *prefixindex.Feed
}

func newEngineIndex() engineIndex {
	s := kvstate.New(kvstate.Options{})
	s.SetPool(kvstate.PoolSpec{Name: "p"}, []kvstate.EndpointSpec{{Name: "e", Addr: "127.0.0.1:8100", Role: kvstate.RoleBoth}})
	p := s.Pool("p")
	return engineIndex{s, p, p.Feed(p.Endpoints()[0])}
}

// hit returns how many leading blocks of the prompt the engine holds according to the index.
func (x engineIndex) hit(p prefixindex.TokenPrompt, blockSize int) int {
	return hitIn(x.state, x.pool, p, blockSize)
}

func hitIn(s *kvstate.State, pool *kvstate.Pool, p prefixindex.TokenPrompt, blockSize int) int {
	var v kvstate.View
	hashes := p.Blocks(nil, blockSize)
	s.View(pool, nil, &v)
	pool.TokenHits(hashes, blockSize, int64(len(hashes)*blockSize), len(hashes), &v)
	return v.Endpoints[0].Hit
}

func noReplay(uint64, func(uint64, []byte)) error { return errNoReplay }

// vLLM 0.32.0's events yield the blocks of these requests' prompts, live and replayed.
func TestRecordedVLLM(t *testing.T) {
	for _, name := range []string{"vllm-0.32.0-kvevents-live.jsonl", "vllm-0.32.0-kvevents-replay.jsonl"} {
		x := newEngineIndex()
		s := stream{sink: x.feed}
		messages := recording(t, name)
		var seqs []uint64
		for _, frames := range messages {
			n := len(frames)
			if _, seq, payload, ok := batchOf(frames[n-3:]); ok && seq != replayEnd {
				s.live(seq, payload, noReplay)
				seqs = append(seqs, seq)
			}
		}
		require.Len(t, seqs, 7)
		for file, want := range map[string]int{
			"vllm-0.32.0-tokenize-chat.json":          116 / 32,
			"vllm-0.32.0-tokenize-chat-turn2.json":    166 / 32,
			"vllm-0.32.0-tokenize-completion.json":    201 / 32,
			"vllm-0.32.0-completion-tokens.json":      128 / 32,
			"vllm-0.32.0-completion-tokens-salt.json": 128 / 32,
		} {
			p := prompt(t, file)
			require.Equal(t, want, x.hit(p, 32), "%s after %s", file, name)
			p.Salt = prefixindex.SaltKey("another tenant's")
			require.Zero(t, x.hit(p, 32), "%s after %s", file, name)
		}
		require.Zero(t, x.feed.Stats().Orphans)
		require.Zero(t, s.count.malformed.Load())
		require.Zero(t, s.decoder.Stats.Ignored)
	}
}

// An engine of some 510 blocks that gets prompt after prompt evicts the oldest blocks first.
func TestRecordedEviction(t *testing.T) {
	x := newEngineIndex()
	s := stream{sink: x.feed}
	held := map[uint64]bool{}
	for _, frames := range recording(t, "vllm-0.32.0-evict-kvevents-live.jsonl") {
		_, seq, payload, ok := batchOf(frames)
		require.True(t, ok)
		s.live(seq, payload, noReplay)
		var d Decoder
		batch, err := d.Batch(payload)
		require.NoError(t, err)
		for _, e := range batch.Events {
			for _, key := range e.Keys {
				if e.Kind == prefixindex.BlocksStored {
					held[key] = true
				} else {
					delete(held, key)
				}
			}
		}
		require.Equal(t, len(held), x.feed.Stats().Held, "after batch %d", seq)
	}
	stats := x.feed.Stats()
	require.Positive(t, stats.Removed)
	require.Zero(t, stats.Orphans, "vLLM evicts the end of a prompt before its beginning")
}

// Two engines, prefill and decode: the decode engine reports fetched blocks, too.
func TestRecordedPrefillAndDecode(t *testing.T) {
	indexes, streams := map[string]engineIndex{}, map[string]*stream{}
	for _, frames := range recording(t, "vllm-0.32.0-pd-kvevents-live.jsonl") {
		topic, seq, payload, ok := batchOf(frames)
		require.True(t, ok)
		if streams[string(topic)] == nil {
			x := newEngineIndex()
			indexes[string(topic)], streams[string(topic)] = x, &stream{sink: x.feed}
		}
		streams[string(topic)].live(seq, payload, noReplay)
	}
	require.Len(t, indexes, 2)
	chat := prompt(t, "vllm-0.32.0-tokenize-chat.json")
	require.Equal(t, 3, indexes["kv@127.0.0.1:8101@tiny"].hit(chat, 32))
	require.Equal(t, 3, indexes["kv@127.0.0.1:8201@tiny"].hit(chat, 32))
	for _, x := range indexes {
		require.Zero(t, x.feed.Stats().Orphans)
	}
}

// llm-d-inference-sim, whose token ids are 32 bits wide.
func TestRecordedSimulator(t *testing.T) {
	x := newEngineIndex()
	s := stream{sink: x.feed}
	for _, frames := range recording(t, "llm-d-sim-kvevents.jsonl") {
		_, seq, payload, _ := batchOf(frames)
		s.live(seq, payload, noReplay)
	}
	require.Equal(t, prefixindex.FeedStats{Stored: 1, Held: 1}, x.feed.Stats())
}
