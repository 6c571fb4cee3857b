package kvevents

import (
	"errors"
	"sync/atomic"
	"time"

	"tandem/kvstate"
)

// Sink takes what one publisher says, in order. A [kvstate.Feed] is one.
type Sink interface {
	Apply(events []kvstate.BlockEvent)
	Clear() // all that was said is void
}

// replay asks a publisher for its batches from a sequence number on and calls each for them, oldest first. It is an error
// if it cannot be asked, or does not answer to the end.
type replay func(from uint64, each func(seq uint64, payload []byte)) error

// errNoReplay says that a publisher has no replay socket that we know of.
var errNoReplay = errors.New("kvevents: no replay")

// stream puts the batches of one publisher in order. It does no I/O: conn.go brings batches in and asks for old ones.
//
// Numbers start at 0 for each process of an engine. One that is lower than expected is a new process, unless the batch is
// not younger than the last one, which replay has then brought already.
type stream struct {
	sink    Sink
	decoder Decoder
	known   bool    // next is known
	next    uint64  // the number expected
	last    float64 // time of the last batch
	lag     atomic.Int64
	count   counters
}

// counters are a stream's numbers; read at any time.
type counters struct {
	batches, events, malformed, gaps, recovered, lost, restarts atomic.Uint64
}

// connected is called when a connection stands and what comes from now on is received: it brings in what was missed.
func (s *stream) connected(ask replay) error {
	if s.known && s.next > 0 {
		same := false // the engine is the one that we know
		from := s.next - 1
		err := ask(from, func(seq uint64, payload []byte) {
			if seq == from {
				batch, err := s.decoder.Batch(payload)
				same = err == nil && batch.Time == s.last
			} else if same {
				s.replayed(seq, payload)
			}
		})
		if errors.Is(err, errNoReplay) {
			return nil // the next number will tell
		}
		if same || err != nil {
			return err
		}
		s.count.restarts.Add(1)
		s.forget()
	}
	err := ask(0, s.replayed)
	if errors.Is(err, errNoReplay) {
		return nil
	}
	return err
}

// replayed takes a batch that was asked for.
func (s *stream) replayed(seq uint64, payload []byte) {
	switch {
	case s.known && seq < s.next:
		return
	case s.known && seq > s.next: // what is between is not kept any more
		s.count.lost.Add(1)
		s.sink.Clear()
	}
	s.apply(seq, payload)
}

// live takes a batch as it is published.
func (s *stream) live(seq uint64, payload []byte, ask replay) {
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
		s.known, s.next = true, 0
		if seq > 0 && ask(0, s.replayed) != nil || s.next < seq {
			s.next = seq // what was before is not known, and need not be
		}
	case seq > s.next:
		s.count.gaps.Add(1)
		if err := ask(s.next, s.replayed); err == nil && s.next >= seq {
			s.count.recovered.Add(1)
		} else {
			s.count.lost.Add(1)
			s.sink.Clear()
			s.next = max(s.next, seq)
		}
	}
	if seq == s.next {
		s.apply(seq, payload)
	}
}

func (s *stream) apply(seq uint64, payload []byte) {
	s.known, s.next = true, seq+1
	batch, err := s.decoder.Batch(payload)
	if err != nil { // what it said is lost
		s.count.malformed.Add(1)
		s.count.lost.Add(1)
		s.sink.Clear()
		return
	}
	s.last = batch.Time
	s.sink.Apply(batch.Events)
	s.count.batches.Add(1)
	s.count.events.Add(uint64(len(batch.Events)))
	s.lag.Store(int64(time.Since(time.UnixMicro(int64(batch.Time * 1e6)))))
}

// forget makes the publisher one of which nothing is known.
func (s *stream) forget() {
	s.known, s.next, s.last = false, 0, 0
	s.sink.Clear()
}
