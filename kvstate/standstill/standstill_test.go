package standstill

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// Each row is an engine that is scraped every 2 s. A letter is a scrape: w shows work, s the same counts as before, i
// no requests, q requests that wait, f a scrape that failed. stands is how many scrapes pass until the engine counts as standing; 0: never.
func TestStandstill(t *testing.T) {
	const busy = 3
	for name, tt := range map[string]struct {
		scrapes  string
		reserved int64         // with i: requests that only reservations know of
		patience time.Duration // of prompts
		lease    time.Duration
		silent   bool // the engine reports nothing but its running requests
		stands   int
	}{
		"works":                        {scrapes: "wwwwwwwwwwww"},
		"stands":                       {scrapes: "wssssss", stands: 4},
		"the least of scrapes":         {scrapes: "wfffffs"},
		"and a failed one":             {scrapes: "wsfsss", stands: 4},
		"a long prompt":                {scrapes: "wsssssssss", patience: 8 * time.Second, stands: 8},
		"never longer than the lease":  {scrapes: "wsssssssssss", patience: time.Hour, stands: 9},
		"a short lease":                {scrapes: "wsssss", lease: 6 * time.Second, stands: 3},
		"idle":                         {scrapes: "wiiiiiiiiiiii"},
		"a request in its API server":  {scrapes: "wiiiiii", reserved: 1, stands: 5},
		"nothing but waiting":          {scrapes: "wqqqqqqqqqqq", stands: 10},
		"a restart":                    {scrapes: "wssswsss"},
		"reports nothing, and no work": {scrapes: "iiiiiiiiiiii", reserved: 1, silent: true},
	} {
		t.Run(name, func(t *testing.T) {
			var k Tracker
			k.SetLease(tt.lease, false)
			at, work, stood := time.Unix(1e9, 0), int64(100), 0
			for i, c := range tt.scrapes {
				at = at.Add(2 * time.Second)
				s := Sample{At: at, Reserved: tt.reserved, Patience: tt.patience}
				s.Counts = Counts{Work: work, Running: busy}
				switch c {
				case 'f':
					continue
				case 'w':
					work++
					s.Counts.Work = work
				case 'q':
					s.Counts.Running, s.Counts.Waiting = 0, 1
				case 'i':
					s.Counts.Running = 0
				}
				if c == 'i' && i > 0 && tt.scrapes[i-1] == 'w' {
					k.Observe(Sample{At: at.Add(-time.Second), Counts: s.Counts})
				}
				if tt.silent {
					s.Counts = Counts{Running: -1, Waiting: -1}
				}
				if k.Observe(s) == Stood {
					require.Zero(t, stood, "reported once")
					stood = i
				}
				require.Equal(t, stood > 0 && i >= stood, k.Standing(at), i)
			}
			require.Equal(t, tt.stands, stood)
		})
	}
}

// An engine that goes on counts again, and what it stood is remembered.
func TestGoesOn(t *testing.T) {
	var k Tracker
	began := time.Unix(1e9, 0)
	at := func(s int) time.Time { return began.Add(time.Duration(s) * time.Second) }
	see := func(s int, work int64) Change {
		return k.Observe(Sample{At: at(s), Counts: Counts{Work: work, Running: 1}})
	}

	_, known := k.Longest(at(0), at(1))
	require.False(t, known)
	require.Equal(t, Same, see(0, 1))
	require.Equal(t, Same, see(2, 2))
	for s := 4; s < 10; s += 2 {
		require.Equal(t, Same, see(s, 2))
	}
	require.Equal(t, Stood, see(10, 2))
	require.Equal(t, Same, see(12, 2))
	stood, known := k.Longest(at(9), at(13))
	require.True(t, known)
	require.Equal(t, 11*time.Second, stood, "since it worked last")
	require.Equal(t, Moved, see(14, 3))
	require.False(t, k.Standing(at(14)))
	stood, _ = k.Longest(at(9), at(15))
	require.Equal(t, 12*time.Second, stood)
	stood, _ = k.Longest(at(14), at(15))
	require.Zero(t, stood, "it is over")
	stood, _ = k.Longest(at(14), at(50))
	require.Equal(t, 36*time.Second, stood, "who answers no scrape shows no progress")

	see(52, 3)
	see(54, 3)
	require.Equal(t, Stood, see(56, 3))
	require.True(t, k.Standing(at(57)))
	require.False(t, k.Standing(at(90)), "no scrape says so any more")
}

// Reservations that nobody releases do not keep an idle engine away for long.
func TestLostReservations(t *testing.T) {
	var k Tracker
	at, stood := time.Unix(1e9, 0), 0
	observe := func(reserved int64) {
		at = at.Add(2 * time.Second)
		k.Observe(Sample{At: at, Reserved: reserved, Counts: Counts{Work: 1}})
		if k.Standing(at) {
			stood++
		}
	}
	for range 300 {
		observe(1)
	}
	require.InDelta(t, 26, stood, 3, "a minute, less the bound")
	stood = 0
	for range 10 {
		observe(2)
	}
	require.Positive(t, stood, "one more is new")
}

// Where nothing renews a lease, an answer that begins after it is outdated, unless a scrape showed that no request waited
// while the lease ran. A letter is a scrape, every 2 s from the request on: q shows requests that wait, r only such that
// run, f failed.
func TestFinalLease(t *testing.T) {
	const lease = 40 * time.Second // the last moment is after 20 s
	for name, tt := range map[string]struct {
		scrapes string
		want    Reason
	}{
		"early":                        {"qqqqqqqqq", ""},
		"at the last moment":           {"qqqqqqqqqq", Late},
		"waits for long":               {"qqqqqqqqqqqqqqqq", Late},
		"its turn came":                {"qqqqqrrrrrrrrrrr", ""},
		"and others wait since":        {"qqqqrqqqqqqqqqqq", ""},
		"its turn came too late":       {"qqqqqqqqqqrrrrrr", Late},
		"the queue did not know it":    {"rrqqqqqqqqqqqqqq", Late},
		"nothing is known":             {"rffffffffffffffr", Late},
		"works all the time":           {"rrrrrrrrrrrrrrrr", ""},
		"many changes, and it is long": {"r" + strings.Repeat("qr", 40), Late},
	} {
		t.Run(name, func(t *testing.T) {
			var d Tracker
			d.SetLease(lease, true)
			since := time.Unix(1e9, 0)
			at := since
			for i, c := range tt.scrapes {
				at = at.Add(2 * time.Second)
				s := Sample{At: at, Counts: Counts{Work: int64(i), Running: 1}}
				if c == 'q' {
					s.Counts.Waiting = 3
				}
				if c != 'f' {
					d.Observe(s)
				}
			}
			require.Equal(t, tt.want, Outdated(nil, &d, since, at))
			require.Empty(t, Outdated(&d, &d, at, at), "a later request")
		})
	}
}
