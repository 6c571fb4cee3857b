package main

import (
	"go/ast"
	"go/types"
	"maps"
	"path"
	"strconv"
	"strings"
)

// typeIn is a named type of ours, as far as the source says: its methods, and for structs and interfaces its members.
type typeIn struct {
	methods  map[string]bool
	fields   map[string]bool
	embedded []string // types of ours, by directory and name
}

// typesOf returns our types by directory and name ("extproc.stream").
func typesOf(all []source) map[string]*typeIn {
	out := map[string]*typeIn{}
	get := func(name string) *typeIn {
		if out[name] == nil {
			out[name] = &typeIn{methods: map[string]bool{}, fields: map[string]bool{}}
		}
		return out[name]
	}
	for _, s := range all {
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

// receiver returns the name of the type that a method belongs to, "" for a function.
func receiver(d *ast.FuncDecl) string {
	if d.Recv == nil {
		return ""
	}
	typ := strings.TrimPrefix(types.ExprString(d.Recv.List[0].Type), "*")
	name, _, _ := strings.Cut(typ, "[") // without type parameters
	return name
}
