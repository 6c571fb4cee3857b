package replay

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"strconv"

	"tandem/replay/profile"
)

// WriteMooncake writes a recording in Mooncake's format, which [traces.Read] reads: its requests come at fixed times.
func (o *Recorded) WriteMooncake(w io.Writer) error {
	numbers := map[uint64]uint64{}
	return o.write(w, func(t *RecordedTurn) any {
		ids := make([]uint64, len(t.Blocks))
		for i, b := range t.Blocks {
			n, ok := numbers[b]
			if !ok {
				n = uint64(len(numbers))
				numbers[b] = n
			}
			ids[i] = n
		}
		return struct {
			Timestamp int64    `json:"timestamp"`
			Input     int      `json:"input_length"`
			Output    int      `json:"output_length"`
			Hashes    []uint64 `json:"hash_ids"`
		}{int64(math.Round(1000 * t.At)), t.Input, t.Output, ids}
	})
}

// WriteSessions writes a recording as sessions of aiperf's form (mooncake_trace), which [sessions.Read] reads: a
// session begins at a timestamp, and a request of it comes some time after the answer before it. aiperf wants
// session_id as text (ai-dynamo/aiperf, dataset/loader/models.py, MooncakeTrace).
func (o *Recorded) WriteSessions(w io.Writer) error {
	numbers := map[uint64]uint64{}
	return o.write(w, func(t *RecordedTurn) any {
		ids := make([]uint64, len(t.Blocks))
		for i, b := range t.Blocks {
			n, ok := numbers[b]
			if !ok {
				n = uint64(len(numbers))
				numbers[b] = n
			}
			ids[i] = n
		}
		line := struct {
			Session   string   `json:"session_id"`
			Timestamp *float64 `json:"timestamp,omitempty"` // ms
			Delay     *float64 `json:"delay,omitempty"`     // ms
			Input     int      `json:"input_length"`
			Output    int      `json:"output_length"`
			Hashes    []uint64 `json:"hash_ids"`
		}{strconv.Itoa(t.root), nil, nil, t.Input, t.Output, ids}
		if t.On < 0 {
			line.Timestamp = new(1000 * t.At)
		} else {
			line.Delay = new(1000 * max(t.Gap, 0))
		}
		return line
	})
}

func (o *Recorded) write(w io.Writer, line func(*RecordedTurn) any) error {
	to := bufio.NewWriter(w)
	enc := json.NewEncoder(to)
	for i := range o.Turns {
		if err := enc.Encode(line(&o.Turns[i])); err != nil {
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
	return p.Apply(&v.Config.Engine)
}
