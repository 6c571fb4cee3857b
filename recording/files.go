package recording

import (
	"cmp"
	"compress/gzip"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"
)

// Files are where a recording goes: a folder of compressed files, in which a file takes an hour at most.
type Files struct {
	Folder   string
	MaxBytes int64         // of all recordings' files in the folder: the oldest go
	Begin    func() []byte // returns the lines with which a file begins
	ID       string        // of the recording

	number int
	began  time.Time
	file   *os.File // nil: none is open
	packed *gzip.Writer
	size   int64 // of the file
	kept   bool  // something of it is there for sure: a flush has reached the file
}

// Bounds of one file. A small one costs little where the end is lost, and when the oldest is removed.
const (
	fileTime  = time.Hour
	fileParts = 8 // a file takes at most this part of MaxBytes
)

// prefix and suffix are those of the names of recordings' files.
const prefix, suffix = "tandem-", ".jsonl.gz"

// Write adds lines. After an error the next call begins another file.
func (f *Files) Write(lines []byte, now time.Time) error {
	if f.file != nil && (f.size > f.MaxBytes/fileParts || now.Sub(f.began) > fileTime) {
		if err := f.Close(); err != nil {
			return err
		}
	}
	if f.file == nil {
		if err := f.open(now); err != nil {
			return err
		}
		lines = append(f.Begin(), lines...)
	}
	if _, err := f.packed.Write(lines); err != nil {
		return f.failed(err)
	}
	return nil
}

// Flush has the file contain all lines so far.
func (f *Files) Flush() error {
	if f.file == nil {
		return nil
	}
	if err := f.packed.Flush(); err != nil {
		return f.failed(err)
	}
	f.kept = true
	return nil
}

// Close ends the file.
func (f *Files) Close() error {
	if f.file == nil {
		return nil
	}
	if err := f.packed.Close(); err != nil {
		return f.failed(err)
	}
	err := f.file.Close()
	f.file = nil
	if err != nil {
		return fmt.Errorf("writing a recording: %w", err)
	}
	return nil
}

// failed gives up a file, and removes it if it has nothing that can be read: while a disk is full, each try would leave
// another one.
func (f *Files) failed(err error) error {
	_ = f.file.Close()
	if !f.kept {
		_ = os.Remove(f.file.Name())
	}
	f.file = nil
	return fmt.Errorf("writing a recording: %w", err)
}

// Path returns the pattern of the files' names.
func (f *Files) Path() string { return filepath.Join(f.Folder, prefix+f.ID+"-*"+suffix) }

// open begins a file, which must not be there: so it is no pipe, and no link to anything.
func (f *Files) open(now time.Time) error {
	if err := os.MkdirAll(f.Folder, 0o750); err != nil {
		return fmt.Errorf("making the folder of recordings: %w", err)
	}
	if err := f.makeRoom(); err != nil {
		return err
	}
	f.number++
	name := filepath.Join(f.Folder, fmt.Sprintf("%s%s-%04d%s", prefix, f.ID, f.number, suffix))
	const flags = os.O_CREATE | os.O_EXCL | os.O_WRONLY | syscall.O_NOFOLLOW
	file, err := os.OpenFile(name, flags, 0o640) //nolint:gosec // the group may replay
	if err != nil {
		return fmt.Errorf("beginning a file of a recording: %w", err)
	}
	f.file, f.size, f.began, f.kept = file, 0, now, false
	f.packed, _ = gzip.NewWriterLevel(counting{f}, gzip.BestSpeed) // a level that there is
	return nil
}

// makeRoom removes the oldest files of recordings until there is room for another one.
func (f *Files) makeRoom() error {
	entries, err := os.ReadDir(f.Folder)
	if err != nil {
		return fmt.Errorf("reading the folder of recordings: %w", err)
	}
	sum := f.MaxBytes / fileParts
	var files []fs.FileInfo
	for _, e := range entries {
		about, err := e.Info()
		if err != nil || !about.Mode().IsRegular() || !strings.HasPrefix(e.Name(), prefix) ||
			!strings.HasSuffix(e.Name(), suffix) {
			continue
		}
		files, sum = append(files, about), sum+about.Size()
	}
	slices.SortFunc(files, func(a, b fs.FileInfo) int {
		return cmp.Or(a.ModTime().Compare(b.ModTime()), strings.Compare(a.Name(), b.Name()))
	})
	for _, old := range files {
		if sum <= f.MaxBytes {
			break
		}
		if err := os.Remove(filepath.Join(f.Folder, old.Name())); err != nil {
			return fmt.Errorf("removing an old recording: %w", err)
		}
		sum -= old.Size()
	}
	return nil
}

// counting counts what reaches the file.
type counting struct{ *Files }

func (c counting) Write(p []byte) (int, error) {
	n, err := c.file.Write(p)
	c.size += int64(n)
	return n, err //nolint:wrapcheck // Files says what it did
}
