package redisstore

import (
	"slices"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	statev1 "tandem/protos/state/v1"
)

// Keys go together where each replica opens what the other seals, so that keys can be changed. Else the smaller group yields, and of two
// as large the one without the oldest replica: somebody always serves.
func TestWhoseKeysDiffer(t *testing.T) {
	type keys = map[uint64][]uint64
	for name, c := range map[string]struct {
		replica uint64
		own     []uint64
		others  keys
		differ  []uint64
		yields  bool
	}{
		"alone":                        {5, []uint64{1}, nil, nil, false},
		"the same":                     {5, []uint64{1}, keys{6: {1}}, nil, false},
		"a new key is known":           {5, []uint64{1}, keys{6: {1, 2}}, nil, false},
		"a new key is in use":          {5, []uint64{1, 2}, keys{6: {2, 1}}, nil, false},
		"an old key is gone too early": {5, []uint64{2}, keys{6: {1, 2}}, []uint64{6}, false},
		"another key, older":           {5, []uint64{1}, keys{6: {2}}, []uint64{6}, false},
		"another key, younger":         {6, []uint64{2}, keys{5: {1}}, []uint64{5}, true},
		"the oldest, and alone":        {5, []uint64{1}, keys{6: {2}, 7: {2}}, []uint64{6, 7}, true},
		"younger, and more":            {7, []uint64{2}, keys{6: {2}, 5: {1}}, []uint64{5}, false},
		"as many, the oldest not ours": {8, []uint64{2}, keys{7: {2}, 6: {1}, 5: {1}}, []uint64{5, 6}, true},
	} {
		require.Equal(t, KeyCheck{Differ: c.differ, Yields: c.yields}, compareKeys(c.replica, c.own, c.others), name)
	}
}

// Fingerprints are published with every heartbeat and when they change; what others publish is compared at once, and forgotten with them.
func TestFingerprintsArePublished(t *testing.T) {
	r := lonely(t, 1)
	x := record(r)
	own := []uint64{1}
	var changed atomic.Int32
	r.store.CompareKeys(func() []uint64 { return own }, func() { changed.Add(1) })
	require.NoError(t, r.flush(true))
	require.Equal(t, []uint64{1}, x.last().GetTicketKeys())
	require.EqualValues(t, 1, changed.Load())
	require.NoError(t, r.flush(true))
	require.EqualValues(t, 1, changed.Load())
	r.state.Routed(r.pool, r.e(0), prompt(1, 2))
	require.NoError(t, r.flush(false))
	require.Empty(t, x.last().GetTicketKeys(), "said already")
	own = []uint64{2, 1}
	require.NoError(t, r.flush(false))
	require.Equal(t, own, x.last().GetTicketKeys())
	require.EqualValues(t, 2, changed.Load())

	require.Empty(t, r.store.KeyCheck().Differ)
	r.hears(&statev1.Batch{Replica: 7})
	require.Empty(t, r.store.KeyCheck().Differ, "of a release before")
	r.hears(&statev1.Batch{Replica: 7, TicketKeys: []uint64{3}})
	require.Equal(t, KeyCheck{Differ: []uint64{7}, Yields: true}, r.store.KeyCheck())
	require.EqualValues(t, 3, changed.Load())
	r.hears(&statev1.Batch{Replica: 7, TicketKeys: slices.Repeat([]uint64{3}, maxFingerprints+1)})
	require.EqualValues(t, 3, changed.Load())
	r.hears(&statev1.Batch{Replica: 7, Leaving: true})
	require.Empty(t, r.store.KeyCheck().Differ)
	require.EqualValues(t, 4, changed.Load())
}
