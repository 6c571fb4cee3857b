package e2e

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// rankedFleet returns one prefill and one decode engine with two data-parallel ranks behind a port each.
func rankedFleet(t *testing.T, dialect string) *fleet {
	o := options{dialect: dialect, prefills: 1, decodes: 1}
	o.pool = "  kvEvents: {replayPort: 1, port: 1}\n" // each engine's own ports override these
	o.engine = func(role string, _ int, free func() string) (args []string, fields string) {
		events, replay := twoInARow(free), twoInARow(free)
		args = []string{
			"--model", "tiny", "--connector", dialect, "--dp-size", "2", "--side-channel", "127.0.0.1:" + twoInARow(free),
			"--kv-events", "tcp://*:" + events, "--kv-events-replay", "tcp://*:" + replay,
		}
		fields = ", dataParallelRanks: 2, kvEventsPort: " + events + ", kvReplayPort: " + replay
		if role == "prefill" && (dialect == "sglang" || dialect == "mooncake") {
			bootstrap := free()
			args = append(args, "--bootstrap", bootstrap)
			fields += ", transfer: {bootstrapPort: " + portOf(bootstrap) + "}"
		}
		return args, fields
	}
	return start(t, o)
}

// Data-parallel ranks behind one port are endpoints to the decision: both legs name theirs, a conversation continues
// on the rank that has its KV, and no client chooses one.
func TestDataParallelRanks(t *testing.T) {
	t.Parallel()
	for _, dialect := range []string{"nixl", "nixl-push", "mooncake", "sglang"} {
		t.Run(dialect, func(t *testing.T) {
			f := rankedFleet(t, dialect)
			prefills, decodes := map[int]bool{}, map[int]bool{}
			const conversations = 12
			for turns := 2; turns <= 3; turns++ {
				for i := range conversations {
					id := fmt.Sprint("ranked-", i, "-", turns)
					got := f.post("/v1/chat/completions", conversation(fmt.Sprint("ranked-", i), turns), "x-request-id", id, "x-data-parallel-rank", "7")
					require.Equal(t, 200, got.status, got.body)
					p, d := f.leg(id, f.prefills[0]), f.leg(id, f.decodes[0])
					prefills[p.Rank], decodes[d.Rank] = true, true
					f.namesRank(dialect, p)
					f.namesRank(dialect, d)
					if turns == 3 { // two ranks, two caches: a hit means that it is the same rank
						require.Positive(t, p.CachedTokens, "%s goes on where it was", id)
					}
				}
			}
			require.Len(t, prefills, 2, "both ranks prefill")
			require.Len(t, decodes, 2, "both ranks decode")
			for rank := range 2 {
				at := f.prefills[0].addr + "#" + strconv.Itoa(rank)
				require.Eventually(t, func() bool { return f.sample("tandem_kv_events_blocks", at) > 0 }, patience, 20*time.Millisecond, "KV events of %s", at)
			}
			require.Zero(t, f.sample("tandem_kv_events_blocks", f.prefills[0].addr), "nothing counts for the engine as a whole")
		})
	}
}

// leg returns the one request under an id at an engine. Legs that run at once may have more behind the id.
func (f *fleet) leg(id string, e *engine) seen {
	f.t.Helper()
	legs := slices.DeleteFunc(f.requests("", e), func(s seen) bool { return s.RequestID != id && !strings.HasPrefix(s.RequestID, id+".") })
	require.Len(f.t, legs, 1, "requests of %s", id)
	return legs[0]
}

// namesRank asserts that a leg names the rank that took it, and that the client's value is gone.
func (f *fleet) namesRank(dialect string, s seen) {
	f.t.Helper()
	rank := strconv.Itoa(s.Rank)
	switch {
	case dialect != "sglang":
		require.Equal(f.t, []string{rank}, s.Headers["X-Data-Parallel-Rank"])
		return
	case s.Leg == "prefill": // its room names it
	default:
		require.Equal(f.t, rank, member(f.t.(*testing.T), s.Body, "data_parallel_rank"))
	}
	require.Empty(f.t, s.Headers["X-Data-Parallel-Rank"])
	room := member(f.t.(*testing.T), s.Body, "bootstrap_room")
	last, err := strconv.Atoi(room[len(room)-1:])
	require.NoError(f.t, err)
	if s.Leg == "prefill" {
		require.Equal(f.t, s.Rank, last%2, "room %s", strings.TrimSpace(room))
	}
}
