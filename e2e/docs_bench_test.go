package e2e

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestDocumentedBenchmarks runs every benchmark that a page or a target of the Makefile names, once each. Packages that several commands
// name are run once, with all their benchmarks; then every command must have found a benchmark by each name that it gives.
func TestDocumentedBenchmarks(t *testing.T) {
	if testing.Short() {
		t.Skip("builds and runs all benchmarks: a minute of one core")
	}
	t.Parallel()
	commands := benchCommands(t)
	require.Greater(t, len(commands), 6, "commands are not found any more")
	packages := map[string]bool{}
	for _, c := range commands {
		for _, p := range c.packages {
			packages[p] = true
		}
	}
	if packages["./..."] {
		packages = map[string]bool{"./...": true}
	}
	args := []string{"test", "-run", "^$", "-bench", ".", "-benchtime", "1x", "-p", "1"}
	for p := range packages {
		args = append(args, p)
	}
	cmd := exec.Command("go", args...)
	cmd.Dir = ".."
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "go %s\n%s", strings.Join(args, " "), out)
	ran := benchmarksOf(string(out))
	require.NotEmpty(t, ran)
	for _, c := range commands {
		for name := range strings.SplitSeq(c.pattern, "|") {
			require.True(t, c.matches(ran, regexp.MustCompile(name)), "%s: `%s` runs no benchmark called %s", c.page, c.line, name)
		}
	}
}

// benchCommand is a `go test -bench` command of a page or of the Makefile.
type benchCommand struct {
	page, line, pattern string
	packages            []string
}

// matches reports whether a benchmark of the command's packages that ran has such a name.
func (c *benchCommand) matches(ran map[string][]string, name *regexp.Regexp) bool {
	for _, p := range c.packages {
		dir, all := strings.CutSuffix(strings.TrimPrefix(p, "./"), "...")
		for pkg, benchmarks := range ran {
			if pkg != dir && !(all && strings.HasPrefix(pkg+"/", dir)) {
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
	pages := []string{"../README.md", "../CONTRIBUTING.md"}
	for _, pattern := range []string{"../docs/*.md", "../docs/*/*.md"} {
		more, err := filepath.Glob(pattern)
		require.NoError(t, err)
		pages = append(pages, more...)
	}
	for _, page := range pages {
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

// benchmarksOf returns the names of the benchmarks that go test ran, by the package's directory.
func benchmarksOf(out string) map[string][]string {
	ran, pkg := map[string][]string{}, ""
	for line := range strings.Lines(out) {
		if p, ok := strings.CutPrefix(line, "pkg: tandem"); ok {
			pkg = strings.TrimPrefix(strings.TrimSpace(p), "/")
		} else if name := regexp.MustCompile(`^Benchmark(\S+)`).FindStringSubmatch(line); name != nil {
			ran[pkg] = append(ran[pkg], name[1])
		}
	}
	return ran
}
