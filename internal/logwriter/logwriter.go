// Package logwriter writes log lines without making anybody wait.
package logwriter

import (
	"fmt"
	"io"
	"sync"
	"sync/atomic"
	"time"
)

// Writer writes log lines on a goroutine of its own: a log reader that has stopped reading must not block the
// request path or the release of reservations. Lines that do not fit are dropped and counted; the count is logged when
// the log can be written again.
type Writer struct {
	to      io.Writer
	lines   chan []byte
	held    atomic.Int64 // bytes in lines
	dropped atomic.Int64
	closing sync.Once
	quit    chan struct{}
	done    chan struct{}
}

// What may wait to be written, and how long a program that ends waits for it.
const (
	maxLogLines = 4096
	maxLogBytes = 8 << 20
	logFlush    = time.Second
)

// New returns a writer whose lines go to another one. Close it.
func New(to io.Writer) *Writer {
	w := &Writer{to: to, lines: make(chan []byte, maxLogLines), quit: make(chan struct{}), done: make(chan struct{})}
	go w.run()
	return w
}

// Write takes a line. It never waits and never fails.
func (w *Writer) Write(line []byte) (int, error) {
	n := int64(len(line))
	if w.held.Add(n) > maxLogBytes {
		w.drop(n)
		return len(line), nil
	}
	select {
	case w.lines <- append([]byte(nil), line...):
	default:
		w.drop(n)
	}
	return len(line), nil
}

func (w *Writer) drop(bytes int64) {
	w.held.Add(-bytes)
	w.dropped.Add(1)
}

func (w *Writer) run() {
	defer close(w.done)
	for {
		select {
		case line := <-w.lines:
			w.write(line)
		case <-w.quit:
			for {
				select {
				case line := <-w.lines:
					w.write(line)
				default:
					return
				}
			}
		}
	}
}

func (w *Writer) write(line []byte) {
	_, _ = w.to.Write(line) // a failed log has nowhere to be reported
	w.held.Add(-int64(len(line)))
	if n := w.dropped.Swap(0); n > 0 {
		_, _ = fmt.Fprintf(w.to, "tandem: %d log lines were dropped, because the log was not read\n", n)
	}
}

// Close writes what is left, for as long as logFlush.
func (w *Writer) Close() {
	w.closing.Do(func() { close(w.quit) })
	select {
	case <-w.done:
	case <-time.After(logFlush):
	}
}
