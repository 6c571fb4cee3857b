package kvtransfer

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/rogpeppe/go-internal/txtar"
	"github.com/stretchr/testify/require"

	"tandem/extproc/openai"
	"tandem/kvstate"
)

// TestConcurrentGolden follows requests of the dialects whose legs run at once: testdata/<dialect>/*.txtar have the
// client's request, the known facts about P, and P's answer; the bodies of both legs, and Tandem's reading of P's
// answer, are checked, or rewritten with -update. The attempt is always the same, so rooms and transfer ids are too.
func TestConcurrentGolden(t *testing.T) {
	for _, d := range All() {
		if d.Concurrent == nil {
			continue
		}
		dialect := d.Name
		files, err := filepath.Glob("testdata/" + dialect + "/*.txtar")
		require.NoError(t, err)
		require.NotEmpty(t, files, dialect)
		for _, file := range files {
			t.Run(dialect+"/"+strings.TrimSuffix(filepath.Base(file), ".txtar"), func(t *testing.T) {
				archive, err := txtar.ParseFile(file)
				require.NoError(t, err)
				got := atOnce(t, d.Concurrent, archive)
				if *update {
					require.NoError(t, os.WriteFile(file, txtar.Format(got), 0o644))
					return
				}
				require.Equal(t, string(txtar.Format(archive)), string(txtar.Format(got)))
			})
		}
	}
}

// goldenID is the attempt of all goldens.
var goldenID = [16]byte{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16}

// atOnce returns the expected archive. Its first line: POST path, prefill at address[, key=value of transfer]...
func atOnce(t *testing.T, d *Concurrent, a *txtar.Archive) *txtar.Archive {
	first, _, _ := strings.Cut(string(a.Comment), "\n")
	words := strings.Split(first, ", ")
	path, ok := strings.CutPrefix(words[0], "POST ")
	require.True(t, ok)
	legs := &Legs{ID: goldenID, RequestID: "client-id", Prefill: &kvstate.Endpoint{}, Decode: &kvstate.Endpoint{EndpointSpec: kvstate.EndpointSpec{
		Addr: "10.0.0.6:8000", Transfer: kvstate.Transfer{TP: 8}}}}
	for _, w := range words[1:] {
		transferWord(t, legs, w)
	}
	if p := learnt(t, d, a); p.Ranks != nil {
		legs.Peer = p
	}
	got := &txtar.Archive{Comment: a.Comment}
	for _, name := range []string{"request", "bootstrap query", "server info", "earlier answer"} {
		if text := section(a, name); text != nil {
			got.Files = append(got.Files, txtar.File{Name: name, Data: text})
		}
	}
	request := section(a, "request")
	api := openai.Classify("POST", path)
	var r openai.Request
	var p openai.Patch
	require.NoError(t, r.Scan(api, request, openai.Limits{}))
	if r.HasControl() {
		request = r.Clean(nil)
		require.NoError(t, r.Scan(api, request, openai.Limits{}))
	}
	p.Reset(&r)
	plan, err := d.Plan(&r, &p, legs)
	if why := d.Unpairable(&r); why != "" {
		err = fmt.Errorf("not over two legs: %s", why)
	}
	if err != nil {
		got.Files = append(got.Files, txtar.File{Name: "no legs", Data: []byte(err.Error())})
		return got
	}
	prefill, decode := legBodies(t, request, p.Edits(), plan)
	requireScans(t, api, prefill)
	requireScans(t, api, decode)
	got.Files = append(got.Files, txtar.File{Name: "prefill request", Data: prefill}, txtar.File{Name: "decode request", Data: decode})
	if headers := planHeaders(plan); headers != "" {
		got.Files = append(got.Files, txtar.File{Name: "headers", Data: []byte(headers)})
	}
	if answer := section(a, "prefill answer"); answer != nil {
		got.Files = append(got.Files, txtar.File{Name: "prefill answer", Data: answer}, txtar.File{Name: "verdict", Data: []byte(judged(d, answer, plan))})
		if decode := section(a, "decode answer"); plan.Joined {
			read, _, err := d.ReadAnswer(answer, plan.Decode)
			require.NoError(t, err)
			joined, err := openai.InputLogprobs{Prefill: read.Joined}.Whole(nil, decode)
			require.NoError(t, err)
			got.Files = append(got.Files, txtar.File{Name: "decode answer", Data: decode}, txtar.File{Name: "answer", Data: joined})
		}
	}
	return got
}

func transferWord(t *testing.T, legs *Legs, w string) {
	key, value, _ := strings.Cut(w, "=")
	tr := &legs.Prefill.Transfer
	number := map[string]any{"bootstrapPort": &tr.BootstrapPort, "handshakePort": &tr.HandshakePort, "notifyPort": &tr.NotifyPort, "tp": &tr.TP, "dp": &tr.DP}
	switch {
	case key == "host":
		tr.Host = value
	case number[key] != nil:
		_, err := fmt.Sscan(value, number[key])
		require.NoError(t, err)
	default:
		addr, ok := strings.CutPrefix(w, "prefill at ")
		require.True(t, ok, w)
		legs.Prefill.Addr = addr
	}
}

// learnt returns what was known of P before the request.
func learnt(t *testing.T, d *Concurrent, a *txtar.Archive) (peer Peer) {
	var err error
	if info := section(a, "server info"); info != nil {
		peer, err = readServerInfo(info)
		require.NoError(t, err)
	}
	if query := section(a, "bootstrap query"); query != nil {
		peer, err = readQuery(query)
		require.NoError(t, err)
	}
	if answer := section(a, "earlier answer"); answer != nil {
		_, peer, err = d.ReadAnswer(answer, nil)
		require.NoError(t, err)
	}
	return peer
}

// legBodies returns both bodies as they leave Envoy: P's by the plan, D's by its undo, as decode-leg's filter makes it.
func legBodies(t *testing.T, request []byte, edits openai.Edits, plan PairPlan) (prefill, decode []byte) {
	require.NoError(t, edits.Check(len(request)))
	prefill = edits.Apply(nil, request)
	undo := edits.Inverse(nil, request)
	require.Equal(t, string(request), string(undo.Apply(nil, prefill)), "undo gives the client's bytes")
	require.Equal(t, edits[0].Start, edits[0].End, "the first edit is an insertion")
	if plan.Decode == nil {
		return prefill, undo[1:].Apply(nil, prefill)
	}
	return prefill, decodeMembers(prefill, undo, plan.Decode)
}

func decodeMembers(prefill []byte, undo openai.Edits, members []byte) []byte {
	edits := append(openai.Edits(nil), undo...)
	edits[0].New = append(append(append([]byte(nil), members...), ','), undo[0].New...)
	return edits.Apply(nil, prefill)
}

func planHeaders(plan PairPlan) string {
	var lines []string
	if plan.RequestID != "" {
		lines = append(lines, "both x-request-id: "+plan.RequestID)
	}
	if plan.PrefillRank != "" {
		lines = append(lines, "prefill x-data-parallel-rank: "+plan.PrefillRank)
	}
	if plan.DecodeRank != "" {
		lines = append(lines, "decode x-data-parallel-rank: "+plan.DecodeRank)
	}
	return strings.Join(lines, "\n")
}

func judged(d *Concurrent, answer []byte, plan PairPlan) string {
	got, peer, err := d.ReadAnswer(answer, plan.Decode)
	if err != nil {
		return "D is cut, and the request planned again: " + err.Error()
	}
	text := fmt.Sprintf("D has its blocks; prompt tokens %d, cached %d", got.PromptTokens, got.CachedTokens)
	for i, r := range peer.Ranks {
		text += fmt.Sprintf("; rank %d is %s at %s:%d", i, r.EngineID, r.Host, r.Port)
	}
	return text
}

// TestRooms: 63 bits, never twice.
func TestRooms(t *testing.T) {
	seen := map[string]bool{}
	for range 2000 {
		var r openai.Request
		var p openai.Patch
		require.NoError(t, r.Scan(openai.Completions, []byte(`{"prompt":["a","b","c"]}`), openai.Limits{}))
		p.Reset(&r)
		legs := &Legs{Prefill: &kvstate.Endpoint{EndpointSpec: kvstate.EndpointSpec{Addr: "10.0.0.5:1"}}, Decode: &kvstate.Endpoint{}}
		for i := range legs.ID {
			legs.ID[i] = byte(len(seen) * (i + 7) >> (i % 3))
		}
		legs.ID[0], legs.ID[1] = byte(len(seen)), byte(len(seen)>>8)
		_, err := newSGLang().Plan(&r, &p, legs)
		require.NoError(t, err)
		body := p.Edits().Apply(nil, r.Body())
		var rooms openai.Request
		require.NoError(t, rooms.Scan(openai.Completions, body, openai.Limits{}))
		list := strings.Trim(string(rooms.Raw(openai.FieldBootstrapRoom)), "[]")
		for room := range strings.SplitSeq(list, ",") {
			require.False(t, seen[room])
			seen[room] = true
			var n int64
			_, err := fmt.Sscan(room, &n)
			require.NoError(t, err)
			require.GreaterOrEqual(t, n, int64(0))
		}
	}
	require.Len(t, seen, 6000)
}

func TestBatchTooLarge(t *testing.T) {
	for body, ok := range map[string]bool{
		`{"prompt":[]}`: true, // not a list of prompts: the engine decides
		`{"prompt":[` + strings.Repeat(`"a",`, maxRooms) + `"a"]}`: false, `{"prompt":[` + strings.Repeat(`"a",`, maxRooms-1) + `"a"]}`: true,
	} {
		var r openai.Request
		var p openai.Patch
		require.NoError(t, r.Scan(openai.Completions, []byte(body), openai.Limits{}))
		p.Reset(&r)
		_, err := newSGLang().Plan(&r, &p, &Legs{Prefill: &kvstate.Endpoint{EndpointSpec: kvstate.EndpointSpec{Addr: "10.0.0.5:1"}}, Decode: &kvstate.Endpoint{}})
		require.Equal(t, ok, err == nil, "%.40s: %v", body, err)
	}
}

func FuzzReadQuery(f *testing.F) {
	f.Add(`{"0":{"engine_id":"a","worker_addr":{"0":{"0":"tcp://10.0.0.5:1"}}}}`)
	f.Add(`{"1":{"engine_id":"b"},"0":{"engine_id":"a"}}`)
	f.Add(`{"-1":{"engine_id":"b"}}`)
	f.Fuzz(func(t *testing.T, body string) {
		peer, err := readQuery([]byte(body))
		if err != nil {
			require.Empty(t, peer.Ranks)
			return
		}
		for _, r := range peer.Ranks {
			require.NotEmpty(t, r.EngineID)
		}
	})
}

func FuzzReadPushPeer(f *testing.F) {
	f.Add(`{"remote_engine_id":"a_dp3","remote_host":"h","remote_port":5600,"tp_size":8}`)
	f.Add(`{"remote_engine_id":7}`)
	f.Fuzz(func(t *testing.T, params string) {
		peer, engine := readPushPeer([]byte(params))
		require.Equal(t, engine == nil, len(peer.Ranks) == 0)
		if engine != nil {
			last := peer.Ranks[len(peer.Ranks)-1]
			require.NotEmpty(t, last.EngineID)
			require.Positive(t, last.Port)
		}
	})
}

// FuzzServerInfo: whatever a context server reports, D's parameters are JSON.
func FuzzServerInfo(f *testing.F) {
	f.Add([]byte(`{"disaggregated_params":{"ctx_dp_rank":0,"ctx_info_endpoint":["tcp://10.0.0.5:5000"]}}`))
	f.Add([]byte(`{"disaggregated_params":{"ctx_dp_rank":-7,"ctx_info_endpoint":"a\"\u0001"}}`))
	f.Fuzz(func(t *testing.T, info []byte) {
		peer, err := readServerInfo(info)
		if err != nil || peer.Ranks == nil {
			return
		}
		var r openai.Request
		var p openai.Patch
		require.NoError(t, r.Scan(openai.Chat, []byte(`{"messages":[]}`), openai.Limits{}))
		p.Reset(&r)
		plan, err := newTRTLLMFirst().Plan(&r, &p, &Legs{ID: goldenID, Prefill: &kvstate.Endpoint{}, Peer: peer})
		require.NoError(t, err)
		requireScans(t, openai.Chat, []byte("{"+string(plan.Decode)+"}"))
		requireScans(t, openai.Chat, p.Edits().Apply(nil, []byte(`{"messages":[]}`)))
	})
}
