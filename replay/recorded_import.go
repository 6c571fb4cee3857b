package replay

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"

	"tandem/recording"
	"tandem/replay/engine"
	"tandem/replay/sessions"
	"tandem/replay/traces"
)

// IsTrace reports whether a file is a trace of requests (Mooncake's format) and no recording of Tandem's. A file that
// cannot be read is none.
func IsTrace(path string) bool { return bytes.Contains(firstLine(path), []byte(`"input_length"`)) }

// IsSessions reports whether a file that [IsTrace] has conversations (aiperf's sessions, mooncake_trace).
func IsSessions(path string) bool { return bytes.Contains(firstLine(path), []byte(`"session_id"`)) }

// firstLine returns the first line of a file, if that is none of Tandem's recordings.
func firstLine(path string) []byte {
	about, err := os.Stat(path)
	if err != nil || !about.Mode().IsRegular() {
		return nil
	}
	file, err := recording.OpenFile(path)
	if err != nil {
		return nil
	}
	defer file.Close()
	begin, _ := io.ReadAll(io.LimitReader(file, 64<<10))
	line, _, _ := bytes.Cut(begin, []byte("\n"))
	if bytes.Contains(line, []byte(`"tandem_recording"`)) {
		return nil
	}
	return line
}

// LoadSessions returns the conversations of a file as those of a recording: they begin at their timestamps, and a turn
// comes its delay after the answer before it. As aiperf reads it, input_length is what a turn's prompt has beside the
// conversation before it.
func LoadSessions(path string) (*Recorded, error) {
	file, err := recording.OpenFile(path)
	if err != nil {
		return nil, fmt.Errorf("opening sessions: %w", err)
	}
	defer file.Close()
	o := &Recorded{Pool: recording.Pool{Name: filepath.Base(path)}, Sample: 1, Recordings: 1, Skipped: map[string]int{},
		whole: true}
	last, unique := map[string]int{}, uint64(1)<<62
	rows := json.NewDecoder(file)
	for n := 1; ; n++ {
		var row sessions.Row
		if err := rows.Decode(&row); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			return nil, fmt.Errorf("%s, object %d: %w", path, n, err)
		}
		x := RecordedTurn{
			At: sessions.Seconds(row.Timestamp), On: -1, Input: row.Input, Output: max(row.Output, 1),
			root: len(o.Turns),
		}
		known := row.Hashes[:min(len(row.Hashes), max(row.Input, 0)/engine.BlockTokens)]
		session, delay := fmt.Sprint(row.Session), sessions.Seconds(row.Delay)
		if on, is := last[session]; is {
			before := &o.Turns[on]
			x.On, x.root, x.Gap, known = on, before.root, delay, before.Kept
			if x.At == 0 {
				x.At = before.At + x.Gap + usualStep*float64(before.Output)
			} else if delay == 0 {
				x.Gap = -max(x.At-before.At, 1e-9)
			}
			x.Input += before.Input + before.Output
		}
		if row.Session == nil || row.Input < 1 || x.Input+x.Output > 1<<24 || !(x.At >= 0 && x.At < 1e9) ||
			!(delay >= 0) {
			return nil, fmt.Errorf("%s, object %d: not a turn of a session", path, n)
		}
		x.Kept = append(x.Kept, known...)
		for len(x.Kept)*engine.BlockTokens < x.Input+x.Output {
			unique++
			x.Kept = append(x.Kept, unique)
		}
		x.Blocks = x.Kept[:(x.Input+engine.BlockTokens-1)/engine.BlockTokens]
		x.Was = &recording.Request{N: uint64(n), Pool: o.Pool.Name, Prompt: int64(x.Input), Cached: -1,
			Answer: int64(x.Output)}
		last[session] = len(o.Turns)
		o.Turns = append(o.Turns, x)
	}
	if len(o.Turns) < 2 {
		return nil, fmt.Errorf("%s: one request is too few", path)
	}
	o.byArrival()
	o.shared = sharedBy(o.Turns, func(t *RecordedTurn) []uint64 { return t.Blocks })
	return o, nil
}

// usualStep is how long a token of an answer is thought to take where only the order of requests hangs on it, s.
const usualStep = .02

// byArrival sorts the turns, and has the first of them come at 0.
func (o *Recorded) byArrival() {
	order := make([]int, len(o.Turns))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(a, b int) int { return cmp.Compare(o.Turns[a].At, o.Turns[b].At) })
	is := make([]int, len(order))
	sorted := make([]RecordedTurn, len(order))
	for i, was := range order {
		is[was], sorted[i] = i, o.Turns[was]
	}
	first := sorted[0].At
	for i := range sorted {
		t := &sorted[i]
		t.root, t.At = is[t.root], t.At-first
		if t.On >= 0 {
			t.On = is[t.On]
		}
		t.Was.T = t.At
	}
	o.Turns, o.Seconds = sorted, max(sorted[len(sorted)-1].At, 1)
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
