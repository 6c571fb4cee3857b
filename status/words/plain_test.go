package words

import (
	"bytes"
	"encoding/json"
	"log/slog"
	"strings"
	"testing"
	"unicode"

	"github.com/stretchr/testify/require"
)

// Foreign texts neither steer a terminal nor look like a line of ours, wherever they are shown; in JSON and logs nothing
// of them is lost.
func TestForeignTextIsPlain(t *testing.T) {
	for text, want := range map[string]string{
		"meta-llama/Llama-3.1-8B":  "meta-llama/Llama-3.1-8B",
		"Qwen/Qwen3 ünïcode 模型 🙂":  "Qwen/Qwen3 ünïcode 模型 🙂",
		"a\x1b[2Jb":                "a?[2Jb",
		"a\x1b]0;title\ab":         "a?]0;title?b",
		"0.32\nPROBLEM all is out": "0.32?PROBLEM all is out",
		"a\r\tb\x00\x7f":           "a??b??",
		"a\u009b31mb":              "a?31mb",         // C1: CSI in one character
		"a\u202egpj.exe\u2066":     "a?gpj.exe?",     // turns the text around
		"a\u2028b\ufeff":           "a?b?",           // a line separator; nothing to be seen
		"a\U000e0041b":             "a?b",            // a tag
		"a\xff\x9bb":               "a\ufffd\ufffdb", // no UTF-8
		"":                         "",
	} {
		require.Equal(t, want, Plain(text), "%q", text)
		require.Equal(t, strings.NewReplacer("?PROBLEM", "\nPROBLEM", "a??b??", "a?\tb??").Replace("1"+want), Lines("1"+text), "%q", text)

		document, err := json.Marshal(map[string]any{text: []any{text, map[string]string{"x": text}, 12345678901234567, nil}})
		require.NoError(t, err)
		plain, err := PlainJSON(document)
		require.NoError(t, err)
		again, err := json.Marshal(map[string]any{want: []any{want, map[string]string{"x": want}, 12345678901234567, nil}})
		require.NoError(t, err)
		require.JSONEq(t, string(again), string(plain))
		require.Contains(t, string(plain), "12345678901234567")

		var out bytes.Buffer
		enc := json.NewEncoder(Escaped(&out))
		enc.SetIndent("", "  ")
		require.NoError(t, enc.Encode(map[string]string{"x": text}))
		slog.New(slog.NewJSONHandler(Escaped(&out), nil)).Warn(text, "model", text)
		require.Equal(t, 4, strings.Count(out.String(), "\n"))
		for _, r := range out.String() {
			require.True(t, r == '\n' || unicode.IsPrint(r), "%q: %q", text, r)
		}
		whole := strings.ToValidUTF8(strings.ReplaceAll(text, "\xff\x9b", "\ufffd\ufffd"), "")
		lines := json.NewDecoder(&out)
		var got struct{ X, Msg, Model string }
		require.NoError(t, lines.Decode(&got))
		require.Equal(t, whole, got.X)
		require.NoError(t, lines.Decode(&got))
		require.Equal(t, []string{whole, whole}, []string{got.Msg, got.Model})
	}
	_, err := PlainJSON([]byte("{"))
	require.Error(t, err)
}
