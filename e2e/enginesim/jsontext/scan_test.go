package jsontext

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"
	"unicode/utf8"

	"tandem/internal/budget"

	"github.com/stretchr/testify/require"
)

func TestScanObject(t *testing.T) {
	tests := []struct {
		body string
		err  string // "" accepts
	}{
		{body: `{}`},
		{body: " \t\r\n{ \"a\" : 1 , \"b\":[ ] } "},
		{body: `{"a":{"b":[1,-2.5e+10,0,0.5,true,false,null,"x\"\\\/\b\f\n\r\t\u00e9\ud83d\ude00"]}}`},
		{body: `{"\u0061":1}`},
		{body: `[1]`, err: "not a JSON object"},
		{body: `"x"`, err: "not a JSON object"},
		{body: ``, err: "Expecting value"},
		{body: `{`, err: "Expecting property name"},
		{body: `{"a"}`, err: "Expecting ':'"},
		{body: `{"a":}`, err: "Expecting value"},
		{body: `{"a":1,}`, err: "Expecting property name"},
		{body: `{"a":1 "b":2}`, err: "Expecting ','"},
		{body: `{"a":[1,]}`, err: "Expecting value"},
		{body: `{"a":01}`, err: "Expecting value"},
		{body: `{"a":1.}`, err: "Expecting digits"},
		{body: `{"a":1e}`, err: "Expecting digits"},
		{body: `{"a":+1}`, err: "Expecting value"},
		{body: `{"a":NaN}`, err: "Expecting value"},
		{body: `{"a":"` + "\n" + `"}`, err: "Invalid control character"},
		{body: `{"a":"\x"}`, err: `Invalid \escape`},
		{body: `{"a":"\u12g4"}`, err: `Invalid \escape`},
		{body: `{"a":"abcdefgh`, err: "Unterminated string"},
		{body: `{"a":1} x`, err: "Extra data"},
		{body: `{"a":"` + "\xff" + `"}`, err: "utf-8"},
		{body: `{"a":` + strings.Repeat("[", 1100) + strings.Repeat("]", 1100) + `}`, err: "nested too deeply"},
	}
	for _, test := range tests {
		_, err := ScanObject(nil, []byte(test.body))
		if test.err == "" {
			require.NoError(t, err, test.body)
		} else {
			require.ErrorContains(t, err, test.err, test.body)
		}
	}
}

func FuzzScanObject(f *testing.F) {
	for _, seed := range []string{`{"a":1}`, `{"a":"\ud83d\ude00\\","b":[{},[]," "]}`, `{"x":-1.5e3,"y":{"z":null}} `, `{"a":"\ud800"}`, `[{}]`} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		members, err := ScanObject(nil, body)
		if errors.Is(err, errDepth) {
			return
		}
		var twin map[string]json.RawMessage
		bad := json.Unmarshal(body, &twin)
		trimmed := bytes.TrimLeft(body, " \n\r\t")
		valid := bad == nil && utf8.Valid(body) && len(trimmed) > 0 && trimmed[0] == '{'
		require.Equal(t, valid, err == nil, "%v %v", err, bad)
		if !valid {
			return
		}
		last := map[string][]byte{}
		for _, m := range members {
			last[string(m.Key)] = m.Raw
		}
		require.Len(t, last, len(twin))
		for k, raw := range twin {
			require.Equal(t, string(raw), string(last[k]))
			walk(t, raw)
		}
	})
}

// walk compares the unchecked walkers with encoding/json.
func walk(t *testing.T, raw []byte) {
	switch {
	case IsString(raw):
		var s string
		require.NoError(t, json.Unmarshal(raw, &s))
		require.Equal(t, s, string(Unquote(raw)))
	case IsArray(raw):
		var twin []json.RawMessage
		require.NoError(t, json.Unmarshal(raw, &twin))
		i := 0
		EachElement(raw, func(e []byte) bool {
			require.Equal(t, string(twin[i]), string(e))
			i++
			walk(t, e)
			return true
		})
		require.Len(t, twin, i)
	case IsObject(raw):
		n := 0
		EachMember(raw, func(_, val []byte) { n++; walk(t, val) })
		var buf bytes.Buffer
		require.NoError(t, json.Compact(&buf, raw))
		require.Equal(t, buf.String(), string(Compact(raw)))
	}
}

func TestInteger(t *testing.T) {
	for raw, want := range map[string]int64{"3": 3, "3.0": 3, "3e0": 3, "1e3": 1000, "-1": -1, "9223372036854775807": 1<<63 - 1} {
		n, ok := Integer([]byte(raw))
		require.True(t, ok, raw)
		require.Equal(t, want, n)
	}
	for _, raw := range []string{"3.5", `"3"`, "null", "1e300", "true", ""} {
		_, ok := Integer([]byte(raw))
		require.False(t, ok, raw)
	}
}

func TestTruthy(t *testing.T) {
	for _, raw := range []string{"true", "1", "-0.5", `"no"`, "[0]", `{"a":1}`} {
		require.True(t, Truthy([]byte(raw)), raw)
	}
	for _, raw := range []string{"", "null", "false", "0", "0.0", `""`, "[ ]", "{ }"} {
		require.False(t, Truthy([]byte(raw)), raw)
	}
}

func TestAppendQuoted(t *testing.T) {
	for _, s := range []string{"", "plain", "a\"b\\c\n\t\r\x01é→", strings.Repeat("x", 1000)} {
		var back string
		require.NoError(t, json.Unmarshal(AppendQuoted(nil, s), &back))
		require.Equal(t, s, back)
	}
}

func TestScanAllocatesNothing(t *testing.T) {
	body := fmt.Appendf(nil, `{"messages":[{"content":%q}],"max_tokens":3}`, strings.Repeat("Some ordinary text, with a quote here and there. ", 4500))
	var room [24]Member
	budget.Allocs(t, 10, 0, func() {
		if _, err := ScanObject(room[:0], body); err != nil {
			t.Fatal(err)
		}
	})
}

func BenchmarkScan(b *testing.B) {
	body := fmt.Appendf(nil, `{"messages":[{"content":%q}]}`, strings.Repeat("Some ordinary text, with a quote here and there. ", 4500))
	var room [24]Member
	b.SetBytes(int64(len(body)))
	b.ReportAllocs()
	for b.Loop() {
		if _, err := ScanObject(room[:0], body); err != nil {
			b.Fatal(err)
		}
	}
}
