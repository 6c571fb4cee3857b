package replay

import (
	"io"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"tandem/replay/sessions"
)

// threeTurns: the second repeats the first one's prompt and answer, the third breaks off within the second's prompt.
const threeTurns = `{"session":1,"tools":1000,"system":100,"turns":[[0,0,0,0,3000,700,"t",9],[20,5,1,2944,4100,100,"e",5],` +
	`[60,30,1,2048,6000,50,"e",5]]}`

// closed plays sessions on engines of 1M tokens.
func closed(t *testing.T, text, policy string, engines int, kv float64, o Closed) *ClosedResult {
	t.Helper()
	var err error
	o.Sessions, err = sessions.Read("by hand", strings.NewReader(text))
	require.NoError(t, err)
	c := DefaultConfig()
	c.Both, c.Engine.KVTokens = engines, kv
	who, err := ParseContender(policy)
	require.NoError(t, err)
	r, err := RunContenders(t.Context(), []Contender{who}, []uint64{1}, c, o, io.Discard)
	require.NoError(t, err)
	return r[0][0]
}

// One session at a time finds all that it had, at whoever's engine, to the token: it is as fast as on an idle engine,
// and its turns wait for the answers before them.
func TestOneSession(t *testing.T) {
	o := Closed{Active: 1, Warm: 100, Measured: 3600, Drain: 100}
	idle := closed(t, threeTurns, "idle", 2, 1e6, o)
	require.InDelta(t, 1, idle.Slowdown, 1e-9)
	for _, policy := range []string{"tandem/never", "thunderagent", "llm-d-in-flight/never", "lru", "belady"} {
		r := closed(t, threeTurns, policy, 2, 1e6, o)
		require.Zero(t, r.Again.All, policy)
		require.InDelta(t, 1, r.Slowdown, .05, policy)
		require.InDelta(t, 1, r.Good, 0, policy)
		require.InDelta(t, idle.Turns, r.Turns, 6, policy)
	}
	require.InDelta(t, 3*3600/55., idle.PerHour, 20, "a session takes about 55 s")
}

// What is computed again is told by its cause: memory for one of two sessions makes each discard the other's KV, and a
// policy that is blind to KV leaves it at the other engine.
func TestComputedAgain(t *testing.T) {
	o := Closed{Active: 6, Warm: 0, Measured: 3600, Drain: 100}
	evicted := closed(t, threeTurns, "llm-d-in-flight/never", 2, 8000, o).Again
	require.Greater(t, evicted.Evicted, .1)
	require.Less(t, evicted.Elsewhere, .02)
	elsewhere := closed(t, threeTurns, "random", 4, 1e6, o).Again
	require.Greater(t, elsewhere.Elsewhere, .1)
	require.Less(t, elsewhere.Evicted, .03, "what an engine has of a block that it has not whole counts as nowhere")
	require.InDelta(t, elsewhere.All, elsewhere.Evicted+elsewhere.Elsewhere+elsewhere.Preempted, 1e-9)
}

// Pooled memory is the engines' KV memory, or their host memory if that is larger: it has copies of the KV.
func TestPooledMemory(t *testing.T) {
	o := Closed{Active: 6, Warm: 100, Measured: 3600, Drain: 100, HostRate: 1e6}
	for _, x := range []struct {
		host  float64
		again bool
	}{{0, true}, {4000, true}, {80_000, false}} {
		o.HostTokens = x.host
		for _, policy := range []string{"lru", "belady"} {
			require.Equal(t, x.again, closed(t, threeTurns, policy, 2, 8000, o).Again.Evicted > 0, "%s, %v", policy, x.host)
		}
	}
}

// Each turn that is not good has one cause: what was evicted, where memory is short, what another engine has, where a
// policy is blind to KV, and others before it, where sessions ask for more than engines compute.
func TestMisses(t *testing.T) {
	sum := func(r *ClosedResult) int {
		m := r.Misses
		return m.Long + m.Evicted + m.Elsewhere + m.Waited + m.Written
	}
	// of 100,000 tokens, which take 13 s, a turn finds all but 200
	const turns = `{"session":1,"tools":0,"system":0,"turns":[[0,0,0,0,100000,100,"t",9],[9,5,1,99968,100300,100,"t",5],` +
		`[9,5,1,100288,100600,50,"e",5]]}`
	for _, x := range []struct {
		policy  string
		kv      float64
		active  int
		engines int
		most    func(Misses) int
	}{
		{"idle", 1e6, 2, 2, func(m Misses) int { return m.Long }}, // each session's first turn
		{"random", 1e6, 2, 8, func(m Misses) int { return m.Elsewhere }},
		{"llm-d-in-flight/never", 150_000, 4, 2, func(m Misses) int { return m.Evicted }},
		{"tandem", 1e6, 40, 2, func(m Misses) int { return m.Waited }},
	} {
		r := closed(t, turns, x.policy, x.engines, x.kv, Closed{Active: x.active, Warm: 100, Measured: 3600, Drain: 100})
		require.InDelta(t, float64(r.Turns)*(1-r.Good), sum(r), .01, "%s: %+v", x.policy, r.Misses)
		most := x.most(r.Misses)
		for _, other := range []int{r.Misses.Evicted, r.Misses.Elsewhere, r.Misses.Waited, r.Misses.Written} {
			require.GreaterOrEqual(t, most, other, "%s: %+v", x.policy, r.Misses)
		}
		require.Positive(t, most, x.policy)
	}
}

// A fleet that cannot serve its sessions keeps users waiting for ever, or until they give up; who gave up takes nothing
// from the engines any more.
func TestGivingUp(t *testing.T) {
	const long = `{"session":1,"tools":0,"system":0,"turns":[[0,0,0,0,200000,700,"t",9],[20,5,0,0,200000,100,"e",5]]}`
	for _, policy := range []string{"tandem", "least-requests", "kairos", "thunderagent", "autellix", "lru"} {
		o := Closed{Active: 12, Warm: 300, Measured: 900, Drain: 300}
		patient := closed(t, long, policy, 2, 1e6, o)
		require.Zero(t, patient.GaveUp, policy)
		o.Patience = 60
		r := closed(t, long, policy, 2, 1e6, o)
		if policy == "lru" { // it has no queues
			require.Zero(t, r.GaveUp)
			continue
		}
		require.Positive(t, r.GaveUp, policy)
		require.LessOrEqual(t, r.TTFT.P99, 60.1, policy)
		require.Greater(t, patient.TTFT.P95, 60., policy)
	}
}

// The number of sessions follows the day, and sessions that come at a rate come at that rate.
func TestSessionsOfADay(t *testing.T) {
	o := Closed{Active: 4, Most: 40, Day: 7200, Warm: 0, Measured: 7200}
	r := closed(t, threeTurns, "idle", 2, 1e6, o)
	peak, night := r.Quarters[3]+r.Quarters[4], r.Quarters[0]+r.Quarters[7]
	require.Greater(t, peak, 5*night)
	require.InEpsilon(t, r.Quarters[1]+r.Quarters[2]+1, r.Quarters[5]+r.Quarters[6]+1, .1, "and back")
	r = closed(t, threeTurns, "idle", 2, 1e6, Closed{Active: 1, PerHour: 300, Measured: 36_000})
	require.InEpsilon(t, 900, r.PerHour, .1, "three turns each")
}
