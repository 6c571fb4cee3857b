package answer

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/require"
)

// FuzzReplacer: whatever the cuts, the answer is as if it had come in one piece.
func FuzzReplacer(f *testing.F) {
	f.Add([]byte(`{"model":"b","x":{"model": "b"}}`), uint8(3), uint8(7))
	f.Add([]byte(`"model":"model":"b""model": "model":"b"`), uint8(1), uint8(2))
	f.Fuzz(func(t *testing.T, text []byte, a, b uint8) {
		i, j := int(a)%(len(text)+1), int(b)%(len(text)+1)
		i, j = min(i, j), max(i, j)
		r := NewReplacer("b", "longer")
		var got []byte
		for n, piece := range [][]byte{text[:i], text[i:j], text[j:]} {
			got = r.Append(got, bytes.Clone(piece), n == 2)
		}
		want := bytes.ReplaceAll(text, []byte(`"model":"b"`), []byte(`"model":"longer"`))
		want = bytes.ReplaceAll(want, []byte(`"model": "b"`), []byte(`"model": "longer"`))
		require.Equal(t, string(want), string(got))
	})
}
