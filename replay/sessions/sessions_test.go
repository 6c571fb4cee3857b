package sessions

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// recorded is what [Describe] says of 239 recorded sessions of coding agents (kv-cache-tester's, without subagents),
// within the usual limits: the quantiles .1, .25, .5, .75 and .9, and the mean. The sessions themselves are not in this
// repository.
var recorded = []struct {
	name   string
	values [5]float64
	mean   float64
	within float64 // factor by which generated sessions may differ at most
}{
	{"turns of a session", [5]float64{8, 19, 49, 105, 173}, 74.6, 1.25},
	{"prefix of a session", [5]float64{11986, 12946, 15177, 15535, 16181}, 14542, 1.1},
	{"first prompt", [5]float64{15459, 17869, 21051, 82954, 132_710}, 52_430, 1.25},
	{"longest prompt of a session", [5]float64{60408, 103_810, 145_360, 158_640, 242_170}, 137_700, 1.4},
	{"prompt", [5]float64{42676, 65839, 99686, 130_050, 153_590}, 101_830, 1.25},
	{"answer", [5]float64{105, 136, 213, 422, 856}, 424, 1.1},
	{"new tokens of a prompt", [5]float64{1, 45, 273, 976, 3137}, 2412, 2},
	{"s after tool use", [5]float64{4, 5, 8, 18, 71}, 35.6, 1.25},
	{"s after the end of a turn", [5]float64{6, 59, 221, 600, 600}, 292, 3},
	{"s after other ends", [5]float64{20, 40, 118, 431, 600}, 225, 1.4},
	{"share of a prompt that its session had", [5]float64{.961, .989, .997, .9995, .99998}, .970, 1.02},
}

// Sessions that are generated are like recorded ones: the table that -v prints.
func TestCoding(t *testing.T) {
	all, err := Generate("coding", 2000, 1)
	require.NoError(t, err)
	got := Describe(Within(all, DefaultLimits()))
	for i, want := range recorded {
		require.Equal(t, want.name, got[i].Name)
		line := fmt.Sprintf("%-40s", want.name)
		for k, v := range want.values {
			line += fmt.Sprintf(" %7.4g %-7.4g", v, got[i].Values[k])
			if v > 1 {
				require.InEpsilon(t, v, got[i].Values[k], want.within-.99, "%s, quantile %d", want.name, k)
			}
		}
		t.Logf("%s mean %.4g %.4g", line, want.mean, got[i].Mean)
		require.InEpsilon(t, want.mean, got[i].Mean, .25, want.name)
	}
}

// Every turn of a generated session can follow the one before it.
func TestGenerate(t *testing.T) {
	for _, kind := range Kinds() {
		all, err := Generate(kind, 300, 2)
		require.NoError(t, err)
		again, err := Generate(kind, 300, 2)
		require.NoError(t, err)
		require.Equal(t, all, again)
		for _, s := range all {
			for i, turn := range s.Turns {
				require.NoError(t, turn.check())
				require.LessOrEqual(t, turn.Had, turn.Input-1, "%s: %+v", kind, turn)
				require.LessOrEqual(t, turn.Back, i)
				if i > 0 {
					require.LessOrEqual(t, turn.Had, s.Turns[i-1].Input+s.Turns[i-1].Output)
				}
			}
		}
	}
	_, err := Generate("cats", 1, 1)
	require.ErrorContains(t, err, `1 sessions of "cats": names are coding, agentx, people`)
}

// AgentX has 43 turns, prompts of 142k tokens and answers of 444 in the median (vllm#57103).
func TestAgentX(t *testing.T) {
	all, err := Generate("agentx", 2000, 1)
	require.NoError(t, err)
	got := Describe(all)
	for i, want := range map[int]float64{0: 43, 4: 142_000, 5: 444} {
		require.InEpsilon(t, want, got[i].Values[2], .15, got[i].Name)
	}
}

const (
	own = `{"session":1,"tools":1000,"system":100,"turns":[[0,0,0,0,3000,700,"t",9],[20,5,1,2944,4100,100,"e",5],` +
		`[60,30,1,2048,6000,50,"o",5]]}`
	tester = `{
  "id": "x", "block_size": 64, "tool_tokens": 1000, "system_tokens": 100,
  "requests": [
    {"t": 0, "type": "s", "in": 192, "out": 64, "hash_ids": [1, 2, 3], "stop": "tool_use", "api_time": 9},
    {"t": 10, "type": "subagent", "requests": [{"t": 0, "in": 5, "out": 5}]},
    {"t": 20, "type": "n", "in": 320, "out": 10, "hash_ids": [1, 2, 3, 4, 5], "stop": "end_turn", "api_time": 5, "think_time": 4},
    {"t": 60, "type": "s", "in": 256, "out": 10, "hash_ids": [1, 2, 9, 8], "stop": "", "api_time": 1}
  ]
}`
	aiperf = `{"session_id": "a", "timestamp": 0, "input_length": 1024, "output_length": 100, "hash_ids": [1, 2]}
{"session_id": "b", "input_length": 500, "output_length": 100}
{"session_id": "a", "delay": 2500, "input_length": 600, "output_length": 50, "hash_ids": [3, 4]}
{"session_id": "b", "timestamp": 7000, "input_length": 30, "output_length": 10}`
)

func TestRead(t *testing.T) {
	for _, test := range []struct {
		name, text string
		want       [][]Turn
	}{
		{"own", own, [][]Turn{{
			{Input: 3000, Output: 700, Stop: Tool, Service: 9},
			{Think: 5, Input: 4100, Output: 100, Back: 1, Had: 3700, Stop: End, Service: 5},
			{Think: 30, Input: 6000, Output: 50, Back: 1, Had: 2048, Service: 5},
		}}},
		{"kv-cache-tester", tester, [][]Turn{{
			{Input: 192, Output: 64, Stop: Tool, Service: 9},
			{Think: 4, Input: 320, Output: 10, Back: 1, Had: 256, Stop: End, Service: 5},
			{Think: 35, Input: 256, Output: 10, Back: 1, Had: 128, Service: 1},
		}}},
		{"aiperf", aiperf, [][]Turn{
			{{Input: 1024, Output: 100}, {Think: 2.5, Input: 1724, Output: 50, Back: 1, Had: 1124}},
			{{Input: 500, Output: 100}, {Think: 7, Input: 630, Output: 10, Back: 1, Had: 600}},
		}},
	} {
		all, err := Read("x", strings.NewReader(test.text))
		require.NoError(t, err, test.name)
		var got [][]Turn
		for _, s := range all {
			got = append(got, s.Turns)
		}
		require.Equal(t, test.want, got, test.name)
	}
}

func TestReadErrors(t *testing.T) {
	for text, want := range map[string]string{
		"":                     "x: no sessions",
		own + `{"turns": [[0]`: "x, object 2: unexpected EOF",
		`{"timestamp": 0}`:     "x, object 1: neither turns, requests nor session_id: not a session",
		`{"turns": []}`:        "x, object 1: a session without turns",
		`{"turns": [[0, -1, 0, 0, 5, 5, "t", 1]]}`: "x, object 1: turn 0: a turn that cannot be: {Think:-1 Input:5 Output:5 Back:0 Had:0 Stop:1 Service:1}",
	} {
		_, err := Read("x", strings.NewReader(text))
		require.EqualError(t, err, want)
	}
}

// A folder's files are read one after the other, as kv-cache-tester publishes them.
func TestOpenFolder(t *testing.T) {
	folder := t.TempDir()
	for name, text := range map[string]string{"a.json": tester, "b.jsonl": own + "\n" + own} {
		require.NoError(t, os.WriteFile(filepath.Join(folder, name), []byte(text), 0o600))
	}
	all, err := Open(folder)
	require.NoError(t, err)
	require.Len(t, all, 3)
}

func FuzzRead(f *testing.F) {
	for _, text := range []string{own, tester, aiperf} {
		f.Add([]byte(text))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		all, err := Read("x", bytes.NewReader(text))
		if err != nil {
			return
		}
		for _, s := range all {
			require.GreaterOrEqual(t, s.PrefixTokens, 0)
			for i, turn := range s.Turns {
				require.NoError(t, turn.check())
				require.True(t, turn.Back <= i && turn.Had < turn.Input)
			}
		}
	})
}
