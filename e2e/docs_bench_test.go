package e2e

import (
	"cmp"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestDocumentedBenchmarks checks that every benchmark that a page or a target of the Makefile names is there. `make
// bench-go` runs them.
func TestDocumentedBenchmarks(t *testing.T) {
	t.Parallel()
	commands := benchCommands(t)
	require.Greater(t, len(commands), 6, "commands are not found any more")
	benchmarks := benchmarksOf(t)
	require.NotEmpty(t, benchmarks)
	for _, c := range commands {
		for name := range strings.SplitSeq(c.pattern, "|") {
			require.True(t, c.matches(benchmarks, regexp.MustCompile(name)), "%s: `%s` runs no benchmark called %s", c.page, c.line, name)
		}
	}
}

// benchCommand is a `go test -bench` command of a page or of the Makefile.
type benchCommand struct {
	page, line, pattern string
	packages            []string
}

// matches reports whether a benchmark of the command's packages has such a name.
func (c *benchCommand) matches(all map[string][]string, name *regexp.Regexp) bool {
	for _, p := range c.packages {
		dir, below := strings.CutSuffix(strings.TrimPrefix(p, "./"), "...")
		for pkg, benchmarks := range all {
			if pkg != dir && !(below && strings.HasPrefix(pkg+"/", dir)) {
				continue
			}
			if slices.ContainsFunc(benchmarks, name.MatchString) {
				return true
			}
		}
	}
	return false
}

// benchCommands returns the commands with -bench of all pages and of the Makefile.
func benchCommands(t *testing.T) (found []benchCommand) {
	t.Helper()
	for _, page := range documentedPages(t) {
		for _, line := range documented(t, page) {
			for part := range strings.SplitSeq(line, "; ") {
				found = appendBench(found, page, part)
			}
		}
	}
	makefile, err := os.ReadFile("../Makefile")
	require.NoError(t, err)
	for line := range strings.Lines(string(makefile)) {
		line = strings.NewReplacer("$(GO)", "go", "$$", "$").Replace(strings.TrimSpace(line))
		found = appendBench(found, "../Makefile", line)
	}
	return found
}

func appendBench(to []benchCommand, page, line string) []benchCommand {
	if !strings.Contains(line, "go test ") {
		return to
	}
	c := benchCommand{page: page, line: line}
	words := regexp.MustCompile(`'[^']*'|\S+`).FindAllString(line, -1)
	for i, w := range words {
		switch {
		case strings.HasPrefix(w, "./"):
			c.packages = append(c.packages, w)
		case i > 0 && words[i-1] == "-bench":
			c.pattern = strings.Trim(w, "'")
		}
	}
	if c.pattern == "" {
		return to
	}
	return append(to, c)
}

// benchmarksOf returns the names of all benchmarks by their packages' directories, as the source has them.
func benchmarksOf(t *testing.T) map[string][]string {
	t.Helper()
	found := map[string][]string{}
	benchmark := regexp.MustCompile(`(?m)^func Benchmark(\w+)\(`)
	require.NoError(t, filepath.WalkDir("..", func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil || d.IsDir() && strings.HasPrefix(d.Name(), ".") && d.Name() != "..":
			return cmp.Or(err, fs.SkipDir)
		case d.IsDir() || !strings.HasSuffix(path, "_test.go"):
			return nil
		}
		text, err := os.ReadFile(path)
		dir := filepath.ToSlash(filepath.Dir(strings.TrimPrefix(path, "../")))
		for _, name := range benchmark.FindAllSubmatch(text, -1) {
			found[dir] = append(found[dir], string(name[1]))
		}
		return err
	}))
	return found
}
