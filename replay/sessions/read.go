package sessions

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"tandem/recording"
)

// maxTokens bounds the tokens of a prompt and of an answer.
const maxTokens = 1 << 24

// Open reads the sessions of a file (.gz: compressed), or of all files of a folder.
func Open(path string) ([]Session, error) {
	about, err := os.Stat(path)
	if err != nil {
		return nil, fmt.Errorf("opening sessions: %w", err)
	}
	if !about.IsDir() {
		return open(path)
	}
	entries, err := os.ReadDir(path)
	if err != nil {
		return nil, fmt.Errorf("opening sessions: %w", err)
	}
	var all []Session
	for _, e := range entries {
		if e.IsDir() {
			continue
		}
		some, err := open(filepath.Join(path, e.Name()))
		if err != nil {
			return nil, err
		}
		all = append(all, some...)
	}
	return all, nil
}

func open(path string) ([]Session, error) {
	file, err := recording.OpenFile(path)
	if err != nil {
		return nil, fmt.Errorf("opening sessions: %w", err)
	}
	defer file.Close()
	return Read(filepath.Base(path), file)
}

// condensed reads a session as an object with tools and system (tokens, with which the first prompt begins) and turns:
// for each [time, think, back, shared, in, out, stop, service], of which shared is how many tokens of the prompt equal
// the beginning of the prompt back turns before.
func condensed(text []byte) (Session, error) {
	var in struct {
		Tools, System int
		Turns         []row
	}
	if err := json.Unmarshal(text, &in); err != nil {
		return Session{}, err
	}
	if len(in.Turns) == 0 {
		return Session{}, errors.New("a session without turns")
	}
	s := Session{Prefix: uint64(in.Tools)<<20 | uint64(in.System), PrefixTokens: max(in.Tools+in.System, 0)}
	for i, r := range in.Turns {
		t := r.turn
		if err := t.check(); err != nil {
			return Session{}, fmt.Errorf("turn %d: %w", i, err)
		}
		if t.Back > i {
			t.Back = 0
		}
		if t.Back > 0 {
			t.Had = had(&s.Turns[i-t.Back], &t, t.Had)
		} else {
			t.Had = 0
		}
		s.Turns = append(s.Turns, t)
	}
	return s, nil
}

type row struct{ turn Turn }

func (r *row) UnmarshalJSON(text []byte) error {
	var at float64
	var stop string
	t := &r.turn
	if err := json.Unmarshal(text, &[]any{&at, &t.Think, &t.Back, &t.Had, &t.Input, &t.Output, &stop,
		&t.Service}); err != nil {
		return err
	}
	t.Stop = map[string]Stop{"t": Tool, "e": End}[stop]
	return nil
}

// rounded is how many tokens of a prompt may be missing in the next one if that contains the answer, too: the shared
// part is recorded in units of 64 tokens.
const rounded = 128

// had returns how many tokens at the beginning of a prompt come from an earlier prompt and its answer, if shared of
// them come from the prompt alone.
func had(from, t *Turn, shared int) int {
	if t.Back == 1 && from.Input-shared < rounded && t.Input > from.Input {
		shared = from.Input + from.Output
	}
	return min(shared, t.Input-1)
}
