package config

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// ValidationErrors are all errors of a configuration, sorted by path.
type ValidationErrors []ValidationError

// ValidationError is one error of a configuration.
type ValidationError struct {
	Path string // as in the file: pools[0].endpoints[1].role; "" for the whole
	Hint string // what is wrong, and how to correct it
}

func (m ValidationError) String() string {
	if m.Path == "" {
		return m.Hint
	}
	return m.Path + ": " + m.Hint
}

// Error lists the mistakes, one per line.
func (m ValidationErrors) Error() string {
	lines := make([]string, len(m))
	for i := range m {
		lines[i] = m[i].String()
	}
	return strings.Join(lines, "\n")
}

func (m *ValidationErrors) add(path, format string, args ...any) {
	*m = append(*m, ValidationError{path, fmt.Sprintf(format, args...)})
}

// unrelated returns the mistakes of more that do not follow from one of m: a value that was removed from the tree is
// missing there.
func (m ValidationErrors) unrelated(more ValidationErrors) (out ValidationErrors) {
	below := func(a, b string) bool {
		return b != "" && (a == b || strings.HasPrefix(a, b+".") || strings.HasPrefix(a, b+"["))
	}
	for _, candidate := range more {
		if !slices.ContainsFunc(m,
			func(s ValidationError) bool { return below(candidate.Path, s.Path) || below(s.Path, candidate.Path) }) {
			out = append(out, candidate)
		}
	}
	return out
}

// comparePaths orders paths naturally: pools[2] before pools[10].
func comparePaths(a, b string) int {
	for {
		i, j := strings.IndexByte(a, '['), strings.IndexByte(b, '[')
		if i < 0 || j < 0 || a[:i] != b[:j] {
			return strings.Compare(a, b)
		}
		n, restA := index(a[i:])
		k, restB := index(b[j:])
		if n != k {
			return cmp.Compare(n, k)
		}
		a, b = restA, restB
	}
}

// index parses the [n] at the beginning of s.
func index(s string) (n int, rest string) {
	number, rest, _ := strings.Cut(s[1:], "]")
	n, _ = strconv.Atoi(number)
	return n, rest
}
