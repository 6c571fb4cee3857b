package packed

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// blockIDs writes ids as a list.
func blockIDs(ids []int, sep string) string {
	return strings.Trim(strings.ReplaceAll(fmt.Sprint(ids), " ", sep), "[]")
}

// randomIDs returns n ids below limit, from a fixed seed.
func randomIDs(n, limit int) []int {
	rng := rand.New(rand.NewPCG(1, 2))
	ids := make([]int, n)
	for i := range ids {
		ids[i] = rng.IntN(limit)
	}
	return ids
}

// fragmentIDs returns ids as a busy allocator gives them: stretches of consecutive ones.
func fragmentIDs(n int) []int {
	rng := rand.New(rand.NewPCG(3, 4))
	ids := make([]int, 0, n)
	for len(ids) < n {
		start := rng.IntN(60000)
		for i := range min(1+rng.IntN(100), n-len(ids)) {
			ids = append(ids, start+i)
		}
	}
	return ids
}

func countingIDs(n int) []int {
	ids := make([]int, n)
	for i := range ids {
		ids[i] = 1000 + i
	}
	return ids
}

func TestPack(t *testing.T) {
	big := strings.Repeat("999999999,0,", 500)
	for _, c := range []struct {
		name, text string
		most       int // bytes packed
	}{
		{"nothing", "", 1},
		{"no list", `{"a":1,"b":"x"}`, 16},
		{"a short list is left", "[1,2,3,4,5,6,7,8,9,10]", 23},
		{"8192 random ids", blockIDs(randomIDs(8192, 65536), ","), 8192*2 + 400},
		{"8192 random ids with spaces", "[[" + blockIDs(randomIDs(8192, 65536), ", ") + "]]", 8192*2 + 400},
		{"8192 small random ids", blockIDs(randomIDs(8192, 2048), ","), 8192*11/8 + 400},
		{"8192 ids in stretches", blockIDs(fragmentIDs(8192), ","), 8192*2 + 400},
		{"8192 neighbours", blockIDs(countingIDs(8192), ","), 400},
		{"8192 times the same", strings.Repeat("7,", 8192), 300},
		{"counting down", blockIDs([]int{20, 19, 18, 17, 16, 15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0}, ","), 40},
		{"lines", "[\n  " + blockIDs(countingIDs(100), ",\n  ") + "\n]", 60},
		{"two groups", "[[" + blockIDs(countingIDs(100), ",") + "],[" + blockIDs(countingIDs(100), ",") + "]]", 60},
		{"the separator changes", blockIDs(countingIDs(50), ",") + "," + blockIDs(countingIDs(50), ", "), 100},
		{"largest integers", big, 4500},
		{"too long for an integer", strings.Repeat("1234567890,", 30), 331},
		{"leading zeros", strings.Repeat("01,", 30), 91},
		{"negative", "[-1" + strings.Repeat(",-1", 30) + "]", 100},
		{"floats", "[1.0" + strings.Repeat(",1.0", 30) + "]", 140},
		{"a float ends the list", "[" + blockIDs(countingIDs(40), ",") + ".5]", 60},
		{"an exponent ends the list", "[" + blockIDs(countingIDs(40), ",") + "e5]", 60},
		{"a comma at the end", "[" + blockIDs(countingIDs(40), ",") + ",]", 60},
		{"in a string", `{"host":"` + blockIDs(countingIDs(40), ",") + `"}`, 60},
		{"a wide separator", blockIDs(countingIDs(40), ","+strings.Repeat(" ", 100)), 5000},
		{"lists of lists", strings.Repeat("[1],", 100), 401},
		{"129 integers", blockIDs(countingIDs(129), ","), 40},
		{"bytes", string([]byte{0, 255, '1', ',', '2', 0, 128}), 8},
	} {
		t.Run(c.name, func(t *testing.T) {
			packed := Pack([]byte("head"), []byte(c.text))
			require.True(t, bytes.HasPrefix(packed, []byte("head")))
			packed = packed[4:]
			require.LessOrEqual(t, len(packed), c.most)
			text, err := Unpack([]byte("tail"), packed, len(c.text))
			require.NoError(t, err)
			require.Equal(t, "tail"+c.text, string(text))
			if len(c.text) > 0 {
				_, err = Unpack(nil, packed, len(c.text)-1)
				require.Error(t, err, "the limit holds")
			}
		})
	}
}

// TestUnpackBroken: a text cut short or changed is refused, never another text. (Tickets are authentic; this is for two
// releases that pack differently.)
func TestUnpackBroken(t *testing.T) {
	text := "[[" + blockIDs(randomIDs(200, 65536), ",") + "],[" + blockIDs(countingIDs(200), ", ") + "]]"
	packed := Pack(nil, []byte(text))
	for n := range packed {
		_, err := Unpack(nil, packed[:n], 1<<20)
		require.Error(t, err, n)
	}
	for i := 1; i < len(packed); i++ {
		for bit := range 8 {
			broken := bytes.Clone(packed)
			broken[i] ^= 1 << bit
			if got, err := Unpack(nil, broken, 1<<20); err == nil {
				require.Equal(t, text, string(got), "byte %d bit %d", i, bit) // padding bits
			}
		}
	}
	_, err := Unpack(nil, nil, 10)
	require.Error(t, err)
	_, err = Unpack(nil, []byte{9}, 10)
	require.Error(t, err)
}

func FuzzPack(f *testing.F) {
	f.Add([]byte(`{"remote_block_ids":[[` + blockIDs(randomIDs(40, 65536), ",") + `]]}`))
	f.Add([]byte(blockIDs(countingIDs(300), ", ")))
	f.Add([]byte("0,00,1, 2,  3,999999999,1000000000"))
	f.Add(Pack(nil, []byte(blockIDs(randomIDs(40, 1000), ","))))
	f.Fuzz(func(t *testing.T, text []byte) {
		packed := Pack(nil, text)
		if len(packed) > len(text)+1 {
			t.Fatalf("%d bytes became %d", len(text), len(packed))
		}
		got, err := Unpack(nil, packed, len(text))
		if err != nil || !bytes.Equal(got, text) {
			t.Fatalf("%q became %q: %v", text, got, err)
		}
		if out, err := Unpack(nil, text, 1<<16); err == nil && len(out) > 1<<16 {
			t.Fatal("the limit does not hold")
		}
	})
}

// TestPackNumbers goes over lists of many shapes: widths, jumps, lengths around the chunk's.
func TestPackNumbers(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 6))
	for i := range 2000 {
		ids := make([]int, 1+rng.IntN(300))
		limit := 1 << rng.IntN(30)
		step := rng.IntN(3)
		for j := range ids {
			if ids[j] = rng.IntN(limit); step > 0 && j > 0 {
				ids[j] = min(ids[j-1]+rng.IntN(step+1), 1<<30)
			}
		}
		text := fmt.Sprintf("%d%s%d", i, blockIDs(ids, ", "[:1+rng.IntN(2)]), i)
		got, err := Unpack(nil, Pack(nil, []byte(text)), len(text))
		require.NoError(t, err)
		require.Equal(t, text, string(got))
	}
}

func BenchmarkPack(b *testing.B) {
	for _, c := range []struct {
		name string
		ids  []int
	}{{"random", randomIDs(8192, 65536)}, {"stretches", fragmentIDs(8192)}} {
		text := []byte(blockIDs(c.ids, ","))
		packed := Pack(nil, text)
		b.Run("pack/"+c.name, func(b *testing.B) {
			b.ReportAllocs()
			b.ReportMetric(float64(len(packed)), "bytes")
			for b.Loop() {
				packed = Pack(packed[:0], text)
			}
		})
		b.Run("unpack/"+c.name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if _, err := Unpack(nil, packed, len(text)); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
