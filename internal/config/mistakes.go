package config

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// Mistakes are all that is wrong with a configuration, sorted by path.
type Mistakes []Mistake

// Mistake is one thing that is wrong.
type Mistake struct {
	Path   string // as one would write it: pools[0].endpoints[1].role; "" for the whole
	Remedy string // what is wrong, and what would be right
}

func (m Mistake) String() string {
	if m.Path == "" {
		return m.Remedy
	}
	return m.Path + ": " + m.Remedy
}

// Error lists the mistakes, a line each.
func (m Mistakes) Error() string {
	lines := make([]string, len(m))
	for i := range m {
		lines[i] = m[i].String()
	}
	return strings.Join(lines, "\n")
}

func (m *Mistakes) add(path, format string, args ...any) {
	*m = append(*m, Mistake{path, fmt.Sprintf(format, args...)})
}

// unrelated are those of more that do not follow from one of m: what was taken out of the tree is missing there, and in
// what holds it.
func (m Mistakes) unrelated(more Mistakes) (out Mistakes) {
	below := func(a, b string) bool {
		return b != "" && (a == b || strings.HasPrefix(a, b+".") || strings.HasPrefix(a, b+"["))
	}
	for _, candidate := range more {
		if !slices.ContainsFunc(m, func(s Mistake) bool { return below(candidate.Path, s.Path) || below(s.Path, candidate.Path) }) {
			out = append(out, candidate)
		}
	}
	return out
}

// comparePaths orders paths as one reads them: pools[2] before pools[10].
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

// index reads the [n] that s begins with.
func index(s string) (n int, rest string) {
	number, rest, _ := strings.Cut(s[1:], "]")
	n, _ = strconv.Atoi(number)
	return n, rest
}
