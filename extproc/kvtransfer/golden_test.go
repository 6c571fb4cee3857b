package kvtransfer

import (
	"bytes"
	"encoding/json"
	"flag"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/rogpeppe/go-internal/txtar"
	"github.com/stretchr/testify/require"

	"tandem/extproc/openai"
	"tandem/internal/budget"
	"tandem/kvstate"
)

var update = flag.Bool("update", false, "rewrite the golden files")

// TestGolden follows requests through both hops: testdata/<dialect>/*.txtar have the client's request and P's answer;
// the bodies for P and D are checked, or rewritten with -update. Read those files as the documentation of the
// dialects.
//
// The first line of a file is the request and its circumstances: POST path, prefill at address, and then, if the
// dialect needs it, decode at address, tp=N, release=X, init=, alloc=, query=, p2p=PORT, source=ADDRESS, host=HOST,
// members=A+B, key=NAME, params=yes, ids=reuse, first=yes. If D continues after P's first token, "decode answer" and
// "decode answer, streamed" are D's answers, from which the client's is made.
func TestGolden(t *testing.T) {
	files, err := filepath.Glob("testdata/*/*.txtar")
	require.NoError(t, err)
	seen := map[string]bool{}
	for _, file := range files {
		dir := filepath.Base(filepath.Dir(file))
		if Named(dir).Concurrent != nil {
			continue // TestConcurrentGolden
		}
		seen[dir] = true
		t.Run(dir+"/"+strings.TrimSuffix(filepath.Base(file), ".txtar"), func(t *testing.T) {
			archive, err := txtar.ParseFile(file)
			require.NoError(t, err)
			got := twoHops(t, dir, archive)
			if *update {
				require.NoError(t, os.WriteFile(file, txtar.Format(got), 0o644))
				return
			}
			require.Equal(t, string(txtar.Format(archive)), string(txtar.Format(got)))
		})
	}
	for _, name := range sequential() {
		require.True(t, seen[name], "no golden file of %s", name)
	}
}

// testAttempt is the name of every attempt in the files.
var testAttempt = [16]byte{0x01, 0x23, 0x45, 0x67, 0x89, 0xab, 0xcd, 0xef, 0x01, 0x23, 0x45, 0x67, 0x89, 0xab, 0xcd, 0xef}

// circumstances reads the first line of a file.
func circumstances(t *testing.T, dialect, line string) (path string, o Options, pair *Pair) {
	o.Name = dialect
	pair = &Pair{RequestID: "r1", Attempt: testAttempt}
	words := strings.Split(line, ", ")
	path = strings.TrimPrefix(words[0], "POST ")
	number := func(s string) int {
		n, err := strconv.Atoi(s)
		require.NoError(t, err)
		return n
	}
	both := func(set func(s *kvstate.Transfer)) { set(&pair.Prefill.Transfer); set(&pair.Decode.Transfer) }
	for _, w := range words[1:] {
		if addr, ok := strings.CutPrefix(w, "prefill at "); ok {
			pair.Prefill.Addr = addr
			continue
		}
		if addr, ok := strings.CutPrefix(w, "decode at "); ok {
			pair.Decode.Addr = addr
			continue
		}
		key, value, ok := strings.Cut(w, "=")
		require.True(t, ok, w)
		switch key {
		case "tp":
			both(func(s *kvstate.Transfer) { s.TP = number(value) })
		case "release":
			both(func(s *kvstate.Transfer) { s.Release = value })
		case "host":
			both(func(s *kvstate.Transfer) { s.Host = value })
		case "init":
			pair.Decode.Transfer.LMCacheInitPort = number(value)
		case "alloc":
			pair.Decode.Transfer.LMCacheAllocPort = number(value)
		case "query":
			pair.Decode.Transfer.LMCacheQueryPort = number(value)
		case "p2p":
			pair.Prefill.Transfer.P2PPort = number(value)
		case "source":
			pair.Source = &Side{Addr: value}
		case "members":
			o.Members = strings.Split(value, "+")
		case "key":
			o.Key = value
		case "ids":
			o.ReuseTokenIDs = value == "reuse"
		case "first":
			o.RetFirstToken = value == "yes"
		case "params":
			o.Params = value == "yes"
		default:
			require.Fail(t, "unknown circumstance", w)
		}
	}
	return path, o, pair
}

func section(a *txtar.Archive, name string) []byte {
	for _, f := range a.Files {
		if f.Name == name {
			return bytes.TrimSuffix(f.Data, []byte("\n"))
		}
	}
	return nil
}

// twoHops returns the expected archive: its request and answer, and the bodies of both legs.
func twoHops(t *testing.T, name string, a *txtar.Archive) *txtar.Archive {
	first, _, _ := strings.Cut(string(a.Comment), "\n")
	path, options, pair := circumstances(t, name, first)
	request, answer := section(a, "request"), section(a, "prefill answer")
	api := openai.Classify("POST", path)
	require.NotEqual(t, openai.PassThrough, api)
	dialect, err := New(options)
	require.NoError(t, err)
	require.Equal(t, name, dialect.Name)
	require.True(t, dialect.Speaks(api))

	got := &txtar.Archive{Comment: a.Comment}
	prefill, undo := prefillBody(t, dialect, api, request, pair)
	got.Files = append(got.Files, txtar.File{Name: "request", Data: request}, txtar.File{Name: "prefill request", Data: prefill},
		txtar.File{Name: "prefill answer", Data: answer})
	add := func(name string, data []byte) { got.Files = append(got.Files, txtar.File{Name: name, Data: data}) }
	read, err := dialect.ReadAnswer(answer, pair)
	switch {
	case err != nil:
		require.ErrorIs(t, err, ErrParams, "a golden's answer must be JSON that ScanAnswer takes")
		add("error", []byte(err.Error()))
	case read.Final != nil:
		add("answer", read.Final)
		stream, err := openai.OneShot(read.Final, true)
		if err != nil {
			add("answer, streamed: error", []byte(err.Error()))
		} else {
			add("answer, streamed", stream)
		}
	case read.Params == nil:
		if read.Unused != "" {
			add("not handed on", []byte(read.Unused))
		}
		add("decode request", request)
	case dialect.Continue != nil:
		continued(t, dialect, api, request, read.Params, a, add)
	case dialect.Completion != nil && api == openai.Completions:
		add("decode request", completed(t, dialect, request, read.Params))
	default:
		decode := decodeBody(dialect, prefill, undo, read.Params)
		add("decode request", decode)
		requireScans(t, api, decode)
	}
	return got
}

// completed returns the body of a completion for D, which is made from the client's.
func completed(t *testing.T, d Dialect, request, params []byte) []byte {
	var r openai.Request
	var p openai.Patch
	require.NoError(t, r.Scan(openai.Completions, request, openai.Limits{}))
	p.Reset(&r)
	require.NoError(t, d.Completion(&p, params))
	edits := p.Edits()
	decode := edits.Apply(nil, request)
	requireScans(t, openai.Completions, decode)
	require.Equal(t, string(request), string(edits.Inverse(nil, request).Apply(nil, decode)), "undo gives the client's bytes")
	return decode
}

// continued adds the body with which D continues after P's first token, D's answer, and the client's.
func continued(t *testing.T, d Dialect, api openai.API, request, params []byte, a *txtar.Archive, add func(string, []byte)) {
	var r openai.Request
	var p openai.Patch
	require.NoError(t, r.Scan(api, request, openai.Limits{}))
	p.Reset(&r)
	answer, err := d.Continue(&r, &p, params)
	require.NoError(t, err)
	edits := p.Edits()
	require.NoError(t, edits.Check(len(request)))
	decode := edits.Apply(nil, request)
	requireScans(t, openai.Completions, decode)
	require.Equal(t, string(request), string(edits.Inverse(nil, request).Apply(nil, decode)), "undo gives the client's bytes")
	add("decode request", decode)
	if whole := section(a, "decode answer"); whole != nil {
		add("decode answer", whole)
		c, err := ReadContinuation(answer)
		require.NoError(t, err)
		got, err := c.Whole(nil, whole)
		require.NoError(t, err)
		require.True(t, json.Valid(got), "%s", got)
		add("answer", got)
	}
	if stream := section(a, "decode answer, streamed"); stream != nil {
		add("decode answer, streamed", stream)
		c, err := ReadContinuation(answer)
		require.NoError(t, err)
		got := c.Begin(nil)
		var events openai.Events
		each := func(event []byte) { got = c.Event(got, event) }
		require.NoError(t, events.Feed(stream, each))
		events.End(each)
		add("answer, streamed", bytes.TrimSuffix(got, []byte("\n")))
	}
}

// prefillBody returns the prefill leg's body of a request, and its undo.
func prefillBody(t *testing.T, d Dialect, api openai.API, request []byte, pair *Pair) ([]byte, openai.Edits) {
	var r openai.Request
	var p openai.Patch
	require.NoError(t, r.Scan(api, request, openai.Limits{}))
	p.Reset(&r)
	d.Prefill(&r, &p, pair)
	edits := p.Edits()
	require.NoError(t, edits.Check(len(request)))
	prefill := edits.Apply(nil, request)
	requireScans(t, api, prefill)
	undo := edits.Inverse(nil, request)
	require.NoError(t, undo.Check(len(prefill)))
	require.Equal(t, string(request), string(undo.Apply(nil, prefill)), "undo gives the client's bytes")
	return prefill, undo
}

// decodeBody returns the decode leg's body: pass 2 makes it from the prefill leg's in one step (extproc.decodeEdits).
func decodeBody(d Dialect, prefill []byte, undo openai.Edits, params []byte) []byte {
	client := undo.Apply(nil, prefill)
	front := bytes.IndexByte(client, '{') + 1
	return slices.Concat(client[:front], append(d.DecodeMember(nil, params), ','), client[front:])
}

func requireScans(t *testing.T, api openai.API, body []byte) {
	var r openai.Request
	require.NoError(t, r.Scan(api, body, openai.Limits{}), "%s", body)
}

func TestNew(t *testing.T) {
	for _, name := range Names() {
		require.Equal(t, name, every(t, name).Name)
	}
	for _, name := range []string{"", "none", "NIXL"} {
		_, err := New(Options{Name: name})
		require.ErrorContains(t, err, "one of "+strings.Join(Names(), ", "), name)
	}
	for want, members := range map[string][]string{
		"no members": nil, "nixl twice": {"nixl", "nixl"}, "lmcache\" cannot be a member": {"nixl", "lmcache"},
	} {
		_, err := New(Options{Name: "multi", Members: members})
		require.ErrorContains(t, err, want)
	}
}

// TestListsOfDialects: whatever lists the dialects has all of them, and no other.
func TestListsOfDialects(t *testing.T) {
	read := func(file, from, to string) string {
		text, err := os.ReadFile("../../" + file)
		require.NoError(t, err)
		_, rest, found := strings.Cut(string(text), from)
		require.True(t, found, "%s: %q", file, from)
		rest, _, found = strings.Cut(rest, to)
		require.True(t, found, "%s: %q", file, to)
		return rest
	}
	quoted := regexp.MustCompile("`([^`]+)`")
	cells := func(table string, column int) (names []string) { // the quoted names of a column
		for row := range strings.SplitSeq(table, "\n") {
			if of := strings.Split(row, "|"); len(of) > column+1 {
				for _, name := range quoted.FindAllStringSubmatch(of[column+1], -1) {
					names = append(names, name[1])
				}
			}
		}
		return names
	}
	var experimental []string
	for _, d := range All() {
		if d.Engines.Experimental {
			experimental = append(experimental, d.Name)
		}
	}
	var ran []string // with a real engine
	stands := read("docs/protocols.md", "| ran with a real engine |\n|---|---|---|---|\n", "\n\n")
	for row := range strings.SplitSeq(stands, "\n") {
		if !strings.HasSuffix(row, "| no |") {
			ran = append(ran, cells(row, 0)...)
		}
	}
	without := func(names, out []string) []string {
		return slices.DeleteFunc(slices.Clone(names), func(name string) bool { return slices.Contains(out, name) })
	}
	require.ElementsMatch(t, Names(), cells(stands, 0), "docs/protocols.md, what stands behind each dialect")
	require.ElementsMatch(t, without(Names(), experimental), ran,
		"docs/protocols.md, what stands behind each dialect: those that ran with a real engine are not Experimental")
	chosen := read("docs/howto/choose-a-dialect.md", "| `kvTransfer` |\n", "\n\n")
	require.ElementsMatch(t, append(Names(), "none"), without(cells(chosen, 2), []string{"members"}),
		"docs/howto/choose-a-dialect.md")
	var said []string
	for _, name := range quoted.FindAllStringSubmatch(read("docs/howto/choose-a-dialect.md", "**Experimental**", "The check"), -1) {
		said = append(said, name[1])
	}
	require.ElementsMatch(t, experimental, said, "docs/howto/choose-a-dialect.md, experimental")
	late := cells(read("docs/security.md", "\nCan a late D of the other dialects", "\n\n- "), 0)
	slices.Sort(late)
	require.ElementsMatch(t, Names(), slices.Compact(late), "docs/security.md, can a late D read foreign KV")
	for file, from := range map[string]string{"README.md": "what is not](docs/supported.md): ", "docs/supported.md": "| [KV transfer](protocols.md) | "} {
		require.Equal(t, strconv.Itoa(len(Names())), read(file, from, " dialects of"), file)
	}
	require.Equal(t, strconv.Itoa(len(experimental)), read("docs/supported.md", "(howto/choose-a-dialect.md)), ", " of them [experimental]"),
		"docs/supported.md")
}

// every returns a dialect by name, with the options that it needs.
func every(t *testing.T, name string) Dialect {
	d, err := New(Options{Name: name, Members: []string{"nixl", "offload"}})
	require.NoError(t, err)
	return d
}

// sequential returns the names of the dialects whose legs only ever follow each other.
func sequential() (names []string) {
	for _, d := range All() {
		if d.Concurrent == nil {
			names = append(names, d.Name)
		}
	}
	return names
}

// TestPrefillEmptyObject: the smallest possible body gets its members and loses them again.
func TestPrefillEmptyObject(t *testing.T) {
	for _, name := range sequential() {
		d := every(t, name)
		for _, api := range []openai.API{openai.Chat, openai.Completions, openai.Responses, openai.Messages, openai.Generate} {
			if d.Speaks(api) {
				prefill, _ := prefillBody(t, d, api, []byte(`{}`), &Pair{})
				require.Contains(t, string(prefill), `"stream":false`)
			}
		}
	}
}

// TestPrefillOverwrites: a client's own control members never reach P, neither merged with ours nor next to them.
func TestPrefillOverwrites(t *testing.T) {
	d, err := New(Options{Name: "nixl"})
	require.NoError(t, err)
	prefill, _ := prefillBody(t, d, openai.Chat, []byte(`{"model":"m","kv_transfer_params":{"do_remote_prefill":true,"remote_host":"evil"}}`), &Pair{})
	require.NotContains(t, string(prefill), "evil")
	require.Equal(t, 1, bytes.Count(prefill, []byte("kv_transfer_params")))
}

// TestPrefillAllocs: no dialect allocates for the prefill leg.
func TestPrefillAllocs(t *testing.T) {
	body := []byte(`{"model":"m","messages":[{"role":"user","content":"Hi"}],"max_tokens":300,"stop":["x"],"stream":true}`)
	var r openai.Request
	var p openai.Patch
	require.NoError(t, r.Scan(openai.Chat, body, openai.Limits{}))
	pair := &Pair{Prefill: Side{Addr: "10.0.0.5:8000"}, Decode: Side{Addr: "10.0.0.6:8000"}}
	allowed := map[string]float64{"lmcache": 1, "moriio-read": 3} // the receiver's host, and the transfer id, as text
	for _, name := range sequential() {
		d := every(t, name)
		patch := func() {
			p.Reset(&r)
			d.Prefill(&r, &p, pair)
			if len(p.Edits()) == 0 {
				t.Fatal("no edits")
			}
		}
		patch()
		budget.Allocs(t, 100, allowed[name], patch, name)
	}
}
