package process

import (
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
)

// Figures returns what earlier runs have written to a file; nothing if there is none.
func Figures[F any](file string) (all []F, err error) {
	text, err := os.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err == nil {
		err = json.Unmarshal(text, &all)
	}
	return all, err
}

// WriteFigures writes a run's figures to a file in the place of those with the same key. What this run did not measure
// stays.
func WriteFigures[F any, K comparable](file string, all, now []F, key func(*F) K) error {
	at := map[K]int{}
	for i := range all {
		at[key(&all[i])] = i
	}
	for i := range now {
		if old, ok := at[key(&now[i])]; ok {
			all[old] = now[i]
			continue
		}
		all = append(all, now[i])
	}
	text, err := json.MarshalIndent(all, "", "  ")
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		return err
	}
	return os.WriteFile(file, append(text, '\n'), 0o644)
}
