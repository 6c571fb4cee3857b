package replay

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"fmt"
	"io"
	"os"
	"strings"

	"tandem/recording"
	"tandem/replay/engine"
	"tandem/replay/traces"
)

// IsTrace reports whether a file is a trace of requests (Mooncake's format) and no recording of Tandem's. A file that
// cannot be read is none.
func IsTrace(path string) bool {
	about, err := os.Stat(path)
	if err != nil || !about.Mode().IsRegular() {
		return false
	}
	file, err := os.Open(path)
	if err != nil {
		return false
	}
	defer file.Close()
	var from io.Reader = file
	if strings.HasSuffix(path, ".gz") {
		if from, err = gzip.NewReader(file); err != nil {
			return false
		}
	}
	begin, _ := io.ReadAll(io.LimitReader(bufio.NewReader(from), 64<<10))
	line, _, _ := bytes.Cut(begin, []byte("\n"))
	return bytes.Contains(line, []byte(`"input_length"`)) && !bytes.Contains(line, []byte(`"tandem_recording"`))
}

// LoadTrace returns the requests of a trace as those of a recording: each comes when it came. Nobody measured how they
// were served.
func LoadTrace(t *traces.Trace) (*Recorded, error) {
	o := &Recorded{Pool: recording.Pool{Name: t.Name}, Sample: 1, Recordings: 1, Skipped: map[string]int{}}
	if len(t.Requests) < 2 {
		return nil, fmt.Errorf("%s: one request is too few", t.Name)
	}
	unique := uint64(1) << 62
	for i := range t.Requests {
		q := &t.Requests[i]
		x := RecordedTurn{At: q.Arrival, On: -1, Input: q.Input, Output: q.Output, root: i,
			Was: &recording.Request{N: uint64(i + 1), T: q.Arrival, Pool: t.Name, Prompt: int64(q.Input), Cached: -1,
				Answer: int64(q.Output)}}
		count := func(n int) int { return (n + engine.BlockTokens - 1) / engine.BlockTokens }
		x.Kept = append(x.Kept, q.Blocks...)
		for len(x.Kept) < count(q.Input+q.Output) {
			unique++
			x.Kept = append(x.Kept, unique)
		}
		x.Blocks = x.Kept[:count(q.Input)]
		o.Turns = append(o.Turns, x)
	}
	o.Seconds = max(t.Duration(), 1)
	o.shared = sharedBy(o.Turns, func(t *RecordedTurn) []uint64 { return t.Blocks })
	return o, nil
}
