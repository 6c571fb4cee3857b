package sessions

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
)

// The formats that [Read] knows, by the members of their objects: turns, requests, or session_id.

// Read reads sessions as JSON objects, one after the other, of one of these formats:
//
//   - this package's own, an object a session: see condensed
//   - those of kv-cache-tester (github.com/callanjfox/kv-cache-tester), an object a session with requests, of which
//     each has in, out, hash_ids, and t or think_time and api_time. Subagents are left out: the gap in which they ran
//     stays
//   - sessions of aiperf (github.com/ai-dynamo/aiperf, mooncake_trace), an object a request: see [Row]
func Read(name string, r io.Reader) (all []Session, err error) {
	in := json.NewDecoder(r)
	bySession := map[string]*rows{}
	var order []*rows
	for n := 1; ; n++ {
		var text json.RawMessage
		if err := in.Decode(&text); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			return nil, fmt.Errorf("%s, object %d: %w", name, n, err)
		}
		var kind struct {
			Turns, Requests json.RawMessage
			Session         any `json:"session_id"`
		}
		if err := json.Unmarshal(text, &kind); err != nil {
			return nil, fmt.Errorf("%s, object %d: %w", name, n, err)
		}
		var s Session
		switch {
		case kind.Turns != nil:
			s, err = condensed(text)
		case kind.Requests != nil:
			s, err = ofTester(text)
		case kind.Session != nil:
			id := fmt.Sprint(kind.Session)
			if bySession[id] == nil {
				bySession[id] = &rows{}
				order = append(order, bySession[id])
			}
			err = bySession[id].add(text)
		default:
			err = errors.New("neither turns, requests nor session_id: not a session")
		}
		if err != nil {
			return nil, fmt.Errorf("%s, object %d: %w", name, n, err)
		}
		if len(s.Turns) > 0 {
			all = append(all, s)
		}
	}
	for _, x := range order {
		all = append(all, x.session)
	}
	if len(all) == 0 {
		return nil, fmt.Errorf("%s: no sessions", name)
	}
	return all, nil
}

// check returns an error for a turn that cannot be.
func (t *Turn) check() error {
	if t.Input < 1 || t.Input > maxTokens || t.Output < 1 || t.Output > maxTokens || t.Back < 0 || t.Had < 0 ||
		!(t.Think >= 0) || !(t.Service >= 0) || math.IsInf(t.Think+t.Service, 1) {
		return fmt.Errorf("a turn that cannot be: %+v", *t)
	}
	return nil
}

// hashed are the hashes of the prompts' blocks of a session so far.
type hashed struct {
	tokens int // of a block
	blocks [][]uint64
}

// lookBack is how many turns may lie between a prompt and the one that it extends.
const lookBack = 8

// add appends a turn that has so many blocks, and finds what it shares with the turns before it.
func (h *hashed) add(s *Session, t Turn, blocks []uint64) error {
	shared := 0
	for back := 1; back <= min(lookBack, len(h.blocks)); back++ {
		before, n := h.blocks[len(h.blocks)-back], 0
		for n < min(len(before), len(blocks)) && before[n] == blocks[n] {
			n++
		}
		if n*h.tokens > shared {
			t.Back, shared = back, n*h.tokens
		}
	}
	if t.Back > 0 {
		t.Had = had(&s.Turns[len(s.Turns)-t.Back], &t, shared)
	}
	if err := t.check(); err != nil {
		return err
	}
	s.Turns, h.blocks = append(s.Turns, t), append(h.blocks, blocks)
	return nil
}

// ofTester reads a session of kv-cache-tester (docs/trace_replay_tester.md there).
func ofTester(text []byte) (Session, error) {
	var in struct {
		Tools     int `json:"tool_tokens"`
		System    int `json:"system_tokens"`
		BlockSize int `json:"block_size"`
		Requests  []struct {
			T        float64
			Type     string
			In, Out  int
			Hashes   []uint64 `json:"hash_ids"`
			Stop     string
			Think    *float64 `json:"think_time"`
			Duration float64  `json:"api_time"`
		}
	}
	if err := json.Unmarshal(text, &in); err != nil {
		return Session{}, err
	}
	s := Session{Prefix: uint64(in.Tools)<<20 | uint64(in.System), PrefixTokens: max(in.Tools+in.System, 0)}
	h := hashed{tokens: in.BlockSize}
	if h.tokens == 0 {
		h.tokens = 64
	}
	ended := 0.0 // the answer before
	for _, r := range in.Requests {
		if r.Type == "subagent" || r.In == 0 {
			continue
		}
		t := Turn{Think: max(r.T-ended, 0), Input: r.In, Output: max(r.Out, 1), Service: r.Duration,
			Stop: map[string]Stop{"tool_use": Tool, "end_turn": End}[r.Stop]}
		if ended = r.T + r.Duration; r.Think != nil && len(s.Turns) > 0 {
			t.Think = *r.Think
		}
		if err := h.add(&s, t, r.Hashes); err != nil {
			return Session{}, err
		}
	}
	return s, nil
}

// rows are the requests of a session of aiperf so far.
type rows struct {
	session Session
	last    float64 // ms: timestamp of the last one
}

// Row is a request of a session, as aiperf writes it.
type Row struct {
	Session   any      `json:"session_id"`
	Timestamp *float64 `json:"timestamp,omitempty"` // ms
	Delay     *float64 `json:"delay,omitempty"`     // ms after the answer before it
	Input     int      `json:"input_length"`        // tokens in addition to the session's prompts and answers before it
	Output    int      `json:"output_length"`
	Hashes    []uint64 `json:"hash_ids,omitempty"` // of the prompt's blocks
}

// Seconds returns a time of a [Row] in seconds. One that it lacks is 0.
func Seconds(ms *float64) float64 {
	if ms == nil {
		return 0
	}
	return *ms / 1000
}

func (x *rows) add(text []byte) error {
	var in Row
	if err := json.Unmarshal(text, &in); err != nil {
		return err
	}
	t := Turn{Input: in.Input, Output: max(in.Output, 1), Think: Seconds(in.Delay)}
	if in.Timestamp != nil {
		if in.Delay == nil && len(x.session.Turns) > 0 {
			t.Think = max(*in.Timestamp-x.last, 0) / 1000
		}
		x.last = *in.Timestamp
	}
	if err := t.check(); err != nil {
		return err
	}
	if n := len(x.session.Turns); n > 0 {
		before := &x.session.Turns[n-1]
		t.Back, t.Had = 1, before.Input+before.Output
		t.Input += t.Had
	}
	x.session.Turns = append(x.session.Turns, t)
	return t.check()
}
