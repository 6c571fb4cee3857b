package openai

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestPatch(t *testing.T) {
	for _, c := range []struct {
		name, body, want string
		change           func(p *Patch)
	}{
		{"into an empty object", `{}`, `{"max_tokens":1}`, func(p *Patch) { p.Set("max_tokens", FieldMaxTokens, []byte("1")) }},
		{"into space", ` { } `, ` {"max_tokens":1 } `, func(p *Patch) { p.Set("max_tokens", FieldMaxTokens, []byte("1")) }},
		{"in front", `{"a":1}`, `{"max_tokens":1,"a":1}`, func(p *Patch) { p.Set("max_tokens", FieldMaxTokens, []byte("1")) }},
		{"in place", `{ "max_tokens" : 5e2 , "a":1}`, `{ "max_tokens" : 1 , "a":1}`, func(p *Patch) { p.Set("max_tokens", FieldMaxTokens, []byte("1")) }},
		{"under an escaped name", `{"max\u005ftokens":5}`, `{"max\u005ftokens":1}`, func(p *Patch) { p.Set("max_tokens", FieldMaxTokens, []byte("1")) }},
		{"several in front", `{"a":1}`, `{"n":1,"stream":false,"a":1}`, func(p *Patch) {
			p.Set("n", FieldN, []byte("1"))
			p.Set("stream", FieldStream, []byte("false"))
		}},
		{"the last change counts", `{"n":2,"stop":1}`, `{"stream":false,"stop":2}`, func(p *Patch) {
			p.Set("n", FieldN, []byte("1"))
			p.Set("stream", FieldStream, []byte("true"))
			p.Set("stream", FieldStream, []byte("false"))
			p.Delete(FieldN)
			p.Delete(FieldStop)
			p.Set("stop", FieldStop, []byte("2"))
		}},
		{"delete the first", `{ "stop" : 1 , "a" : 2 }`, `{ "a" : 2 }`, func(p *Patch) { p.Delete(FieldStop) }},
		{"delete the last", `{ "a" : 2 , "stop" : 1 }`, `{ "a" : 2  }`, func(p *Patch) { p.Delete(FieldStop) }},
		{"delete in the middle", `{"a":2,"stop":1,"b":3}`, `{"a":2,"b":3}`, func(p *Patch) { p.Delete(FieldStop) }},
		{"delete the only one", `{"stop":1}`, `{}`, func(p *Patch) { p.Delete(FieldStop) }},
		{"delete neighbours", `{"a":0,"stop":1 , "n":2 ,"b":3}`, `{"a":0 ,"b":3}`, func(p *Patch) { p.Delete(FieldN); p.Delete(FieldStop) }},
		{"delete the first two", `{"stop":1 , "n":2 ,"b":3}`, `{"b":3}`, func(p *Patch) { p.Delete(FieldN); p.Delete(FieldStop) }},
		{"delete the last two", `{"b":3,"stop":1 , "n":2 }`, `{"b":3 }`, func(p *Patch) { p.Delete(FieldN); p.Delete(FieldStop) }},
		{"delete around one", `{"stop":1,"b":3,"n":2}`, `{"b":3}`, func(p *Patch) { p.Delete(FieldN); p.Delete(FieldStop) }},
		{"replace all", `{"stop":1,"n":2}`, `{"stream":false}`, func(p *Patch) {
			p.Set("stream", FieldStream, []byte("false"))
			p.Delete(FieldN)
			p.Delete(FieldStop)
		}},
		{"delete what is not there", `{"a":1}`, `{"a":1}`, func(p *Patch) { p.Delete(FieldN); p.DeleteSampling(FieldN) }},
		{"sampling in place", `{"sampling_params":{"n":2,"stop":1}}`, `{"sampling_params":{"max_tokens":1,"n":1}}`, func(p *Patch) {
			p.SetSampling("n", FieldN, []byte("1"))
			p.SetSampling("max_tokens", FieldMaxTokens, []byte("1"))
			p.DeleteSampling(FieldStop)
		}},
		{"sampling emptied", `{"sampling_params":{"stop":1}}`, `{"sampling_params":{}}`, func(p *Patch) { p.DeleteSampling(FieldStop) }},
		{"sampling made", `{"a":1}`, `{"sampling_params":{"n":1,"max_tokens":1},"a":1}`, func(p *Patch) {
			p.SetSampling("n", FieldN, []byte("1"))
			p.SetSampling("max_tokens", FieldMaxTokens, []byte("1"))
		}},
		{"sampling null", `{"sampling_params":null}`, `{"sampling_params":{"n":1}}`, func(p *Patch) { p.SetSampling("n", FieldN, []byte("1")) }},
		{"sampling no object", `{"sampling_params":[]}`, `{"sampling_params":[]}`, func(p *Patch) { p.SetSampling("n", FieldN, []byte("1")) }},
		{"sampling among others", `{"n":5,"sampling_params":{"n":2},"stop":3}`, `{"stream":false,"n":6,"sampling_params":{"n":1}}`, func(p *Patch) {
			p.Set("stream", FieldStream, []byte("false"))
			p.SetSampling("n", FieldN, []byte("1"))
			p.Set("n", FieldN, []byte("6"))
			p.Delete(FieldStop)
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			var p Patch
			p.Reset(scanned(t, Generate, c.body))
			c.change(&p)
			edits := p.Edits()
			require.Equal(t, c.want, string(edits.Apply(nil, []byte(c.body))))
			require.Equal(t, edits, p.Edits(), "asked twice")
			checkUndo(t, edits, []byte(c.body))
		})
	}
}

// TestPrefillLeg follows a chat body: nothing but the planned changes, and all of them undone.
func TestPrefillLeg(t *testing.T) {
	const body = `{"model":"m", "messages":[{"role":"user","content":"a\u00e9\/ \ud83d"}],` +
		`"seed":9223372036854775807,"temperature":1e-3,"logit_bias":{"5":1.0},"stream":true,"stream_options":{"include_usage":true},` +
		`"max_tokens":1,"x":{"y":[1,2,{"z":null}]},"stop":["a","b"]}`
	var p Patch
	edits := prefillEdits(&p, scanned(t, Chat, body))
	require.Equal(t, `{"max_completion_tokens":1,"min_tokens":1,"n":1,"kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null},`+
		`"model":"m", "messages":[{"role":"user","content":"a\u00e9\/ \ud83d"}],`+
		`"seed":9223372036854775807,"temperature":1e-3,"logit_bias":{"5":1.0},"stream":false,`+
		`"max_tokens":1,"x":{"y":[1,2,{"z":null}]}}`, string(edits.Apply(nil, []byte(body))))
	require.Equal(t, 1, edits[0].Start, "what is put in comes first")
	require.Equal(t, 1, edits[0].End)
	require.Len(t, edits, 4, "a value that is there already is no edit")
	checkUndo(t, edits, []byte(body))
}

// checkUndo compares Inverse, Len, Size and Check with the effect of Apply.
func checkUndo(t testing.TB, edits Edits, body []byte) {
	t.Helper()
	require.NoError(t, edits.Check(len(body)))
	edited := edits.Apply(nil, body)
	require.Equal(t, len(edited), edits.Len(len(body)))
	undo := edits.Inverse(nil, body)
	require.NoError(t, undo.Check(len(edited)))
	require.Equal(t, string(body), string(undo.Apply(nil, edited)))
	require.Equal(t, len(body), undo.Len(len(edited)))
	require.Equal(t, len(edited)-len(body), edits.Size()-undo.Size())
	require.Equal(t, string(edited), string(undo.Inverse(nil, edited).Apply(nil, body)), "undone twice")
	require.Equal(t, "x"+string(edited), string(edits.Apply([]byte("x"), body)), "Apply appends")
}

func TestEditsCheck(t *testing.T) {
	require.NoError(t, Edits(nil).Check(0))
	require.NoError(t, Edits{{0, 0, nil, false}, {0, 3, nil, false}, {3, 3, nil, false}}.Check(3))
	for _, e := range []Edits{{{Start: -1}}, {{End: 4}}, {{Start: 2, End: 1}}, {{End: 2}, {Start: 1, End: 3}}, {{Start: 4, End: 4}}} {
		require.Error(t, e.Check(3))
	}
}

// FuzzPatch compares Patch with its dumb twin, and every undo with the bytes it came from. Each byte of ops is a
// change: which member, set or delete, at the top or in sampling_params.
func FuzzPatch(f *testing.F) {
	for _, s := range []string{
		`{}`, `{"stop":1}`, ` { "a" : 1 , "stop" : [ "x" ] , "n" : 2 } `, `{"sampling_params":{"n":2,"stop":1,"max_tokens":5},"stream":true}`,
		`{"sampling_params":null,"kv_transfer_params":{}}`, `{"n":1,"stop":1,"stream":1,"max_tokens":1}`, `{"sampling_params":{},"max\u005ftokens":1}`,
	} {
		f.Add([]byte(s), []byte{0, 1, 2, 3, 4, 8, 16, 17, 18, 24, 25, 26})
		f.Add([]byte(s), []byte{9, 10, 11, 2, 26})
	}
	f.Fuzz(func(t *testing.T, body, ops []byte) {
		var r Request
		if len(ops) > 64 || r.Scan(Generate, body, Limits{}) != nil {
			return
		}
		var p Patch
		p.Reset(&r)
		twin := newSlowPatch(t, body)
		keys := [...]string{"max_tokens", "n", "stop", "stream", "kv_transfer_params"}
		for i, op := range ops {
			key, value := keys[int(op&7)%len(keys)], []byte{'0' + byte(i%10)}
			switch f := fieldOf([]byte(key)); op >> 3 & 3 {
			case 0:
				p.Set(key, f, value)
				twin.set(key, string(value))
			case 1:
				p.Delete(f)
				twin.delete(key)
			case 2:
				p.SetSampling(key, f, value)
				twin.sampling.set(key, string(value))
			case 3:
				p.DeleteSampling(f)
				twin.sampling.delete(key)
			}
		}
		edits := p.Edits()
		checkUndo(t, edits, body)
		edited := edits.Apply(nil, body)
		require.True(t, json.Valid(edited), "%q", edited)
		top, sampling := twin.result()
		compareMembers(t, top, sampling, edited)
	})
}

// compareMembers compares an edited body with the expected members.
func compareMembers(t testing.TB, top, sampling []slowMember, edited []byte) {
	t.Helper()
	got := slowMembers(t, edited)
	require.Len(t, got, len(top), "%q", edited)
	for i, m := range got {
		require.Equal(t, top[i].key, m.key)
		if m.key == "sampling_params" && isObject(m.value) {
			require.Equal(t, sampling, slowMembers(t, []byte(m.value)), "%q", edited)
			continue
		}
		require.Equal(t, top[i].value, m.value)
	}
}
