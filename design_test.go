package tandem_test

import (
	"fmt"
	"go/ast"
	"go/types"
	"os"
	"path"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// inThePicture are the packages that a reader meets first. The list in docs/design.md has all.
var inThePicture = []string{
	"carrier", "carrier/filter", "carrier/replicas", "cmd/tandem", "envoy-configs", "replica/config", "replica", "replica/beside", "replica/xds", "status",
	"extproc", "extproc/concurrent", "extproc/core", "extproc/ended", "extproc/journey", "extproc/envoywire", "extproc/kvtransfer", "extproc/latebinding", "extproc/openai",
	"extproc/pass", "extproc/plan", "extproc/replan", "extproc/telemetry", "picker", "picker/admission", "picker/roles",
	"kvstate", "kvstate/discovery", "kvstate/kvevents", "kvstate/prefixindex", "kvstate/redisstore", "kvstate/scrape",
}

// TestThePictureIsTrue compares the picture of docs/design.md with the imports. An arrow that follows from others is left out.
func TestThePictureIsTrue(t *testing.T) {
	imports := map[string][]string{}
	for _, s := range sources(t) {
		if s.test || !slices.Contains(inThePicture, s.dir) {
			continue
		}
		imports[s.dir] = append(imports[s.dir], nil...)
		for _, p := range s.imports() {
			if ours, ok := strings.CutPrefix(p, module+"/"); ok && !slices.Contains(imports[s.dir], ours) {
				imports[s.dir] = append(imports[s.dir], ours)
			}
		}
	}
	for dir, to := range imports {
		imports[dir] = slices.DeleteFunc(to, func(p string) bool { _, shown := imports[p]; return !shown })
	}
	const file, begin, end = "docs/design.md", "```mermaid\n", "```\n"
	text, err := os.ReadFile(file)
	require.NoError(t, err)
	before, rest, found := strings.Cut(string(text), begin)
	require.True(t, found, "%s has no picture", file)
	was, after, found := strings.Cut(rest, end)
	require.True(t, found)
	want := picture(imports)
	if *update {
		require.NoError(t, os.WriteFile(file, []byte(before+begin+want+end+after), 0o600))
		return
	}
	require.Equal(t, want, was, "go test . -run TestThePicture -update draws it anew")
}

// picture draws packages and their imports in Mermaid's language: a box for each top folder, and the arrows that do not follow
// from others.
func picture(imports map[string][]string) string {
	var dirs []string
	for dir := range imports {
		dirs = append(dirs, dir)
	}
	slices.Sort(dirs)
	id := func(dir string) string { return strings.NewReplacer("/", "_", "-", "_").Replace(dir) }
	var b strings.Builder
	// As narrow as can be: the site draws it as wide as a page, and its letters as small as that takes.
	b.WriteString("%%{init: {\"flowchart\": {\"nodeSpacing\": 8, \"rankSpacing\": 30, \"padding\": 4, \"subGraphTitleMargin\": {\"top\": 2, \"bottom\": 12}}}}%%\nflowchart TD\n")
	for i, dir := range dirs {
		top, _, _ := strings.Cut(dir, "/")
		if i == 0 || !strings.HasPrefix(dirs[i-1]+"/", top+"/") {
			fmt.Fprintf(&b, "  subgraph %s_room[%s]\n", id(top), top)
		}
		fmt.Fprintf(&b, "    %s[%s]\n", id(dir), strings.TrimPrefix(dir, top+"/"))
		if i == len(dirs)-1 || !strings.HasPrefix(dirs[i+1]+"/", top+"/") {
			b.WriteString("  end\n")
		}
	}
	for _, from := range dirs {
		slices.Sort(imports[from])
		for _, to := range imports[from] {
			if !slices.ContainsFunc(imports[from], func(by string) bool { return by != to && reaches(imports, by, to) }) {
				fmt.Fprintf(&b, "  %s --> %s\n", id(from), id(to))
			}
		}
	}
	return b.String()
}

// reaches reports whether a package imports another one, directly or by others. Go allows no circles.
func reaches(imports map[string][]string, from, to string) bool {
	return slices.ContainsFunc(imports[from], func(p string) bool { return p == to || reaches(imports, p, to) })
}

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

// receiver returns the name of the type that a method belongs to, "" for a function.
func receiver(d *ast.FuncDecl) string {
	if d.Recv == nil {
		return ""
	}
	typ := strings.TrimPrefix(types.ExprString(d.Recv.List[0].Type), "*")
	name, _, _ := strings.Cut(typ, "[") // without type parameters
	return name
}
