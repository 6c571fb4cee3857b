package kvevents

import (
	"bytes"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"tandem/kvstate"
	"tandem/kvstate/prefixindex"
)

// Sink receives the reports of one publisher, in order. A [prefixindex.Feed] is one.
type Sink interface {
	Apply(events []prefixindex.BlockEvent)
	Clear() // everything reported before is void
}

// replay asks a publisher for its batches from a sequence number on and calls each for them, oldest first. It is an
// error if it cannot be asked, or does not answer to the end.
type replay func(from uint64, each func(seq uint64, payload []byte)) error

// errNoReplay: no replay socket of the publisher is known.
var errNoReplay = errors.New("kvevents: no replay")

// stream puts the batches of one publisher in order. It does no I/O: subscription.go brings live batches, and
// replay.go old ones. One goroutine at a time calls connected, live and position.
//
// Numbers start at 0 for each process of an engine. A number below the expected one means a new process, unless the
// batch is not newer than the last one: then a replay has brought it already.
//
// A replica that starts keeps batches back while it is joining: another replica's feed may be loaded (load), which
// they continue.
type stream struct {
	mu        sync.Mutex // not held during a replay
	sink      Sink
	decoder   Decoder
	known     bool    // next is known
	next      uint64  // the number expected
	last      float64 // of the last batch
	joining   bool
	loading   bool // a part of a feed was loaded and more are to come
	kept      []keptBatch
	keptBytes int
	lag       atomic.Int64
	count     counters
}

// keptBatch is a batch that arrived while the stream was joining.
type keptBatch struct {
	seq     uint64
	payload []byte
}

// maxKept bounds the bytes of the kept batches: some 5 s of an engine that stores and evicts 5,000 blocks a second.
const maxKept = 4 << 20

// counters are a stream's statistics; read at any time.
type counters struct {
	batches, events, malformed, gaps, recovered, lost, restarts, forwarded atomic.Uint64
}

// connected is called when a connection is established and all later batches are received: it fetches the missed ones.
func (s *stream) connected(ask replay) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.joining {
		return nil // join does it
	}
	return s.catchUp(ask)
}

// catchUp requests all batches that the publisher keeps and that were not applied yet.
func (s *stream) catchUp(ask replay) error {
	if s.known && s.next > 0 {
		// kept: the publisher keeps our last batch; same: it is equal; on: there are later ones
		kept, same, on := false, false, false
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
			return nil // the next number decides
		}
		if same || err != nil {
			return err
		}
		if on && !kept { // it has published more batches than it keeps
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

// asking requests batches, and calls each for them, without holding the lock while it waits.
func (s *stream) asking(ask replay, from uint64, each func(seq uint64, payload []byte)) error {
	s.mu.Unlock()
	defer s.mu.Lock()
	return ask(from, func(seq uint64, payload []byte) {
		s.mu.Lock()
		defer s.mu.Unlock()
		each(seq, payload)
	})
}

// replayed applies a batch of a replay.
func (s *stream) replayed(seq uint64, payload []byte) {
	switch {
	case s.known && seq < s.next:
		return
	case s.known && seq > s.next: // the batches between are not kept any more
		s.count.lost.Add(1)
		s.sink.Clear()
	}
	s.apply(seq, payload)
}

// live applies a batch that has just been published.
func (s *stream) live(seq uint64, payload []byte, ask replay) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.joining {
		s.keep(seq, payload)
		return
	}
	s.take(seq, payload, ask)
}

func (s *stream) keep(seq uint64, payload []byte) {
	if s.keptBytes += len(payload); s.keptBytes > maxKept { // appears as a gap
		s.kept, s.keptBytes = nil, len(payload)
	}
	s.kept = append(s.kept, keptBatch{seq, bytes.Clone(payload)})
}

func (s *stream) take(seq uint64, payload []byte, ask replay) {
	before := s.last
	if s.known && seq < s.next {
		batch, err := s.decoder.Batch(payload)
		if err != nil {
			s.count.malformed.Add(1)
			return
		}
		if batch.Time <= s.last {
			return // a replay was faster
		}
		s.count.restarts.Add(1)
		s.forget()
	}
	switch {
	case !s.known:
		s.known, s.next = true, 0
		if seq > 0 && s.asking(ask, 0, s.replayed) != nil || s.next < seq {
			s.next = seq // earlier reports are unknown, and not needed
		}
	case seq > s.next:
		s.closeGap(seq, ask)
	}
	if seq == s.next {
		s.apply(seq, payload)
	}
	if s.last != before {
		s.lag.Store(int64(time.Since(time.UnixMicro(int64(s.last * 1e6)))))
	}
}

// position records the number of the publisher's next batch: all earlier ones were published.
func (s *stream) position(next uint64, ask replay) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.known && !s.joining && next > s.next {
		s.closeGap(next, ask)
	}
}

// closeGap fetches the batches missing before seq, or forgets everything.
func (s *stream) closeGap(seq uint64, ask replay) {
	s.count.gaps.Add(1)
	if err := s.asking(ask, s.next, s.replayed); err == nil && s.next >= seq {
		s.count.recovered.Add(1)
		return
	}
	s.count.lost.Add(1)
	s.sink.Clear()
	s.next = max(s.next, seq)
}

func (s *stream) apply(seq uint64, payload []byte) {
	s.known, s.next = true, seq+1
	batch, err := s.decoder.Batch(payload)
	if err != nil { // the events in it are lost
		s.count.malformed.Add(1)
		s.count.lost.Add(1)
		s.sink.Clear()
		return
	}
	s.last = batch.Time
	s.sink.Apply(batch.Events)
	s.count.batches.Add(1)
	s.count.events.Add(uint64(len(batch.Events)))
}

// forget drops everything known of the publisher.
func (s *stream) forget() {
	s.known, s.next, s.last = false, 0, 0
	s.sink.Clear()
}

// load loads a part of another replica's feed while the stream is joining.
func (s *stream) load(p *kvstate.FeedPart) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.joining || !p.First && !s.loading {
		return
	}
	if p.First {
		s.forget()
	}
	s.sink.Apply(p.Events)
	if s.loading = p.More; !p.More {
		s.known, s.next, s.last = p.Next > 0, p.Next, p.Time
	}
}

// isLoaded reports whether a feed was loaded or need not be.
func (s *stream) isLoaded() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return !s.joining || s.known
}

// join ends joining: the batches kept here, and those that the publisher keeps, continue the loaded feed.
func (s *stream) join(ask replay) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.joining {
		return nil
	}
	if s.loading {
		s.forget()
	}
	err := s.catchUp(ask)
	for len(s.kept) > 0 { // more may arrive during a replay
		kept := s.kept
		s.kept, s.keptBytes = nil, 0
		for _, k := range kept {
			s.take(k.seq, k.payload, ask)
		}
	}
	s.joining, s.loading = false, false
	return err
}

func (s *stream) isKnown() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.known
}

// reset is forget for another goroutine.
func (s *stream) reset() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.forget()
}
