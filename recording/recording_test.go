package recording

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

const header = `{"tandem_recording":1,"id":"a","block_bytes":512,"sample":1,"start":1}` + "\n"

// A line is what was appended: each is an object, and says all that a request has.
func TestLine(t *testing.T) {
	for _, q := range []Request{
		{N: 1, Prompt: -1, Cached: -1, Answer: -1},
		{N: 7, T: 12.25, Pool: "chat", Model: `a "name" ü`, Who: "00ff", Priority: -3, Blocks: []uint64{1, 1<<48 - 1},
			Bytes:  1100,
			Prompt: 250, Guess: true, Cached: 0, Answer: 3, Stream: true, Route: "split", Prefill: "p:1", Decode: "d:1",
			Replans: 2, Waited: .5, P: 1, Head: 2, First: 3, Each: .02, Took: 4, Status: 200, Ended: "ok"},
	} {
		text := Append(nil, &q)
		require.True(t, json.Valid(text), string(text))
		r, err := Read("a line", strings.NewReader(header+string(text)))
		require.NoError(t, err)
		require.Equal(t, []Request{q}, r.Requests)
	}
}

// A request has the blocks of the one that it extends; if that one's line is lost, those that extend it still share.
func TestBlocks(t *testing.T) {
	line := func(q Request) string { return string(Append(nil, &q)) }
	r, err := Read("lines", strings.NewReader(header+
		line(Request{N: 2, On: 1, Same: 2, Blocks: []uint64{9}})+ // they end in another order than they came
		line(Request{N: 1, Blocks: []uint64{5, 6}})+
		line(Request{N: 11, On: 10, Same: 2, Blocks: []uint64{7}})+line(Request{N: 12, On: 10, Same: 1})))
	require.NoError(t, err)
	require.Equal(t, []uint64{5, 6, 9}, r.Requests[1].Blocks)
	require.Len(t, r.Requests[2].Blocks, 3)
	require.Equal(t, r.Requests[2].Blocks[:1], r.Requests[3].Blocks)
}

func TestRefused(t *testing.T) {
	for text, why := range map[string]string{
		"":                                     "no requests are recorded",
		`{"n":1}`:                              "the first line must say tandem_recording",
		`{"tandem_recording":2}`:               "version 2 of the format",
		`{"tandem_recording":1}`:               "a header that cannot be",
		header + `{"n":1,"blocks":"AAAA"}`:     "not hashes",
		header + `{"n":0}`:                     "cannot be",
		header + `{"n":1,"on":1}`:              "cannot be",
		header + `{"n":1,"same":99999}`:        "cannot be",
		header + `{"n":1,"prompt":1e9}`:        "json",
		header + `{"n":1,"answer":1000000000}`: "tokens",
		header + `{"n":1,"took":-1}`:           "below 0",
		header + strings.Replace(header, `"a"`, `"b"`, 1) + `{"n":1}`: "another recording",
	} {
		_, err := Read("refused", strings.NewReader(text))
		require.ErrorContains(t, err, why, text)
	}
}

// A folder is one recording, whatever of it is left; a file without an end is said.
func TestFolder(t *testing.T) {
	f := Files{Folder: t.TempDir(), MaxBytes: 1 << 20, ID: "a", Begin: func() []byte { return []byte(header) }}
	at := time.Now()
	for n := range 3 {
		require.NoError(t, f.Write(Append(nil, &Request{N: uint64(n + 1), T: float64(n)}),
			at.Add(time.Duration(n)*2*time.Hour)))
	}
	require.NoError(t, f.Flush())
	r, err := Open(f.Folder)
	require.NoError(t, err)
	require.Len(t, r.Requests, 3)
	require.Equal(t, []string{"tandem-a-0003.jsonl.gz"}, r.Cut)
	require.NoError(t, os.Remove(filepath.Join(f.Folder, "tandem-a-0001.jsonl.gz")))
	require.NoError(t, f.Close())
	r, err = Open(f.Folder)
	require.NoError(t, err)
	require.Len(t, r.Requests, 2)
	require.Empty(t, r.Cut)
	_, err = Open(filepath.Join(f.Folder, "none"))
	require.Error(t, err)
}

func FuzzRead(f *testing.F) {
	f.Add(header + `{"n":2,"on":1,"same":2,"blocks":"AAAAAAAA","prompt":3}`)
	f.Fuzz(func(t *testing.T, text string) {
		r, err := Read("fuzzed", strings.NewReader(text))
		if err != nil {
			return
		}
		var again bytes.Buffer // what it says is what it said
		again.WriteString(header)
		for i := range r.Requests {
			q := r.Requests[i]
			q.On, q.Same = 0, 0
			again.Write(Append(nil, &q))
		}
		_, err = Read("again", &again)
		require.NoError(t, err)
	})
}
