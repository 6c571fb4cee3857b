package prefixindex

import (
	"fmt"
	"math"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"tandem/internal/budget"

	"github.com/stretchr/testify/require"
)

// usesOf returns the popularity of a block of a prompt, by its steps.
func usesOf(steps []UseStep, block int) float64 {
	for _, s := range steps {
		if block < int(s.Blocks) {
			return float64(s.Uses)
		}
	}
	return 0
}

// Counts are compared with a slow twin that counts every block of every prompt: they are within a fifth of it, and a
// block less than a sixteenth of its depth before a less popular one may count as that.
func TestUsesAgainstTwin(t *testing.T) {
	for seed := range uint64(20) {
		r := rand.New(rand.NewPCG(seed, 1))
		began := time.Unix(1e9, 0)
		u, now := NewUses(began), began
		arrivals := map[uint64][]time.Time{}
		prompt := func() []uint64 { // a tree: long common beginnings, and an end of its own
			kind := r.Uint64N(4)
			hashes := randomPrompt(1+int(kind)*100, kind+1)
			return append(hashes, randomPrompt(r.IntN(200), r.Uint64())...)
		}
		for range 2000 {
			now = now.Add(time.Duration(r.IntN(200)) * time.Millisecond)
			p := prompt()
			u.Note(p, now)
			for _, h := range p {
				arrivals[h] = append(arrivals[h], now)
			}
		}
		twin := func(h uint64) float64 {
			sum := 0.0
			for _, at := range arrivals[h] {
				sum += math.Exp(-now.Sub(at).Minutes())
			}
			return sum
		}
		p := prompt()
		steps := u.Steps(nil, p, now)
		require.LessOrEqual(t, len(steps), MaxUseSteps)
		for i, h := range p {
			want := twin(h)
			if got := usesOf(steps, i); want >= 2 && twin(p[min(i+1+i/16, len(p)-1)]) > want*.9 {
				require.InEpsilon(t, want, got, .25, "seed %d, block %d of %d", seed, i, len(p))
			} else {
				require.LessOrEqual(t, got, want*1.25+.5, "seed %d, block %d of %d", seed, i, len(p))
			}
		}
	}
}

// A new and frequent prompt counts by its rate, before a window has passed; one that no longer comes fades.
func TestUsesFollowTheRate(t *testing.T) {
	began := time.Unix(1e9, 0)
	u, p := NewUses(began), randomPrompt(64, 1)
	u.Note(p, began)
	require.Empty(t, u.Steps(nil, p, began), "one prompt shares nothing")
	now := began
	for range 200 { // ten a second
		now = now.Add(100 * time.Millisecond)
		u.Note(p, now)
	}
	require.InEpsilon(t, 600, usesOf(u.Steps(nil, p, now), 60), .1)
	require.InDelta(t, 75, usesOf(u.Steps(nil, p, now.Add(time.Minute)), 60), 15, "200, faded for a minute and more, of a window and a third")
	require.Empty(t, u.Steps(nil, p, now.Add(10*time.Minute)))
	now = now.Add(time.Hour)
	for range 10 { // it starts again
		now = now.Add(time.Second)
		u.Note(p, now)
	}
	require.InEpsilon(t, 60, usesOf(u.Steps(nil, p, now), 60), .15)
}

// A million other prompts do not displace one that is used occasionally.
func TestUsesAreBounded(t *testing.T) {
	began := time.Unix(1e9, 0)
	u, p := NewUses(began), randomPrompt(64, 1)
	for i := range 100_000 {
		now := began.Add(time.Duration(i) * time.Millisecond)
		if i%2000 == 0 {
			u.Note(p, now)
		}
		u.Note(randomPrompt(20, uint64(i)<<20), now)
	}
	require.InEpsilon(t, 24, usesOf(u.Steps(nil, p, began.Add(100*time.Second)), 60), .25)
}

func TestUsesUnderConcurrency(t *testing.T) {
	u, p, now := NewUses(time.Unix(1e9, 0)), randomPrompt(300, 1), time.Unix(1e9, 0).Add(time.Minute)
	var all sync.WaitGroup
	for range 4 {
		all.Go(func() {
			var steps []UseStep
			for range 1000 {
				u.Note(p, now)
				steps = u.Steps(steps[:0], p, now)
			}
		})
	}
	all.Wait()
	require.Positive(t, usesOf(u.Steps(nil, p, now), 100))
}

func TestUsesAllocate(t *testing.T) {
	now := time.Unix(1e9, 0)
	u, p := NewUses(now), randomPrompt(8192, 1)
	var steps []UseStep
	budget.Allocs(t, 20, 0, func() {
		u.Note(p, now)
		steps = u.Steps(steps[:0], p, now)
	})
}

// BenchmarkUses is the worst case of counting a prompt and finding its counts: all of it is popular.
func BenchmarkUses(b *testing.B) {
	for _, blocks := range []int{430, 8192} {
		b.Run(fmt.Sprint(blocks), func(b *testing.B) {
			now := time.Unix(1e9, 0)
			u, p := NewUses(now), randomPrompt(blocks, 1)
			var steps []UseStep
			b.ReportAllocs()
			for b.Loop() {
				now = now.Add(time.Millisecond)
				u.Note(p, now)
				steps = u.Steps(steps[:0], p, now)
			}
		})
	}
}
