package picker

import (
	"cmp"
	"slices"
)

// shares keep flows to their part of what a queue sends, as fair queueing does it (generalised processor sharing: Parekh and
// Gallager, 1993): every flow has a time of its own that runs on with the work that is sent for it, and all of them together
// have one that runs as if each got the same. A flow owes what its own time is ahead of the common one.
type shares struct {
	flows  map[uint64]*flow
	active int     // flows that wait
	common float64 // s of work
	spare  []*flow
}

// flow is one of them.
type flow struct {
	waiting int
	own     float64 // s of work
	before  float64 // scratch: work of its requests that stand before the one looked at
}

// maxFlows is how many are remembered that have nothing waiting.
const maxFlows = 4096

// join notes one more request of a flow.
func (s *shares) join(id uint64) {
	if s.flows == nil {
		s.flows = map[uint64]*flow{}
	}
	f := s.flows[id]
	if f == nil {
		f = s.fresh()
		s.flows[id] = f
	}
	if f.waiting++; f.waiting == 1 {
		s.active++
		f.own = max(f.own, s.common) // nobody saves up for later
	}
}

func (s *shares) fresh() *flow {
	if n := len(s.spare); n > 0 {
		f := s.spare[n-1]
		s.spare = s.spare[:n-1]
		return f
	}
	return &flow{}
}

// leave notes one fewer. With the last one everything is forgotten: where nobody waits nobody is wronged.
func (s *shares) leave(id uint64) {
	f := s.flows[id]
	if f.waiting--; f.waiting > 0 {
		return
	}
	s.active--
	if s.active == 0 {
		for id := range s.flows {
			s.forget(id)
		}
		s.common = 0
	} else if f.own <= s.common || len(s.flows) > maxFlows {
		s.forget(id)
	}
}

func (s *shares) forget(id uint64) {
	f := s.flows[id]
	*f = flow{}
	if len(s.spare) < maxFlows {
		s.spare = append(s.spare, f)
	}
	delete(s.flows, id)
}

// sent counts work that was sent for a flow while others waited.
func (s *shares) sent(id uint64, work float64) {
	if s.active == 0 {
		return
	}
	f := s.flows[id]
	if f == nil { // sent on arrival, beside those who wait
		if len(s.flows) > maxFlows {
			return
		}
		f = s.fresh()
		s.flows[id] = f
	}
	f.own = max(f.own, s.common) + work
	s.common += work / float64(s.active)
}

// owes is what a flow got beyond its share, s of work.
func (s *shares) debt(f *flow) float64 { return max(f.own-s.common, 0) }

// turn is how much work, in seconds, a flow may be ahead of others before that counts: within it the shortest goes first,
// whose ever it is.
const shareSlack = 0.5

// inOrder is the order in which those who wait are walked, as positions; nil: as they stand. A request's turn comes when all
// flows have got as much as its own has with what goes before it (start-time fair queueing: Goyal, Vin and Cheng, 1996).
func (q *Queue) inOrder() []int32 {
	if q.shares.active < 2 {
		return nil
	}
	n := len(q.waiting)
	order, turns := grown(&q.order, n), grown(&q.slots, n)
	for _, f := range q.shares.flows {
		f.before = q.shares.debt(f)
	}
	for i := range q.waiting {
		w := &q.waiting[i]
		f := q.shares.flows[w.Flow]
		order[i], turns[i] = int32(i), int32(f.before/shareSlack)
		f.before += w.Work
	}
	slices.SortFunc(order, func(a, b int32) int {
		return cmp.Or(cmp.Compare(q.waiting[b].Priority, q.waiting[a].Priority), cmp.Compare(turns[a], turns[b]), cmp.Compare(a, b))
	})
	return order
}
