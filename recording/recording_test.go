package recording

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
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
		header + `{"n":2,"on":1,"gap":1e300}`:  "cannot be",
		header + `{"n":1,"prompt":1e9}`:        "json",
		header + `{"n":1,"answer":1000000000}`: "tokens",
		header + `{"n":1,"took":-1}`:           "below 0",
		header + strings.NewReplacer(`"a"`, `"b"`, "512", "64").Replace(header) + `{"n":1}`:    "replay each by itself",
		header + strings.NewReplacer(`"a"`, `"b"`, `"sample":1`, `"sample":9`).Replace(header): "replay each by itself",
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

// Recordings of several replicas are one, by arrival. A conversation that went from one to the other is found where
// they have one salt, and where its blocks are its own; what else begins alike is no conversation.
func TestJoined(t *testing.T) {
	head := func(id, salt string, start float64) string {
		return fmt.Sprintf(`{"tandem_recording":1,"id":%q,"replica":%q,"block_bytes":512,"sample":1,"salt":%q,"usage":true,"start":%g}`+"\n",
			id, id, salt, start)
	}
	line := func(q Request) string { return string(Append(nil, &q)) }
	long, system := []uint64{1, 2, 3, 4, 5, 6}, []uint64{1, 2}
	first := line(Request{N: 1, T: 1, Blocks: long[:3], Bytes: 1600, Took: 2}) +
		line(Request{N: 2, On: 1, Same: 3, T: 20, Blocks: long[3:], Bytes: 3100, Took: 1, Gap: 17}) +
		line(Request{N: 3, T: 21, Blocks: system, Bytes: 1100, Took: 1})
	// the conversation's second turn, 4 s after the other recording began, whose third turn is there again
	second := line(Request{N: 1, T: 4, Blocks: long[:4], Bytes: 2100, Took: 1}) +
		line(Request{N: 2, T: 50, Blocks: append(slices.Clone(system), 77), Bytes: 1700, Took: 1})
	for _, c := range []struct {
		name, salt string
		crossed    int
		on         []uint64 // by arrival
		gap        []float64
	}{
		{"one salt", "s", 2, []uint64{0, 1, 2, 0, 0}, []float64{0, 6, 10, 0, 0}},
		{"another one", "t", 0, []uint64{0, 0, 1, 0, 0}, []float64{0, 0, 17, 0, 0}},
	} {
		t.Run(c.name, func(t *testing.T) {
			for _, text := range []string{
				head("a", "s", 100) + first + head("b", c.salt, 105) + second,
				head("b", c.salt, 105) + second + head("a", "s", 100) + first, // in any order
			} {
				r, err := Read("joined", strings.NewReader(text))
				require.NoError(t, err)
				require.Len(t, r.Parts, 2)
				require.Equal(t, "a", r.ID)
				require.Equal(t, c.crossed, r.Crossed)
				for i := range r.Requests {
					q := &r.Requests[i]
					require.EqualValues(t, i+1, q.N)
					require.Equal(t, c.on[i], q.On, "request %d", q.N)
					require.InDelta(t, c.gap[i], q.Gap, 1e-6)
				}
				require.InDelta(t, 9, r.Requests[1].T, 1e-6)
				require.Equal(t, c.salt == "s", r.Requests[1].Blocks[0] == r.Requests[0].Blocks[0])
			}
		})
	}
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

// A file that was cut anywhere, as that of a writer that was killed, has what is whole before.
func TestCutAnywhere(t *testing.T) {
	f := Files{Folder: t.TempDir(), MaxBytes: 1 << 20, ID: "a", Begin: func() []byte { return []byte(header) }}
	for n := range 60 {
		q := Request{N: uint64(n + 1), T: float64(n), Pool: "chat", Bytes: n * 7919, Prompt: int64(n) * 104729}
		require.NoError(t, f.Write(Append(nil, &q), time.Now()))
		if n == 29 {
			require.NoError(t, f.Flush())
		}
	}
	path := f.file.Name()
	require.NoError(t, f.Close())
	whole, err := os.ReadFile(path)
	require.NoError(t, err)
	before := 0
	for n := range whole {
		require.NoError(t, os.WriteFile(path, whole[:n], 0o600))
		r, err := Open(f.Folder)
		if err != nil {
			require.ErrorContains(t, err, "no requests are recorded", n)
			require.Zero(t, before, n)
			continue
		}
		require.Len(t, r.Cut, 1, n)
		require.GreaterOrEqual(t, len(r.Requests), before, n)
		before = len(r.Requests)
		require.EqualValues(t, before, r.Requests[before-1].N)
	}
	require.GreaterOrEqual(t, before, 59)
}
