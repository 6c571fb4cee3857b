package decode

import (
	"fmt"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	statev1 "tandem/protos/state/v1"
)

// The reader is the protobuf library's twin: it reads the same, whatever it has read before, and refuses the same.
func FuzzReader(f *testing.F) {
	for _, b := range []*statev1.Batch{
		{Replica: 7, Seq: 1, LeaseMs: 1000, Complete: true, Addresses: []string{"10.0.0.0:1", "10.0.0.1:1"},
			Blocks: []*statev1.Blocks{
				{Address: 1, Kind: statev1.Blocks_KIND_ROUTED, Hashes: []uint64{1, 2}, Also: []uint32{0, 300}}, {Parent: 3},
			},
			Loads: []*statev1.Load{{Address: 1, Requests: 2, PromptTokens: -5}, {}}},
		{Replica: 8, Addresses: []string{"10.0.0.2:1"}, Loads: []*statev1.Load{{Requests: 1}}, Released: []uint64{1, 2},
			Signals: []*statev1.Signals{{Running: -1}}, WaitsAll: true},
		{},
	} {
		text, err := proto.Marshal(b)
		require.NoError(f, err)
		f.Add(text)
	}
	f.Add([]byte("\x4a\x05\x1a\x03abc"))      // hashes cut off
	f.Add([]byte("\x42\x01\xff"))             // an address that is not UTF-8
	f.Add([]byte("\x48\x01\x4a\x02\x28\x07")) // other wire types: unknown, and one number by itself
	var r Reader
	f.Fuzz(func(t *testing.T, text []byte) {
		var want statev1.Batch
		wantErr := proto.Unmarshal(text, &want)
		got, err := r.Read(string(text))
		require.Equal(t, wantErr == nil, err == nil, "%v, want %v", err, wantErr)
		if err != nil {
			return
		}
		want.ProtoReflect().SetUnknown(nil)
		got.ProtoReflect().SetUnknown(nil)
		require.True(t, proto.Equal(&want, got), "%v, want %v", got, &want)
	})
}

// What a reader keeps is bounded.
func TestReaderForgets(t *testing.T) {
	var r Reader
	for i := range maxKeptAddresses + 2 {
		text, err := proto.Marshal(&statev1.Batch{Addresses: []string{fmt.Sprint(i)}})
		require.NoError(t, err)
		_, err = r.Read(string(text))
		require.NoError(t, err)
		require.LessOrEqual(t, len(r.addresses), maxKeptAddresses+1)
	}
	require.Len(t, r.addresses, 1)
	_, _ = r.Read(string(make([]byte, 2*maxKeptEntry)))
	_, _ = r.Read("")
	require.Less(t, cap(r.text), maxKeptEntry)
}

// Addresses that no endpoint has are not kept: somebody could make a replica keep as much of them as Redis takes.
func TestLongAddressesAreNotKept(t *testing.T) {
	var r Reader
	kept := 0
	for i := range 100 {
		long := strings.Repeat("x", 200_000) + strconv.Itoa(i)
		text, err := proto.Marshal(&statev1.Batch{Addresses: []string{long, "10.0.0.1:8000"}})
		require.NoError(t, err)
		b, err := r.Read(string(text))
		require.NoError(t, err)
		require.Equal(t, long, b.GetAddresses()[0])
	}
	for addr := range r.addresses {
		kept += len(addr)
	}
	require.Less(t, kept, 1<<10)
}
