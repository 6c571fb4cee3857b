package kvtransfer

import (
	"bytes"
	"compress/flate"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"tandem/extproc/kvtransfer/packed"
	"tandem/extproc/openai"
	ticketv1 "tandem/protos/ticket/v1"
)

// plainMessage is the dumb twin of appendTicket: the generated message.
func plainMessage(t *Ticket) *ticketv1.Ticket {
	m := &ticketv1.Ticket{
		Id: t.ID[:], Stage: ticketv1.Ticket_Stage(t.Stage), Pool: t.Pool, Prefill: t.Prefill, Decode: t.Decode,
		PrefillReservation: t.Reservations[0], DecodeReservation: t.Reservations[1], Split: t.Split, Stream: t.Stream, StreamUsage: t.StreamUsage, Redirects: uint32(t.Redirects), Prefills: uint32(t.Prefills),
		Excluded: t.Excluded, Cause: t.Cause, BodyBytes: uint64(t.BodyBytes), PromptTokens: t.PromptTokens, Session: t.Session, Path: t.Path, Authority: t.Authority, CachedPlusOne: t.Cached, WrittenPlusOne: t.Written,
		ExpectedCachedTokens: t.ExpectedCached, ExpectedPrefillUs: t.ExpectedPrefill.Microseconds(),
		Prompt: t.Prompt, LearnBytes: uint64(t.Learn.Bytes), LearnLora: t.Learn.LoRA, LearnSalt: t.Learn.Salt,
		Model: t.Model,
		Loads: t.Loads, LeastBytes: uint32(t.LeastBytes), Shaped: t.Shaped,
	}
	if !t.Expires.IsZero() {
		m.ExpiresUnixMs = t.Expires.UnixMilli()
	}
	if !t.Started.IsZero() {
		m.StartedUnixUs = t.Started.UnixMicro()
	}
	for _, e := range t.Undo {
		m.Undo = append(m.Undo, &ticketv1.Edit{Start: uint64(e.Start), End: uint64(e.End), Text: e.New})
	}
	if t.ParamsRef != ([16]byte{}) {
		m.ParamsRef = t.ParamsRef[:]
	}
	if t.Params != nil {
		m.PackedParams = packed.Pack(nil, t.Params)
	}
	return m
}

func randomTicket(rng *rand.Rand) *Ticket {
	t := &Ticket{Stage: Stage(1 + rng.IntN(7)), Expires: now.Add(time.Duration(rng.IntN(1e6)) * time.Millisecond), Split: rng.IntN(2) == 0, Stream: rng.IntN(2) == 0, StreamUsage: rng.IntN(2) == 0}
	if rng.IntN(2) == 0 {
		t.ID, t.Started, t.Pool, t.Prefill = [16]byte{byte(rng.Uint32())}, now, "pool", "[::1]:8000"
	}
	if rng.IntN(2) == 0 {
		t.Decode, t.Reservations, t.Redirects, t.Prefills = "10.0.0.1:1", [2]uint64{rng.Uint64(), rng.Uint64()}, rng.IntN(20), rng.IntN(300)
	}
	for i := range rng.IntN(4) {
		t.Excluded = append(t.Excluded, fmt.Sprintf("10.0.0.%d:8000", i))
	}
	if rng.IntN(2) == 0 {
		t.ExpectedCached, t.ExpectedPrefill = rng.Int64N(1<<30), time.Duration(rng.Int64N(1<<40))*time.Microsecond
	}
	at := 0
	for range rng.IntN(20) {
		e := openai.Edit{Start: at + rng.IntN(200), New: bytes.Repeat([]byte("x"), rng.IntN(300))}
		e.End = e.Start + rng.IntN(100)
		at = e.End
		t.Undo = append(t.Undo, e)
	}
	t.BodyBytes = at
	if rng.IntN(2) == 0 {
		t.Authority = "my_service:8080"
		t.Session, t.Model, t.Path, t.Cached = rng.Uint64(), "sql-adapter", "/v1/chat/completions", rng.Int64N(1<<30)
		t.Written = rng.Int64N(1 << 30)
		t.Prompt, t.Learn = rng.Uint64(), Learn{Bytes: rng.IntN(1 << 20), LoRA: "adapter", Salt: rng.Uint64()}
		t.Loads, t.LeastBytes = rng.IntN(2) == 0, rng.IntN(4096)
		t.Shaped = rng.IntN(2) == 0
		t.Cause, t.PromptTokens, t.ParamsRef = CausePrefill, rng.Int64N(1<<30), [16]byte{3}
		t.Params = []byte(goodParams("remote_block_ids", "["+blockIDs(randomIDs(1+rng.IntN(100), 1<<30), ",")+"]"))
	}
	return t
}

// TestTicketCodecAgainstGenerated: the generated code reads the hand-written encoding, and the other way round.
func TestTicketCodecAgainstGenerated(t *testing.T) {
	rng := rand.New(rand.NewPCG(7, 8))
	for i := range 500 {
		want := randomTicket(rng)
		if i == 0 {
			want = fullTicket()
		}
		message := appendTicket(nil, want)
		if want.Params != nil {
			message = appendParams(message, packed.Pack(nil, want.Params))
		}
		var read ticketv1.Ticket
		require.NoError(t, proto.Unmarshal(message, &read))
		require.Empty(t, read.ProtoReflect().GetUnknown())
		require.True(t, proto.Equal(plainMessage(want), &read))

		written, err := proto.Marshal(plainMessage(want))
		require.NoError(t, err)
		got := new(Ticket)
		require.NoError(t, parseTicket(got, written))
		requireTicket(t, want, got)
	}
}

// FuzzTicketMessage: any authentic ticket is read without panic, within bounds, and as by the generated code.
func FuzzTicketMessage(f *testing.F) {
	f.Add(appendTicket(nil, smallTicket()))
	f.Add(appendParams(appendTicket(nil, fullTicket()), packed.Pack(nil, fullTicket().Params)))
	f.Fuzz(func(t *testing.T, message []byte) {
		var got Ticket
		if parseTicket(&got, message) != nil {
			return
		}
		require.LessOrEqual(t, got.Undo.Size(), MaxUndoBytes)
		require.LessOrEqual(t, len(got.Params), MaxParamsBytes)
		var twin ticketv1.Ticket
		if proto.Unmarshal(message, &twin) != nil {
			return // texts that are not UTF-8
		}
		require.Equal(t, twin.Pool, got.Pool)
		require.Equal(t, twin.Excluded, got.Excluded)
		require.Equal(t, twin.PrefillReservation, got.Reservations[0])
		require.Len(t, got.Undo, len(twin.Undo))
		for i, e := range twin.Undo {
			require.Equal(t, e.Start, uint64(got.Undo[i].Start))
			require.Equal(t, string(e.Text), string(got.Undo[i].New))
		}
	})
}

// Empty parameters for D differ from absent ones: then D's body is the client's own.
func TestEmptyParams(t *testing.T) {
	keys := newKeys(t, 1)
	for _, params := range [][]byte{nil, {}} {
		sealed, err := keys.Seal(nil, &Ticket{Stage: PairLegs, Expires: time.Now().Add(time.Minute), Params: params}, "id")
		require.NoError(t, err)
		got, err := keys.Open(string(sealed), "id", time.Now())
		require.NoError(t, err)
		require.Equal(t, params, got.Params)
	}
}

// ticketOf converts the generated message into a Ticket, without the bounds of parseTicket.
func ticketOf(m *ticketv1.Ticket) *Ticket {
	t := &Ticket{
		ID: [16]byte(m.GetId()), Stage: Stage(m.GetStage()), Expires: time.UnixMilli(m.GetExpiresUnixMs()), Pool: m.GetPool(), Prefill: m.GetPrefill(), Decode: m.GetDecode(),
		Reservations: [2]uint64{m.GetPrefillReservation(), m.GetDecodeReservation()}, Split: m.GetSplit(), Redirects: int(m.GetRedirects()), Prefills: int(m.GetPrefills()),
		Excluded: m.GetExcluded(), Cause: m.GetCause(), BodyBytes: int(m.GetBodyBytes()), PromptTokens: m.GetPromptTokens(), Stream: m.GetStream(),
		StreamUsage: m.GetStreamUsage(), Session: m.GetSession(), Path: m.GetPath(), Cached: m.GetCachedPlusOne(), Written: m.GetWrittenPlusOne(), Model: m.GetModel(), Prompt: m.GetPrompt(), Authority: m.GetAuthority(),
	}
	for _, e := range m.GetUndo() {
		t.Undo = append(t.Undo, openai.Edit{Start: int(e.GetStart()), End: int(e.GetEnd()), New: e.GetText()})
	}
	return t
}

// BenchmarkTicketCodec compares the hand-written codec of a usual ticket's message with the generated code
// (docs/adr/0032).
func BenchmarkTicketCodec(b *testing.B) {
	ticket := smallTicket()
	message := appendTicket(nil, ticket)
	b.Run("write/hand", func(b *testing.B) {
		b.ReportAllocs()
		var dst []byte
		for b.Loop() {
			dst = appendTicket(dst[:0], ticket)
		}
	})
	b.Run("write/generated", func(b *testing.B) {
		b.ReportAllocs()
		var dst []byte
		var err error
		for b.Loop() {
			dst, err = proto.MarshalOptions{}.MarshalAppend(dst[:0], plainMessage(ticket))
			require.NoError(b, err)
		}
	})
	b.Run("read/hand", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			require.NoError(b, parseTicket(new(Ticket), message))
		}
	})
	b.Run("read/generated", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			m := new(ticketv1.Ticket)
			require.NoError(b, proto.Unmarshal(message, m))
			require.NotNil(b, ticketOf(m))
		}
	})
}

// BenchmarkPackAgainstFlate compares pack with general compression, for a long list of block ids.
func BenchmarkPackAgainstFlate(b *testing.B) {
	text := []byte(goodParams("remote_block_ids", "["+blockIDs(randomIDs(8192, 1<<16), ",")+"]"))
	b.Run("pack", func(b *testing.B) {
		var dst []byte
		for b.Loop() {
			dst = packed.Pack(dst[:0], text)
		}
		b.ReportMetric(float64(len(dst)), "B")
	})
	for _, level := range []int{flate.BestSpeed, flate.BestCompression} {
		b.Run(fmt.Sprint("flate level ", level), func(b *testing.B) {
			var dst bytes.Buffer
			w, err := flate.NewWriter(&dst, level)
			require.NoError(b, err)
			for b.Loop() {
				dst.Reset()
				w.Reset(&dst)
				_, err = w.Write(text)
				require.NoError(b, err)
				require.NoError(b, w.Close())
			}
			b.ReportMetric(float64(dst.Len()), "B")
		})
	}
}
