package recorder

import (
	"crypto/cipher"
	"crypto/rand"
	"encoding/binary"
	"encoding/hex"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cespare/xxhash/v2"

	"tandem/recording"
)

// Bounds of what is in memory: lines that wait to be written, requests that have not ended, and their hashes.
const (
	maxBuffer  = 4 << 20
	maxPending = 1 << 16
	maxHashes  = 8 << 20 // of 8 bytes
	soonBuffer = 256 << 10
	lostAfter  = time.Hour // after which the end of a request is not expected any more
)

// session is one recording.
type session struct {
	wiring *Wiring
	about  recording.Header
	began  time.Time
	until  time.Time // zero: it does not end by itself
	stop   atomic.Bool
	over   chan struct{} // closed when all is written
	key    cipher.Block

	mu            sync.Mutex
	pending       map[uint64]*pending // by key; see keyFor
	hashes        int                 // of all of them
	spare         []*pending
	conversations *conversations
	numbers       uint64
	buffer, other []byte // lines: those that come, and those that are written
	lines         int    // in buffer
	counted       Status // lines, dropped, failed
	sealing       [2][aes16]byte

	// of the goroutine that writes
	files           recording.Files
	flushed, minute time.Time
	retry           time.Time
	failing         bool
	unsure          int // lines that were written since the last flush
}

const aes16 = 16

// pending is a request that has not ended. Later requests use the memory again.
type pending struct {
	line    recording.Request
	tip     tip   // of its prompt
	before  int32 // slot of the prompt that it extends, if line.On says one
	started time.Time
	skipped bool // its conversation is not in the sample
}

func newSession(o Options, w *Wiring) (*session, error) {
	key, salt, err := keyOf(&o)
	if err != nil {
		return nil, err
	}
	var id [6]byte
	_, _ = rand.Read(id[:]) // never fails (crypto/rand)
	now := time.Now()
	s := &session{
		wiring: w, began: now, over: make(chan struct{}), key: key, pending: map[uint64]*pending{},
		conversations: newConversations(),
		about: recording.Header{
			Version: recording.Version, ID: hex.EncodeToString(id[:]), From: now.UTC().Format(time.RFC3339),
			Release: w.Release, Replica: w.Replica, BlockBytes: blockBytes, Sample: max(o.Sample, 1), Usage: w.Usage,
			Salt: salt, Start: float64(now.UnixMicro()) / 1e6,
		},
	}
	if o.For > 0 {
		s.until = now.Add(o.For)
	}
	s.files = recording.Files{Folder: o.Folder, MaxBytes: o.MaxBytes, Begin: s.header, ID: s.about.ID}
	s.minute, s.flushed = now, now
	return s, nil
}

func (s *session) status() Status {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := s.counted
	out.On, out.Files, out.Began, out.Until, out.Sample = true, s.files.Path(), s.began, s.until, s.about.Sample
	return out
}

// keyFor returns the key of a request: clients may send one id with several.
func keyFor[T string | []byte](id T, started time.Time) uint64 {
	var h uint64
	switch id := any(id).(type) {
	case string:
		h = xxhash.Sum64String(id)
	case []byte:
		h = xxhash.Sum64(id)
	}
	return (h ^ uint64(started.UnixMicro())) * 0x9E3779B185EBCA87
}

// seal returns the keyed hash of a hash. Without the key nobody can check whether it belongs to a known text.
func (s *session) seal(hash uint64) uint64 {
	binary.LittleEndian.PutUint64(s.sealing[0][:], hash)
	s.key.Encrypt(s.sealing[1][:], s.sealing[0][:])
	return recording.Mask(binary.LittleEndian.Uint64(s.sealing[1][:]))
}

// new returns memory for a request that has begun; nil: there are too many.
func (s *session) new() *pending {
	if len(s.pending) >= maxPending || s.hashes > maxHashes {
		return nil
	}
	if n := len(s.spare); n > 0 {
		p := s.spare[n-1]
		s.spare = s.spare[:n-1]
		blocks := p.line.Blocks[:0]
		*p = pending{}
		p.line.Blocks = blocks
		return p
	}
	return &pending{}
}

// maxSpare is how many requests' memory is kept for others.
const maxSpare = 1024

// remove takes a request out of those that have not ended.
func (s *session) remove(key uint64, p *pending) {
	delete(s.pending, key)
	s.hashes -= len(p.line.Blocks)
	if len(s.spare) < maxSpare {
		s.spare = append(s.spare, p)
	}
}

// write writes the lines that wait, and reports whether the recording is over.
func (s *session) write(now time.Time) (over bool) {
	over = s.stop.Load()
	s.mu.Lock()
	lines, n := s.buffer, s.lines
	s.buffer, s.other, s.lines = s.other[:0], lines, 0
	if len(s.pending) > 0 && now.Sub(s.minute) > fleetEvery {
		s.forget(now)
	}
	s.mu.Unlock()
	if now.Sub(s.minute) > fleetEvery || over {
		s.minute = now
		lines = append(lines, s.fleet()...)
	}
	s.unsure += n
	flushed, err := s.save(lines, now, over)
	result, sure := Written, s.unsure
	switch {
	case err != nil:
		result = Failed
	case !flushed:
		return over
	}
	s.unsure = 0
	s.mu.Lock()
	defer s.mu.Unlock()
	if err != nil {
		s.counted.Error = err.Error()
		s.counted.Failed += int64(sure)
	} else {
		s.counted.Lines += int64(sure)
	}
	if sure > 0 {
		s.wiring.Lines(result, sure)
	}
	return over
}

// forget removes requests whose end will not be reported.
func (s *session) forget(now time.Time) {
	for key, p := range s.pending {
		if now.Sub(p.started) > lostAfter {
			s.remove(key, p)
		}
	}
}

// save writes lines into the file, and reports whether all that was written has reached it. While that fails, it is
// tried every few seconds.
func (s *session) save(lines []byte, now time.Time, over bool) (flushed bool, err error) {
	if s.failing && now.Before(s.retry) && !over {
		return false, errRetries
	}
	if len(lines) > 0 {
		err = s.files.Write(lines, now)
	}
	if flushed = over || now.Sub(s.flushed) > flushEvery || s.failing && len(lines) > 0; err == nil && flushed {
		s.flushed = now
		err = s.files.Flush()
	}
	if err == nil && over {
		err = s.files.Close()
	}
	if err == nil {
		s.failing = s.failing && len(lines) == 0
		return flushed, nil
	}
	if s.retry = now.Add(retryEvery); !s.failing {
		s.wiring.Log.Error("the recording cannot be written", "files", s.files.Path(), "err", err)
	}
	s.failing = true
	return false, err
}
