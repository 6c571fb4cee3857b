package kvstate

import (
	"testing"
	"time"

	"tandem/kvstate/prefixindex"

	"github.com/stretchr/testify/require"
)

// remoteQueue is a queue's knowledge of other replicas, and the number of updates.
type remoteQueue struct {
	known           map[uint64]Queued
	changes         uint64
	notified, ended []uint64
}

func (b *remoteQueue) look(p *Pool) {
	b.notified, b.ended = nil, nil
	p.SyncRemoteQueue(b.known, &b.changes, func(w *Queued) { b.notified = append(b.notified, w.ID) }, func(id uint64, _ bool) { b.ended = append(b.ended, id) })
}

func waitsPool(t *testing.T) (*State, *Pool) {
	t.Helper()
	s := New(Options{})
	s.SetPool(PoolSpec{Name: "chat", Models: []string{"*"}}, []EndpointSpec{{Name: "p", Addr: "10.0.0.1:1", Role: RolePrefill}})
	return s, s.Pool("chat")
}

// Requests that wait at other replicas are known from their publications, even if the pool's endpoints change
// meanwhile.
func TestRemoteQueue(t *testing.T) {
	s, p := waitsPool(t)
	b := &remoteQueue{known: map[uint64]Queued{}}
	b.look(p)
	require.Empty(t, b.notified)

	p.ApplyQueued(7, []Queued{{ID: 1, PromptTokens: 10}, {ID: 2}}, nil, nil, false)
	p.ApplyQueued(8, []Queued{{ID: 3}, {ID: 2, PromptTokens: 99}}, nil, nil, false)
	require.Len(t, p.Freed(), 1, "who waits here may be next")
	s.SetPool(p.Spec, nil)
	p = s.Pool("chat")
	b.look(p)
	require.ElementsMatch(t, []uint64{1, 2, 3}, b.notified)
	require.Equal(t, uint64(7), b.known[2].Replica, "nobody speaks for others")
	require.Zero(t, b.known[2].PromptTokens)
	b.look(p)
	require.Empty(t, b.notified)

	p.ApplyQueued(7, []Queued{{ID: 1, PromptTokens: 20}}, []uint64{2, 3}, nil, false)
	b.look(p)
	require.Equal(t, []uint64{1}, b.notified, "told anew")
	require.Equal(t, []uint64{2}, b.ended)
	require.Equal(t, int64(20), b.known[1].PromptTokens)

	p.ApplyQueued(7, []Queued{{ID: 4}}, nil, nil, true)
	b.look(p)
	require.Equal(t, []uint64{4}, b.notified)
	require.Equal(t, []uint64{1}, b.ended)
	p.ApplyQueued(7, nil, nil, nil, true)
	b.look(p)
	require.Equal(t, []uint64{4}, b.ended, "it is gone")
	require.Len(t, b.known, 1)
}

// A replica that publishes too much does not fill the memory of others.
func TestWaitsAreBounded(t *testing.T) {
	_, p := waitsPool(t)
	for id := range uint64(10_000) {
		p.ApplyQueued(7, []Queued{{ID: id + 1}}, nil, nil, false)
	}
	b := &remoteQueue{known: map[uint64]Queued{}}
	b.look(p)
	require.Len(t, b.known, maxRemoteQueued)
	p.ApplyQueued(7, nil, nil, nil, true)
	b.look(p)
	require.Empty(t, b.known)
}

// silentReplicas are other replicas that do nothing.
type silentReplicas struct{ changed int }

func (d *silentReplicas) Changed()                                        { d.changed++ }
func (*silentReplicas) Routed(*Pool, *Endpoint, []uint64)                 {}
func (*silentReplicas) Released(*Pool, ReservationID)                     {}
func (*silentReplicas) Learned(*Pool, prefixindex.LearnedTokens)          {}
func (*silentReplicas) SessionServed(*Pool, uint64, *Endpoint, *Endpoint) {}
func (*silentReplicas) KVLoaded(*Pool, string, string, bool)              {}
func (*silentReplicas) Reachable() bool                                   { return true }
func (*silentReplicas) Consume([16]byte, bool) (first, known bool)        { return true, false }
func (*silentReplicas) PutHandOver([16]byte, []byte)                      {}
func (*silentReplicas) TakeHandOver([16]byte) (params []byte, _ bool)     { return nil, false }

// The first of the requests that wait here are published, by priority and position; without other replicas none is.
func TestWaitsHere(t *testing.T) {
	s, p := waitsPool(t)
	s.PublishQueued(p, Queued{ID: 1})
	s.PublishDequeued(p, 1, true)
	require.Empty(t, p.Queued())
	require.Empty(t, p.TakeDispatched(), "there is nobody to tell")
	peers := &silentReplicas{}
	s.Connect(peers)
	for id := range uint64(200) {
		s.PublishQueued(p, Queued{ID: id + 1, Position: -float64(id), Arrived: time.Now()})
	}
	s.PublishQueued(p, Queued{ID: 900, Position: 1e9, Priority: 1})
	require.Equal(t, 201, peers.changed)
	entries := p.Queued()
	require.Len(t, entries, MaxQueuedPublished)
	require.Equal(t, []uint64{900, 200, 199}, []uint64{entries[0].ID, entries[1].ID, entries[2].ID})
	before := entries[0].Version
	s.PublishQueued(p, Queued{ID: 900, Priority: 1, PromptTokens: 5})
	require.Greater(t, p.Queued()[0].Version, before)
	s.PublishDequeued(p, 900, true)
	s.PublishDequeued(p, 900, true)
	require.Equal(t, 203, peers.changed)
	require.Equal(t, uint64(200), p.Queued()[0].ID)
}
