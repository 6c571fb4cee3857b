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

	meant string // of an unknown field: the path of the one that was probably meant, "" if there is none
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
	*m = append(*m, ValidationError{Path: path, Hint: fmt.Sprintf(format, args...)})
}

// unrelated returns the mistakes of more that do not follow from one of m: a value that was removed from the tree is
// missing there.
func (m ValidationErrors) unrelated(more ValidationErrors) (out ValidationErrors) {
	for _, candidate := range more {
		if !slices.ContainsFunc(m, func(s ValidationError) bool { return related(candidate.Path, s.Path) }) {
			out = append(out, candidate)
		}
	}
	return out
}

// related reports whether one of two settings holds the other.
func related(a, b string) bool {
	return a != "" && a == b || Within(a, b) || Within(b, a)
}

// Within reports whether a setting is part of another one.
func Within(path, outer string) bool {
	return outer != "" && (strings.HasPrefix(path, outer+".") || strings.HasPrefix(path, outer+"["))
}

// warning is about a setting that is valid.
type warning struct {
	path, text string
	given      []string // paths of other settings that it rests on
}

// unmisled returns the warnings that hold in spite of the errors. A warning may be caused by an error if the error is
// in a setting that the warning depends on, in a field that was meant to be such a setting, or in the file as a whole.
func (m ValidationErrors) unmisled(all []warning) (out []string) {
	for _, w := range all {
		misled := func(e ValidationError) bool {
			rests := func(path string) bool { return related(path, e.Path) || related(path, e.meant) }
			return e.Path == "" || rests(w.path) || slices.ContainsFunc(w.given, rests)
		}
		if !slices.ContainsFunc(m, misled) {
			out = append(out, w.path+": "+w.text)
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
