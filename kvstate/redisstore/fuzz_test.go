package redisstore

import (
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"tandem/kvstate"
	statev1 "tandem/protos/state/v1"
)

// Whatever lies in a stream, or in a snapshot, is read without panic, and no endpoint has less than nothing booked by it.
func FuzzTakeIn(f *testing.F) {
	whole, err := proto.Marshal(&statev1.Batch{
		Replica: 7, Seq: 1, LeaseMs: 1000, Complete: true, Joining: true, Addresses: []string{addr(0), addr(1), "elsewhere:1"},
		Blocks: []*statev1.Blocks{{Address: 1, Kind: statev1.Blocks_KIND_ROUTED, Hashes: []uint64{1, 2}}, {Address: 9}},
		Loads:  []*statev1.Load{{Address: 0, Requests: 2, PromptTokens: -5}, {Address: 2, Requests: 1 << 62}, {Address: 7}},
		Health: []*statev1.Health{{Address: 1, Failed: true}}, Signals: []*statev1.Signals{{Address: 0, Running: -1}},
		Sessions: []*statev1.Session{{Key: 1, Prefill: 1, Decode: 9}}, Released: []uint64{1},
		Waits: []*statev1.Waits{{Id: 3, WaitedUs: 1 << 63, PromptTokens: -1, HeldAt: []uint32{0, 9, 1}, Held: []int64{-1, 5}}}, WaitsOver: []uint64{4}, WaitsAll: true,
		WantsFeeds: true, Events: []*statev1.EventBatch{{Address: 1, Rank: 1 << 31, Seq: 3, Payload: []byte("x")}, {Address: 9}},
		Snapshot: &statev1.SnapshotNotice{Id: 1, Chunks: 1 << 31, Position: "1-x", Everyone: true},
	})
	require.NoError(f, err)
	f.Add("1700000000000-0", whole)
	feed, err := proto.Marshal(&statev1.SnapshotChunk{Addresses: []string{addr(0)}, Feeds: []*statev1.Feed{
		{Next: 3, First: true, Runs: []*statev1.Run{{Keys: []uint64{1}, Blocks: []uint64{2}, BlockSize: 16}, {Keys: []uint64{1, 2}, Blocks: []uint64{1}}, {}}}, {Address: 9},
	}})
	require.NoError(f, err)
	f.Add("1700000000000-0", feed)
	f.Add("x", []byte("\xff"))
	r := apart(f, Options{URL: "redis://127.0.0.1:1"}, 2)
	newEvents(f, r)
	r.p.joined = true
	f.Fuzz(func(t *testing.T, id string, b []byte) {
		r.p.takeIn(message(id, string(b)))
		_ = r.p.loadChunk(r.pool, b)
		for i := range 2 {
			requests, tokens := r.e(i).RemoteLoad().Requests, r.e(i).RemoteLoad().PromptTokens
			require.True(t, requests >= 0 && tokens >= 0)
		}
		for _, w := range r.received() {
			require.True(t, w.Work >= 0 && w.PromptTokens > 0 && len(w.Held) <= kvstate.MaxHeld)
		}
		if parsed, err := parseStreamID(id); err == nil {
			_ = parsed.String()
		}
	})
}
