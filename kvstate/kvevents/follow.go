package kvevents

import (
	"time"

	"tandem/kvstate"
	"tandem/kvstate/prefixindex"
)

// Several replicas share the work (docs/adr/0008): one listens to a publisher and tells the others what it said, already
// decoded, and the number of the last batch. So each of them is where the publisher is and can go on from there.
//
// Who is to listen begins when it knows what the one before it knew, and that one ends when it hears that the other listens
// and has got as far. Meanwhile both tell the same, which is taken once, by the numbers. A publisher that connects to us is
// listened to by whomever it connects to.

// follower is the part of a subscription that hears of other replicas. The stream's lock guards it.
type follower struct {
	listening bool      // the publisher is connected, or was not told yet that it need not be
	lacks     bool      // something was missed that others took
	loading   bool      // parts of what it lacks are coming in: the sink has some of it, while nothing is known of the stream
	lacksAt   time.Time // since when it lacks something
	loadedAt  time.Time // when the last part came in
	told      time.Time // when another replica said last that it listens
	heir      time.Time // when the one that is to listen did, since this one is not to
	heirNext  uint64    // how far that was
}

// take takes what another replica has collected. It does not wait for the publisher.
func (s *subscription) take(c *kvstate.Collected, now time.Time) {
	t := &s.stream
	t.mu.Lock()
	defer t.mu.Unlock()
	if !c.Part {
		s.follower.told = now
		if c.Heir {
			s.follower.heir, s.follower.heirNext = now, c.Next
		}
	}
	up := s.up.Load()
	switch {
	case up && (c.Part || c.Reset || c.From > t.next || c.Epoch != t.epoch): // who listens hears that too
	case c.Part:
		s.load(c, now)
	case c.Reset:
		t.forget()
		s.takeTo(c)
	case s.follower.lacks:
	case up && c.Next <= t.next:
	case c.From > t.next || c.Epoch != t.epoch:
		s.miss(now)
	case c.Next > t.next: // again what is known does no harm
		if c.Doubt {
			t.sink.Suspect()
		}
		s.takeTo(c)
	}
}

// takeTo takes events in and is where they lead to.
func (s *subscription) takeTo(c *kvstate.Collected) {
	t := &s.stream
	t.sink.Apply(c.Events)
	t.known, t.learned, t.next, t.last, t.epoch = c.Next > 0, true, c.Next, c.Time, c.Epoch
	t.void, t.hole = false, nil
	s.follower.lacks, s.follower.loading = false, false
	if len(c.Events) > 0 && !c.Part {
		if !c.Old {
			t.took(c.Time)
		}
		t.count.relayed.Add(1)
	}
	select {
	case t.relayed <- struct{}{}:
	default:
	}
}

func (s *subscription) miss(now time.Time) {
	s.follower.lacks, s.follower.loading, s.follower.lacksAt = true, false, now
	s.stream.count.missed.Add(1)
}

// load takes a part of all that another replica knows, if something is lacking.
func (s *subscription) load(c *kvstate.Collected, now time.Time) {
	if !s.follower.lacks || !c.Reset && !s.follower.loading {
		return
	}
	s.follower.loadedAt = now
	if c.Reset {
		s.stream.forget()
	}
	if s.follower.loading = c.More; c.More {
		s.stream.sink.Apply(c.Events)
		return
	}
	if c.Doubt {
		defer s.stream.sink.Suspect()
	}
	s.takeTo(c)
}

// firstSay is how long after it has connected a replica says that it listens, unless it hears something before: engines take
// a moment to note that somebody subscribes.
const firstSay = 500 * time.Millisecond

// say tells others that this replica listens to the publisher, if it does, and how far it is.
func (s *subscription) say() {
	t := &s.stream
	t.mu.Lock()
	defer t.mu.Unlock()
	if s.up.Load() && time.Since(s.since) > firstSay {
		t.say(kvstate.Collected{From: t.next, Next: t.next, Time: t.last})
	}
}

// partBlocks is about how many blocks make a part of what is known of a publisher: some 512 KiB.
const partBlocks = 1 << 15

// contents calls each with all that is known of the publisher, in parts, if this replica listens to it.
func (s *subscription) contents(each func(*kvstate.Collected) error) (err error) {
	t := &s.stream
	t.mu.Lock()
	if !s.up.Load() {
		t.mu.Unlock()
		return nil
	}
	held, doubt := s.publisher.Snapshot(), s.publisher.HasSuspects()
	c := kvstate.Collected{Endpoint: s.target.endpoint, Rank: s.target.rank, Next: t.next, Epoch: t.epoch, Time: t.last, Reset: true, Part: true, More: true, Doubt: doubt}
	t.mu.Unlock()
	var words []uint64
	blocks := 0
	held.Each(func(e *prefixindex.BlockEvent) {
		own := *e
		words = append(words, e.Keys...)
		own.Keys = words[len(words)-len(e.Keys):]
		words = append(words, e.Blocks...)
		own.Blocks = words[len(words)-len(e.Blocks):]
		c.Events = append(c.Events, own)
		if blocks += len(e.Keys); blocks >= partBlocks && err == nil {
			err = each(&c)
			c.Reset, c.Events, words, blocks = false, c.Events[:0], words[:0], 0
		}
	})
	if c.More = false; err == nil {
		err = each(&c)
	}
	return err
}

// turn is what a subscription is to do next.
type turn int

const (
	stay turn = iota
	listen
	rest
)

// next decides whether a replica that is to listen to the publisher, or is not, begins or ends that. Engines that connect to
// us are not its business.
func (s *subscription) next(ours, alone bool, lease time.Duration, now time.Time) turn {
	t := &s.stream
	t.mu.Lock()
	defer t.mu.Unlock()
	others := now.Sub(s.follower.told) < lease
	if ours {
		s.follower.heir = time.Time{}
	}
	// What another one says that is not to listen either is not enough: it may be about to end, too.
	goesOn := now.Sub(s.follower.heir) < lease && t.next >= s.follower.heirNext
	switch {
	case s.follower.listening && !ours && (goesOn || others && !s.up.Load()):
		s.follower.listening, t.deaf = false, true
		t.learned = t.known // what comes next is the other's to tell; should it be killed before it does, that is one replica taking over from another
		s.up.Store(false)
		return rest
	case s.follower.listening || !ours:
		return stay
	case alone, others && !s.follower.lacks, !others && now.Sub(s.opened) >= lease:
		s.follower.listening = true
		return listen
	}
	return stay
}

// accepts reports whether to begin to listen to a publisher that connects to us: that is once.
func (s *subscription) accepts() bool {
	s.stream.mu.Lock()
	defer s.stream.mu.Unlock()
	began := s.follower.listening
	s.follower.listening = true
	return !began
}

// settle forgets what a publisher said that nobody has listened to for too long, and what was doubted for too long.
func (s *subscription) settle(now time.Time) {
	t := &s.stream
	t.mu.Lock()
	defer t.mu.Unlock()
	s.publisher.ExpireSuspects(now)
	if s.up.Load() {
		s.heard = now
		return
	}
	if s.follower.told.After(s.heard) {
		s.heard = s.follower.told
	}
	switch {
	case s.follower.loading && now.Sub(s.follower.loadedAt) > staleAfter:
		s.follower.loading = false
		s.log.Warn("KV events: the rest of what was missed does not come; the part that came is forgotten")
	case !t.known:
		return
	case now.Sub(s.heard) > staleAfter:
		s.log.Warn("KV events: the publisher stays away; what it said is forgotten")
	case s.follower.lacks && now.Sub(s.follower.lacksAt) > staleAfter:
		s.log.Warn("KV events: what was missed cannot be had; what the publisher said is forgotten")
	default:
		return
	}
	t.forget()
}

// isKnown reports whether all that the publisher says reaches this replica, by itself or through another one.
func (s *subscription) isKnown(lease time.Duration, now time.Time) bool {
	s.stream.mu.Lock()
	defer s.stream.mu.Unlock()
	return s.up.Load() || !s.follower.lacks && now.Sub(s.follower.told) < lease
}

func (s *subscription) isLacking() bool {
	s.stream.mu.Lock()
	defer s.stream.mu.Unlock()
	return s.follower.lacks && !s.up.Load()
}
