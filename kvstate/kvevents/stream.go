package kvevents

import (
	"errors"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"tandem/kvstate"
	"tandem/kvstate/prefixindex"
)

// Sink takes what one publisher says, in order. A [prefixindex.Feed] is one.
type Sink interface {
	Apply(events []prefixindex.BlockEvent)
	Clear()   // all that was said is void
	Suspect() // some of it may be, and cannot be asked for again
}

// replay asks a publisher for its batches from a sequence number on and calls each for them, oldest first. It is an error
// if it cannot be asked, or does not answer to the end.
type replay func(from uint64, each func(seq uint64, payload []byte)) error

// errNoReplay says that a publisher has no replay socket that we know of.
var errNoReplay = errors.New("kvevents: no replay")

// stream puts the batches of one publisher in order. It does no I/O: conn.go brings batches in and asks for old ones. Other
// replicas that listen to the publisher bring batches in as well (follow.go), while this one does not.
//
// Numbers start at 0 for each process of an engine. One that is lower than expected is a new process, unless the batch is
// not younger than the last one, which replay has then brought already.
type stream struct {
	mu      sync.Mutex // not held while a replay is waited for
	sink    Sink
	tell    func(kvstate.Collected) // what was taken from the publisher; nil: nobody wants to know
	decoder Decoder
	deaf    bool          // the connection is given up: what still comes over it is not taken
	known   bool          // next is known
	learned bool          // and from another replica
	next    uint64        // the number expected
	last    float64       // time of the last batch
	epoch   uint64        // drawn when all before was void last; others have it from us, or we from them
	void    bool          // what others were told is void, and they have not been told that
	hole    *uint64       // the number expected before batches were lost that are only doubted
	relayed chan struct{} // another replica has brought something; nil: there is none
	lag     atomic.Int64
	count   counters
}

// counters are a stream's numbers; read at any time.
type counters struct {
	batches, events, malformed, gaps, recovered, lost, restarts, relayed, missed atomic.Uint64
}

// connected is called when a connection stands and what comes from now on is received: it brings in what was missed.
func (s *stream) connected(ask replay) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.known && s.next > 0 {
		kept, same, on := false, false, false // the last batch that we know is kept; it is the same one; there are later ones
		from, last := s.next-1, s.last
		err := s.asking(ask, from, func(seq uint64, payload []byte) {
			if seq == from {
				batch, err := s.decoder.Batch(payload)
				kept, same = true, err == nil && batch.Time == last
				return
			}
			if on = true; same {
				s.replayed(seq, payload)
			}
		})
		if errors.Is(err, errNoReplay) {
			return nil // the next number will tell
		}
		if same || err != nil || s.deaf { // deaf: what came was not looked at
			return err
		}
		if on && !kept { // it has gone on for longer than it keeps batches
			s.count.gaps.Add(1)
			s.count.lost.Add(1)
		} else {
			s.count.restarts.Add(1)
		}
		s.forget()
	}
	err := s.asking(ask, 0, s.replayed)
	if errors.Is(err, errNoReplay) {
		return nil
	}
	return err
}

// asking asks for batches, and calls each for them, without holding the lock while it waits.
func (s *stream) asking(ask replay, from uint64, each func(seq uint64, payload []byte)) error {
	s.mu.Unlock()
	defer s.mu.Lock()
	return ask(from, func(seq uint64, payload []byte) {
		s.mu.Lock()
		defer s.mu.Unlock()
		if !s.deaf {
			each(seq, payload)
		}
	})
}

// replayed takes a batch that was asked for.
func (s *stream) replayed(seq uint64, payload []byte) {
	switch {
	case !s.known:
		s.void = true // what was before is not known
	case seq < s.next:
		return
	case seq > s.next: // what is between is not kept any more
		s.count.lost.Add(1)
		s.clear()
	}
	s.apply(seq, payload, true)
}

// live takes a batch as it is published.
func (s *stream) live(seq uint64, payload []byte, ask replay) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.deaf {
		return
	}
	before := s.last
	if s.known && seq < s.next {
		batch, err := s.decoder.Batch(payload)
		if err != nil {
			s.count.malformed.Add(1)
			return
		}
		if batch.Time <= s.last {
			return // replay was faster
		}
		s.count.restarts.Add(1)
		s.forget()
	}
	switch {
	case !s.known:
		s.known, s.next, s.void = true, 0, true
		if seq > 0 && s.asking(ask, 0, s.replayed) != nil || s.next < seq {
			s.next = seq // what was before is not known, and need not be
		}
	case seq > s.next:
		s.close(seq, ask)
	}
	if seq == s.next && !s.deaf {
		s.apply(seq, payload, false)
	}
	if s.last != before && !s.deaf {
		s.took(s.last)
	}
}

// close brings in what is missing before batch seq, or does without it.
func (s *stream) close(seq uint64, ask replay) {
	s.count.gaps.Add(1)
	err := s.asking(ask, s.next, s.replayed)
	learned := errors.Is(err, errNoReplay) && s.learned
	if learned {
		s.awaitRelay(seq)
	}
	switch {
	case s.deaf:
	case (err == nil || learned) && s.next >= seq:
		s.count.recovered.Add(1)
	case learned: // while one replica took over from another: a few seconds' worth
		s.sink.Suspect()
		from := s.next
		s.hole, s.next = &from, seq
	default:
		s.count.lost.Add(1)
		s.clear()
		s.next = max(s.next, seq)
	}
}

// relayWait is how long a batch that was missed may take to come from another replica.
const relayWait = 500 * time.Millisecond

// awaitRelay waits until another replica has brought in all before batch seq, or does not.
func (s *stream) awaitRelay(seq uint64) {
	if s.relayed == nil {
		return
	}
	late := time.NewTimer(relayWait)
	defer late.Stop()
	for s.next < seq && !s.deaf {
		s.mu.Unlock()
		waiting := true
		select {
		case <-s.relayed:
		case <-late.C:
			waiting = false
		}
		s.mu.Lock()
		if !waiting {
			return
		}
	}
}

// apply takes a batch; an old one did not come as it was published.
func (s *stream) apply(seq uint64, payload []byte, old bool) {
	s.known, s.learned, s.next = true, false, seq+1
	batch, err := s.decoder.Batch(payload)
	if err != nil { // what it said is lost
		s.count.malformed.Add(1)
		s.count.lost.Add(1)
		s.clear()
		return
	}
	s.last = batch.Time
	s.sink.Apply(batch.Events)
	s.count.batches.Add(1)
	s.count.events.Add(uint64(len(batch.Events)))
	s.say(kvstate.Collected{From: seq, Next: seq + 1, Time: batch.Time, Events: batch.Events, Old: old})
}

// took notes how old the last batch was when it was taken, if it came as it was published: one that was asked for is as old as it is.
func (s *stream) took(at float64) { s.lag.Store(int64(time.Since(time.UnixMicro(int64(at * 1e6))))) }

// say tells others what was taken, and what has become of all before.
func (s *stream) say(c kvstate.Collected) {
	if s.hole != nil {
		c.From, c.Doubt, s.hole = *s.hole, true, nil
	}
	if s.void {
		s.epoch = rand.Uint64() | 1
	}
	c.Reset, s.void, c.Epoch = s.void, false, s.epoch
	if s.tell != nil {
		s.tell(c)
	}
}

// forget makes the publisher one of which nothing is known.
func (s *stream) forget() {
	s.known, s.learned, s.next, s.last = false, false, 0, 0
	s.clear()
}

func (s *stream) clear() {
	s.sink.Clear()
	s.void, s.hole = true, nil
}
