package replay

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"tandem/recording"
	"tandem/replay/sessions"
	"tandem/replay/traces"
)

// recorded writes a recording of conversations of so many turns, of a fleet of two and two.
func recorded(t *testing.T, conversations, turns, sample int, more ...string) *recording.Recording {
	t.Helper()
	var out strings.Builder
	fmt.Fprintf(&out, `{"tandem_recording":1,"id":"x","block_bytes":512,"sample":%d,"usage":true,"start":1}`+"\n",
		sample)
	out.WriteString(`{"fleet":{"at":1,"pools":[{"name":"chat","split":"auto","late":true,"answer_weight":0.5,"ttft":2,"tpot":0.04,` +
		`"engines":[{"address":"p0","role":"prefill","kv":500000,"speed":2},{"address":"p1","role":"prefill","kv":500000},` +
		`{"address":"d0","role":"decode","kv":500000,"pace":1.5},{"address":"d1","role":"decode","kv":500000}]}]}}` + "\n")
	random := rand.New(rand.NewPCG(1, 1))
	n := uint64(0)
	for c := range conversations {
		blocks := make([]uint64, 0, 400)
		for i := range 16 { // all begin alike
			blocks = append(blocks, uint64(100+i))
		}
		before, at := uint64(0), float64(c*sample)
		for turn := range turns {
			had := len(blocks)
			for range 16 {
				blocks = append(blocks, recording.Mask(random.Uint64()))
			}
			n++
			q := recording.Request{N: n, T: at, Pool: "chat", Model: "m", Bytes: 512 * len(blocks),
				Prompt: int64(128 * len(blocks)),
				Cached: 100, Answer: 50, Stream: true, Route: "split", First: .4, Each: .02, Took: 1.5, Status: 200, Ended: "ok",
				Blocks: blocks}
			if turn > 0 {
				q.On, q.Same, q.Gap, q.Blocks = before, had, 3, blocks[had:]
			}
			out.Write(recording.Append(nil, &q))
			before, at = n, at+4.5
		}
	}
	for _, line := range more {
		out.WriteString(line + "\n")
	}
	r, err := recording.Read("by hand", strings.NewReader(out.String()))
	require.NoError(t, err)
	return r
}

// A recording is played on the fleet that it was made of, with what Tandem had learned of it; a turn waits for
// the answer before it, and finds what it had.
func TestRecorded(t *testing.T) {
	o, err := LoadRecorded(recorded(t, 20, 4, 1), "")
	require.NoError(t, err)
	require.Len(t, o.Turns, 80)
	v, notes := o.Variant()
	require.Empty(t, notes)
	require.Equal(t, "2+2", v.Fleet())
	require.InDelta(t, 2./16000, v.Config.Engine.PrefillToken, 1e-9)
	require.InDelta(t, .018, v.Config.Engine.DecodeStep, 1e-9)
	require.InDelta(t, 500_000, v.Config.Engine.KVTokens, 1e-9)
	r, err := v.Play(t.Context(), o)
	require.NoError(t, err)
	require.Zero(t, r.Stuck)
	require.Greater(t, r.Cached, .6, "a turn has three quarters of its prompt, the first one half")
	require.Less(t, r.Again, .1)
	m := o.Measured(&v.Config)
	require.InDelta(t, 1, m.Kept, 1e-9)
	require.InDelta(t, .4, m.TTFT.P50, 1e-9)
	require.NotEmpty(t, Off(m, r), "the times of the recording are made up")
	require.Empty(t, Off(r, r))
	m.TPOT, m.TTFT = Spread{}, r.TTFT
	m.Cached = r.Cached
	require.Empty(t, Off(m, r), "what nobody measured is not off")
}

// Where a beginning ends that all share lies within a block of the recording: the tokens that most requests found in a
// cache say where, else it is the middle of the block.
func TestWhereASharedBeginningEnds(t *testing.T) {
	for _, test := range []struct {
		cached func(i int) int64
		want   int
	}{
		{func(int) int64 { return 2096 }, 2096},
		{func(i int) int64 { return []int64{2096, 2096, 2048, 9000, -1}[i%5] }, 2096},
		{func(int) int64 { return -1 }, 2048 + 64},
		{func(int) int64 { return 0 }, 2048 + 64},
	} {
		r := recorded(t, 20, 1, 1)
		for i := range r.Requests {
			r.Requests[i].Cached = test.cached(i)
		}
		o, err := LoadRecorded(r, "")
		require.NoError(t, err)
		for _, turn := range o.Turns {
			require.Equal(t, test.want, turn.Part.Behind*512+turn.Part.Tokens)
		}
	}
}

// What a recording says is what is played: one conversation in five stands for five, which share what all share.
func TestSampleIsScaledBack(t *testing.T) {
	all, err := LoadRecorded(recorded(t, 100, 3, 1), "chat")
	require.NoError(t, err)
	fifth, err := LoadRecorded(recorded(t, 20, 3, 5), "chat")
	require.NoError(t, err)
	v, _ := all.Variant()
	was, err := v.Play(t.Context(), all)
	require.NoError(t, err)
	is, err := v.Play(t.Context(), fifth)
	require.NoError(t, err)
	require.InDelta(t, was.Requests, is.Requests, 30)
	require.InDelta(t, was.Cached, is.Cached, .1)
	v.Load = 2
	twice, err := v.Play(t.Context(), all)
	require.NoError(t, err)
	require.InDelta(t, 2*was.Requests, twice.Requests, 20)
	require.InDelta(t, was.Cached, twice.Cached, .1, "copies do not share what was their own")
}

// A day that is played more than once keeps its shape: nobody comes in the hours in which nobody came.
func TestCopiesComeWhenTheirConversationsCame(t *testing.T) {
	o, err := LoadRecorded(recorded(t, 200, 1, 1), "chat")
	require.NoError(t, err)
	for i := range o.Turns {
		o.Turns[i].At /= 4
	}
	v, _ := o.Variant()
	v.Load = 5
	r, err := v.Play(t.Context(), o)
	require.NoError(t, err)
	require.InDelta(t, 600, r.Requests, 60, "the first tenth does not count")
	require.Positive(t, r.KV[kvPoints/5])
	require.Zero(t, slices.Max(r.KV[kvPoints/2:]))

	for _, random := range []float64{0, .3, .999} {
		for _, at := range []float64{0, 1, o.Seconds / 2, o.Seconds} {
			require.InDelta(t, at, o.near(at, random), o.Seconds/20+1e-9)
			require.LessOrEqual(t, o.near(at, random), o.Seconds)
		}
	}
}

// What is not played is counted, by its reason, and what disturbed the fleet is noted.
func TestNotPlayed(t *testing.T) {
	r := recorded(t, 3, 2, 1,
		`{"n":90,"t":9,"pool":"chat","bytes":10,"prompt":3,"route":"split","status":503,"ended":"failed"}`,
		`{"n":91,"t":9,"pool":"chat","bytes":10,"prompt":3,"route":"pass_through","status":200,"ended":"ok"}`,
		`{"n":92,"t":9,"pool":"chat","bytes":10,"prompt":3,"route":"decode_alone","status":200,"ended":"ok"}`,
		`{"fleet":{"at":60,"pools":[{"name":"chat","engines":[{"address":"p0","role":"prefill","out":true,"external":4}]}]}}`)
	o, err := LoadRecorded(r, "")
	require.NoError(t, err)
	require.Equal(t, map[string]int{"have no prompt": 1, "have no answer": 1}, o.Skipped)
	require.Equal(t, 1, o.Guessed)
	require.Equal(t, []string{"the pool had 1 to 4 engines, and is played with the 1 that it had last",
		"1 engines were out for a part of the time",
		"engines had 2.0 requests on average that did not come through Tandem"}, o.Notes)
	_, err = LoadRecorded(r, "other")
	require.ErrorContains(t, err, `no pool "other"`)
}

// The fleet is the last one that had engines. Those that encode media are none of it, and what they did not say is said.
func TestFleetThatWas(t *testing.T) {
	snapshot := func(engines string) string {
		return `{"fleet":{"at":60,"pools":[{"name":"chat","engines":[` + engines + `]}]}}`
	}
	p, d := `{"address":"p0","role":"prefill","speed":1,"kv":9}`, `{"address":"d0","role":"decode","pace":1}`
	for _, c := range []struct {
		name, last            string
		prefill, decode, both int
		notes                 []string
	}{
		{"none at the end", "", 2, 2, 0, nil},
		{"one encodes", p + `,{"address":"e0","role":"encode"},` + d, 1, 1, 0,
			[]string{"1 engines that encode media are not played"}},
		{"one does both", p + `,{"address":"b0","role":"both"},` + d, 1, 1, 3,
			[]string{"engines with one role beside engines with both are replayed as if all had both"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			o, err := LoadRecorded(recorded(t, 3, 2, 1, snapshot(c.last)), "")
			require.NoError(t, err)
			config, _, _ := o.Fleet()
			require.Equal(t, c.prefill, config.Prefill)
			require.Equal(t, c.decode, config.Decode)
			require.Equal(t, c.both, config.Both)
			require.Subset(t, o.Notes, c.notes)
		})
	}
	r := recorded(t, 3, 2, 1)
	for i := range r.Fleets[0].Pools[0].Engines {
		r.Fleets[0].Pools[0].Engines[i].KV = 0
	}
	o, err := LoadRecorded(r, "")
	require.NoError(t, err)
	_, _, notes := o.Fleet()
	require.Contains(t, notes, "engines did not say how much KV they keep: each has memory for 1000000 tokens here")
	r.Fleets[0].Pools[0].Engines = nil
	_, err = LoadRecorded(r, "")
	require.ErrorContains(t, err, `what engines pool "chat" had`)
}

// What no engine of a fleet can take does not keep the promise, and nothing is said of no requests.
func TestWhatCannotBePlayed(t *testing.T) {
	o, err := LoadRecorded(recorded(t, 20, 2, 1), "")
	require.NoError(t, err)
	now, _ := o.Variant()
	kept := func(what string) (*RecordedResult, error) {
		v, err := now.With(what)
		require.NoError(t, err)
		return v.Play(t.Context(), o)
	}
	r, err := kept("kv:50000")
	require.NoError(t, err)
	require.InDelta(t, 1, r.Kept, 0)
	r, err = kept("kv:5000") // the first turns have 4,146 tokens, the second ones 6,194
	require.NoError(t, err)
	require.InDelta(t, .5, r.Kept, .1)
	r, err = kept("kv:100")
	require.NoError(t, err)
	require.Zero(t, r.Kept)
	_, err = kept("load:.001")
	require.ErrorContains(t, err, "no request was played")
}

// Of a recording whose requests came at one moment all count.
func TestAllAtOnce(t *testing.T) {
	all := recorded(t, 20, 1, 1)
	for i := range all.Requests {
		all.Requests[i].T, all.Requests[i].Cached = 7, 1e6
	}
	o, err := LoadRecorded(all, "")
	require.NoError(t, err)
	now, _ := o.Variant()
	r, err := now.Play(t.Context(), o)
	require.NoError(t, err)
	require.Equal(t, 20, r.Requests)
	was := o.Measured(&now.Config)
	require.Equal(t, 20, was.Requests)
	require.InDelta(t, 1, was.Cached, 0, "more than all of a prompt is not in a cache")
}

// Time between recordings in which a replica recorded nothing is said, also of the only one.
func TestGapsAreNoted(t *testing.T) {
	part := func(replica string, start, last float64) recording.Part {
		return recording.Part{Header: recording.Header{Replica: replica, Start: start}, Last: last}
	}
	for name, c := range map[string]struct {
		parts []recording.Part
		notes []string
	}{
		"one":           {[]recording.Part{part("a", 5, 100)}, nil},
		"restarted":     {[]recording.Part{part("a", 5, 100), part("a", 106, 200)}, nil},
		"another day":   {[]recording.Part{part("a", 5, 100), part("a", 905, 1000)}, []string{`replica "a" recorded nothing for 800 s of 1000 s`}},
		"two":           {[]recording.Part{part("a", 5, 100), part("b", 5, 100)}, nil},
		"one came late": {[]recording.Part{part("a", 5, 100), part("b", 55, 100)}, []string{`replica "b" recorded nothing for 50 s of 100 s`}},
		"one ended":     {[]recording.Part{part("a", 5, 40), part("b", 5, 100)}, []string{`replica "a" recorded nothing for 60 s of 100 s`}},
	} {
		t.Run(name, func(t *testing.T) {
			r := &recording.Recording{Header: c.parts[0].Header, Parts: c.parts}
			notes := joined(r)
			require.Len(t, notes, len(c.notes))
			for i := range c.notes {
				require.Contains(t, notes[i], c.notes[i])
			}
		})
	}
}

func TestVariants(t *testing.T) {
	o, err := LoadRecorded(recorded(t, 3, 2, 1), "")
	require.NoError(t, err)
	now, _ := o.Variant()
	for text, fleet := range map[string]string{
		"4+4": "4+4", "8": "8", "8 roles:auto": "8", "split:never binding:immediate": "2+2",
		"host:2e6 kv:1e5 load:2": "2+2",
		"policy:llm-d 1+3":       "1+3",
	} {
		v, err := now.With(text)
		require.NoError(t, err, text)
		require.Equal(t, fleet, v.Fleet())
		_, err = v.Play(t.Context(), o)
		require.NoError(t, err)
	}
	for _, text := range []string{"four", "split:sometimes", "host:much", "load:-1", "policy:best", "0+4",
		"roles:auto", "1+x"} {
		_, err := now.With(text)
		require.Error(t, err, text)
	}
}

// The advice is the fleet that keeps the promise best, and says as plainly when roles do not pay.
func TestAdvice(t *testing.T) {
	o, err := LoadRecorded(recorded(t, 30, 3, 1), "")
	require.NoError(t, err)
	now, _ := o.Variant()
	shown := 0
	a, err := Advise(t.Context(), o, now, 4, func(*Row) { shown++ })
	require.NoError(t, err)
	require.Greater(t, shown, 5)
	text := strings.Join(a.Sentences(), "\n")
	require.Contains(t, text, "Run ")
	require.Regexp(t, `P/D (pays|does not pay)`, text)
	require.Equal(t, a.pays(), a.Best().Config.Both == 0)
	now.Load = 20
	a, err = Advise(t.Context(), o, now, 2, func(*Row) {})
	require.NoError(t, err)
	require.Contains(t, strings.Join(a.Sentences(), "\n"), "No fleet of up to 2 engines")
}

// A recording becomes the common formats, and what is read of them says the same of it.
func TestExported(t *testing.T) {
	o, err := LoadRecorded(recorded(t, 9, 3, 1), "")
	require.NoError(t, err)
	var mooncake, again, loops strings.Builder
	require.NoError(t, o.WriteMooncake(&mooncake))
	file := filepath.Join(t.TempDir(), "exported.jsonl")
	require.NoError(t, os.WriteFile(file, []byte(mooncake.String()), 0o600))
	require.True(t, IsTrace(file))
	trace, err := traces.Open(file, 0, 1)
	require.NoError(t, err)
	require.Len(t, trace.Requests, 27)
	require.Greater(t, trace.Bound(), .6)
	back, err := LoadTrace(trace)
	require.NoError(t, err)
	require.NoError(t, back.WriteMooncake(&again))
	require.Equal(t, mooncake.String(), again.String())
	v, _ := o.Variant()
	was, err := v.Play(t.Context(), o)
	require.NoError(t, err)
	is, err := v.Play(t.Context(), back)
	require.NoError(t, err)
	require.Equal(t, was.Requests, is.Requests)
	require.InDelta(t, was.Cached, is.Cached, .1)

	require.NoError(t, o.WriteSessions(&loops))
	require.Contains(t, loops.String(), `"session_id":"0","timestamp":0,"input_length"`, "as aiperf reads it")
	all, err := sessions.Read("exported", strings.NewReader(loops.String()))
	require.NoError(t, err)
	require.Len(t, all, 9)
	for _, s := range all {
		require.Len(t, s.Turns, 3)
		require.InDelta(t, 3, s.Turns[1].Think, 1e-9)
		require.Equal(t, []int{4096, 6144, 8192}, []int{s.Turns[0].Input, s.Turns[1].Input, s.Turns[2].Input})
		require.Greater(t, s.Turns[1].Had, 3000)
	}
}

// aiperf puts the prompts of a session and their answers before each of its prompts, and refuses a hash_id that stands
// for blocks of two lengths: what continues an answer is written without them, and what branches off as a session.
func TestExportedAsAIPerfReadsIt(t *testing.T) {
	o := &Recorded{Turns: []RecordedTurn{
		{On: -1, Input: 1100, Output: 20, Blocks: []uint64{7, 8, 9}},
		{At: 2, On: 0, Gap: .5, Input: 1700, Output: 20, Blocks: []uint64{7, 8, 9, 10}},
		{At: 3, On: 0, Gap: 1, Input: 1536, Output: 20, Blocks: []uint64{7, 8, 9}},
		{At: 4, On: 1, Gap: .5, Input: 1710, Output: 20, Blocks: []uint64{7, 8, 9, 10}}, // without most of the answer
		{At: 5, On: 3, Gap: -.1, Input: 1800, Output: 20, Blocks: []uint64{7, 8, 9, 10}},
	}}
	var sessions, requests strings.Builder
	require.NoError(t, o.WriteSessions(&sessions))
	require.Equal(t, `{"session_id":"0","timestamp":0,"input_length":1100,"output_length":20,"hash_ids":[0,1,2]}
{"session_id":"0","delay":500,"input_length":580,"output_length":20}
{"session_id":"2","timestamp":3000,"input_length":1536,"output_length":20,"hash_ids":[0,1,3]}
{"session_id":"0","delay":500,"input_length":1,"output_length":20}
{"session_id":"4","timestamp":5000,"input_length":1800,"output_length":20,"hash_ids":[0,1,3,4]}
`, sessions.String())
	sessions.WriteString(`{"session_id":5,"timestamp":6000,"input_length":700,"output_length":20}`) // others number them
	file := filepath.Join(t.TempDir(), "x.sessions")
	require.NoError(t, os.WriteFile(file, []byte(sessions.String()), 0o600))
	require.True(t, IsTrace(file) && IsSessions(file))
	back, err := LoadSessions(file)
	require.NoError(t, err)
	var turns []string
	for i := range back.Turns {
		turn := &back.Turns[i]
		turns = append(turns, fmt.Sprint(turn.On, turn.Gap, turn.Input, turn.Output))
		if i < 5 {
			require.Equal(t, back.Turns[0].Blocks[:2], turn.Blocks[:2])
		}
	}
	require.Equal(t, []string{"-1 0 1100 20", "0 0.5 1700 20", "1 0.5 1721 20", "-1 0 1536 20", "-1 0 1800 20", "-1 0 700 20"},
		turns)
	v := Variant{Policy: "tandem", Config: DefaultConfig(), Load: 1}
	r, err := v.Play(t.Context(), back)
	require.NoError(t, err)
	require.Zero(t, r.Stuck)
	require.Greater(t, r.Cached, .5)
	require.NoError(t, o.WriteMooncake(&requests))
	require.Contains(t, requests.String(), `"input_length":1100,"output_length":20,"hash_ids":[0,1,2]`)
	require.Contains(t, requests.String(), `"timestamp":3000,"input_length":1536,"output_length":20,"hash_ids":[0,1,3]`)
}

func FuzzRecording(f *testing.F) {
	f.Add(`{"tandem_recording":1,"id":"x","block_bytes":512,"sample":1}` + "\n" +
		`{"n":1,"t":1,"blocks":"AAAAAAAA","prompt":3}` + "\n" +
		`{"n":2,"on":1,"same":1,"t":1,"prompt":3}`)
	f.Fuzz(func(_ *testing.T, text string) {
		if r, err := recording.Read("fuzzed", strings.NewReader(text)); err == nil {
			_, _ = LoadRecorded(r, "")
		}
	})
}
