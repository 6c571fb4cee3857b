package tandem_test

import (
	"bytes"
	"fmt"
	"go/ast"
	"os"
	"testing"

	"github.com/stretchr/testify/require"
)

// Limits of size: above them a type or a package does more than one thing. Tests and generated code do not count.
const (
	maxMethods = 40 // of a type
	maxFields  = 20
	maxFiles   = 20 // of a package
	maxLines   = 3000
)

// larger are the types and packages above a limit, with the reason and the size that they must not exceed.
var larger = map[string]struct {
	size   int
	reason string
}{
	"cmd/tandem: files":                 {35, "one file for each subcommand and each thing that is wired"},
	"cmd/tandem: lines":                 {4000, "one file for each subcommand and each thing that is wired"},
	"e2e/load.result: fields":           {30, "one field for each figure of the report"},
	"envoy-configs.model: methods":      {80, "one method for each part of Envoy's configuration"},
	"extproc.waiter: fields":            {30, "one request that waits: what it asked, how it waits, what it got"},
	"extproc.poolAdmission: fields":     {30, "the host of an admission queue, with the scratch of its look-ups"},
	"extproc/envoywire.Headers: fields": {40, "one field for each header that is read"},
	"extproc/kvtransfer.Ticket: fields": {40, "one field for each of the sealed ticket"},
	"extproc/kvtransfer: files":         {30, "one file for each dialect"},
	"extproc/kvtransfer: lines":         {5000, "one file for each dialect"},
	"extproc/openai: files":             {30, "one file for each thing that is read of a body"},
	"extproc/openai: lines":             {4000, "one file for each thing that is read of a body"},
	"extproc/telemetry.Metrics: fields": {40, "one field for each metric"},
	"extproc: files":                    {50, "concurrent, answer and endpointpicker are still files and no packages; planning still reads the stream"},
	"extproc: lines":                    {7200, "concurrent, answer and endpointpicker are still files and no packages; planning still reads the stream"},
	"internal/grpcserver.conn: fields":  {30, "the limits of one connection"},
	"kvstate.State: methods":            {90, "endpoints, reservations, health, load and sessions lie behind one state"},
	"kvstate/prefixindex: lines":        {3600, "one index with its holders and feeds"},
	"kvstate: files":                    {30, "endpoints, reservations, health, load and sessions lie behind one state"},
	"kvstate: lines":                    {3900, "endpoints, reservations, health, load and sessions lie behind one state"},
	"replay: files":                     {30, "one file for each peer that is played"},
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
	for name, size := range sizes {
		limit := limits[name]
		if of, ok := larger[name]; ok {
			limit = of.size
		}
		require.LessOrEqual(t, size, limit, "%s: split it, or say in larger why not", name)
	}
	for name := range larger {
		require.Contains(t, sizes, name, "an exception for what is not there")
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
