package kvstate

import (
	"testing"
	"time"

	"tandem/kvstate/prefixindex"

	"github.com/stretchr/testify/require"
)

// board is what a waiting room knows of other replicas, and how often it was told.
type board struct {
	known      map[uint64]Waits
	changes    uint64
	said, over []uint64
}

func (b *board) look(p *Pool) {
	b.said, b.over = nil, nil
	p.WaitsElsewhere(b.known, &b.changes, func(w *Waits) { b.said = append(b.said, w.ID) }, func(id uint64, _ bool) { b.over = append(b.over, id) })
}

func waitsPool(t *testing.T) (*State, *Pool) {
	t.Helper()
	s := New(Options{})
	s.SetPool(PoolSpec{Name: "chat", Models: []string{"*"}}, []EndpointSpec{{Name: "p", Addr: "10.0.0.1:1", Role: RolePrefill}})
	return s, s.Pool("chat")
}

// Who waits at other replicas is known from what they tell, also where the pool gets other endpoints meanwhile.
func TestWaitsElsewhere(t *testing.T) {
	s, p := waitsPool(t)
	b := &board{known: map[uint64]Waits{}}
	b.look(p)
	require.Empty(t, b.said)

	p.ApplyWaits(7, []Waits{{ID: 1, PromptTokens: 10}, {ID: 2}}, nil, nil, false)
	p.ApplyWaits(8, []Waits{{ID: 3}, {ID: 2, PromptTokens: 99}}, nil, nil, false)
	require.Len(t, p.Freed(), 1, "who waits here may be next")
	s.SetPool(p.Spec, nil)
	p = s.Pool("chat")
	b.look(p)
	require.ElementsMatch(t, []uint64{1, 2, 3}, b.said)
	require.Equal(t, uint64(7), b.known[2].Replica, "nobody speaks for others")
	require.Zero(t, b.known[2].PromptTokens)
	b.look(p)
	require.Empty(t, b.said)

	p.ApplyWaits(7, []Waits{{ID: 1, PromptTokens: 20}}, []uint64{2, 3}, nil, false)
	b.look(p)
	require.Equal(t, []uint64{1}, b.said, "told anew")
	require.Equal(t, []uint64{2}, b.over)
	require.Equal(t, int64(20), b.known[1].PromptTokens)

	p.ApplyWaits(7, []Waits{{ID: 4}}, nil, nil, true)
	b.look(p)
	require.Equal(t, []uint64{4}, b.said)
	require.Equal(t, []uint64{1}, b.over)
	p.ApplyWaits(7, nil, nil, nil, true)
	b.look(p)
	require.Equal(t, []uint64{4}, b.over, "it is gone")
	require.Len(t, b.known, 1)
}

// A replica that tells of more than it should does not fill the memory of others.
func TestWaitsAreBounded(t *testing.T) {
	_, p := waitsPool(t)
	for id := range uint64(10_000) {
		p.ApplyWaits(7, []Waits{{ID: id + 1}}, nil, nil, false)
	}
	b := &board{known: map[uint64]Waits{}}
	b.look(p)
	require.Len(t, b.known, maxWaitsHeard)
	p.ApplyWaits(7, nil, nil, nil, true)
	b.look(p)
	require.Empty(t, b.known)
}

// deaf are peers who are told and do nothing.
type deaf struct{ changed int }

func (d *deaf) Changed()                                    { d.changed++ }
func (*deaf) Routed(*Pool, *Endpoint, []uint64)             {}
func (*deaf) Released(*Pool, ReservationID)                 {}
func (*deaf) Learned(*Pool, prefixindex.LearnedTokens)      {}
func (*deaf) Stuck(*Pool, uint64, *Endpoint, *Endpoint)     {}
func (*deaf) Spend([16]byte, bool) (first, known bool)      { return true, false }
func (*deaf) PutHandOver([16]byte, []byte)                  {}
func (*deaf) TakeHandOver([16]byte) (params []byte, _ bool) { return nil, false }
func (*deaf) KeepTurn([16]byte, []byte, time.Duration)      {}
func (*deaf) TakeTurn([16]byte) (turn []byte, _ bool)       { return nil, false }

// Of those who wait here the first are told, by priority and place; alone nobody is.
func TestWaitsHere(t *testing.T) {
	s, p := waitsPool(t)
	s.Wait(p, Waits{ID: 1})
	require.Empty(t, p.Waits(), "there is nobody to tell")
	peers := &deaf{}
	s.Share(peers)
	for id := range uint64(200) {
		s.Wait(p, Waits{ID: id + 1, Place: -float64(id), Arrived: time.Now()})
	}
	s.Wait(p, Waits{ID: 900, Place: 1e9, Priority: 1})
	require.Equal(t, 201, peers.changed)
	told := p.Waits()
	require.Len(t, told, MaxWaitsTold)
	require.Equal(t, []uint64{900, 200, 199}, []uint64{told[0].ID, told[1].ID, told[2].ID})
	before := told[0].Told
	s.Wait(p, Waits{ID: 900, Priority: 1, PromptTokens: 5})
	require.Greater(t, p.Waits()[0].Told, before)
	s.WaitOver(p, 900, true)
	s.WaitOver(p, 900, true)
	require.Equal(t, 203, peers.changed)
	require.Equal(t, uint64(200), p.Waits()[0].ID)
}
