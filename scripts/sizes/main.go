// Sizes prints how large the house is: lines by room, the largest packages and types, long functions, words of docs,
// each beside what it was at the last release (scripts/sizes/last.json; -update writes it, when a release is made). It
// is a report: it fails nothing, and a number is a reason to look, not a limit to meet.
package main

import (
	"bytes"
	"cmp"
	"encoding/json"
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
)

const (
	module       = "tandem"
	last         = "scripts/sizes/last.json"
	longFunction = 60 // lines
	largest      = 12 // packages and types that are shown
)

// source is one Go file that is neither a test nor generated.
type source struct {
	dir, file string
	lines     int
	set       *token.FileSet
	ast       *ast.File
}

func main() {
	update := flag.Bool("update", false, "write what is measured to "+last+", for a release")
	flag.Parse()
	if err := report(*update); err != nil {
		slog.Error("sizes", "error", err)
		os.Exit(1)
	}
}

// report prints all sizes; update writes them, too.
func report(update bool) error {
	now, err := measure()
	if err != nil {
		return err
	}
	if update {
		text, err := json.MarshalIndent(now, "", "  ")
		if err != nil {
			return err
		}
		if err := os.WriteFile(last, append(text, '\n'), 0o600); err != nil {
			return err
		}
	}
	before := map[string]float64{}
	if text, err := os.ReadFile(last); err == nil {
		if err := json.Unmarshal(text, &before); err != nil {
			return fmt.Errorf("%s: %w", last, err)
		}
	}
	fmt.Printf("%-52s %10s %10s\n", "", "now", "last")
	for _, name := range shown(now) {
		was := "-"
		if n, ok := before[name]; ok {
			was = number(n)
		}
		fmt.Printf("%-52s %10s %10s\n", name, number(now[name]), was)
	}
	return nil
}

func number(n float64) string { return strings.TrimSuffix(fmt.Sprintf("%.2f", n), ".00") }

// shown returns the names to print: all totals, and of packages and types the largest.
func shown(now map[string]float64) (names []string) {
	kinds := map[string][]string{}
	for name := range now {
		kind, _, _ := strings.Cut(name, ": ")
		kinds[kind] = append(kinds[kind], name)
	}
	for _, kind := range slices.Sorted(maps.Keys(kinds)) {
		of := kinds[kind]
		slices.SortFunc(of, func(a, b string) int { return cmp.Or(cmp.Compare(now[b], now[a]), strings.Compare(a, b)) })
		names = append(names, of[:min(len(of), largest)]...)
	}
	return names
}

// helpers are the packages that only tests import.
var helpers = [...]string{
	"extproc/envoywire/wiretest", "extproc/journey/script", "extproc/usage/reader/readertest", "internal/budget",
}

// measure returns each size by its name ("package lines: kvstate").
func measure() (map[string]float64, error) {
	out := map[string]float64{}
	all, err := sources()
	if err != nil {
		return nil, err
	}
	functions := 0.0
	for _, s := range all {
		lines := float64(s.lines)
		out["package lines: "+s.dir] += lines
		room := "product"
		switch {
		case strings.HasPrefix(s.dir, "e2e"), s.dir == "cmd/enginesim", strings.HasPrefix(s.dir, "scripts"),
			slices.Contains(helpers[:], s.dir):
			room = "tests, simulator, scripts"
		case strings.HasPrefix(s.dir, "replay"):
			room = "replay"
		}
		out["lines of Go without tests: "+room] += lines
		for _, d := range s.ast.Decls {
			if f, ok := d.(*ast.FuncDecl); ok && f.Body != nil {
				functions++
				if s.set.Position(f.End()).Line-s.set.Position(f.Pos()).Line >= longFunction {
					out[fmt.Sprintf("functions: percent over %d lines", longFunction)]++
				}
			}
		}
	}
	out[fmt.Sprintf("functions: percent over %d lines", longFunction)] *= 100 / functions
	packages := 0.0
	for name := range out {
		if strings.HasPrefix(name, "package lines: ") {
			packages++
		}
	}
	out["packages: all"] = packages
	types := typesOf(all)
	for name := range types {
		methods, fields := reached(types, name, map[string]bool{})
		out["methods reached: "+name] = float64(len(methods))
		out["fields reached: "+name] = float64(len(fields))
	}
	return out, filepath.WalkDir(".", func(p string, d fs.DirEntry, err error) error {
		if err != nil || hidden(p, d) {
			return cmp.Or(err, fs.SkipDir)
		}
		if path.Ext(p) == ".md" && !strings.HasPrefix(p, filepath.Join("docs", "adr")) {
			text, err := os.ReadFile(p) //nolint:gosec // the repository's own files
			if err != nil {
				return err
			}
			out["words of docs: without adr/"] += float64(len(bytes.Fields(text)))
		}
		return nil
	})
}

// hidden reports whether a folder has nothing of ours to measure.
func hidden(p string, d fs.DirEntry) bool {
	return d.IsDir() && p != "." && (strings.HasPrefix(d.Name(), ".") || d.Name() == "testdata" ||
		d.Name() == "bin" || d.Name() == "dist")
}

// sources returns all Go files below the working directory, the repository's root, but tests and generated ones.
func sources() (out []source, err error) {
	return out, filepath.WalkDir(".", func(p string, d fs.DirEntry, err error) error {
		if err != nil || hidden(p, d) {
			return cmp.Or(err, fs.SkipDir)
		}
		if path.Ext(p) != ".go" || strings.HasSuffix(p, "_test.go") {
			return nil
		}
		text, err := os.ReadFile(p) //nolint:gosec // the repository's own files
		if err != nil {
			return err
		}
		set := token.NewFileSet()
		f, err := parser.ParseFile(set, p, text, parser.ParseComments|parser.SkipObjectResolution)
		if err == nil && !ast.IsGenerated(f) {
			out = append(out, source{filepath.ToSlash(filepath.Dir(p)), filepath.ToSlash(p), bytes.Count(text,
				[]byte("\n")), set, f})
		}
		return err
	})
}
