package kvtransfer

import (
	"encoding/json"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"

	"tandem/extproc/openai"
	"tandem/kvstate"
)

// rankedLegs returns an attempt with rank 2 of P's 3 and rank 1 of D's 2.
func rankedLegs(release string) *Legs {
	return &Legs{
		ID: [16]byte{7, 9}, RequestID: "r",
		Prefill: &kvstate.Endpoint{EndpointSpec: kvstate.EndpointSpec{Addr: "10.0.0.5:8000#2", Ranks: 3, Rank: 2}},
		Decode:  &kvstate.Endpoint{EndpointSpec: kvstate.EndpointSpec{Addr: "10.0.0.6:8000#1", Ranks: 2, Rank: 1, Transfer: kvstate.Transfer{Release: release}}},
	}
}

// The room determines P's rank, a member of D's body its own, under the name of the release.
func TestSGLangRanks(t *testing.T) {
	for release, name := range map[string]string{
		"": "data_parallel_rank", "0.4.9.post6": "data_parallel_rank", "0.5.9": "data_parallel_rank", "0.5.22": "routed_dp_rank", "0.5.23": "routed_dp_rank", "1.0": "routed_dp_rank",
	} {
		for _, prompt := range []string{`"one"`, `["one","two"]`} {
			var r openai.Request
			var p openai.Patch
			require.NoError(t, r.Scan(openai.Completions, []byte(`{"prompt":`+prompt+`}`), openai.Limits{}))
			p.Reset(&r)
			plan, err := newSGLang().Plan(&r, &p, rankedLegs(release))
			require.NoError(t, err)
			var d map[string]json.RawMessage
			require.NoError(t, json.Unmarshal([]byte("{"+string(plan.Decode)+"}"), &d))
			require.Equal(t, "1", string(d[name]), release)
			require.Len(t, d, 4)
			var rooms []int64
			if prompt[0] == '"' {
				rooms = make([]int64, 1)
				require.NoError(t, json.Unmarshal(d["bootstrap_room"], &rooms[0]))
			} else {
				require.NoError(t, json.Unmarshal(d["bootstrap_room"], &rooms))
			}
			for _, room := range rooms {
				require.EqualValues(t, 2, room%3)
			}
			require.Empty(t, plan.PrefillRank, "a header would contradict the room, or the body")
		}
	}
}

// A chosen rank is P's in the header and in D's parameters.
func TestChosenRankOfAPeer(t *testing.T) {
	legs := rankedLegs("")
	legs.Peer = Peer{[]Rank{{EngineID: "e_dp0"}, {EngineID: "e_dp1"}}}
	_, ok := legs.rank()
	require.False(t, ok, "rank 2 is not known yet")
	legs.Peer.Ranks = append(legs.Peer.Ranks, Rank{EngineID: "e_dp2"})
	for i := range 10 {
		legs.ID[8] = byte(i)
		rank, ok := legs.rank()
		require.True(t, ok)
		require.Equal(t, "e_dp2", rank.EngineID)
		require.Equal(t, strconv.Itoa(2), legs.rankHeader())
	}
}
