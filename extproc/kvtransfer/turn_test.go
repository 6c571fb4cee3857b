package kvtransfer

import (
	"bytes"
	"encoding/json"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tandem/extproc/openai"
	"tandem/kvstate"
)

// keptObject is D's object of an answer of 40 tokens.
const keptObject = `{"do_remote_prefill":false,"do_remote_decode":true,"remote_block_ids":[[1,2,3]],"remote_engine_id":"e","remote_request_id":"r",` +
	`"remote_host":"10.0.0.6","remote_port":5600,"tp_size":1,"remote_num_tokens":40}`

func turnDialect(t *testing.T) *Turns {
	d, err := New(Options{Name: "nixl", Bidirectional: true})
	require.NoError(t, err)
	return d.Turns
}

func count40() (ids []uint32) {
	for i := range uint32(40) {
		ids = append(ids, 1000+i)
	}
	return ids
}

// TestReadTurn: an object that is not perfectly understood is not stored, because P would load other blocks with it.
func TestReadTurn(t *testing.T) {
	d := turnDialect(t)
	_, err := d.Read([]byte(keptObject), count40(), &Side{Addr: "10.0.0.6:8000"})
	require.NoError(t, err)
	for name, c := range map[string]struct{ from, to, want string }{
		"of a prefill endpoint":      {`"do_remote_prefill":false`, `"do_remote_prefill":true`, "do_remote_prefill is"},
		"not to be fetched":          {`"do_remote_decode":true`, `"do_remote_decode":false`, "do_remote_decode is"},
		"nobody says so":             {`"do_remote_decode":true,`, ``, "do_remote_decode is missing"},
		"said twice":                 {`"do_remote_decode":true`, `"do_remote_decode":true,"do_remote_decode":true`, "do_remote_decode is there twice"},
		"no blocks":                  {`[[1,2,3]]`, `[[]]`, "not one block id"},
		"blocks by name":             {`[[1,2,3]]`, `[["1","2","3"]]`, "not a block id"},
		"two groups":                 {`[[1,2,3]]`, `[[1,2,3],[4,5,6]]`, "2 KV cache groups"},
		"a block too many":           {`[[1,2,3]]`, `[[1,2,3,4]]`, "4 blocks do not hold 40 tokens"},
		"blocks that fit no size":    {`[[1,2,3]]`, `[[1,2,3,4,5,6]]`, "6 blocks do not hold 40 tokens"},
		"no engine":                  {`"remote_engine_id":"e",`, ``, "remote_engine_id is missing"},
		"no request":                 {`"remote_request_id":"r",`, ``, "remote_request_id is missing"},
		"no host":                    {`"10.0.0.6"`, `""`, "remote_host is"},
		"no port":                    {`5600`, `0`, "remote_port is"},
		"no tokens":                  {`,"remote_num_tokens":40`, ``, "remote_num_tokens is"},
		"none at all":                {`"remote_num_tokens":40`, `"remote_num_tokens":0`, "remote_num_tokens is"},
		"more than are known":        {`"remote_num_tokens":40`, `"remote_num_tokens":41`, "the KV of 41 tokens, of which 40 are known"},
		"a fraction":                 {`"remote_num_tokens":40`, `"remote_num_tokens":40.0`, "remote_num_tokens is"},
		"not to its end":             {`40}`, `40`, "not JSON"},
		"something else, then there": {`{"do`, `[] {"do`, "not an object"},
	} {
		object := strings.Replace(keptObject, c.from, c.to, 1)
		require.NotEqual(t, keptObject, object, name)
		_, err := d.Read([]byte(object), count40(), &Side{Addr: "10.0.0.6:8000"})
		require.ErrorIs(t, err, ErrParams, name)
		require.ErrorContains(t, err, c.want, name)
	}
}

// TestTurnHost: P reaches D at its configured address, or, if the reported one is only valid on D's machine, at the
// address that Tandem uses.
func TestTurnHost(t *testing.T) {
	d := turnDialect(t)
	for host, want := range map[string]string{"10.9.9.9": "10.9.9.9", "localhost": "10.0.0.6", "127.0.0.1": "10.0.0.6", "0.0.0.0": "10.0.0.6"} {
		turn, err := d.Read([]byte(strings.Replace(keptObject, "10.0.0.6", host, 1)), count40(), &Side{Addr: "10.0.0.6:8000"})
		require.NoError(t, err)
		require.Contains(t, string(turn.Params), `"remote_host":"`+want+`"`, host)
	}
	turn, err := d.Read([]byte(keptObject), count40(), &Side{Addr: "10.0.0.6:8000", Transfer: kvstate.Transfer{Host: "kv.d"}})
	require.NoError(t, err)
	require.Contains(t, string(turn.Params), `"remote_host":"kv.d"`)
}

// TestTurnBegins compares the sums with the ids themselves: any other token, at any position, makes it another prompt.
func TestTurnBegins(t *testing.T) {
	long := make([]uint32, 5000) // more than one piece of the summing
	for i := range long {
		long[i] = uint32(i) * 2654435761
	}
	for _, n := range []int{1, 2, 1023, 1024, 1025, 2048, 4999} {
		turn := Turn{Tokens: n, Sum: sumOf(long[:n])}
		require.True(t, turn.Begins(long[:n+1]))
		require.False(t, turn.Begins(long[:n]), "nothing to compute")
		require.False(t, turn.Begins(long[:n-1]))
		for _, at := range []int{0, n / 2, n - 1} {
			other := slices.Clone(long)
			other[at] ^= 1 << (at % 32)
			require.False(t, turn.Begins(other), "%d of %d", at, n)
		}
		other := slices.Clone(long)
		other[n]++
		require.True(t, turn.Begins(other), "what is behind is the prompt's own")
	}
}

// TestUnmarshalTurn: a stored turn comes back unchanged, and anything else in its place is refused.
func TestUnmarshalTurn(t *testing.T) {
	turn, err := turnDialect(t).Read([]byte(keptObject), count40(), &Side{Addr: "10.0.0.6:8000"})
	require.NoError(t, err)
	text, err := turn.Marshal()
	require.NoError(t, err)
	back, err := UnmarshalTurn(text)
	require.NoError(t, err)
	require.Equal(t, turn, back)
	require.False(t, back.Expires)
	back, err = UnmarshalTurn(bytes.Replace(text, []byte(`"tp_size"`), []byte(`"remote_blocks_expiry_time":1795305037.5,"tp_size"`), 1))
	require.NoError(t, err)
	require.True(t, back.Expires, "P is told until when it may fetch them")
	for _, change := range [][2]string{
		{`"tokens":40`, `"tokens":39`}, {`"remote_num_tokens":40`, `"remote_num_tokens":48`}, {`"decode":"10.0.0.6:8000"`, `"decode":""`},
		{`[[1,2,3]]`, `["a"]`}, {`"sum":"`, `"sum":"AAAA`}, {`"params":{`, `"params":[{`}, {`{`, ``},
	} {
		require.Contains(t, string(text), change[0])
		_, err := UnmarshalTurn(bytes.Replace(text, []byte(change[0]), []byte(change[1]), 1))
		require.ErrorIs(t, err, errNotTurn, change[1])
	}
}

// TestTurnsTaken: for which requests P gets turns, and for how long.
func TestTurnsTaken(t *testing.T) {
	all := []openai.API{openai.Chat, openai.Completions, openai.Responses, openai.Messages, openai.Generate}
	takes := func(o Options) (out []string) {
		o.Name, o.Bidirectional = "nixl", true
		d, err := New(o)
		require.NoError(t, err)
		for i, a := range all {
			for _, ids := range []bool{false, true} {
				if d.Turns.Takes(a, ids) {
					out = append(out, map[bool]string{true: "ids", false: "text"}[ids]+[]string{" chat", " completions", "", "", ""}[i])
				}
			}
		}
		return out
	}
	require.Equal(t, []string{"ids completions"}, takes(Options{}))
	require.Equal(t, []string{"text chat", "ids chat", "ids completions"}, takes(Options{ReuseTokenIDs: true}))
	require.Equal(t, 450*time.Second, turnDialect(t).TTL)
	d, err := New(Options{Name: "nixl", Bidirectional: true, TurnTTL: time.Minute})
	require.NoError(t, err)
	require.Equal(t, time.Minute, d.Turns.TTL)
}

// FuzzReadTurn: a stored object is well-formed, its count fits the ids, and it reads back the same.
func FuzzReadTurn(f *testing.F) {
	f.Add([]byte(keptObject))
	f.Add([]byte(strings.Replace(keptObject, "[[1,2,3]]", "[1,2,3]", 1)))
	f.Add([]byte(strings.Replace(keptObject, "40", "1", 1)))
	f.Fuzz(func(t *testing.T, params []byte) {
		turn, err := nixlTurns{}.ReadTurn(params, count40(), &Side{Addr: "10.0.0.6:8000"})
		if err != nil {
			require.ErrorIs(t, err, ErrParams)
			return
		}
		require.True(t, json.Valid(turn.Params), "%s", turn.Params)
		require.Positive(t, turn.Tokens)
		require.LessOrEqual(t, turn.Tokens, 40)
		require.True(t, turn.Begins(append(count40(), 1)))
		text, err := turn.Marshal()
		require.NoError(t, err)
		back, err := UnmarshalTurn(text)
		require.NoError(t, err)
		require.Equal(t, turn.Sum, back.Sum)
		_, err = readPull(turn.Params)
		require.Error(t, err, "it is never what D is sent")
	})
}
