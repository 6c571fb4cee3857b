package tandem_test

import (
	"bytes"
	"fmt"
	"go/ast"
	"go/token"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/require"
)

// Limits of size: above them a type, a package or a function does more than one thing. Tests and generated code do not count.
const (
	maxMethods    = 40 // of a type
	maxFields     = 20
	maxReached    = 25 // fields that a receiver reaches, those of embedded structs too; of methods maxMethods
	maxFiles      = 20 // of a package
	maxLines      = 3000
	maxComplexity = 20  // of a function or a closure: one, and one for each branch, loop, case, && and ||
	maxColumns    = 120 // of a line; a tab counts as 4
)

// larger are the types and packages above a limit, with the reason and the size that they must not exceed.
var larger = map[string]struct {
	size   int
	reason string
}{
	"envoy-configs: lines":              {3200, "one model of Envoy's configuration, and two ways to hand it to Envoy Gateway"},
	"extproc/envoywire.Headers: fields": {30, "one field for each header that is read"},
	"extproc/kvtransfer.Ticket: fields": {35, "one field for each of the sealed ticket"},
	"extproc/kvtransfer: files":         {26, "one file for each dialect"},
	"extproc/kvtransfer: lines":         {5000, "one file for each dialect"},
	"extproc/openai: lines":             {3600, "one file for each thing that is read of a body"},
	"internal/enginesim/api: lines":     {3050, "the answers of six APIs, each in its engine's own form"},
	"internal/grpcserver.conn: fields":  {23, "the limits of one connection"},
	"kvstate/prefixindex: lines":        {3126, "one index with its holders and feeds"},
	"kvstate/redisstore: lines":         {3100, "what replicas exchange, one file for each part"},
	"kvstate: files":                    {28, "endpoints, reservations, health, load and sessions lie behind one state"},
	"kvstate: lines":                    {3900, "endpoints, reservations, health, load and sessions lie behind one state"},
	"replay: files":                     {23, "one file for each peer that is played"},
	"replay: lines":                     {3100, "one file for each peer that is played"},
}

// branching are the functions above maxComplexity, with the reason and the complexity that they must not exceed.
var branching = map[string]struct {
	size   int
	reason string
}{
	"extproc/envoywire.Headers.slot":        {29, "one case for each header that is read"},
	"extproc/envoywire.LogBatch.readCommon": {25, "one case for each field of the wire"},
	"extproc/envoywire.Reply.Marshal":       {22, "one branch for each field of the wire"},
	"extproc/kvtransfer.Ticket.setNumber":   {21, "one case for each field of the ticket"},
	"extproc/openai.fieldOf":                {52, "one case for each field that is read"},
	"kvstate/kvevents.cursor.skipNested":    {24, "one case for each type of MessagePack"},
	"replay.newChooser":                     {23, "one case for each policy that is played"},
}

// longLines are the lines of more than maxColumns that packages had when the limit was set. The numbers may only fall.
var longLines = map[string]int{
	"cmd/tandem":       43,
	"envoy-configs":    32,
	"extproc":          33,
	"internal/replica": 22,
	"status":           2,
}

// TestTypesAndPackagesStaySmall holds the limits, and the exceptions to some room above what they were made for.
func TestTypesAndPackagesStaySmall(t *testing.T) {
	sizes, limits := map[string]int{}, map[string]int{}
	add := func(name string, limit, n int) { sizes[name], limits[name] = sizes[name]+n, limit }
	for _, s := range sources(t) {
		if s.test || s.generated {
			continue
		}
		text, err := os.ReadFile(s.file)
		require.NoError(t, err)
		add(s.dir+": files", maxFiles, 1)
		add(s.dir+": lines", maxLines, bytes.Count(text, []byte("\n")))
		for _, d := range s.ast.Decls {
			switch d := d.(type) {
			case *ast.FuncDecl:
				if name := receiver(d); name != "" {
					add(s.dir+"."+name+": methods", maxMethods, 1)
				}
			case *ast.GenDecl:
				for _, spec := range d.Specs {
					if typ, ok := spec.(*ast.TypeSpec); ok {
						if of, ok := typ.Type.(*ast.StructType); ok {
							add(s.dir+"."+typ.Name.Name+": fields", maxFields, fields(of))
						}
					}
				}
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(sizes)) {
		of, excepted := larger[name]
		switch size := sizes[name]; {
		case !excepted && size > limits[name]:
			t.Errorf("%s: %d, at most %d: split it. If it does one thing all the same, add to larger (house_test.go):\n\t%q: {%d, \"why\"},",
				name, size, limits[name], name, size)
		case excepted && size > of.size:
			t.Errorf("%s: %d, at most %d, an exception that may only shrink: split it, or take something away", name, size, of.size)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(larger)) {
		if _, ok := sizes[name]; !ok {
			t.Errorf("%s: an exception for what is not there: take it out of larger (house_test.go)", name)
		}
	}
}

// receiver returns the name of the type that a method belongs to, "" for a function.
func receiver(d *ast.FuncDecl) string {
	if d.Recv == nil {
		return ""
	}
	typ := d.Recv.List[0].Type
	for {
		switch of := typ.(type) {
		case *ast.StarExpr:
			typ = of.X
		case *ast.IndexExpr:
			typ = of.X
		case *ast.IndexListExpr:
			typ = of.X
		case *ast.Ident:
			return of.Name
		default:
			return fmt.Sprintf("%T", of)
		}
	}
}

// fields counts the fields of a struct; an embedded one counts as one.
func fields(s *ast.StructType) (n int) {
	for _, f := range s.Fields.List {
		n += max(len(f.Names), 1)
	}
	return n
}

// complexity returns the cyclomatic complexity of a function's or closure's body, without the closures in it: each is
// read, and counted, by itself.
func complexity(body *ast.BlockStmt) int {
	n := 1
	ast.Inspect(body, func(node ast.Node) bool {
		switch node := node.(type) {
		case *ast.IfStmt, *ast.ForStmt, *ast.RangeStmt:
			n++
		case *ast.CaseClause:
			if node.List != nil {
				n++
			}
		case *ast.CommClause:
			if node.Comm != nil {
				n++
			}
		case *ast.BinaryExpr:
			if node.Op == token.LAND || node.Op == token.LOR {
				n++
			}
		case *ast.FuncLit:
			return false
		}
		return true
	})
	return n
}

// TestFunctionsAreSimple holds the limit of complexity, and each exception to what it was made for.
func TestFunctionsAreSimple(t *testing.T) {
	seen := map[string]bool{}
	for _, s := range sources(t) {
		if s.test || s.generated {
			continue
		}
		for _, d := range s.ast.Decls {
			f, ok := d.(*ast.FuncDecl)
			if !ok {
				continue
			}
			name := s.dir + "." + f.Name.Name
			if of := receiver(f); of != "" {
				name = s.dir + "." + of + "." + f.Name.Name
			}
			if f.Body == nil {
				continue
			}
			check := func(name string, n int) {
				limit := maxComplexity
				if of, ok := branching[name]; ok {
					seen[name], limit = true, of.size
				}
				if n > limit {
					t.Errorf("%s: %s has complexity %d, at most %d: split it, or say in branching (house_test.go) why not:\n\t%q: {%d, \"why\"},",
						s.file, name, n, limit, name, n)
				}
			}
			check(name, complexity(f.Body))
			ast.Inspect(f.Body, func(node ast.Node) bool {
				if closure, ok := node.(*ast.FuncLit); ok {
					check(name+" closure", complexity(closure.Body))
				}
				return true
			})
		}
	}
	for _, name := range slices.Sorted(maps.Keys(branching)) {
		if !seen[name] {
			t.Errorf("%s: an exception for what is not there: take it out of branching (house_test.go)", name)
		}
	}
}

// TestLinesAreShort holds the limit of columns. A package with longer lines from before may have no more than it has: lower
// its number when you shorten some.
func TestLinesAreShort(t *testing.T) {
	wide := map[string][]string{} // file:line, by directory
	for _, s := range sources(t) {
		if s.test || s.generated {
			continue
		}
		text, err := os.ReadFile(s.file)
		require.NoError(t, err)
		number := 0
		for line := range strings.Lines(string(text)) {
			number++
			if utf8.RuneCountInString(strings.ReplaceAll(strings.TrimRight(line, "\n"), "\t", "    ")) > maxColumns {
				wide[s.dir] = append(wide[s.dir], fmt.Sprintf("%s:%d", s.file, number))
			}
		}
	}
	for _, dir := range slices.Sorted(maps.Keys(wide)) {
		if n := len(wide[dir]); n > longLines[dir] {
			t.Errorf("%s: %d lines of more than %d columns, at most %d; code that moves takes its number along:\n\t%s",
				dir, n, maxColumns, longLines[dir], strings.Join(wide[dir], "\n\t"))
		}
	}
	for dir, n := range longLines {
		if len(wide[dir]) < n {
			t.Logf("%s: %d lines of more than %d columns; lower its number from %d", dir, len(wide[dir]), maxColumns, n)
		}
	}
}
