package kvtransfer

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// goodParams returns an object of vLLM 0.32.0 with one member's value exchanged.
func goodParams(name, value string) string {
	members := [][2]string{
		{"do_remote_prefill", "true"}, {"do_remote_decode", "false"}, {"remote_block_ids", "[[1,2,3,4]]"},
		{"remote_engine_id", `"2fb8d142"`}, {"remote_request_id", `"chatcmpl-x-1a2b3c4d"`}, {"remote_host", `"10.0.0.5"`},
		{"remote_port", "5600"}, {"tp_size", "1"}, {"remote_num_tokens", "126"}, {"remote_prefill_cached_tokens", "96"},
	}
	var b strings.Builder
	sep := "{"
	for _, m := range members {
		if m[0] == name {
			m[1] = value
		}
		if m[1] != "" {
			fmt.Fprintf(&b, "%s%q:%s", sep, m[0], m[1])
			sep = ","
		}
	}
	return b.String() + "}"
}

func readAnswer(params string) (Answer, error) {
	return newNIXL(false).ReadAnswer([]byte(`{"id":"x","kv_transfer_params":`+params+`,"usage":{"prompt_tokens":7,"prompt_tokens_details":null}}`), reachedAt("10.0.0.9:8000"))
}

func TestSimulatorBlocks(t *testing.T) {
	a, err := readAnswer(goodParams("remote_block_ids", `["DUMMY_ID"]`))
	require.NoError(t, err)
	require.Contains(t, string(a.Params), `["DUMMY_ID"]`)
}

func TestParamsRefused(t *testing.T) {
	for _, c := range [][2]string{
		{"do_remote_prefill", ""}, {"do_remote_prefill", "false"}, {"do_remote_prefill", "null"}, {"do_remote_prefill", "1"}, {"do_remote_prefill", `"true"`},
		{"remote_block_ids", ""}, {"remote_block_ids", "null"},
		{"remote_block_ids", "[[[]]]"}, {"remote_block_ids", "[[[1]]]"}, {"remote_block_ids", `["a"]`}, {"remote_block_ids", `["DUMMY_ID","DUMMY_ID"]`}, {"remote_block_ids", `[["1"]]`},
		{"remote_block_ids", `"1"`}, {"remote_block_ids", "1"}, {"remote_block_ids", "{}"}, {"remote_block_ids", `{"0":[1]}`}, {"remote_block_ids", "true"},
		{"remote_block_ids", "[true]"}, {"remote_block_ids", "[[false]]"}, {"remote_block_ids", "[null]"}, {"remote_block_ids", "[1,null]"}, {"remote_block_ids", "[[1],null]"},
		{"remote_block_ids", "[1.0]"}, {"remote_block_ids", "[1.5,2]"}, {"remote_block_ids", "[1e3]"}, {"remote_block_ids", "[-1]"}, {"remote_block_ids", "[-0]"},
		{"remote_block_ids", "[1,[2]]"}, {"remote_block_ids", "[[1],2]"}, {"remote_block_ids", "[2147483648]"}, {"remote_block_ids", "[9223372036854775807]"},
		{"remote_block_ids", "[100000000000000000000000000]"}, {"remote_block_ids", "[[1,2],[3,{}]]"},
		{"remote_block_ids", strings.Repeat("[", 200) + "1" + strings.Repeat("]", 200)},
		{"remote_engine_id", ""}, {"remote_engine_id", "null"}, {"remote_engine_id", `""`}, {"remote_engine_id", "7"}, {"remote_engine_id", `["x"]`},
		{"remote_request_id", "null"}, {"remote_request_id", `""`}, {"remote_request_id", "1"}, {"remote_request_id", "true"},
		{"remote_host", ""}, {"remote_host", "null"}, {"remote_host", `""`}, {"remote_host", "127"}, {"remote_host", `{}`},
		{"remote_port", ""}, {"remote_port", "null"}, {"remote_port", "0"}, {"remote_port", "65536"}, {"remote_port", "-1"}, {"remote_port", "5600.0"},
		{"remote_port", "56e2"}, {"remote_port", "1e3"}, {"remote_port", `"5600"`}, {"remote_port", "true"}, {"remote_port", "[5600]"}, {"remote_port", "18446744073709557216"},
	} {
		a, err := readAnswer(goodParams(c[0], c[1]))
		require.ErrorIs(t, err, ErrParams, "%s: %s", c[0], c[1])
		require.ErrorContains(t, err, c[0])
		require.Zero(t, a)
		require.Less(t, len(err.Error()), 250)
	}
	for _, params := range []string{
		`{}`, `[]`, `""`, `"nixl"`, `7`, `true`, `false`, `{"do_remote_prefill":true}`,
		`{"do_remote_prefill":true,` + goodParams("", "")[1:], // there twice
		`{"remote\u005fhost":"evil",` + goodParams("", "")[1:],
	} {
		_, err := readAnswer(params)
		require.ErrorIs(t, err, ErrParams, params)
	}
}

// TestParamsUnused: a fault that every P of that release shares does not count as a failure of this one; D computes
// the prompt.
func TestParamsUnused(t *testing.T) {
	for _, c := range [][2]string{{"remote_block_ids", "[]"}, {"remote_block_ids", "[[]]"}, {"remote_block_ids", "[[],[]]"}, {"remote_request_id", ""}} {
		a, err := readAnswer(goodParams(c[0], c[1]))
		require.NoError(t, err)
		require.Nil(t, a.Params)
		require.Contains(t, a.Unused, c[0])
	}
	answer := []byte(`{"kv_transfer_params":` + goodParams("remote_request_id", "") + `}`)
	for release, handed := range map[string]bool{"0.12.0": true, "v0.9.2": true, "0.11": true, "0.13.0": false, "0.33.0": false, "1.0.0": false, "0.x": false, "": false} {
		pair := reachedAt("10.0.0.9:8000")
		pair.Prefill.Transfer.Release = release
		a, err := newNIXL(false).ReadAnswer(answer, pair)
		require.NoError(t, err)
		require.Equal(t, handed, a.Params != nil, release)
	}
}

func TestAnswersRefused(t *testing.T) {
	for _, body := range []string{
		"", "null", "[]", "{", `{"kv_transfer_params":`, `{"kv_transfer_params":{"do_remote_prefill":true}`, "<html>502</html>", "data: {}\n\n", `{"kv_transfer_params":{]}`,
		`{"a":` + strings.Repeat("[", 5000) + strings.Repeat("]", 5000) + `}`,
	} {
		_, err := newNIXL(false).ReadAnswer([]byte(body), reachedAt("10.0.0.9:8000"))
		require.Error(t, err, body)
	}
	huge := "[" + strings.Repeat("1000000000,", MaxParamsBytes/11) + "1]"
	_, err := readAnswer(goodParams("remote_block_ids", huge))
	require.ErrorIs(t, err, ErrParams)
}

func TestParamsAccepted(t *testing.T) {
	for _, c := range [][2]string{
		{"", ""}, {"remote_block_ids", "[0]"}, {"remote_block_ids", "[ 1 , 2 ]"}, {"remote_block_ids", "[[1, 2],\n [3]]"}, {"remote_block_ids", "[[],[1]]"},
		{"remote_block_ids", "[2147483647]"}, {"remote_block_ids", "[[1],[]]"}, {"remote_port", "1"}, {"remote_port", "65535"},
		{"remote_engine_id", `"\u00e9"`}, {"tp_size", `"whatever"`}, {"tp_size", `{"a":[1e400,{"b":"}]\"\\"}]}`}, {"remote_num_tokens", "1e3"},
		{"tp_size", strings.Repeat("[", 400) + strings.Repeat("]", 400)},
	} {
		params := goodParams(c[0], c[1])
		a, err := readAnswer(params)
		require.NoError(t, err, params)
		require.Equal(t, params, string(a.Params), "verbatim")
	}
}

// TestNoParams: P has nothing for D, which is not an error.
func TestNoParams(t *testing.T) {
	for _, body := range []string{`{}`, `{"kv_transfer_params":null}`, `{"id":"x","usage":null}`, `{"kv_transfer_params": null ,"usage":{"prompt_tokens":3}}`} {
		a, err := newNIXL(false).ReadAnswer([]byte(body), reachedAt("10.0.0.9:8000"))
		require.NoError(t, err)
		require.Nil(t, a.Params)
	}
}

func TestAnswerTokens(t *testing.T) {
	for _, c := range []struct {
		name, answer   string
		prompt, cached int64
	}{
		{"of the object", `{"usage":{"prompt_tokens":1,"prompt_tokens_details":{"cached_tokens":0}},"kv_transfer_params":` + goodParams("", "") + `}`, 126, 96},
		{"messages leave the cached ones out", `{"usage":{"input_tokens":3,"cache_read_input_tokens":0},"kv_transfer_params":` + goodParams("", "") + `}`, 126, 96},
		{"of the usage, before 0.21", `{"usage":{"prompt_tokens":7,"prompt_tokens_details":{"cached_tokens":5}},"kv_transfer_params":` +
			strings.Replace(goodParams("remote_num_tokens", ""), `,"remote_prefill_cached_tokens":96`, "", 1) + `}`, 7, 5},
		{"nonsense counts for nothing", `{"usage":{"prompt_tokens":7},"kv_transfer_params":` + strings.Replace(goodParams("remote_num_tokens", "-5"), ":96", `:"96"`, 1) + `}`, 7, -1},
		{"nobody said", `{"choices":[]}`, -1, -1},
	} {
		a, err := newNIXL(false).ReadAnswer([]byte(c.answer), reachedAt("10.0.0.9:8000"))
		require.NoError(t, err, c.name)
		require.Equal(t, c.prompt, a.PromptTokens, c.name)
		require.Equal(t, c.cached, a.CachedTokens, c.name)
	}
}

func TestRepairHost(t *testing.T) {
	for _, c := range []struct{ host, prefill, want string }{
		{`"localhost"`, "10.0.0.9:8000", `"10.0.0.9"`},
		{`"LocalHost"`, "10.0.0.9:8000", `"10.0.0.9"`},
		{`"localhost."`, "10.0.0.9:8000", `"10.0.0.9"`},
		{`"local\u0068ost"`, "10.0.0.9:8000", `"10.0.0.9"`},
		{`"127.0.0.1"`, "10.0.0.9:8000", `"10.0.0.9"`},
		{`"127.8.8.8"`, "10.0.0.9:8000", `"10.0.0.9"`},
		{`"0.0.0.0"`, "10.0.0.9:8000", `"10.0.0.9"`},
		{`"::"`, "10.0.0.9:8000", `"10.0.0.9"`},
		{`"::1"`, "10.0.0.9:8000", `"10.0.0.9"`},
		{`"[::1]"`, "10.0.0.9:8000", `"10.0.0.9"`},
		{`"::ffff:127.0.0.1"`, "10.0.0.9:8000", `"10.0.0.9"`},
		{`"localhost"`, "[fd00::9]:8000", `"fd00::9"`},
		{`"127.0.0.1"`, "[fd00:0:0:0::9]:8000", `"fd00::9"`},
		{`"::"`, "[::ffff:10.0.0.9]:8000", `"10.0.0.9"`},
		{`"localhost"`, "[fe80::9%eth0]:8000", `"fe80::9"`},
		// the operator's choice
		{`"10.0.0.5"`, "10.0.0.9:8000", `"10.0.0.5"`},
		{`"fd00::5"`, "10.0.0.9:8000", `"fd00::5"`},
		{`"prefill-0.prefill"`, "10.0.0.9:8000", `"prefill-0.prefill"`},
		{`"localhost.example.com"`, "10.0.0.9:8000", `"localhost.example.com"`},
		{`"mylocalhost"`, "10.0.0.9:8000", `"mylocalhost"`},
		{`"127.1"`, "10.0.0.9:8000", `"127.1"`},
		// one machine
		{`"localhost"`, "127.0.0.1:8101", `"localhost"`},
		{`"127.0.0.1"`, "[::1]:8101", `"127.0.0.1"`},
		{`"0.0.0.0"`, "127.0.0.1:8101", `"0.0.0.0"`},
		{`"localhost"`, "[::ffff:127.0.0.1]:8101", `"localhost"`},
		// no better address is known
		{`"localhost"`, "", `"localhost"`},
		{`"localhost"`, "prefill-0:8000", `"localhost"`},
	} {
		a, err := newNIXL(false).ReadAnswer([]byte(`{"kv_transfer_params":`+goodParams("remote_host", c.host)+`}`), reachedAt(c.prefill))
		require.NoError(t, err)
		require.Equal(t, goodParams("remote_host", c.want), string(a.Params), "%s reached at %s", c.host, c.prefill)
	}
}

// TestRepairKeepsTheAnswer: a repaired object is a new one; P's answer stays as it is.
func TestRepairKeepsTheAnswer(t *testing.T) {
	answer := []byte(`{"kv_transfer_params":` + goodParams("remote_host", `"localhost"`) + `}`)
	before := bytes.Clone(answer)
	_, err := newNIXL(false).ReadAnswer(answer, reachedAt("[fd00::9]:8000"))
	require.NoError(t, err)
	require.Equal(t, before, answer)
}

// plainReadPull is the dumb twin of readPull, written after the rule's text.
func plainReadPull(raw []byte) bool {
	var members map[string]json.RawMessage
	if json.Unmarshal(raw, &members) != nil || members == nil || plainCountMembers(raw) != len(members) {
		return false
	}
	for _, name := range []string{"remote_engine_id", "remote_request_id", "remote_host"} {
		var s *string
		if json.Unmarshal(members[name], &s) != nil || s == nil || *s == "" {
			return false
		}
	}
	port, err := strconv.Atoi(string(members["remote_port"]))
	if err != nil || port < 1 || port > 65535 || string(members["remote_port"]) != strconv.Itoa(port) {
		return false
	}
	return string(members["do_remote_prefill"]) == "true" && plainBlockIDs(members["remote_block_ids"])
}

func plainBlockIDs(raw []byte) bool {
	if string(raw) == `["DUMMY_ID"]` { // llm-d's simulator
		return true
	}
	var groups [][]json.RawMessage
	var flat []json.RawMessage
	if json.Unmarshal(raw, &flat) != nil {
		return false
	}
	if json.Unmarshal(raw, &groups) == nil {
		flat = nil
		for i, g := range groups {
			if g == nil { // null is no list
				return false
			}
			flat = append(flat, groups[i]...)
		}
	}
	for _, id := range flat {
		if n, err := strconv.ParseInt(string(id), 10, 32); err != nil || n < 0 || string(id) != strconv.FormatInt(n, 10) {
			return false
		}
	}
	return len(flat) > 0
}

// plainCountMembers counts keys as they stand, duplicates included.
func plainCountMembers(raw []byte) int {
	dec := json.NewDecoder(bytes.NewReader(raw))
	n, depth, key := 0, 0, false
	for {
		token, err := dec.Token()
		if err != nil {
			return n
		}
		switch token {
		case json.Delim('{'), json.Delim('['):
			depth++
			key = depth == 1
			continue
		case json.Delim('}'), json.Delim(']'):
			depth--
		}
		if depth == 1 {
			if key {
				n++
			}
			key = !key
		}
	}
}

// seedAnswers adds the golden files' answers.
func seedAnswers(f *testing.F) {
	files, err := filepath.Glob("testdata/nixl/*.txtar")
	require.NoError(f, err)
	for _, file := range files {
		text, err := os.ReadFile(file)
		require.NoError(f, err)
		_, answer, _ := strings.Cut(string(text), "-- prefill answer --\n")
		answer, _, _ = strings.Cut(answer, "\n-- ")
		f.Add(answer)
	}
}

func FuzzReadAnswer(f *testing.F) {
	seedAnswers(f)
	f.Add(`{"kv_transfer_params":` + goodParams("remote_host", `"localhost"`) + `}`)
	f.Fuzz(func(t *testing.T, answer string) {
		a, err := newNIXL(false).ReadAnswer([]byte(answer), reachedAt("10.0.0.9:8000"))
		if err != nil || a.Params == nil {
			require.Nil(t, a.Params)
			return
		}
		require.True(t, json.Valid(a.Params))
		if twinJudges(string(a.Params)) {
			require.True(t, plainReadPull(a.Params), "%s", a.Params)
		}
	})
}

// twinJudges reports whether the twin can decide: it refuses objects with a duplicate of an unread member, and reads
// invalid UTF-8.
func twinJudges(params string) bool {
	var members map[string]json.RawMessage
	return json.Valid([]byte(params)) && json.Unmarshal([]byte(params), &members) == nil && len(members) == plainCountMembers([]byte(params)) &&
		strings.TrimSpace(params) == params && !strings.ContainsRune(params, '\ufffd')
}

// FuzzParams: readPull accepts and refuses the same JSON as its twin.
func FuzzParams(f *testing.F) {
	f.Add(goodParams("", ""))
	for _, c := range [][2]string{
		{"remote_block_ids", "[[1],[ ]]"}, {"remote_block_ids", "[null]"}, {"remote_port", "1e3"}, {"remote_engine_id", `"\""`}, {"tp_size", `{"a":[{}]}`}, {"remote_host", "null"},
	} {
		f.Add(goodParams(c[0], c[1]))
	}
	f.Fuzz(func(t *testing.T, params string) {
		_, err := readPull([]byte(params)) // must not panic, valid or not
		if twinJudges(params) {
			require.Equal(t, plainReadPull([]byte(params)), err == nil, "%s: %v", params, err)
		}
	})
}

func BenchmarkReadAnswer(b *testing.B) {
	answer := []byte(`{"id":"x","kv_transfer_params":` + goodParams("remote_block_ids", "[["+blockIDs(randomIDs(8192, 65536), ",")+"]]") + `}`)
	b.ReportAllocs()
	for b.Loop() {
		if _, err := newNIXL(false).ReadAnswer(answer, reachedAt("10.0.0.9:8000")); err != nil {
			b.Fatal(err)
		}
	}
}

// The configured host of P counts, whatever P reports.
func TestTransferHost(t *testing.T) {
	pair := reachedAt("127.0.0.1:8000")
	pair.Prefill.Transfer.Host = "kv.example"
	for _, host := range []string{`"localhost"`, `"10.0.0.7"`} {
		a, err := newNIXL(false).ReadAnswer([]byte(`{"kv_transfer_params":`+goodParams("remote_host", host)+`}`), pair)
		require.NoError(t, err)
		require.Equal(t, goodParams("remote_host", `"kv.example"`), string(a.Params))
	}
}

// reachedAt returns a pair whose P was reached at an address.
func reachedAt(addr string) *Pair { return &Pair{Prefill: Side{Addr: addr}} }
