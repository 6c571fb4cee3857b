package admission

// shares gives each flow a fair share of the dispatched work (generalised processor sharing: Parekh and Gallager,
// 1993). Every flow has a virtual time, which advances with the work dispatched for it. The common virtual time
// advances as if all flows got equal shares. A flow's debt is the difference between its own time and the common one.
type shares struct {
	flows  map[uint64]*flow
	active int     // flows with waiting requests
	common float64 // s of work
	spare  []*flow
}

// flow is the state of one flow.
type flow struct {
	waiting int
	own     float64 // s of work
	before  float64 // scratch: work of its requests before the current one
}

// maxFlows bounds the flows without waiting requests.
const maxFlows = 4096

// join adds a request of a flow.
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
		f.own = max(f.own, s.common) // unused shares are lost
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

// leave removes a request. With the last one all state is dropped: without competition there are no debts.
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
	if f == nil { // sent on arrival, while others wait
		if len(s.flows) > maxFlows {
			return
		}
		f = s.fresh()
		s.flows[id] = f
	}
	f.own = max(f.own, s.common) + work
	s.common += work / float64(s.active)
}

// debt returns the work that a flow got beyond its share, s.
func (s *shares) debt(f *flow) float64 { return max(f.own-s.common, 0) }

// shareSlack is the debt in seconds of work that is ignored: within it the shortest request goes first, whatever
// its flow.
const shareSlack = 0.5
