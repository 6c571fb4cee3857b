package kvstate

// Peers are the other replicas, as a State reaches them (package redisstore). Its first half is told what others should
// know; these calls come from the request path, so they copy what they need and return. Its second half asks what only all
// replicas together can answer; each of these has a deadline of its own, of milliseconds, and says when it has no answer.
type Peers interface {
	// Changed says that a booking, a failure or a signal of some endpoint is not what it was.
	Changed()
	// Routed says that an endpoint was sent a prompt with these blocks.
	Routed(p *Pool, e *Endpoint, hashes []uint64)
	// Released says that a reservation that another replica made is over.
	Released(p *Pool, id ReservationID)
	// Stuck says where a session was served; either may be nil.
	Stuck(p *Pool, session uint64, prefill, decode *Endpoint)

	// Spend notes that a ticket is used. first is whether nobody had; it means nothing unless known.
	Spend(ticket [16]byte) (first, known bool)
	// PutHandOver keeps params where every replica finds them.
	PutHandOver(ref [16]byte, params []byte)
	// TakeHandOver returns what a replica has put there.
	TakeHandOver(ref [16]byte) ([]byte, bool)
}

// Share connects the state with other replicas. To be called once, before the state is in use.
func (s *State) Share(p Peers) { s.peers = p }

func (s *State) changed() {
	if s.peers != nil {
		s.peers.Changed()
	}
}

// ReleaseWherever ends a reservation that any replica may have made: whoever has made it is told that it is over. (It would
// learn that from Envoy's log too, but as much as a second later.)
func (s *State) ReleaseWherever(p *Pool, id ReservationID) {
	if id != 0 && !s.Release(id) && s.peers != nil {
		s.peers.Released(p, id)
	}
}

// ApplyRouted is [State.Routed] by another replica.
func (s *State) ApplyRouted(p *Pool, e *Endpoint, hashes []uint64) { p.index.add(e.routed, hashes) }

// ApplyFailed is [State.MarkFailed] or [State.MarkGood] by another replica.
func (s *State) ApplyFailed(e *Endpoint, failed bool) { e.failed.Store(failed) }

// SetOthers says what all other replicas have booked on an endpoint.
func (e *Endpoint) SetOthers(requests, promptTokens int64) {
	e.othersRequests.Store(requests)
	e.othersTokens.Store(promptTokens)
}

// Others is what other replicas have booked on the endpoint.
func (e *Endpoint) Others() (requests, promptTokens int64) {
	return e.othersRequests.Load(), e.othersTokens.Load()
}
