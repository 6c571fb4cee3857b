// Package ledger appends lines of JSON to a file without making anybody wait.
package ledger

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"syscall"
	"time"
)

// Stdout is the path of the standard output.
const Stdout = "-"

// maxLines is how many lines may wait to be written; a line is some hundred bytes.
const maxLines = 1 << 14

// lookEvery is how often the file is looked for: one that was moved away is begun anew.
const lookEvery = time.Second

// Ledger takes lines from anybody and writes them in [Ledger.Run]. Lines that do not fit, because the file is not
// written to fast enough, are dropped and counted.
type Ledger struct {
	path  string
	log   *slog.Logger
	lines chan any
	ended func(result string)
	file  *os.File // nil: the standard output
	to    io.Writer
	loud  bool // the last write went well: a failure is worth a line of the log
	torn  bool // a part of the last line was written
}

// What becomes of a line.
const (
	Written = "written"
	Dropped = "dropped" // too many waited
	Failed  = "failed"  // the file cannot be written
)

// writeWithin is how long a line waits for the reader of a named pipe.
const writeWithin = time.Second

// Open opens a ledger, whose file is made if it is not there. ended is called with the result of each line. If the path
// is a named pipe that nobody reads yet, or the disk is full, [Ledger.Run] tries again.
func Open(path string, log *slog.Logger, ended func(result string)) (*Ledger, error) {
	l := &Ledger{path: path, log: log, lines: make(chan any, maxLines), to: os.Stdout, loud: true, ended: ended}
	if path == Stdout {
		return l, nil
	}
	l.to = io.Discard
	err := l.open()
	if passing(err) {
		l.failed(err)
		err = nil
	}
	return l, err
}

// passing reports whether opening may go well later, without anybody changing the configuration.
func passing(err error) bool {
	return errors.Is(err, syscall.ENXIO) || errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT)
}

func (l *Ledger) open() error {
	// A named pipe that nobody reads would keep a blocking open for ever. Files do not know O_NONBLOCK.
	const flags = os.O_CREATE | os.O_APPEND | os.O_WRONLY | syscall.O_NONBLOCK
	file, err := os.OpenFile(l.path, flags, 0o640) //nolint:gosec // the group may bill
	if err != nil {
		return fmt.Errorf("opening the ledger: %w", err)
	}
	if l.file != nil {
		_ = l.file.Close()
	}
	l.file, l.to = file, file
	return nil
}

// Add takes a line, which must not change any more. It never waits.
func (l *Ledger) Add(line any) {
	select {
	case l.lines <- line:
	default:
		l.ended(Dropped)
	}
}

// Run writes lines until ctx ends, then for a second those that still wait, and closes the file.
func (l *Ledger) Run(ctx context.Context) {
	done := make(chan struct{})
	go func() { l.run(ctx); close(done) }()
	<-ctx.Done()
	select {
	case <-done:
	case <-time.After(time.Second): // nobody reads
	}
}

func (l *Ledger) run(ctx context.Context) {
	look := time.NewTicker(lookEvery)
	defer look.Stop()
	for {
		select {
		case line := <-l.lines:
			l.write(line)
		case <-look.C:
			l.reopen()
		case <-ctx.Done():
			for len(l.lines) > 0 {
				l.write(<-l.lines)
			}
			if l.file != nil {
				_ = l.file.Close()
			}
			return
		}
	}
}

// reopen begins the file anew if it was moved away or removed, or could not be opened.
func (l *Ledger) reopen() {
	if l.path == Stdout {
		return
	}
	if l.file != nil {
		ours, err := l.file.Stat()
		if err != nil {
			return
		}
		if there, err := os.Stat(l.path); err == nil && os.SameFile(ours, there) {
			return
		}
	}
	if err := l.open(); err != nil {
		l.failed(err)
	}
}

func (l *Ledger) write(line any) {
	text, err := json.Marshal(line)
	if err == nil && l.file == nil && l.path != Stdout {
		l.ended(Failed)
		return
	}
	if err == nil {
		text = append(text, '\n')
		if l.torn {
			text = append([]byte("\n"), text...)
		}
		var n int
		if l.file != nil {
			_ = l.file.SetWriteDeadline(time.Now().Add(writeWithin)) // an error: a file, which has none
		}
		n, err = l.to.Write(text) // one write a line: readers and other writers see whole ones
		l.torn = err != nil && (l.torn || n > 0)
	}
	if err != nil {
		l.ended(Failed)
		l.failed(err)
		return
	}
	l.loud = true
	l.ended(Written)
}

// failed logs the first failure after a success.
func (l *Ledger) failed(err error) {
	if l.loud {
		l.log.Error("the ledger cannot be written", "file", l.path, "err", err)
	}
	l.loud = false
}
