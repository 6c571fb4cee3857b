// Package traces reads traces of requests, and generates some: what a fleet has to serve, without saying how.
//
// Arrows: it imports replay/engine for the size of a block. Package replay plays traces.
package traces

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"

	"tandem/replay/engine"
)

// Request is one line of a trace.
type Request struct {
	Arrival float64 // seconds from the start
	Input   int     // tokens of the prompt, at least 1
	Output  int     // tokens of the answer, at least 1
	// Blocks of the prompt, engine.BlockTokens tokens each, the last possibly shorter. Two prompts whose first n blocks
	// are equal share that prefix.
	Blocks []uint64
	// The program that makes it: an agent, a subagent, a conversation. 0: unknown. Last: it makes no other.
	Program uint64
	Last    bool
}

// Trace is a sequence of requests in order of arrival.
type Trace struct {
	Name     string
	Requests []Request
	again    func(rate float64) (*Trace, error) // of a generated trace: generates it again at another rate
}

// maxLine bounds a line of a trace: a prompt of two million tokens has 4,000 blocks.
const maxLine = 1 << 20

// Read reads a trace in Mooncake's format: a JSON object per line, with timestamp (ms), input_length and
// output_length (tokens) and hash_ids. Timestamps are often coarse: requests of the same timestamp are spread at
// random, by seed, until the next one.
func Read(name string, r io.Reader, seed uint64) (*Trace, error) {
	t := &Trace{Name: name}
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, maxLine)
	for n := 1; lines.Scan(); n++ {
		if len(bytes.TrimSpace(lines.Bytes())) == 0 {
			continue
		}
		q, err := readLine(lines.Bytes())
		if err != nil {
			return nil, fmt.Errorf("%s, line %d: %w", name, n, err)
		}
		t.Requests = append(t.Requests, q)
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("reading %s: %w", name, err)
	}
	if len(t.Requests) == 0 {
		return nil, fmt.Errorf("%s: no requests", name)
	}
	t.spread(rand.New(rand.NewPCG(seed, 1)))
	return t, nil
}

func readLine(line []byte) (Request, error) {
	var in struct {
		Timestamp float64  `json:"timestamp"`
		Input     int      `json:"input_length"`
		Output    int      `json:"output_length"`
		Hashes    []uint64 `json:"hash_ids"`
	}
	if err := json.Unmarshal(line, &in); err != nil {
		return Request{}, err
	}
	switch {
	case in.Timestamp < 0 || in.Timestamp > 1e12:
		return Request{}, fmt.Errorf("timestamp %v is not between 0 and 1e12 ms", in.Timestamp)
	case in.Input < 1 || in.Input > 1<<24:
		return Request{}, fmt.Errorf("input_length %d is not between 1 and %d", in.Input, 1<<24)
	case in.Output < 1 || in.Output > 1<<24:
		return Request{}, fmt.Errorf("output_length %d is not between 1 and %d", in.Output, 1<<24)
	case len(in.Hashes) > blocksOf(in.Input):
		return Request{}, fmt.Errorf("%d hash_ids for %d tokens: one stands for %d", len(in.Hashes), in.Input,
			engine.BlockTokens)
	}
	return Request{Arrival: in.Timestamp / 1000, Input: in.Input, Output: in.Output, Blocks: in.Hashes}, nil
}

func blocksOf(tokens int) int { return (tokens + engine.BlockTokens - 1) / engine.BlockTokens }

// spread distributes requests of one timestamp over the time until the next, and starts the trace at 0.
func (t *Trace) spread(random *rand.Rand) {
	slices.SortStableFunc(t.Requests, ByArrival)
	first, gap := t.Requests[0].Arrival, 0.0
	for from, to := 0, 0; from < len(t.Requests); from = to {
		at := t.Requests[from].Arrival
		//nolint:revive // the condition does the work
		for to = from; to < len(t.Requests) && t.Requests[to].Arrival == at; to++ {
		}
		if to < len(t.Requests) {
			gap = t.Requests[to].Arrival - at
		}
		for i := from; i < to; i++ {
			t.Requests[i].Arrival = at - first
			if to-from > 1 {
				t.Requests[i].Arrival += gap * random.Float64()
			}
		}
	}
	slices.SortStableFunc(t.Requests, ByArrival)
}

// ByArrival orders requests by their arrival.
func ByArrival(a, b Request) int {
	switch {
	case a.Arrival < b.Arrival:
		return -1
	case a.Arrival > b.Arrival:
		return 1
	}
	return 0
}

// MarkLast marks the last request of each program.
func (t *Trace) MarkLast() {
	seen := map[uint64]bool{}
	for i := len(t.Requests) - 1; i >= 0; i-- {
		q := &t.Requests[i]
		q.Last = q.Program == 0 || !seen[q.Program]
		seen[q.Program] = true
	}
}

// Generated reports whether another rate means more sessions at a time, and not arrivals closer together.
func (t *Trace) Generated() bool { return t.again != nil }

// Duration returns the time from the first arrival to the last, seconds.
func (t *Trace) Duration() float64 { return t.Requests[len(t.Requests)-1].Arrival }

// ErrNoDuration means that a trace's rate cannot be set because all requests arrive at once.
var ErrNoDuration = errors.New("all requests of the trace arrive at the same time")

// Faster returns the trace at by times its rate. In a recorded trace the arrivals move closer together; a generated
// trace is generated again, with more sessions at a time.
func (t *Trace) Faster(by float64) (*Trace, error) {
	if t.again != nil {
		return t.again(by * float64(len(t.Requests)) / t.Duration())
	}
	out := &Trace{Name: t.Name, Requests: slices.Clone(t.Requests)}
	for i := range out.Requests {
		out.Requests[i].Arrival /= by
	}
	return out, nil
}

// Bound returns the share of prompt tokens that caches could serve at best, if they never evicted.
func (t *Trace) Bound() float64 {
	seen := map[uint64]bool{}
	var hit, all int
	for i := range t.Requests {
		q := &t.Requests[i]
		n := 0
		for n < len(q.Blocks) && seen[q.Blocks[n]] {
			n++
		}
		for _, b := range q.Blocks[n:] {
			seen[b] = true
		}
		hit += min(n*engine.BlockTokens, q.Input-1)
		all += q.Input
	}
	return float64(hit) / float64(all)
}
