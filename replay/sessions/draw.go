package sessions

import (
	"math/rand/v2"
	"slices"
)

// Draw draws sessions to play, and when: the same ones for all that play with a seed.
type Draw struct {
	Random *rand.Rand // also of what else is drawn in the course of a play

	all   []Session
	until []float64 // sums of their durations
	seed  uint64
}

// NewDraw returns a draw of some sessions.
func NewDraw(all []Session, seed uint64) *Draw {
	d := &Draw{Random: rand.New(rand.NewPCG(seed, 11)), all: all, seed: seed}
	sum := 0.0
	for i := range all {
		sum += all[i].Duration()
		d.until = append(d.until, sum)
	}
	return d
}

// Within returns a session within its recording, at a time that is drawn at random: the turn that comes next, and the
// seconds until then.
func (d *Draw) Within() (s *Session, next int, wait float64) {
	at := d.Random.Float64() * d.until[len(d.until)-1]
	i, _ := slices.BinarySearch(d.until, at)
	if s = &d.all[i]; i > 0 {
		at -= d.until[i-1]
	}
	for ; next < len(s.Turns)-1; next++ {
		t := &s.Turns[next]
		if at <= t.Think+t.Service {
			break
		}
		at -= t.Think + t.Service
	}
	return s, next, max(s.Turns[next].Think-at, d.Random.Float64()*10)
}

// Anew returns the session that begins as the one with that number, and the seconds until its first turn.
func (d *Draw) Anew(number uint64) (s *Session, wait float64) {
	random := rand.New(rand.NewPCG(d.seed<<32|number, 12))
	s = &d.all[random.IntN(len(d.all))]
	return s, random.Float64() * 10
}
