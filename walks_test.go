package tandem_test

import (
	"go/ast"
	"os"
	"path"
	"regexp"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestWalksAreTrue holds the walks of docs/design.md to the code: each step is a file that declares the function it names,
// and of two neighbours one imports the other's package, or they share it.
func TestWalksAreTrue(t *testing.T) {
	files, imports := map[string]source{}, map[string]bool{} // of packages: "from -> to"
	for _, s := range sources(t) {
		files[s.file] = s
		if !s.test {
			for _, p := range s.imports() {
				imports[module+"/"+s.dir+" -> "+p] = true
			}
		}
	}
	text, err := os.ReadFile("docs/design.md")
	require.NoError(t, err)
	step := regexp.MustCompile("^(\\d+)\\. `([\\w/.-]+\\.go)` \\(`([\\w.]+)`\\): ")
	steps, before := 0, ""
	for line := range slices.Values(regexp.MustCompile("\r?\n").Split(string(text), -1)) {
		m := step.FindStringSubmatch(line)
		if m == nil {
			continue
		}
		number, file, function := m[1], m[2], m[3]
		steps++
		s, found := files[file]
		require.True(t, found, "docs/design.md: there is no file %s", file)
		require.Contains(t, declared(s), function, "docs/design.md: %s does not declare it", file)
		if number != "1" {
			from, to := module+"/"+files[before].dir, module+"/"+s.dir
			require.True(t, from == to || imports[from+" -> "+to] || imports[to+" -> "+from],
				"docs/design.md: neither the package of %s nor that of %s imports the other", before, file)
		}
		before = path.Clean(file)
	}
	require.Greater(t, steps, 25)
}

// declared returns the functions of a file, methods as Type.Name.
func declared(s source) (names []string) {
	for _, d := range s.ast.Decls {
		if f, ok := d.(*ast.FuncDecl); ok {
			name := f.Name.Name
			if of := receiver(f); of != "" {
				name = of + "." + name
			}
			names = append(names, name)
		}
	}
	return names
}
