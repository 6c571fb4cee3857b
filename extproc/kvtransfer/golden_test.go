package kvtransfer

import (
	"bytes"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/rogpeppe/go-internal/txtar"
	"github.com/stretchr/testify/require"

	"tandem/extproc/openai"
)

var update = flag.Bool("update", false, "rewrite the golden files")

// TestNIXLGolden follows requests through both hops: testdata/nixl/*.txtar hold what the client sent and what P answered;
// what P and D were sent is checked, or rewritten with -update. Read those files as the documentation of the dialect.
func TestNIXLGolden(t *testing.T) {
	for _, dialect := range []string{"nixl", "mooncake-0.13"} {
		goldenTwoHops(t, dialect)
	}
}

func goldenTwoHops(t *testing.T, dialect string) {
	files, err := filepath.Glob("testdata/" + dialect + "/*.txtar")
	require.NoError(t, err)
	require.NotEmpty(t, files)
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txtar"), func(t *testing.T) {
			archive, err := txtar.ParseFile(file)
			require.NoError(t, err)
			got := twoHops(t, dialect, archive)
			if *update {
				require.NoError(t, os.WriteFile(file, txtar.Format(got), 0o644))
				return
			}
			require.Equal(t, string(txtar.Format(archive)), string(txtar.Format(got)))
		})
	}
}

func section(a *txtar.Archive, name string) []byte {
	for _, f := range a.Files {
		if f.Name == name {
			return bytes.TrimSuffix(f.Data, []byte("\n"))
		}
	}
	return nil
}

// twoHops gives the archive as it should be: its request and answer, and what both legs are sent.
func twoHops(t *testing.T, name string, a *txtar.Archive) *txtar.Archive {
	first, _, _ := strings.Cut(string(a.Comment), "\n")
	path, addr, ok := strings.Cut(strings.TrimPrefix(first, "POST "), ", prefill at ")
	require.True(t, ok, "the first line: POST path, prefill at address")
	request, answer := section(a, "request"), section(a, "prefill answer")
	api := openai.Classify("POST", path)
	require.NotEqual(t, openai.PassThrough, api)
	dialect, err := New(name)
	require.NoError(t, err)

	prefill, undo := prefillBody(t, dialect, api, request)
	got := &txtar.Archive{Comment: a.Comment, Files: []txtar.File{
		{Name: "request", Data: request}, {Name: "prefill request", Data: prefill}, {Name: "prefill answer", Data: answer},
	}}
	read, err := dialect.ReadAnswer(answer, addr)
	switch {
	case err != nil:
		require.ErrorIs(t, err, ErrParams)
		got.Files = append(got.Files, txtar.File{Name: "error", Data: []byte(err.Error())})
	case read.Params == nil:
		got.Files = append(got.Files, txtar.File{Name: "nothing to hand over"})
	default:
		decode := decodeBody(dialect, prefill, undo, read.Params)
		got.Files = append(got.Files, txtar.File{Name: "decode request", Data: decode})
		requireScans(t, api, decode)
	}
	return got
}

// prefillBody is the prefill leg's body of a request, and what undoes it.
func prefillBody(t *testing.T, d Dialect, api openai.API, request []byte) ([]byte, openai.Edits) {
	var r openai.Request
	var p openai.Patch
	require.NoError(t, r.Scan(api, request, openai.Limits{}))
	p.Reset(&r)
	d.Prefill(&r, &p)
	edits := p.Edits()
	require.NoError(t, edits.Check(len(request)))
	require.Equal(t, edits[0].Start, edits[0].End, "the first edit is an insertion")
	require.Equal(t, byte('{'), request[edits[0].Start-1])
	prefill := edits.Apply(nil, request)
	requireScans(t, api, prefill)
	undo := edits.Inverse(nil, request)
	require.NoError(t, undo.Check(len(prefill)))
	require.Equal(t, string(request), string(undo.Apply(nil, prefill)), "undo gives the client's bytes")
	return prefill, undo
}

// decodeBody turns the prefill leg's body into the decode leg's in one step, as pass 2 does.
func decodeBody(d Dialect, prefill []byte, undo openai.Edits, params []byte) []byte {
	edits := append(openai.Edits(nil), undo...)
	edits[0].New = append(append(d.DecodeMember(nil, params), ','), undo[0].New...)
	return edits.Apply(nil, prefill)
}

func requireScans(t *testing.T, api openai.API, body []byte) {
	var r openai.Request
	require.NoError(t, r.Scan(api, body, openai.Limits{}), "%s", body)
}

func TestNew(t *testing.T) {
	d, err := New("nixl")
	require.NoError(t, err)
	require.Equal(t, "nixl", d.Name())
	for _, name := range []string{"", "none", "NIXL", "lmcache"} {
		_, err := New(name)
		require.Error(t, err, name)
	}
}

// TestPrefillEmptyObject: the smallest body there is gets its members and loses them again.
func TestPrefillEmptyObject(t *testing.T) {
	d, err := New("nixl")
	require.NoError(t, err)
	for _, api := range []openai.API{openai.Chat, openai.Completions, openai.Responses, openai.Messages, openai.Generate} {
		prefill, _ := prefillBody(t, d, api, []byte(`{}`))
		require.Contains(t, string(prefill), `"do_remote_decode":true`)
	}
}

// TestPrefillOverwrites: what a client sent of its own never reaches P, neither merged nor beside ours.
func TestPrefillOverwrites(t *testing.T) {
	d, err := New("nixl")
	require.NoError(t, err)
	prefill, _ := prefillBody(t, d, openai.Chat, []byte(`{"model":"m","kv_transfer_params":{"do_remote_prefill":true,"remote_host":"evil"}}`))
	require.NotContains(t, string(prefill), "evil")
	require.Equal(t, 1, bytes.Count(prefill, []byte("kv_transfer_params")))
}

func TestPrefillAllocs(t *testing.T) {
	if raceDetector {
		t.Skip("no budgets under the race detector")
	}
	d, err := New("nixl")
	require.NoError(t, err)
	body := []byte(`{"model":"m","messages":[{"role":"user","content":"Hi"}],"max_tokens":300,"stop":["x"],"stream":true}`)
	var r openai.Request
	var p openai.Patch
	require.NoError(t, r.Scan(openai.Chat, body, openai.Limits{}))
	patch := func() {
		p.Reset(&r)
		d.Prefill(&r, &p)
		if len(p.Edits()) == 0 {
			t.Fatal("no edits")
		}
	}
	patch()
	require.Zero(t, testing.AllocsPerRun(100, patch))
}
