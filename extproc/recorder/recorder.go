// Package recorder records a fleet's requests for `tandem replay`, as package recording describes: one line for each
// that ends, with what was known when its endpoints were chosen. It sees no byte of an answer, and writes only keyed
// hashes of prompts.
//
// No request waits for it. Lines go to memory, from which [Recorder.Run] writes them; what does not fit is dropped and
// counted.
package recorder

import (
	"context"
	"crypto/aes"
	"crypto/cipher"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"tandem/recording"
)

// Options are how it is recorded.
type Options struct {
	Folder   string
	MaxBytes int64         // of all files there
	For      time.Duration // after which the recording ends; 0: never
	Sample   int           // one conversation in N is recorded
	SaltFile string        // "": a random salt, which is forgotten when the recording ends
}

// Wiring is what a recorder needs of the program around it.
type Wiring struct {
	Log     *slog.Logger
	Release string
	Replica string
	Usage   bool                   // answers are read
	Fleet   func() recording.Fleet // what is known of the engines
	Lines   func(result string, n int)
}

// What becomes of a line.
const (
	Written = "written"
	Dropped = "dropped" // too many waited to be written
	Failed  = "failed"  // the file could not be written
)

// Recorder records requests between Start and Stop. It is safe for concurrent use; a nil one records nothing.
type Recorder struct {
	wiring Wiring
	now    atomic.Pointer[session] // nil: nothing is recorded
	writes atomic.Pointer[session] // until all of it is written
	order  sync.Mutex
	wake   chan struct{}
	last   Status
}

// New returns a recorder that does not record yet.
func New(w Wiring) *Recorder { return &Recorder{wiring: w, wake: make(chan struct{}, 1)} }

// Status is what a recorder does.
type Status struct {
	On      bool      `json:"on"`
	Files   string    `json:"files,omitempty"` // pattern of their names
	Began   time.Time `json:"began,omitzero"`
	Until   time.Time `json:"until,omitzero"`
	Sample  int       `json:"sample,omitempty"`
	Lines   int64     `json:"lines"` // written
	Dropped int64     `json:"dropped"`
	Failed  int64     `json:"failed"`
	Error   string    `json:"error,omitempty"` // of the last try to write
}

// ErrOn means that a recording is in progress.
var ErrOn = errors.New("a recording is in progress: end it before another one begins (tandem record stop)")

// On reports whether requests are recorded.
func (r *Recorder) On() bool { return r != nil && r.now.Load() != nil }

// Start begins a recording.
func (r *Recorder) Start(o Options) error {
	r.order.Lock()
	defer r.order.Unlock()
	if r.writes.Load() != nil {
		return ErrOn
	}
	s, err := newSession(o, &r.wiring)
	if err != nil {
		return err
	}
	r.writes.Store(s)
	r.now.Store(s)
	r.notify()
	r.wiring.Log.Info("recording", "files", s.files.Path(), "for", o.For, "sample", o.Sample)
	return nil
}

// Stop ends the recording. The channel is closed when [Recorder.Run] has written what is left; nil: there is none.
func (r *Recorder) Stop() <-chan struct{} {
	s := r.now.Swap(nil)
	if s == nil {
		return nil
	}
	s.stop.Store(true)
	r.notify()
	return s.over
}

func (r *Recorder) notify() {
	select {
	case r.wake <- struct{}{}:
	default:
	}
}

// Status returns what the recorder does, or did last.
func (r *Recorder) Status() Status {
	s := r.now.Load()
	r.order.Lock()
	defer r.order.Unlock()
	if s == nil {
		return r.last
	}
	return s.status()
}

// saltBytes is the least length of a salt.
const saltBytes = 16

// keyOf returns the key of the hashes, and what tells it apart, which says nothing of it.
func keyOf(o *Options) (key cipher.Block, id string, err error) {
	salt := make([]byte, 32)
	_, _ = rand.Read(salt) // never fails (crypto/rand)
	if o.SaltFile != "" {
		if salt, err = os.ReadFile(o.SaltFile); err != nil {
			return nil, "", fmt.Errorf("reading the salt: %w", err)
		}
		if len(salt) < saltBytes {
			return nil, "", fmt.Errorf("the salt in %s has %d bytes: at least %d", o.SaltFile, len(salt), saltBytes)
		}
	}
	sum := sha256.Sum256(append([]byte("tandem recording\x00"), salt...))
	if key, err = aes.NewCipher(sum[:16]); err != nil {
		return nil, "", fmt.Errorf("making the key of hashes: %w", err)
	}
	of := sha256.Sum256(sum[16:])
	return key, hex.EncodeToString(of[:4]), nil
}

// How often what is left over is written, and what else has its time.
const (
	writeEvery = time.Second
	flushEvery = 5 * time.Second
	fleetEvery = time.Minute
	retryEvery = 5 * time.Second // after the file could not be written
)

// Run writes recordings until ctx ends.
func (r *Recorder) Run(ctx context.Context) {
	if r == nil {
		return
	}
	tick := time.NewTicker(writeEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			r.Stop()
		case <-r.wake:
		case <-tick.C:
		}
		if s := r.writes.Load(); s != nil {
			if !s.until.IsZero() && !time.Now().Before(s.until) {
				r.now.CompareAndSwap(s, nil)
				s.stop.Store(true)
			}
			if over := s.write(time.Now()); over {
				r.over(s)
			}
		}
		if ctx.Err() != nil {
			return
		}
	}
}

// over keeps what became of a recording.
func (r *Recorder) over(s *session) {
	r.order.Lock()
	defer r.order.Unlock()
	r.last = s.status()
	r.last.On = false
	r.writes.Store(nil)
	close(s.over)
	r.wiring.Log.Info("the recording has ended", "files", r.last.Files, "lines", r.last.Lines,
		"dropped", r.last.Dropped, "failed", r.last.Failed)
}

// header returns the lines with which a file begins.
func (s *session) header() []byte {
	text, err := json.Marshal(&s.about)
	if err != nil {
		return nil // cannot happen: it has texts and numbers
	}
	return append(append(text, '\n'), s.fleet()...)
}

// fleet returns the line about the engines.
func (s *session) fleet() []byte {
	text, err := json.Marshal(struct {
		Fleet recording.Fleet `json:"fleet"`
	}{s.wiring.Fleet()})
	if err != nil {
		s.wiring.Log.Error("what is known of the engines is not recorded", "err", err)
		return nil
	}
	return append(text, '\n')
}
