package replay

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"strconv"

	"tandem/replay/engine"
	"tandem/replay/profile"
	"tandem/replay/sessions"
)

// WriteMooncake writes a recording in Mooncake's format, which [traces.Read] reads: its requests come at fixed times.
func (o *Recorded) WriteMooncake(w io.Writer) error {
	numbers := numbers{}
	return o.write(w, func(i int) any {
		t := &o.Turns[i]
		return struct {
			Timestamp int64    `json:"timestamp"`
			Input     int      `json:"input_length"`
			Output    int      `json:"output_length"`
			Hashes    []uint64 `json:"hash_ids"`
		}{int64(math.Round(1000 * t.At)), t.Input, t.Output, numbers.of(t)}
	})
}

// WriteSessions writes a recording as sessions of aiperf's form (mooncake_trace), which [sessions.Read] reads: a
// session begins at a timestamp with a whole prompt, and a request of it comes some time after the answer before it,
// with the tokens that are new in it (aiperf 0.13, dataset/loader/base_trace_loader.py: DELTAS_WITHOUT_RESPONSES).
// Requests that come before that answer, or after another one has gone on from it, begin sessions of their own.
// aiperf wants session_id as text (dataset/loader/models.py, MooncakeTrace).
func (o *Recorded) WriteSessions(w io.Writer) error {
	numbers := numbers{}
	session, has := make([]int, len(o.Turns)), make([]int, len(o.Turns)) // has: tokens, with the answer
	gone := make([]bool, len(o.Turns))
	return o.write(w, func(i int) any {
		t := &o.Turns[i]
		line := sessions.Row{Output: t.Output}
		if on := t.On; on >= 0 && t.Gap >= 0 && !gone[on] {
			gone[on], session[i] = true, session[on]
			line.Delay, line.Input = new(1000*t.Gap), max(t.Input-has[on], 1)
			has[i] = has[on]
		} else {
			session[i] = i
			line.Timestamp, line.Input, line.Hashes = new(1000*t.At), t.Input, numbers.of(t)
		}
		has[i] += line.Input + t.Output
		line.Session = strconv.Itoa(session[i])
		return line
	})
}

// numbers are the hash_ids of blocks. One that a prompt has a part of, because it ends there, has a number of its own:
// aiperf refuses traces where one stands for blocks of several lengths.
type numbers map[numbered]uint64

type numbered struct {
	block  uint64
	tokens int
}

// of returns those of a prompt.
func (n numbers) of(t *RecordedTurn) []uint64 {
	ids := make([]uint64, len(t.Blocks))
	for i, b := range t.Blocks {
		key := numbered{b, min(t.Input-i*engine.BlockTokens, engine.BlockTokens)}
		id, ok := n[key]
		if !ok {
			id = uint64(len(n))
			n[key] = id
		}
		ids[i] = id
	}
	return ids
}

func (o *Recorded) write(w io.Writer, line func(turn int) any) error {
	to := bufio.NewWriter(w)
	enc := json.NewEncoder(to)
	for i := range o.Turns {
		if err := enc.Encode(line(i)); err != nil {
			return fmt.Errorf("writing a trace: %w", err)
		}
	}
	return to.Flush()
}

// ReadProfile makes the engines of a variant as fast as a profile says.
func ReadProfile(file string, v *Variant) error {
	p, err := profile.Read(file)
	if err != nil {
		return err
	}
	if p.Host > 0 {
		v.Host = p.Host
	}
	err = p.Apply(&v.Config.Engine)
	v.Config.LocalTokens = int(v.Config.Engine.StepTokens)
	return err
}
