package openai

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/require"
)

func updateGolden() bool { return flag.Lookup("update").Value.String() == "true" }

func TestMain(m *testing.M) {
	flag.Bool("update", false, "write the golden files anew")
	flag.Parse()
	os.Exit(m.Run())
}

func scanned(t testing.TB, api API, body string) *Request {
	t.Helper()
	r := new(Request)
	require.NoError(t, r.Scan(api, []byte(body), Limits{}), body)
	return r
}

func TestScanAccepts(t *testing.T) {
	for _, body := range []string{
		`{}`,
		" \t\r\n{ } \n",
		`{"a":0,"b":-0,"c":0.0,"d":10.25,"e":1e3,"f":1E+3,"g":-1.5e-3,"h":9223372036854775808,"i":1e999}`,
		`{"a":true,"b":false,"c":null,"d":"","e":[],"f":{}}`,
		"{ \"a\" : [ 1 , 2 , [ ] , { } , [ { \"b\" : [ null ] } ] ] , \"c\" : \"d\" }",
		`{"a":[1,2,3,0,10, 20,  30,1.5,-2,3,400000000,12345678,1e5]}`,
		`{"a":"\"\\\/\b\f\n\r\t\u00e9\u0000"}`,
		`{"a":"\ud83d\ude00","b":"\ud83d","c":"\ude00\ud83d"}`,
		"{\"a\":\"\x7f\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80\"}",
		"{\"a\":\"\xff\xfe\"}", // the engine decides about a value's UTF-8
		`{"":1," ":2,"a":{"a":1,"a":2}}`,
		`{"kv_transfer_params":null,"sampling_params":{"extra_args":{"x":[1]}},"vllm_xargs":"no object"}`,
		`{"a":` + strings.Repeat("[", 511) + strings.Repeat("]", 511) + `}`,
		`{"sampling_params":{"extra_args":{"x":` + strings.Repeat("[", 509) + strings.Repeat("]", 509) + `}}}`,
	} {
		require.True(t, json.Valid([]byte(body)), body)
		scanned(t, Chat, body)
	}
}

// TestScanRefuses has the error messages for clients in testdata/refused.txt.
func TestScanRefuses(t *testing.T) {
	var got strings.Builder
	for _, body := range []string{
		``, ` `, `null`, `[]`, `"a"`, `1`, `[`, `x`, `{`, `{"`, `{"a`, `{"a"`, `{"a":`, `{"a":1`, `{"a":1,`, `{"a":1,}`, `{,}`,
		`{"a" 1}`, `{"a":1 "b":2}`, `{"a":1]`, `{a:1}`, `{'a':1}`, `{"a":1}}`, `{"a":1} x`, `{"a":1}{"b":2}`,
		`{"a":[1,]}`, `{"a":[1 2]}`, `{"a":[1}`, `{"a":[,1]}`, `{"a":{"b":1]}`, `{"a":{"b"}}`, `{"a":{1:2}}`, `{"a":{"b":1,}}`,
		`{"a":01}`, `{"a":-}`, `{"a":+1}`, `{"a":.5}`, `{"a":1.}`, `{"a":1.e3}`, `{"a":1e}`, `{"a":1e+}`, `{"a":0x10}`, `{"a":1_000}`,
		`{"a":[1,02,3,4,5,6]}`, `{"a":[1,2,,3,4,5,6,7,8]}`, `{"a":[123456,12345x,1,2,3,4,5]}`,
		`{"a":NaN}`, `{"a":Infinity}`, `{"a":-Infinity}`, `{"a":True}`, `{"a":tru}`, `{"a":nulL}`, `{"a":undefined}`,
		`{"a":"\x"}`, `{"a":"\u12"}`, `{"a":"\u12g4"}`, `{"a":"\`, `{"a":"\"`, `{"a":"0123456789`,
		"{\"a\":\"b\nc\"}", "{\"a\":\"0123456789\x000123456789\"}", "{\"a\":\"\x1f\"}", "{\"a\tb\":1}", "{\"a\":1}\x00",
		"\xEF\xBB\xBF{}", " \xEF\xBB\xBF{}", "\xFE\xFF\x00{\x00}", "{\x00\"\x00a\x00\"\x00", "\xA0{}", "{\"\xff\":1}", "{\"\xed\xa0\x80\":1}",
		`{"model":"a","model":"b"}`, `{"a":1,"\u0061":2}`, `{"\ud800":1,"\ud800":2}`, `{"a\"b":1,"a\"b":2}`,
		`{"` + strings.Repeat("long", 20) + `":1,"` + strings.Repeat("long", 20) + `":2}`,
		`{"sampling_params":{"n":1,"n":2}}`, `{"vllm_xargs":{"n":1,"n":2}}`, `{"sampling_params":{"extra_args":{"n":1,"n":2}}}`,
		`{"a":` + strings.Repeat("[", 512) + strings.Repeat("]", 512) + `}`,
		`{"a":` + strings.Repeat(`{"b":`, 512) + `1` + strings.Repeat("}", 512) + `}`,
		`{"sampling_params":{"extra_args":{"x":` + strings.Repeat("[", 510) + strings.Repeat("]", 510) + `}}}`,
		members(513),
		`{"model":1}`, `{"model":["a"]}`, `{"model":"\ud800"}`, `{"model":"` + strings.Repeat("m", 1025) + `"}`, "{\"model\":\"\xff\"}",
	} {
		var r Request
		err := r.Scan(Chat, []byte(body), Limits{})
		var e *Error
		require.ErrorAs(t, err, &e, body)
		require.Equal(t, 400, e.Status)
		require.False(t, r.HasControl())
		require.Nil(t, r.Raw(FieldModel))
		short := strconv.Quote(body)
		if len(short) > 60 {
			short = short[:40] + "..." + short[len(short)-15:]
		}
		fmt.Fprintf(&got, "%s\n    %s param=%q\n    %s\n", short, e.Code, e.Param, e.Message)
	}
	golden(t, "refused.txt", got.String())
}

func members(n int) string {
	var b strings.Builder
	for i := range n {
		fmt.Fprintf(&b, `,"%d":0`, i)
	}
	return "{" + b.String()[1:] + "}"
}

func golden(t *testing.T, name, got string) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if updateGolden() {
		require.NoError(t, os.WriteFile(path, []byte(got), 0o644))
	}
	want, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, string(want), got)
}

func TestLimits(t *testing.T) {
	var r Request
	require.NoError(t, r.Scan(Chat, []byte(members(512)), Limits{}))
	require.NoError(t, r.Scan(Chat, []byte(`{"a":[[]]}`), Limits{MaxDepth: 3}))
	require.ErrorContains(t, r.Scan(Chat, []byte(`{"a":[[[]]]}`), Limits{MaxDepth: 3}), "more than 3 levels")
	require.ErrorContains(t, r.Scan(Chat, []byte(`{"sampling_params":{}}`), Limits{MaxDepth: 1}), "more than 1 levels")
	require.ErrorContains(t, r.Scan(Chat, []byte(`{"a":1,"b":2}`), Limits{MaxMembers: 1}), "more than 1 members")

	deep := func(n int) []byte { return []byte(`{"a":` + strings.Repeat("[", n-1) + strings.Repeat("]", n-1) + `}`) }
	require.NoError(t, r.Scan(Chat, deep(maxNesting), Limits{MaxDepth: 1 << 30}))
	require.ErrorContains(t, r.Scan(Chat, deep(maxNesting+1), Limits{MaxDepth: 1 << 30}), "more than 1024 levels")
	require.ErrorContains(t, r.Scan(Chat, bytes.Repeat([]byte(`{"a":`), 1<<20), Limits{}), "levels")
}

// TestErrorsKeepSecrets: no error may repeat a client's input, beyond a short plain name.
func TestErrorsKeepSecrets(t *testing.T) {
	var r Request
	for _, body := range []string{
		`{"messages":"secret" secret}`, `{"secret secret":1,"secret secret":2}`, "{\"secret\n\":1}",
		`{"secret\nX-Injected: 1":1,"secret\nX-Injected: 1":2}`, `{"model":{"secret":1}}`, `{"a":secret}`,
	} {
		err := r.Scan(Chat, []byte(body), Limits{})
		require.Error(t, err)
		require.NotContains(t, err.Error(), "secret")
	}
	require.NotContains(t, ModelNotFound("secret\r\nSet-Cookie: a").Error(), "secret")
	require.Contains(t, ModelNotFound("meta-llama/Llama-3.1-8B").Error(), "`meta-llama/Llama-3.1-8B`")
}

func TestUnescape(t *testing.T) {
	for inside, want := range map[string]string{
		``:                         "",
		`plain`:                    "plain",
		`\"\\\/\b\f\n\r\t`:         "\"\\/\b\f\n\r\t",
		`\u0041\u00e9\u20AC`:       "Aé€",
		`x\ud83d\ude00y`:           "x😀y",
		`\ud83d`:                   "\xed\xa0\xbd",
		`\ud83dx`:                  "\xed\xa0\xbdx",
		`\ud83d\n`:                 "\xed\xa0\xbd\n",
		`\ude00\ud83d`:             "\xed\xb8\x80\xed\xa0\xbd",
		`\ud83d\ud83d\ude00`:       "\xed\xa0\xbd😀",
		`\uffff\u0000\ufffd\u07ff`: "\uffff\x00\ufffd\u07ff",
	} {
		require.Equal(t, want, string(appendUnescaped(nil, []byte(inside))), inside)
	}
}

// TestStringsAtEveryPlace puts every byte at every place of strings of every length, so that each step of the scanner's
// eight-byte strides meets each of them.
func TestStringsAtEveryPlace(t *testing.T) {
	var r Request
	for length := 1; length < 20; length++ {
		for at := range length {
			for c := range 256 {
				body := []byte(`{"a":"` + strings.Repeat("x", length) + `"}`)
				body[6+at] = byte(c)
				if err := r.Scan(Chat, body, Limits{}); json.Valid(body) != (err == nil) {
					t.Fatalf("%q: %v", body, err)
				}
			}
		}
	}
}

// TestScanBroken breaks random bodies in random places and compares with encoding/json.
func TestScanBroken(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 6))
	const spite = "{}[]\",:\\ue0123456789-+. \n\t\x00tfnax"
	var r Request
	valid := 0
	for range 10_000 {
		body := randomObject(rng, nil, 4)
		for range rng.IntN(3) {
			i := rng.IntN(len(body))
			switch rng.IntN(3) {
			case 0:
				body[i] = spite[rng.IntN(len(spite))]
			case 1:
				body = slices.Delete(body, i, i+1)
			case 2:
				body = slices.Insert(body, i, spite[rng.IntN(len(spite))])
			}
			if len(body) == 0 {
				body = []byte("{")
			}
		}
		err := r.Scan(Chat, body, Limits{})
		if err == nil {
			checkMembers(t, &r)
			valid++
		}
		var e *Error
		switch errors.As(err, &e); {
		case err == nil, e.Code == "invalid_body", e.Code == "duplicate_key":
			require.True(t, json.Valid(body) || err != nil && e.Code == "duplicate_key", "%q", body)
		case strings.Contains(e.Message, string(faultKeyUTF8)): // stricter than encoding/json
		default:
			require.False(t, json.Valid(body), "%q: %v", body, err)
		}
	}
	require.Greater(t, valid, 3_000)
}

// randomObject appends a JSON object with everything that JSON has.
func randomObject(rng *rand.Rand, b []byte, depth int) []byte {
	b = append(randomSpace(rng, b), '{')
	for i := range rng.IntN(6) {
		if i > 0 {
			b = append(b, ',')
		}
		b = randomSpace(rng, b)
		b = fmt.Appendf(b, `"%d%s`, i, randomText(rng)) // the number keeps keys apart
		b = append(randomSpace(rng, append(b, '"')), ':')
		b = randomValue(rng, b, depth-1)
	}
	return randomSpace(rng, append(randomSpace(rng, b), '}'))
}

func randomValue(rng *rand.Rand, b []byte, depth int) []byte {
	b = randomSpace(rng, b)
	switch n := rng.IntN(9); {
	case n < 2 && depth > 0:
		return randomObject(rng, b, depth)
	case n < 4 && depth > 0:
		b = append(b, '[')
		for i := range rng.IntN(8) {
			if i > 0 {
				b = append(b, ',')
			}
			b = randomValue(rng, b, depth-1)
		}
		return randomSpace(rng, append(randomSpace(rng, b), ']'))
	case n < 6:
		numbers := [...]string{"0", "-0", "7", "128255", "12345678", "123456789012", "-1.5", "1e5", "2.5E-10", "0.125"}
		return append(b, numbers[rng.IntN(len(numbers))]...)
	case n < 7:
		return append(b, [...]string{"true", "false", "null"}[rng.IntN(3)]...)
	default:
		return fmt.Appendf(b, `"%s"`, randomText(rng))
	}
}

func randomText(rng *rand.Rand) string {
	var b strings.Builder
	for range rng.IntN(12) {
		b.WriteString([...]string{"a", "word ", `\n`, `\"`, `\\`, `\u00e9`, `\ud83d\ude00`, "é", "한", "😀", "0123456789"}[rng.IntN(11)])
	}
	return b.String()
}

func randomSpace(rng *rand.Rand, b []byte) []byte {
	if rng.IntN(4) > 0 {
		return b
	}
	return append(b, [...]string{" ", "\n  ", "\t", "\r\n"}[rng.IntN(4)]...)
}

// FuzzScan compares the scanner with encoding/json. They differ only where the scanner is documented to be stricter.
func FuzzScan(f *testing.F) {
	for _, s := range []string{
		`{"model":"m","messages":[{"role":"user","content":"a\n\u00e9"}],"n":1,"stream":false}`,
		`{"a":1,"\u0061":2}`, `{"a":[1,2,3,44444444,5,0,01,-1,1.5e-3]}`, `{"sampling_params":{"extra_args":{"kv_transfer_params":{}}}}`,
		`{"vllm_xargs":{"kv_transfer_params":"x","ok":1}}`, ` {"a" : [ ] , "b" : { } } `, `{"a":"\ud800\udc00\ud800"}`, `[1]`, `{"model":3}`,
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		var r Request
		err := r.Scan(Chat, body, Limits{})
		if err == nil {
			require.True(t, json.Valid(body))
			checkMembers(t, &r)
			return
		}
		var e *Error
		require.ErrorAs(t, err, &e)
		require.True(t, json.Valid(e.JSON()))
		require.True(t, utf8.ValidString(e.Message))
		switch e.Code {
		case "invalid_json", "empty_body":
			require.True(t, !json.Valid(body) || strings.Contains(e.Message, string(faultKeyUTF8)), "%q: %v", body, err)
		case "invalid_body":
			require.NotEqual(t, byte('{'), bytes.TrimLeft(body, " \t\r\n")[0])
		case "duplicate_key":
			require.True(t, !json.Valid(body) || hasDuplicates(t, body), "%q", body)
		case "invalid_model", "too_deep", "too_many_members":
		default:
			t.Fatalf("unknown code %q", e.Code)
		}
	})
}

// checkMembers compares the found members with those of a slow reader.
func checkMembers(t *testing.T, r *Request) {
	t.Helper()
	want := slowMembers(t, r.Body())
	got := r.members[scopeTop]
	require.Len(t, got, len(want))
	for i := range got {
		m := &got[i]
		require.Equal(t, want[i].value, string(r.text(m)))
		require.Equal(t, want[i].key, decoded(t, r.body[m.key:m.keyEnd]))
		if m.field != fieldUnknown && m.field != fieldControl {
			require.Equal(t, want[i].value, string(r.Raw(m.field)))
		}
	}
	require.False(t, hasDuplicates(t, r.Body()), "%q", r.Body())
}
