package ledger

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// counts are what became of lines.
type counts struct {
	mu sync.Mutex
	of map[string]int
}

func (c *counts) add(result string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.of[result]++
}

func (c *counts) count(result string) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.of[result]
}

func open(t *testing.T, path string) (*Ledger, *counts) {
	t.Helper()
	c := &counts{of: map[string]int{}}
	l, err := Open(path, slog.New(slog.DiscardHandler), c.add)
	require.NoError(t, err)
	return l, c
}

func read(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	return string(text)
}

// A file that was moved away is begun anew, and no line is lost; what waits at the end is written.
func TestRotated(t *testing.T) {
	path := filepath.Join(t.TempDir(), "ledger")
	require.NoError(t, os.WriteFile(path, []byte("of before\n"), 0o600))
	l, c := open(t, path)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { l.Run(ctx); close(done) }()
	l.Add(1)
	require.Eventually(t, func() bool { return read(t, path) == "of before\n1\n" }, time.Minute, time.Millisecond)
	require.NoError(t, os.Rename(path, path+".1"))
	require.Eventually(t, func() bool { _, err := os.Stat(path); return err == nil }, time.Minute, time.Millisecond)
	l.Add(2)
	require.Eventually(t, func() bool { return read(t, path) == "2\n" }, time.Minute, time.Millisecond)
	for range 100 {
		l.Add("last")
	}
	cancel()
	<-done
	require.Equal(t, 100, strings.Count(read(t, path), "\"last\"\n"))
	require.Equal(t, map[string]int{Written: 102}, c.of)
}

// A named pipe at the ledger's path keeps nobody waiting: not the start, and not what comes after it is replaced. Lines
// are written as soon as somebody reads, and to the file that takes the pipe's place.
func TestANamedPipe(t *testing.T) {
	path := filepath.Join(t.TempDir(), "ledger")
	require.NoError(t, syscall.Mkfifo(path, 0o600))
	l, c := open(t, path) // nobody reads
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { l.Run(ctx); close(done) }()
	l.Add("lost")
	require.Eventually(t, func() bool { return c.count(Failed) == 1 }, time.Minute, time.Millisecond)

	reader, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	require.NoError(t, err)
	got := make([]byte, 1<<10)
	require.Eventually(t, func() bool {
		l.Add("read")
		_ = reader.SetReadDeadline(time.Now().Add(10 * time.Millisecond))
		n, _ := reader.Read(got)
		return strings.HasPrefix(string(got[:n]), "\"read\"\n")
	}, time.Minute, time.Millisecond)

	before := c.count(Failed)
	long := strings.Repeat("x", 1<<20) // more than a pipe holds, and nobody reads any more
	l.Add(long)
	require.Eventually(t, func() bool { return c.count(Failed) > before }, time.Minute, time.Millisecond)
	require.NoError(t, os.Remove(path))
	require.Eventually(t, func() bool {
		l.Add("file")
		text, _ := os.ReadFile(path)
		return strings.Contains(string(text), "\"file\"\n")
	}, time.Minute, 10*time.Millisecond)
	cancel()
	<-done
}

// What a full disk does not take is lost and counted, and the ledger goes on when there is room again.
func TestAFullDisk(t *testing.T) {
	path := filepath.Join(t.TempDir(), "ledger")
	require.NoError(t, os.Symlink("/dev/full", path))
	l, c := open(t, path)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { l.Run(ctx); close(done) }()
	l.Add(1)
	require.Eventually(t, func() bool { return c.count(Failed) == 1 }, time.Minute, time.Millisecond)
	require.NoError(t, os.Remove(path))
	require.Eventually(t, func() bool { _, err := os.Stat(path); return err == nil }, time.Minute, time.Millisecond)
	l.Add(2)
	require.Eventually(t, func() bool { return read(t, path) == "2\n" }, time.Minute, time.Millisecond)
	cancel()
	<-done
}

// Nobody waits for a ledger: what does not fit is dropped, and counted.
func TestNobodyWaits(t *testing.T) {
	l, c := open(t, filepath.Join(t.TempDir(), "ledger"))
	for range maxLines + 5 { // nobody writes yet
		l.Add(1)
	}
	require.Equal(t, map[string]int{Dropped: 5}, c.of)
}

// A write that fails costs its line, and the next line begins anew.
func TestFailedWrites(t *testing.T) {
	l, c := open(t, filepath.Join(t.TempDir(), "ledger"))
	to := &full{}
	l.to = to
	l.write("one")
	l.write("two")
	to.room = 100
	l.write("three")
	require.Equal(t, "\"o\n\"three\"\n", to.String())
	require.Equal(t, map[string]int{Failed: 2, Written: 1}, c.of)
	_, err := Open(filepath.Join(t.TempDir(), "no", "folder"), nil, nil)
	require.ErrorContains(t, err, "opening the ledger")
}

// full takes two bytes, and then nothing until it has room.
type full struct {
	strings.Builder
	room int
}

func (f *full) Write(b []byte) (int, error) {
	if f.room == 0 {
		n := min(2-f.Len(), len(b))
		_, _ = f.Builder.Write(b[:n])
		return n, os.ErrClosed
	}
	return f.Builder.Write(b)
}
