package standstill

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// Each row is an engine that is scraped every 2 s. A letter is a scrape:
//
//	w  it has worked since the last one: counters have risen, and requests run
//	d  it has worked, finished one answer, and reports no requests
//	k  only its use of memory has changed: a step of a long prompt
//	r  it was started again: counters fall
//	s  requests run, and nothing has changed
//	q  requests wait, none runs, and nothing has changed
//	i  it reports no requests, and nothing has changed
//	f  the scrape failed
//
// A digit before a letter: from here on so many requests are reserved there. stands is how many scrapes pass until the
// engine counts as standing; 0: never.
func TestStandstill(t *testing.T) {
	for name, tt := range map[string]struct {
		scrapes  string
		patience time.Duration // of prompts
		lease    time.Duration
		partners bool // it waits for others' work
		silent   bool // the engine reports nothing but its running requests
		fresh    bool // it has not worked yet
		stands   int
	}{
		"works":                        {scrapes: "3wwwwwwwwwwww"},
		"stands":                       {scrapes: "3wssssss", stands: 4},
		"stands before it has worked":  {scrapes: "i1sssssssssss", fresh: true, stands: 10},
		"the least of scrapes":         {scrapes: "3wfffffs"},
		"and a failed one":             {scrapes: "3wsfsss", stands: 4},
		"never longer than the lease":  {scrapes: "3wsssssssssss", patience: time.Hour, stands: 9},
		"a short lease":                {scrapes: "3wsssss", lease: 6 * time.Second, stands: 3},
		"idle":                         {scrapes: "wiiiiiiiiiiii"},
		"reports nothing, and no work": {scrapes: "1iiiiiiiiiiii", silent: true},

		"a long prompt in one step":           {scrapes: "1wssssssss", patience: 8 * time.Second, stands: 8},
		"a long prompt in many":               {scrapes: "1wkkkkkkkkkkkk"},
		"a full queue behind it":              {scrapes: "9wkkkkkkkkkkkk"},
		"started again":                       {scrapes: "1wsssrsss"},
		"started again, with no requests":     {scrapes: "1wssr0iiiiiiii"},
		"waits for memory, or for a partner":  {scrapes: "2wqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqq"},
		"others come there, and it sees them": {scrapes: "2wqqqqqq3wqqqqqq4wqqqqqqqqqqq"},
		"others come there, and it does not":  {scrapes: "2wqqqqqq4qqqqqq", stands: 10},

		"requests in its API server":               {scrapes: "wi1iiiiii", stands: 5},
		"some came before it had worked last":      {scrapes: "wi1w2iiiiii", stands: 7},
		"it had finished one of two":               {scrapes: "i2diiiiii", stands: 5},
		"a client does not read its answer":        {scrapes: "i1diiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiii"},
		"nor that of a long one":                   {scrapes: "i1wwsswdiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiii"},
		"it does not, and another one does":        {scrapes: "i1diiii2d1iiiii"},
		"prefill computes, or pushes, for decode":  {scrapes: "wi3iiiiiiiiiiiiiii", partners: true},
		"the legs meet, and decode stands running": {scrapes: "3wsssss", partners: true, stands: 4},
	} {
		t.Run(name, func(t *testing.T) {
			var k Tracker
			k.Configure(HandOver{Lease: tt.lease, Partners: tt.partners})
			at, s, stood, scrape := time.Unix(1e9, 0), Sample{Patience: tt.patience}, 0, -1
			if s.Counts.Work = 100; tt.fresh {
				s.Counts.Work = 1
			}
			for _, c := range tt.scrapes {
				if c >= '0' && c <= '9' {
					s.Reserved = int64(c - '0')
					continue
				}
				at, scrape = at.Add(2*time.Second), scrape+1
				s.At, s.Counts.Running, s.Counts.Waiting = at, 0, 0
				switch c {
				case 'f':
					continue
				case 'w':
					s.Counts.Work, s.Counts.Running = s.Counts.Work+1, s.Reserved
				case 'd':
					s.Counts.Work, s.Counts.Done = s.Counts.Work+1, s.Counts.Done+1
				case 'k':
					s.Counts.Usage, s.Counts.Running = s.Counts.Usage+0.01, 1
				case 'r':
					s.Counts.Work, s.Counts.Done = 1, 0
				case 's':
					s.Counts.Running = s.Reserved
				case 'q':
					s.Counts.Waiting = 2
				}
				if tt.silent {
					s.Counts = Counts{Running: -1, Waiting: -1}
				}
				if k.Observe(s) == Stood {
					require.Zero(t, stood, "reported once")
					stood = scrape
				}
				require.Equal(t, stood > 0 && scrape >= stood, k.Standing(at), scrape)
			}
			require.Equal(t, tt.stands, stood)
		})
	}
}

// What an engine that waits reads later may be foreign by then, although it is not taken for one that stands.
func TestWaitingProvesNothing(t *testing.T) {
	var k Tracker
	at := time.Unix(1e9, 0)
	for i := range 10 {
		k.Observe(Sample{At: at.Add(time.Duration(2*i) * time.Second), Reserved: 1, Counts: Counts{Work: 9, Waiting: 1}})
	}
	now := at.Add(19 * time.Second)
	require.False(t, k.Standing(now))
	stood, known := k.Longest(at, now)
	require.True(t, known)
	require.Equal(t, 19*time.Second, stood)
	require.Equal(t, StoodStill, Outdated(nil, &k, at, now))
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
		k.Observe(Sample{At: at, Reserved: reserved, Counts: Counts{Work: 9}})
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
			d.Configure(HandOver{Lease: lease, Final: true})
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
