package kvtransfer

import (
	"context"
	"log/slog"
	"strconv"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"tandem/kvstate"
)

// An endpoint that was away may be another engine when it is back, although no request failed there.
func TestPeersThatWereAway(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		state, e := oneEndpoint()
		starts := 1
		source := PeerSource{Ask: func(context.Context, *kvstate.Endpoint) (Peer, error) {
			return Peer{[]Rank{{EngineID: "start " + strconv.Itoa(starts)}}}, nil
		}}
		peers := source.NewPeers(slog.New(slog.DiscardHandler))
		who := func() string {
			peer, ok := peers.Lookup(t.Context(), e)
			require.True(t, ok)
			return peer.Ranks[0].EngineID
		}
		require.Equal(t, "start 1", who())
		time.Sleep(time.Second)
		starts = 2
		require.Equal(t, "start 1", who(), "it is not asked each time")
		state.Health.Mark(e, false, kvstate.CauseCheck, "")
		time.Sleep(time.Second)
		state.Health.MarkHealthy(e)
		time.Sleep(time.Second)
		require.Equal(t, "start 2", who())
	})
}

// What answers reveal about ranks is forgotten in the same way, rank by rank.
func TestLearnedRanksThatWereAway(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		state, e := oneEndpoint()
		peers := (&PeerSource{}).NewPeers(slog.New(slog.DiscardHandler))
		learn := func(ranks ...Rank) {
			peers.Learn(e.Addr, Peer{ranks})
			time.Sleep(time.Second)
		}
		known := func() []Rank {
			peer, _ := peers.Lookup(t.Context(), e) // which asks nobody
			return peer.Ranks
		}
		a, b, c := Rank{EngineID: "a"}, Rank{EngineID: "b"}, Rank{EngineID: "c"}
		learn(Rank{}, b)
		learn(a)
		require.Equal(t, []Rank{a, b}, known())
		state.Health.Mark(e, false, kvstate.CauseCheck, "")
		state.Health.MarkHealthy(e)
		_, ok := peers.Lookup(t.Context(), e)
		require.False(t, ok)
		time.Sleep(time.Second)
		learn(Rank{}, c)
		require.Equal(t, []Rank{{}, c}, known(), "rank 0 may be another engine, too")
		learn(a)
		require.Equal(t, []Rank{a, c}, known(), "it was not restarted")
	})
}

func oneEndpoint() (*kvstate.State, *kvstate.Endpoint) {
	s := kvstate.New(kvstate.Options{})
	s.SetPool(kvstate.PoolSpec{Name: "chat"}, []kvstate.EndpointSpec{{Addr: "10.0.0.1:1", Role: kvstate.RolePrefill}})
	return s, s.Pool("chat").Endpoint("10.0.0.1:1")
}
