package kvstate

import "time"

// generations is a map that forgets what is older than its time to live, in two generations: a new one begins when the
// current one is that old, and the one before is dropped. So an entry is kept for at least the time to live, and for
// twice as long at most. Its user guards it.
type generations[K comparable, V any] struct {
	ttl      time.Duration
	began    time.Time
	now, old map[K]V
}

func newGenerations[K comparable, V any](ttl time.Duration) generations[K, V] {
	return generations[K, V]{ttl: ttl, began: time.Now(), now: map[K]V{}}
}

func (g *generations[K, V]) find(k K) (v V, ok bool) {
	if v, ok = g.now[k]; !ok {
		v, ok = g.old[k]
	}
	return v, ok
}

// age begins a new generation if it is time.
func (g *generations[K, V]) age(now time.Time) {
	if now.Sub(g.began) > g.ttl {
		g.renew(now)
	}
}

// renew begins a new generation.
func (g *generations[K, V]) renew(now time.Time) { g.old, g.now, g.began = g.now, map[K]V{}, now }
