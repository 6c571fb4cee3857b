package tandem_test

import (
	"go/ast"
	"maps"
	"path"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// reach is what a receiver of a type reaches by one selector: methods and fields, its own and those of embedded types.
type reach struct{ methods, fields int }

// reaching are the types above maxMethods or maxReached, with what they reached when the limit was set. The numbers may
// only fall: give a room fields of its own, and do not embed another room's type.
var reaching = map[string]reach{
	"cmd/tandem.replayOptions":            {2, 35},
	"extproc/pass.Policy":                 {21, 30},
	"kvstate.endpointState":               {8, 26},
	"replay.dynamoLoad":                   {21, 26},
	"replay/engine.Engine":                {24, 34},
	"extproc.Server":                      {21, 31},
	"extproc/latebinding.Queue":           {27, 29},
	"extproc/latebinding.Waiter":          {4, 28},
	"extproc/openai.Request":              {47, 9},
	"extproc/telemetry.Metrics":           {29, 34},
	"extproc/telemetry.Observer":          {41, 43},
	"extproc/telemetry.Planned":           {0, 26},
	"extproc/telemetry.Trace":             {5, 42},
	"internal/enginesim/api.Config":       {6, 51},
	"internal/enginesim/api.Record":       {5, 35},
	"internal/enginesim/api.Server":       {86, 46},
	"internal/enginesim/api.call":         {62, 20},
	"internal/enginesim/connector.Config": {5, 40},
	"internal/enginesim/connector.Node":   {49, 34},
	"internal/enginesim/connector.Params": {10, 32},
	"internal/enginesim/engine.metrics":   {2, 34},
	"kvstate.Endpoint":                    {35, 49},
	"kvstate.State":                       {96, 28},
	"kvstate/redisstore.poolReplica":      {40, 27},
	"replay.replica":                      {27, 29},
	"status.Decided":                      {5, 44},
	"status.Endpoint":                     {4, 31},
	"status.Status":                       {8, 26},
}

// typeIn is a named type of ours, as far as the source says: its methods, and for structs and interfaces its members.
type typeIn struct {
	methods  map[string]bool
	fields   map[string]bool
	embedded []string // types of ours, by directory and name
}

// typesOf returns our types by directory and name ("extproc.stream").
func typesOf(t *testing.T) map[string]*typeIn {
	t.Helper()
	out := map[string]*typeIn{}
	get := func(name string) *typeIn {
		if out[name] == nil {
			out[name] = &typeIn{methods: map[string]bool{}, fields: map[string]bool{}}
		}
		return out[name]
	}
	for _, s := range sources(t) {
		if s.test || s.generated {
			continue
		}
		imported := map[string]string{} // directories of ours by the name that the file uses
		for _, i := range s.ast.Imports {
			p, _ := strconv.Unquote(i.Path.Value)
			if dir, ours := strings.CutPrefix(p, module+"/"); ours {
				name := path.Base(dir)
				if i.Name != nil {
					name = i.Name.Name
				}
				imported[name] = dir
			}
		}
		named := func(e ast.Expr) (name, of string) {
			for {
				switch x := e.(type) {
				case *ast.StarExpr:
					e = x.X
				case *ast.IndexExpr:
					e = x.X
				case *ast.Ident:
					return x.Name, s.dir + "." + x.Name
				case *ast.SelectorExpr:
					if pkg, ok := x.X.(*ast.Ident); ok && imported[pkg.Name] != "" {
						return x.Sel.Name, imported[pkg.Name] + "." + x.Sel.Name
					}
					return x.Sel.Name, ""
				default:
					return "", ""
				}
			}
		}
		for _, d := range s.ast.Decls {
			switch d := d.(type) {
			case *ast.FuncDecl:
				if of := receiver(d); of != "" {
					get(s.dir + "." + of).methods[d.Name.Name] = true
				}
			case *ast.GenDecl:
				for _, spec := range d.Specs {
					if typ, ok := spec.(*ast.TypeSpec); ok {
						members(get(s.dir+"."+typ.Name.Name), typ.Type, named)
					}
				}
			}
		}
	}
	return out
}

// members adds what a type's expression declares.
func members(to *typeIn, of ast.Expr, named func(ast.Expr) (name, of string)) {
	switch of := of.(type) {
	case *ast.StructType:
		for _, f := range of.Fields.List {
			for _, name := range f.Names {
				to.fields[name.Name] = true
			}
			if len(f.Names) == 0 {
				name, from := named(f.Type)
				to.fields[name] = true
				to.embedded = append(to.embedded, from)
			}
		}
	case *ast.InterfaceType:
		for _, f := range of.Methods.List {
			for _, name := range f.Names {
				to.methods[name.Name] = true
			}
			if len(f.Names) == 0 {
				_, from := named(f.Type)
				to.embedded = append(to.embedded, from)
			}
		}
	}
}

// reached returns the names of all methods and fields of a type, those of embedded types too.
func reached(types map[string]*typeIn, name string, visited map[string]bool) (methods, fields map[string]bool) {
	of := types[name]
	if of == nil || visited[name] {
		return nil, nil
	}
	visited[name] = true
	methods, fields = maps.Clone(of.methods), maps.Clone(of.fields)
	for _, e := range of.embedded {
		m, f := reached(types, e, visited)
		maps.Copy(methods, m)
		maps.Copy(fields, f)
	}
	return methods, fields
}

// TestReceiversReachLittle holds what a reader has to know of one receiver: whoever reads x.name finds it among so many.
// Types of other modules count as one field.
func TestReceiversReachLittle(t *testing.T) {
	types := typesOf(t)
	seen := map[string]bool{}
	for _, name := range slices.Sorted(maps.Keys(types)) {
		if len(types[name].embedded) == 0 { // its own members have limits of their own (larger)
			continue
		}
		methods, fields := reached(types, name, map[string]bool{})
		now := reach{len(methods), len(fields)}
		limit := reach{maxMethods, maxReached}
		if of, ok := reaching[name]; ok {
			seen[name] = true
			limit = of
			if now.methods < limit.methods || now.fields < limit.fields {
				t.Logf("%s reaches %d methods and %d fields: lower its numbers", name, now.methods, now.fields)
			}
		}
		if now.methods > limit.methods || now.fields > limit.fields {
			t.Errorf("%s reaches %d methods and %d fields by embedding, at most %d and %d: give a part of it a name",
				name, now.methods, now.fields, limit.methods, limit.fields)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(reaching)) {
		if !seen[name] {
			t.Errorf("%s: an exception for what embeds nothing any more: take it out of reaching", name)
		}
	}
}
