package kvtransfer

import (
	"bytes"
	"encoding/base64"
	"fmt"
	"math/rand/v2"
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"
	"google.golang.org/protobuf/encoding/protowire"

	"tandem/extproc/openai"
	"tandem/internal/budget"
)

var now = time.UnixMilli(1_795_227_855_885)

func secret(b byte) [32]byte { return [32]byte{b, 1, 2, 3} }

func newKeys(t testing.TB, primary byte, older ...byte) *Keys {
	var rest [][32]byte
	for _, b := range older {
		rest = append(rest, secret(b))
	}
	k, err := NewKeys(secret(primary), rest...)
	require.NoError(t, err)
	return k
}

// smallTicket returns a ticket that goes out with a prefill leg.
func smallTicket() *Ticket {
	return &Ticket{
		ID: [16]byte{1, 2, 3}, Stage: PrefillLeg, Expires: now.Add(10 * time.Minute), Started: now.Add(-time.Millisecond),
		Pool: "chat", Prefill: "10.0.12.5:8000", Decode: "10.0.13.77:8000", Reservations: [2]uint64{1 << 63, 2}, Split: true, Prefills: 1,
		Undo: openai.Edits{
			{Start: 1, End: 220}, {Start: 1300, End: 1301, New: []byte("512")}, {Start: 1400, End: 1400, New: []byte(`,"stop":["\n\nHuman:"]`)},
			{Start: 1410, End: 1415, New: []byte("true")}, {Start: 1420, End: 1420, New: []byte(`,"stream_options":{"include_usage":true}`)},
		},
		BodyBytes: 1500, PromptTokens: 320,
	}
}

// largeTicket returns the hand-over of a prompt of 8,192 blocks.
func largeTicket() *Ticket {
	t := smallTicket()
	t.Stage = HandOver
	t.Params = []byte(goodParams("remote_block_ids", "[["+blockIDs(randomIDs(8192, 65536), ",")+"]]"))
	return t
}

func fullTicket() *Ticket {
	t := smallTicket()
	t.Stage, t.Redirects, t.Cause, t.Excluded = Failed, 3, CauseDecode, []string{"10.0.0.1:1", "[fd00::1]:2"}
	t.Params, t.ParamsRef = []byte(`{"a": [1,2]}`), [16]byte{15: 9}
	return t
}

func requireTicket(t *testing.T, want, got *Ticket) {
	require.NotNil(t, got)
	require.True(t, want.Expires.Equal(got.Expires))
	require.True(t, want.Started.Equal(got.Started))
	w, g := *want, *got
	w.Expires, w.Started, g.Expires, g.Started = time.Time{}, time.Time{}, time.Time{}, time.Time{}
	for _, x := range []*Ticket{&w, &g} {
		edits := make(openai.Edits, len(x.Undo))
		for i, e := range x.Undo {
			edits[i] = openai.Edit{Start: e.Start, End: e.End, New: append([]byte{}, e.New...)}
		}
		x.Undo = edits
	}
	require.Equal(t, w, g)
}

func TestTicketRoundTrip(t *testing.T) {
	k := newKeys(t, 1)
	for name, want := range map[string]*Ticket{
		"small": smallTicket(), "large": largeTicket(), "full": fullTicket(),
		"nearly nothing": {Stage: DecodeLeg, Expires: now.Add(time.Second)},
	} {
		t.Run(name, func(t *testing.T) {
			header, err := k.Seal([]byte("head:"), want, "req-1")
			require.NoError(t, err)
			require.True(t, bytes.HasPrefix(header, []byte("head:")))
			got, err := k.Open(string(header[5:]), "req-1", now)
			require.NoError(t, err)
			requireTicket(t, want, got)
		})
	}
}

// TestTicketParamsVerbatim: D gets the engine's object byte for byte.
func TestTicketParamsVerbatim(t *testing.T) {
	k := newKeys(t, 1)
	ids := randomIDs(500, 65536)
	for _, params := range []string{
		goodParams("remote_block_ids", "[["+blockIDs(ids, ",")+"]]"), goodParams("remote_block_ids", "[["+blockIDs(ids, ", ")+"]]"),
		goodParams("remote_block_ids", "[ [ "+blockIDs(ids, " ,")+" ] , [ "+blockIDs(ids, ",\n\t")+" ] ]"),
		`{ "remote_block_ids" : [ ` + blockIDs(ids, " , ") + ` ] , "t": 1795227885.4512837, "n": 9223372036854775807, "e": 1e3 }`,
		"{}", " ", `{"é":"\u00e9\ud83d\ude00"}`, strings.Repeat("x", 30000),
	} {
		want := largeTicket()
		want.Params = []byte(params)
		header, err := k.Seal(nil, want, "req-1")
		require.NoError(t, err)
		got, err := k.Open(string(header), "req-1", now)
		require.NoError(t, err)
		require.Equal(t, params, string(got.Params))
	}
}

func TestTicketSizes(t *testing.T) {
	k := newKeys(t, 1)
	small, err := k.Seal(nil, smallTicket(), "req-1")
	require.NoError(t, err)
	require.Less(t, len(small), 512)
	large, err := k.Seal(nil, largeTicket(), "req-1")
	require.NoError(t, err)
	require.Less(t, len(large), 23_000)
	require.Less(t, len(large), MaxHeaderBytes)
	for _, c := range large {
		require.True(t, c-'0' <= 9 || c|0x20-'a' <= 25 || c == '-' || c == '_', "a header value without surprises")
	}
}

func TestTicketExpires(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := newKeys(t, 1)
		want := smallTicket()
		want.Started = time.Now()
		want.Expires = time.Now().Add(30 * time.Second)
		header, err := k.Seal(nil, want, "req-1")
		require.NoError(t, err)
		time.Sleep(30*time.Second - time.Millisecond)
		_, err = k.Open(string(header), "req-1", time.Now())
		require.NoError(t, err)
		time.Sleep(time.Millisecond)
		got, err := k.Open(string(header), "req-1", time.Now())
		require.ErrorIs(t, err, ErrTicketExpired)
		requireTicket(t, want, got) // its reservations can be released
	})
	k := newKeys(t, 1)
	header, err := k.Seal(nil, &Ticket{Stage: PrefillLeg}, "req-1") // a ticket without deadline is expired
	require.NoError(t, err)
	_, err = k.Open(string(header), "req-1", now)
	require.ErrorIs(t, err, ErrTicketExpired)
}

func TestTicketBoundToRequest(t *testing.T) {
	k := newKeys(t, 1)
	header, err := k.Seal(nil, smallTicket(), "req-1")
	require.NoError(t, err)
	for _, id := range []string{"", "req-2", "req-", "req-11", "REQ-1", "req-1 "} {
		got, err := k.Open(string(header), id, now)
		require.ErrorIs(t, err, ErrTicketForged, id)
		require.Nil(t, got)
	}
}

func TestKeyRotation(t *testing.T) {
	sealed := func(k *Keys) string {
		header, err := k.Seal(nil, smallTicket(), "req-1")
		require.NoError(t, err)
		return string(header)
	}
	opens := func(k *Keys, header string) bool {
		got, err := k.Open(header, "req-1", now)
		if err != nil {
			require.ErrorIs(t, err, ErrTicketForged)
			require.Nil(t, got)
		}
		return err == nil
	}
	before, announced, changed, after := newKeys(t, 1), newKeys(t, 1, 2), newKeys(t, 2, 1), newKeys(t, 2)
	for _, step := range [][2]*Keys{{before, announced}, {announced, changed}, {changed, after}} {
		require.True(t, opens(step[0], sealed(step[1])) && opens(step[1], sealed(step[0])), "replicas one step apart understand each other")
	}
	require.False(t, opens(after, sealed(before)))
	require.False(t, opens(before, sealed(after)))
	generated, err := GenerateKeys()
	require.NoError(t, err)
	require.True(t, opens(generated, sealed(generated)))
	require.False(t, opens(generated, sealed(before)))
}

// TestKeysConcurrently: tickets of many requests at once do not mix.
func TestKeysConcurrently(t *testing.T) {
	k := newKeys(t, 1)
	var group errgroup.Group
	for i := range 8 {
		group.Go(func() error {
			rng := rand.New(rand.NewPCG(uint64(i), 9))
			for j := range 50 {
				want, id := randomTicket(rng), fmt.Sprintf("req-%d-%d", i, j)
				header, err := k.Seal(nil, want, id)
				if err != nil {
					return err
				}
				got, err := k.Open(string(header), id, now)
				if err != nil {
					return err
				}
				if got.ID != want.ID || !bytes.Equal(got.Params, want.Params) || got.Undo.Size() != want.Undo.Size() {
					return fmt.Errorf("%s got another ticket", id)
				}
			}
			return nil
		})
	}
	require.NoError(t, group.Wait())
}

// reseal seals a message that no Ticket encodes to, as another release might.
func reseal(k *Keys, message []byte) string {
	return string(k.sealMessage(nil, &scratch{message: message}, "req-1"))
}

// TestTicketOfNewerRelease: unknown fields pass, in any wire type and place.
func TestTicketOfNewerRelease(t *testing.T) {
	k := newKeys(t, 1)
	var unknown []byte
	unknown = protowire.AppendVarint(protowire.AppendTag(unknown, 100, protowire.VarintType), 7)
	unknown = protowire.AppendString(protowire.AppendTag(unknown, 101, protowire.BytesType), "new")
	unknown = protowire.AppendFixed32(protowire.AppendTag(unknown, 102, protowire.Fixed32Type), 7)
	unknown = protowire.AppendFixed64(protowire.AppendTag(unknown, 103, protowire.Fixed64Type), 7)
	unknown = protowire.AppendTag(protowire.AppendTag(unknown, 104, protowire.StartGroupType), 104, protowire.EndGroupType)
	unknown = protowire.AppendVarint(protowire.AppendTag(unknown, fieldPool, protowire.VarintType), 7) // a known number of another type
	edit := append(appendNumber(nil, fieldEditEnd, 219), unknown...)

	want := smallTicket()
	message := append(append(bytes.Clone(unknown), appendTicket(nil, want)...), unknown...)
	got, err := k.Open(reseal(k, message), "req-1", now)
	require.NoError(t, err)
	requireTicket(t, want, got)

	message = appendBytes(appendTicket(nil, &Ticket{Stage: PrefillLeg, Expires: want.Expires}), fieldUndo, edit)
	got, err = k.Open(reseal(k, message), "req-1", now)
	require.NoError(t, err)
	require.Equal(t, openai.Edits{{End: 219}}, got.Undo)
}

func TestTicketOfOtherVersion(t *testing.T) {
	k := newKeys(t, 1)
	header, err := k.Seal(nil, smallTicket(), "req-1")
	require.NoError(t, err)
	raw, err := sealed64.DecodeString(string(header))
	require.NoError(t, err)
	raw[0]++
	got, err := k.Open(sealed64.EncodeToString(raw), "req-1", now)
	require.ErrorIs(t, err, ErrTicketVersion)
	require.Nil(t, got)
}

// TestTicketUnreadable: an authentic ticket that makes no sense (or would make us allocate without end) is reported as
// of an unknown release.
func TestTicketUnreadable(t *testing.T) {
	k := newKeys(t, 1)
	good := appendTicket(nil, smallTicket())
	number := func(f protowire.Number, v uint64) []byte {
		return append(bytes.Clone(good), appendNumber(nil, f, v)...)
	}
	text := func(f protowire.Number, v []byte) []byte { return append(bytes.Clone(good), appendBytes(nil, f, v)...) }
	repeat := func(f protowire.Number, v []byte, n int) []byte {
		return append(bytes.Clone(good), bytes.Repeat(appendBytes(nil, f, v), n)...)
	}
	edit := func(start, end uint64) []byte {
		return appendNumber(appendNumber(nil, fieldEditStart, start), fieldEditEnd, end)
	}
	for name, message := range map[string][]byte{
		"empty": {}, "no stage": appendBytes(nil, fieldID, make([]byte, 16)), "garbage": []byte("garbage"), "cut short": good[:len(good)-1],
		"a new stage": number(fieldStage, 9), "a huge stage": number(fieldStage, 1<<40), "a stage that wraps": number(fieldStage, 256+1),
		"short id": text(fieldID, []byte("x")), "short reference": text(fieldParamsRef, []byte("x")),
		"redirects": number(fieldRedirects, 1<<40), "negative": number(fieldPromptTokens, 1<<63), "late": number(fieldExpires, 1<<63), "length": number(fieldBodyBytes, 1<<50),
		"an edit out of order": text(fieldUndo, edit(0, 5)), "an edit beyond the body": text(fieldUndo, edit(1450, 1501)), "an edit backwards": text(fieldUndo, edit(1460, 1455)),
		"an edit far out": text(fieldUndo, edit(1<<63, 1<<63)), "a broken edit": text(fieldUndo, []byte{8}),
		"many edits": repeat(fieldUndo, nil, 5000), "many addresses": repeat(fieldExcluded, nil, 5000),
		"long undo":      repeat(fieldUndo, appendBytes(edit(1450, 1450), fieldEditText, make([]byte, 1000)), 10),
		"no packed text": text(fieldPackedParams, nil), "broken packed text": text(fieldPackedParams, []byte{1, 5}),
		"bomb": text(fieldPackedParams, append(append([]byte{1, 0xff, 0xff, 0xff, 0x7f}, make([]byte, 8)...), bytes.Repeat([]byte{3, ',', 0, 128, 0, 1, 0}, 4000)...)),
	} {
		got, err := k.Open(reseal(k, message), "req-1", now)
		require.ErrorIs(t, err, ErrTicketVersion, name)
		require.Nil(t, got, name)
	}
}

func TestTicketForged(t *testing.T) {
	k := newKeys(t, 1)
	header, err := k.Seal(nil, smallTicket(), "req-1")
	require.NoError(t, err)
	good := string(header)
	for name, forged := range map[string]string{
		"nothing": "", "garbage": "garbage", "not base64": strings.Repeat("%", 100), "long": strings.Repeat("A", 1<<20), "padding": good + "=",
		"cut": good[:len(good)-1], "longer": good + "A", "line break": good + "\n", "line break inside": good[:8] + "\r\n" + good[8:], "space": " " + good,
		"standard alphabet": base64.StdEncoding.EncodeToString([]byte(strings.Repeat("\xff", 100))), "two": good + good,
		"twisted": good[4:] + good[:4],
	} {
		got, err := k.Open(forged, "req-1", now)
		require.Error(t, err, name)
		require.Nil(t, got, name)
		require.NotContains(t, err.Error(), good[20:40])
	}
	for n := range good {
		_, err := k.Open(good[:n], "req-1", now)
		require.Error(t, err, n)
	}
	for i := range good {
		for bit := range 8 {
			flipped := []byte(good)
			flipped[i] ^= 1 << bit
			_, err := k.Open(string(flipped), "req-1", now)
			require.Error(t, err, "byte %d bit %d", i, bit)
		}
	}
}

func TestSealRefuses(t *testing.T) {
	k := newKeys(t, 1)
	for name, change := range map[string]func(*Ticket){
		"undo":      func(t *Ticket) { t.Undo = openai.Edits{{New: make([]byte, MaxUndoBytes+1)}} },
		"edits":     func(t *Ticket) { t.Undo = make(openai.Edits, maxEdits+1) },
		"addresses": func(t *Ticket) { t.Excluded = make([]string, maxExcluded+1) },
		"params":    func(t *Ticket) { t.Params = make([]byte, MaxParamsBytes+1) },
		"counts":    func(t *Ticket) { t.Redirects = -1 },
	} {
		ticket := smallTicket()
		change(ticket)
		header, err := k.Seal([]byte("x"), ticket, "req-1")
		require.Error(t, err, name)
		require.Equal(t, "x", string(header))
	}
}

// TestTicketsDiffer: sealing the same ticket twice gives different headers.
func TestTicketsDiffer(t *testing.T) {
	k := newKeys(t, 1)
	a, _ := k.Seal(nil, smallTicket(), "req-1")
	b, _ := k.Seal(nil, smallTicket(), "req-1")
	require.NotEqual(t, a, b)
	require.Equal(t, string(a[:6]), string(b[:6]), "version and key id")
}

func FuzzTicketOpen(f *testing.F) {
	k := newKeys(f, 1)
	good, err := os.ReadFile("testdata/ticket-v1-small.txt") // the same in every worker
	require.NoError(f, err)
	f.Add(string(good), uint(0), byte(1))
	f.Add(string(good[:40]), uint(3), byte(0))
	f.Add("AQ", uint(0), byte(0))
	f.Fuzz(func(t *testing.T, header string, at uint, flip byte) {
		if header != string(good) {
			if got, err := k.Open(header, "req-1", now); err == nil || got != nil {
				t.Fatal("a ticket out of nothing")
			}
		}
		flipped := bytes.Clone(good)
		flipped[at%uint(len(good))] ^= flip
		if got, err := k.Open(string(flipped), "req-1", now); flip != 0 && (err == nil || got != nil) {
			t.Fatal("a changed ticket was taken")
		}
	})
}

// TestTicketOfThisFormat: the tickets in testdata, sealed under secret(1) for req-1 by published releases, can always
// be opened. -update writes only missing ones: a ticket that no longer opens needs another version byte, and a file of
// its own.
func TestTicketOfThisFormat(t *testing.T) {
	for file, want := range map[string]*Ticket{"testdata/ticket-v1-small.txt": smallTicket(), "testdata/ticket-v1-full.txt": fullTicket()} {
		header, err := os.ReadFile(file)
		if os.IsNotExist(err) && *update {
			sealed, err := newKeys(t, 1).Seal(nil, want, "req-1")
			require.NoError(t, err)
			require.NoError(t, os.WriteFile(file, sealed, 0o644))
			header = sealed
		}
		require.NotEmpty(t, header)
		got, err := newKeys(t, 1).Open(string(header), "req-1", now)
		require.NoError(t, err)
		requireTicket(t, want, got)
	}
}

// Budgets of the code on every request's path.
func TestTicketAllocs(t *testing.T) {
	k := newKeys(t, 1)
	for _, c := range []struct {
		name       string
		ticket     *Ticket
		seal, open float64
	}{{"small", smallTicket(), 0, 7}, {"large", largeTicket(), 0, 8}} {
		buf, err := k.Seal(nil, c.ticket, "req-1")
		require.NoError(t, err)
		header := string(buf)
		budget.Allocs(t, 100, c.seal, func() { _, _ = k.Seal(buf[:0], c.ticket, "req-1") }, "sealing a %s one", c.name)
		budget.Allocs(t, 100, c.open, func() { _, _ = k.Open(header, "req-1", now) }, "opening a %s one", c.name)
	}
}

func BenchmarkTicket(b *testing.B) {
	k := newKeys(b, 1)
	for _, c := range []struct {
		name   string
		ticket *Ticket
	}{{"small", smallTicket()}, {"8192blocks", largeTicket()}} {
		buf, err := k.Seal(nil, c.ticket, "req-1")
		require.NoError(b, err)
		header := string(buf)
		size := float64(len(header))
		b.Run("seal/"+c.name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				buf, _ = k.Seal(buf[:0], c.ticket, "req-1")
			}
			b.ReportMetric(size, "header-bytes")
		})
		b.Run("open/"+c.name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if _, err := k.Open(header, "req-1", now); err != nil {
					b.Fatal(err)
				}
			}
		})
		b.Run("both/"+c.name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				buf, _ = k.Seal(buf[:0], c.ticket, "req-1")
				if _, err := k.Open(string(buf), "req-1", now); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

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
