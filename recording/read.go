package recording

import (
	"bufio"
	"cmp"
	"compress/gzip"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// Recording is what the files of a recording say, or those of several that are joined: of the replicas of a fleet,
// or of one that was restarted.
type Recording struct {
	Header             // of the first one
	Parts    []Part    // all of them, by their beginning
	Fleets   []Fleet   // by time
	Requests []Request // by arrival, with all their blocks
	Cut      []string  // files whose end is missing: their writer was killed, or still writes
	Crossed  int       // requests that continue a conversation of another part
}

// Part is a recording that was joined with others.
type Part struct {
	Header
	Last float64 // its last arrival, from the start of the first part
}

// maxLine bounds a line in bytes, maxBlocks the blocks of a prompt, maxLines the requests that are read.
const (
	maxLine   = 1 << 20
	maxBlocks = 1 << 13
	maxLines  = 1 << 24
)

// Open reads files of recordings, of which a folder has several (*.jsonl, *.jsonl.gz), and joins the recordings.
func Open(paths ...string) (*Recording, error) {
	r := &reader{}
	for _, path := range paths {
		about, err := os.Stat(path)
		if err != nil {
			return nil, fmt.Errorf("opening a recording: %w", err)
		}
		files := []string{path}
		if about.IsDir() {
			if files, err = filepath.Glob(filepath.Join(path, "*.jsonl*")); err != nil {
				return nil, fmt.Errorf("opening a recording: %w", err)
			}
		}
		for _, file := range files {
			if err := r.open(file); err != nil {
				return nil, err
			}
		}
	}
	return r.result(strings.Join(paths, ", "))
}

// Read reads one file, uncompressed.
func Read(name string, from io.Reader) (*Recording, error) {
	r := &reader{}
	if err := r.read(name, from); err != nil {
		return nil, err
	}
	return r.result(name)
}

type reader struct {
	parts  []*Recording // one for each id
	fleets []Fleet
	cut    []string
	lines  int
	now    *Recording // of the file that is read; nil: its header is not read yet
}

func (r *reader) open(path string) error {
	file, err := OpenFile(path)
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) { // nothing was written yet
		r.cut = append(r.cut, path)
		return nil
	} else if err != nil {
		return fmt.Errorf("opening a recording: %w", err)
	}
	defer file.Close()
	return r.read(filepath.Base(path), file)
}

// OpenFile opens a file to read it. If its name ends in .gz, what is read is decompressed.
func OpenFile(path string) (io.ReadCloser, error) {
	file, err := os.Open(path)
	if err != nil || !strings.HasSuffix(path, ".gz") {
		return file, err
	}
	unpacked, err := gzip.NewReader(file)
	if err != nil {
		return nil, fmt.Errorf("decompressing %s: %w", path, errors.Join(err, file.Close()))
	}
	return struct {
		io.Reader
		io.Closer
	}{unpacked, file}, nil
}

func (r *reader) read(name string, from io.Reader) error {
	lines := bufio.NewScanner(from)
	lines.Buffer(nil, maxLine)
	r.now = nil
	for n := 1; lines.Scan(); n++ {
		if r.lines++; r.lines > maxLines {
			return fmt.Errorf("%s: more than %d lines: replay a part of its files", name, maxLines)
		}
		if err := r.line(lines.Bytes()); err != nil {
			if errors.Is(lines.Err(), io.ErrUnexpectedEOF) && !lines.Scan() {
				break // the file was cut within its last line
			}
			return fmt.Errorf("%s, line %d: %w", name, n, err)
		}
	}
	switch err := lines.Err(); {
	case errors.Is(err, io.ErrUnexpectedEOF):
		r.cut = append(r.cut, name)
	case err != nil:
		return fmt.Errorf("reading %s: %w", name, err)
	}
	return nil
}

// line is any line.
type line struct {
	Version *int   `json:"tandem_recording"`
	Fleet   *Fleet `json:"fleet"`
	requestLine
}

type requestLine struct {
	N        uint64  `json:"n"`
	On       uint64  `json:"on"`
	Same     int     `json:"same"`
	Gap      float64 `json:"gap"`
	T        float64 `json:"t"`
	Pool     string  `json:"pool"`
	Model    string  `json:"model"`
	Who      string  `json:"who"`
	Priority int32   `json:"priority"`
	Blocks   string  `json:"blocks"`
	Bytes    int     `json:"bytes"`
	Prompt   *int64  `json:"prompt"`
	Guess    bool    `json:"guess"`
	Cached   *int64  `json:"cached"`
	Answer   *int64  `json:"answer"`
	Stream   bool    `json:"stream"`
	Route    string  `json:"route"`
	Prefill  string  `json:"prefill"`
	Decode   string  `json:"decode"`
	Replans  int     `json:"replans"`
	Waited   float64 `json:"waited"`
	P        float64 `json:"p"`
	Head     float64 `json:"head"`
	First    float64 `json:"first"`
	Each     float64 `json:"each"`
	Took     float64 `json:"took"`
	Status   int     `json:"status"`
	Ended    string  `json:"ended"`
}

func (r *reader) line(text []byte) error {
	var l line
	if err := json.Unmarshal(text, &l); err != nil {
		return err
	}
	switch {
	case l.Version != nil:
		return r.header(text)
	case r.now == nil:
		return errors.New("not a recording: the first line must say tandem_recording")
	case l.Fleet != nil:
		r.fleets = append(r.fleets, *l.Fleet)
		return nil
	}
	q, err := l.requestLine.request()
	if err != nil {
		return err
	}
	r.now.Requests = append(r.now.Requests, q)
	return nil
}

func (r *reader) header(text []byte) error {
	var h Header
	if err := json.Unmarshal(text, &h); err != nil {
		return err
	}
	switch {
	case h.Version != Version:
		return fmt.Errorf("version %d of the format: this program reads %d", h.Version, Version)
	case h.BlockBytes < 1 || h.Sample < 1 || !(h.Start >= 0):
		return fmt.Errorf("a header that cannot be: blocks of %d bytes, one conversation in %d, begun at %g",
			h.BlockBytes, h.Sample, h.Start)
	}
	if i := slices.IndexFunc(r.parts, func(p *Recording) bool { return p.ID == h.ID }); i >= 0 {
		r.now = r.parts[i]
		return nil
	}
	if len(r.parts) > 0 {
		switch is := &r.parts[0].Header; {
		case is.BlockBytes != h.BlockBytes:
			return fmt.Errorf("recording %q hashes %d bytes at a time, and %q %d: replay each by itself",
				is.ID, is.BlockBytes, h.ID, h.BlockBytes)
		case is.Sample != h.Sample:
			return fmt.Errorf("recording %q has one conversation in %d, and %q one in %d: replay each by itself",
				is.ID, is.Sample, h.ID, h.Sample)
		}
	}
	r.now = &Recording{Header: h}
	r.parts = append(r.parts, r.now)
	return nil
}

// maxTokens bounds the tokens of a prompt and of an answer.
const maxTokens = 1 << 26

func (l *requestLine) request() (Request, error) {
	or := func(n *int64) int64 {
		if n == nil {
			return -1
		}
		return *n
	}
	q := Request{
		N: l.N, On: l.On, Same: l.Same, Gap: l.Gap, T: l.T, Pool: l.Pool, Model: l.Model, Who: l.Who,
		Priority: l.Priority,
		Bytes:    l.Bytes, Prompt: or(l.Prompt), Guess: l.Guess, Cached: or(l.Cached), Answer: or(l.Answer),
		Stream: l.Stream,
		Route:  l.Route, Prefill: l.Prefill, Decode: l.Decode, Replans: l.Replans, Waited: l.Waited, P: l.P,
		Head:  l.Head,
		First: l.First, Each: l.Each, Took: l.Took, Status: l.Status, Ended: l.Ended,
	}
	hashes, err := base64.RawURLEncoding.DecodeString(l.Blocks)
	switch {
	case err != nil || len(hashes)%hashBytes != 0:
		return q, errors.New("blocks are not hashes")
	case q.N == 0 || q.On >= q.N || q.Same < 0 || q.Same > maxBlocks || q.Bytes < 0 || q.T < 0 ||
		max(q.T, q.Gap) > 1e9:
		return q, errors.New("a request that cannot be")
	case max(q.Prompt, q.Cached, q.Answer) > maxTokens || min(q.Prompt, q.Cached, q.Answer) < -1:
		return q, errors.New("a number of tokens that cannot be")
	case min(q.Waited, q.P, q.Head, q.First, q.Each, q.Took) < 0:
		return q, errors.New("a time below 0")
	}
	for i := 0; i < len(hashes); i += hashBytes {
		h := uint64(0)
		for _, b := range hashes[i : i+hashBytes] {
			h = h<<8 | uint64(b)
		}
		q.Blocks = append(q.Blocks, h)
	}
	return q, nil
}

// result orders what was read, completes the blocks of the requests, and joins the recordings.
func (r *reader) result(name string) (*Recording, error) {
	r.parts = slices.DeleteFunc(r.parts, func(p *Recording) bool { return len(p.Requests) == 0 })
	if len(r.parts) == 0 {
		return nil, fmt.Errorf("%s: no requests are recorded", name)
	}
	for i, p := range r.parts {
		p.complete(uint64(i))
	}
	out := join(r.parts)
	out.Fleets, out.Cut = r.fleets, r.cut
	slices.SortFunc(out.Fleets, func(a, b Fleet) int { return cmp.Compare(a.At, b.At) })
	return out, nil
}

// complete orders requests by arrival, and gives them their blocks. What nobody knows differs between parts.
func (r *Recording) complete(part uint64) {
	slices.SortFunc(r.Requests, func(a, b Request) int { return cmp.Compare(a.N, b.N) })
	r.Requests = slices.CompactFunc(r.Requests, func(a, b Request) bool { return a.N == b.N })
	at := make(map[uint64]int, len(r.Requests))
	for i := range r.Requests {
		q := &r.Requests[i]
		at[q.N] = i
		if q.Same == 0 {
			continue
		}
		var all []uint64
		if before, ok := at[q.On]; ok && len(r.Requests[before].Blocks) >= q.Same {
			all = r.Requests[before].Blocks[:q.Same:q.Same]
		} else { // its line is lost: what extends it shares what nobody knows
			for i := range q.Same {
				all = append(all, 1<<63|part<<52|q.On<<24|uint64(i))
			}
		}
		q.Blocks = append(all, q.Blocks...)
	}
	slices.SortStableFunc(r.Requests, func(a, b Request) int { return cmp.Compare(a.T, b.T) })
}
