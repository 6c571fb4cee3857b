package admission

import (
	"cmp"
	"slices"
)

// Requests are walked by priority. Within one, those go first that can still keep the pool's promise; among these each
// flow has its turn, and within a turn the key decides. When there is too little capacity for all, some miss the
// promise in any order: if the oldest went first, each would wait until it is too late for it, and all would.

// misses reports whether a request cannot have its first token within the promise any more, wherever it goes.
func (q *Queue) misses(w *Waiting, now float64) bool {
	return q.Promise > 0 && now-w.Arrived+w.Work > q.Promise
}

// mixed reports whether some requests can keep the promise, and some cannot.
func (q *Queue) mixed(now float64) bool {
	if q.Promise <= 0 || len(q.waiting) < 2 {
		return false
	}
	first := q.misses(&q.waiting[0], now)
	for i := range q.waiting {
		if q.misses(&q.waiting[i], now) != first {
			return true
		}
	}
	return false
}

// inOrder returns the order in which to walk the requests, as positions; nil: as they stand. It is a request's turn
// when all flows have got as much as its own, including its earlier requests (start-time fair queueing: Goyal, Vin
// and Cheng, 1996).
func (q *Queue) inOrder(now float64) []int32 {
	flows := q.shares.active >= 2
	if !flows && !q.mixed(now) {
		return nil
	}
	n := len(q.waiting)
	order, turns := slices.Grow(q.order[:0], n)[:n], slices.Grow(q.slots[:0], n)[:n]
	q.order, q.slots = order, turns
	for _, f := range q.shares.flows {
		f.before = q.shares.debt(f)
	}
	for i := range q.waiting {
		w := &q.waiting[i]
		order[i], turns[i] = int32(i), 0
		if flows {
			f := q.shares.flows[w.Flow]
			turns[i] = int32(f.before / shareSlack)
			f.before += w.Work
		}
	}
	slices.SortFunc(order, func(a, b int32) int {
		one, other := &q.waiting[a], &q.waiting[b]
		if by := cmp.Compare(other.Priority, one.Priority); by != 0 {
			return by
		}
		if late := q.misses(one, now); late != q.misses(other, now) {
			if late {
				return 1
			}
			return -1
		}
		return cmp.Or(cmp.Compare(turns[a], turns[b]), cmp.Compare(a, b))
	})
	return order
}
