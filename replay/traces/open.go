package traces

import (
	"bytes"
	"compress/gzip"
	_ "embed" // a trace
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"tandem/recording"
)

// mooncakeTrace is the public conversation trace (README.md).
//
//go:embed mooncake-conversation.jsonl.gz
var mooncakeTrace []byte

// Open reads the trace in a file (.gz: compressed), or the built-in public one ("mooncake"), or generates one if name
// is one of [Kinds].
func Open(name string, requests int, seed uint64) (*Trace, error) {
	if slices.Contains(Kinds(), name) {
		return Generate(name, requests, usualRate, seed)
	}
	if name == "mooncake" {
		r, err := gzip.NewReader(bytes.NewReader(mooncakeTrace))
		if err != nil {
			return nil, fmt.Errorf("the trace that is built in: %w", err)
		}
		return Read(name, r, seed)
	}
	file, err := recording.OpenFile(name)
	if err != nil {
		return nil, fmt.Errorf("opening the trace (a file, or one of mooncake, %s): %w", strings.Join(Kinds(), ", "),
			err)
	}
	defer file.Close()
	return Read(filepath.Base(name), file, seed)
}
