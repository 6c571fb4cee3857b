package recorder

import (
	"compress/gzip"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cespare/xxhash/v2"
	"github.com/stretchr/testify/require"

	"tandem/internal/budget"
	"tandem/recording"
)

// stand is a recorder that runs.
type stand struct {
	*testing.T
	*Recorder
	folder string
	lines  map[string]int
	ended  context.CancelFunc
}

func newStand(t *testing.T, o Options) *stand {
	t.Helper()
	s := &stand{T: t, folder: o.Folder, lines: map[string]int{}}
	s.Recorder = New(Wiring{
		Log: slog.New(slog.DiscardHandler), Usage: true, Lines: func(result string, n int) { s.lines[result] += n },
		Fleet: func() recording.Fleet { return recording.Fleet{Pools: []recording.Pool{{Name: "chat"}}} },
	})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { s.Recorder.Run(ctx); close(done) }()
	s.ended = func() { cancel(); <-done }
	t.Cleanup(s.ended)
	require.NoError(t, s.Start(o))
	return s
}

func usual(t *testing.T) Options {
	t.Helper()
	return Options{Folder: filepath.Join(t.TempDir(), "recordings"), MaxBytes: 1 << 20, Sample: 1}
}

// read ends the recording and reads it.
func (s *stand) read() *recording.Recording {
	s.Helper()
	<-s.Stop()
	got, err := recording.Open(s.folder)
	require.NoError(s, err)
	return got
}

// blocksOf hashes a prompt as package openai does, as far as this matters: each block with those before it.
func blocksOf(text string) (out []uint64) {
	h := uint64(17)
	for len(text) >= blockBytes {
		h = xxhash.Sum64String(text[:blockBytes]) ^ h*31
		out, text = append(out, h), text[blockBytes:]
	}
	return out
}

// ask records a request from its choice to its end.
func (s *stand) ask(id, text string, at, until time.Time) {
	s.choose(id, text, at)
	s.Ended(&End{ID: []byte(id), Started: at, Ended: until, Tenant: []byte("the tenant Smith"), Prompt: 900,
		Cached: 300, Answer: 30,
		Head: time.Second / 4, First: time.Second / 2, Each: 20 * time.Millisecond, Status: 200, How: "ok"})
}

func (s *stand) choose(id, text string, at time.Time) {
	s.Chosen(&Choice{ID: id, Started: at, Pool: "chat", Model: "llama", Listed: true, Blocks: blocksOf(text),
		Text:  []byte(text),
		Bytes: len(text), Tokens: 800, Route: "split", Prefill: "10.0.0.1:80", Decode: "10.0.0.2:80", Waited: time.Second})
}

// What a request's line says, and how a conversation is known by its prompts alone: a turn begins with the whole
// prompt before it. Prompts that only share their beginning are conversations of their own.
func TestLines(t *testing.T) {
	s := newStand(t, usual(t))
	system := strings.Repeat("You are a helpful assistant. ", 100) // 2,900 bytes
	at := time.Now()
	first := system + "What is the capital of France?"
	s.ask("1", first, at, at.Add(2*time.Second))
	s.ask("2", system+"Who was Napoleon?", at.Add(time.Second), at.Add(3*time.Second))
	s.ask("3", first+"Paris."+strings.Repeat("And of Spain? ", 60), at.Add(6*time.Second), at.Add(8*time.Second))
	s.ask("4", "Hi", at.Add(7*time.Second), at.Add(8*time.Second))
	s.ask("5", "Hi there", at.Add(9*time.Second), at.Add(10*time.Second))
	got := s.read()
	require.Equal(t, 512, got.BlockBytes)
	require.Len(t, got.Requests, 5)
	a, b, c, short, long := got.Requests[0], got.Requests[1], got.Requests[2], got.Requests[3], got.Requests[4]
	require.Equal(t, [...]uint64{0, 0, 1, 0, 4}, [...]uint64{a.On, b.On, c.On, short.On, long.On})
	require.Len(t, a.Blocks, 5)
	require.Equal(t, a.Blocks, b.Blocks, "the system prompt is shared")
	require.Equal(t, a.Blocks, c.Blocks[:5])
	require.Equal(t, len(first+"Paris.")+14*60, c.Bytes)
	require.InDelta(t, 4, c.Gap, 1e-5)
	require.InDelta(t, 1, long.Gap, 1e-5)
	a.Who, a.T, a.Blocks = "", 0, nil
	require.Equal(t, recording.Request{N: 1, Pool: "chat", Model: "llama", Bytes: len(first), Prompt: 900, Cached: 300,
		Answer: 30, Route: "split", Prefill: "10.0.0.1:80", Decode: "10.0.0.2:80", Waited: 1, Head: .25, First: .5,
		Each: .02, Took: 2, Status: 200, Ended: "ok"}, a)
	require.NotEmpty(t, got.Fleets)
	require.Equal(t, map[string]int{Written: 5}, s.lines)
}

// Envoy reports the end of an answer a moment after the client has it, who may have asked again by then.
func TestEndThatIsReportedLate(t *testing.T) {
	s := newStand(t, usual(t))
	at := time.Now()
	s.choose("1", "Hello", at)
	s.choose("2", "Hello. And then?", at.Add(3*time.Second))
	s.choose("3", "Hello. And then? At once?", at.Add(4*time.Second))
	for i, q := range [][2]time.Duration{{0, 2 * time.Second}, {3 * time.Second, 9 * time.Second},
		{4 * time.Second, 9 * time.Second}} {
		s.Ended(&End{ID: []byte(fmt.Sprint(i + 1)), Started: at.Add(q[0]), Ended: at.Add(q[1]), Prompt: -1, Cached: -1,
			Answer: -1})
	}
	got := s.read().Requests
	require.InDelta(t, 1, got[1].Gap, 1e-5)
	require.InDelta(t, -1, got[2].Gap, 0, "its answer was still being written")
}

// Whoever has a recording and knows a prompt cannot tell whether it was asked; with the salt he can, so it is a
// secret. No byte of a prompt, of a tenant, or of a model's name that the client made up is in the file.
func TestHashesSayNothingWithoutTheSalt(t *testing.T) {
	secret := strings.Repeat("The merger with Initech is on May 4th. ", 40)
	o := usual(t)
	o.SaltFile = filepath.Join(t.TempDir(), "salt")
	require.NoError(t, os.WriteFile(o.SaltFile, []byte("0123456789abcdef0123456789abcdef"), 0o600))
	s := newStand(t, o)
	at := time.Now()
	s.ask("1", secret, at, at.Add(time.Second))
	s.Chosen(&Choice{ID: "2", Started: at, Pool: "chat", Model: "gpt-for-Mr-Smith", Route: "split"})
	s.Ended(&End{ID: []byte("2"), Started: at, Ended: at, Tenant: []byte("the tenant Smith")})
	got := s.read()
	in := func(of []uint64) (n int) {
		for i, h := range of {
			if i < len(got.Requests[0].Blocks) && got.Requests[0].Blocks[i] == recording.Mask(h) {
				n++
			}
		}
		return n
	}
	guessed := blocksOf(secret)
	require.Zero(t, in(guessed), "without any salt")
	for _, salt := range []string{"", "another", "0123456789abcdef0123456789abcdeF"} {
		require.Zero(t, in(sealedWith(t, salt, guessed)))
	}
	require.Equal(t, len(guessed), in(sealedWith(t, "0123456789abcdef0123456789abcdef", guessed)), "with it")

	for _, file := range files(t, o.Folder) {
		text := unpacked(t, file)
		require.Contains(t, text, `"blocks"`)
		for _, word := range []string{"merger", "Initech", "Smith", "gpt-for", "0123456789abcdef"} {
			require.NotContains(t, text, word)
		}
	}
}

func sealedWith(t *testing.T, salt string, hashes []uint64) (out []uint64) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "salt")
	require.NoError(t, os.WriteFile(file, []byte(salt+strings.Repeat("\x00", max(saltBytes-len(salt), 0))), 0o600))
	key, _, err := keyOf(&Options{SaltFile: file})
	require.NoError(t, err)
	s := &session{key: key}
	for _, h := range hashes {
		out = append(out, s.seal(h))
	}
	return out
}

// A folder that cannot be written to costs no request anything, and is tried again: one where a named pipe or a file
// stands, and one on a full disk.
func TestNothingWaitsForTheDisk(t *testing.T) {
	for name, block := range map[string]func(path string) error{
		"a named pipe":            func(path string) error { return syscall.Mkfifo(path, 0o600) },
		"a file":                  func(path string) error { return os.WriteFile(path, nil, 0o600) },
		"a link to a full device": func(path string) error { return os.Symlink("/dev/full", path) },
	} {
		t.Run(name, func(t *testing.T) {
			o := usual(t)
			require.NoError(t, block(o.Folder))
			s := newStand(t, o)
			at := time.Now()
			for i := range 100 {
				s.ask(fmt.Sprint(i), "Hi", at, at)
			}
			require.Less(t, time.Since(at), 10*time.Second)
			require.Eventually(t, func() bool { return s.Status().Failed == 100 }, time.Minute, time.Millisecond)
			require.NotEmpty(t, s.Status().Error)
			require.NoError(t, os.Remove(o.Folder))
			for i := 100; s.Status().Lines == 0; i++ {
				s.ask(fmt.Sprint(i), "Hi", at, at)
				time.Sleep(10 * time.Millisecond) // until it tries again
			}
			require.NotEmpty(t, s.read().Requests)
		})
	}
}

// A disk that is full costs no request anything, its retries leave no files, and recording goes on when there is room.
func TestFullDisk(t *testing.T) {
	disk := t.TempDir()
	if err := syscall.Mount("tmpfs", disk, "tmpfs", 0, "size=256k"); err != nil {
		t.Skip("mounting a small disk: ", err)
	}
	t.Cleanup(func() { require.NoError(t, syscall.Unmount(disk, 0)) })
	ballast := filepath.Join(disk, "ballast")
	other, err := os.Create(ballast)
	require.NoError(t, err)
	_, err = io.Copy(other, io.LimitReader(rand.Reader, 1<<20))
	require.ErrorIs(t, err, syscall.ENOSPC)
	require.NoError(t, other.Close())
	o := usual(t)
	o.Folder = filepath.Join(disk, "recordings")
	s := newStand(t, o)
	n := 0
	ask := func() {
		n++
		at := time.Now()
		s.ask(fmt.Sprint(n), rand.Text()+strings.Repeat("Hi. ", 500), at, at)
		require.Less(t, time.Since(at), 5*time.Second)
		time.Sleep(time.Millisecond)
	}
	for s.Status().Failed == 0 {
		ask()
	}
	require.Contains(t, s.Status().Error, "no space left")
	for tries := s.Status().Failed; s.Status().Failed < tries+100; {
		ask()
	}
	left, err := filepath.Glob(filepath.Join(o.Folder, "*"))
	require.NoError(t, err)
	require.Empty(t, left)
	require.NoError(t, os.Remove(ballast))
	for s.Status().Lines == 0 {
		ask()
	}
	require.NotEmpty(t, s.read().Requests)
}

// One conversation in three is recorded, with all its turns.
func TestSample(t *testing.T) {
	o := usual(t)
	o.Sample = 3
	s := newStand(t, o)
	at := time.Now()
	for i := range 300 {
		text := fmt.Sprintf("conversation %03d", i)
		for turn := range 4 {
			s.ask(fmt.Sprint(i, " ", turn), text, at, at)
			text += " and so on"
		}
	}
	got := s.read()
	require.InDelta(t, 100, len(got.Requests)/4, 40)
	by := map[uint64]int{}
	roots := map[uint64]uint64{}
	for _, q := range got.Requests {
		root := q.N
		if q.On > 0 {
			root = roots[q.On]
		}
		roots[q.N] = root
		by[root]++
	}
	for root, n := range by {
		require.Equal(t, 4, n, root)
	}
}

// Files are bounded in number and size together: the oldest go, those of recordings before included, and nothing
// else.
func TestFilesAreBounded(t *testing.T) {
	o := usual(t)
	o.MaxBytes = 64 << 10
	require.NoError(t, os.MkdirAll(o.Folder, 0o750))
	require.NoError(t, os.WriteFile(filepath.Join(o.Folder, "notes.txt"), make([]byte, 1<<20), 0o600))
	old := filepath.Join(o.Folder, "tandem-old-0001.jsonl.gz")
	require.NoError(t, os.WriteFile(old, make([]byte, 60<<10), 0o600))
	f := recording.Files{Folder: o.Folder, MaxBytes: o.MaxBytes, ID: "new",
		Begin: func() []byte { return []byte("{}\n") }}
	line := make([]byte, 3<<10)
	at := time.Now()
	for i := range 200 {
		for j := range line { // what does not shrink
			line[j] = byte(xxhash.Sum64String(fmt.Sprint(i, j)))
		}
		require.NoError(t, f.Write(line, at))
		require.NoError(t, f.Flush())
		sum := int64(0)
		for _, name := range files(t, o.Folder) {
			about, err := os.Stat(name)
			require.NoError(t, err)
			sum += about.Size()
		}
		require.LessOrEqual(t, sum, o.MaxBytes+o.MaxBytes/8)
	}
	require.NoFileExists(t, old)
	require.FileExists(t, filepath.Join(o.Folder, "notes.txt"))
}

func files(t *testing.T, folder string) []string {
	t.Helper()
	out, err := filepath.Glob(filepath.Join(folder, "*.gz"))
	require.NoError(t, err)
	return out
}

func unpacked(t *testing.T, file string) string {
	t.Helper()
	packed, err := os.Open(file)
	require.NoError(t, err)
	defer packed.Close()
	from, err := gzip.NewReader(packed)
	require.NoError(t, err)
	text, err := io.ReadAll(from)
	if !errors.Is(err, io.ErrUnexpectedEOF) { // it is still written
		require.NoError(t, err)
	}
	return string(text)
}

// A recording by itself ends when its time is over, and its end is in the file.
func TestEndsByItself(t *testing.T) {
	o := usual(t)
	o.For = time.Millisecond
	s := newStand(t, o)
	require.Eventually(t, func() bool { return !s.On() && s.Status().Files != "" }, time.Minute, time.Millisecond)
	require.Nil(t, s.Stop())
	require.NoError(t, s.Start(usual(t)), "another one may begin")
}

func TestRecordingAllocatesNothing(t *testing.T) {
	s := newStand(t, usual(t))
	at := time.Now()
	text := strings.Repeat("0123456789", 100)
	choice := Choice{ID: "1", Started: at, Pool: "chat", Model: "llama", Listed: true, Blocks: blocksOf(text),
		Text:  []byte(text),
		Bytes: len(text), Tokens: 800, Route: "split", Prefill: "10.0.0.1:80", Decode: "10.0.0.2:80"}
	end := End{ID: []byte("1"), Started: at, Ended: at, Prompt: 250, Cached: 0, Answer: 30, Status: 200, How: "ok"}
	one := func() {
		s.Chosen(&choice)
		s.Counted("1", at, 250, 0)
		s.Prefilled("1", at, time.Second)
		s.Ended(&end)
	}
	for range 5000 { // its memory has its size
		one()
	}
	budget.Allocs(t, 1000, 1, one)
}

func BenchmarkRequest(b *testing.B) {
	for _, size := range []int{1000, 100_000} {
		b.Run(fmt.Sprint(size), func(b *testing.B) {
			o := Options{Folder: b.TempDir(), MaxBytes: 1 << 30, Sample: 1}
			r := New(Wiring{Log: slog.New(slog.DiscardHandler), Usage: true, Lines: func(string, int) {},
				Fleet: func() recording.Fleet { return recording.Fleet{} }})
			require.NoError(b, r.Start(o))
			s := r.now.Load()
			at := time.Now()
			text := strings.Repeat("0123456789", size/10)
			choice := Choice{ID: "1", Started: at, Pool: "chat", Model: "llama", Listed: true, Blocks: blocksOf(text),
				Text: []byte(text), Bytes: size, Tokens: 800, Route: "split", Prefill: "10.0.0.1:80", Decode: "10.0.0.2:80"}
			end := End{ID: []byte("1"), Started: at, Ended: at, Prompt: 250, Cached: 0, Answer: 30, Status: 200, How: "ok",
				First: time.Second / 3, Each: time.Second / 77}
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				for j := range choice.Blocks {
					choice.Blocks[j] += uint64(i)
				}
				r.Chosen(&choice)
				r.Counted("1", at, 250, 0)
				r.Prefilled("1", at, time.Second/9)
				r.Ended(&end)
				if i%1000 == 0 { // with what it takes to write it
					s.write(at)
				}
			}
		})
	}
}
