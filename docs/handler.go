package docs

import (
	"bytes"
	"embed"
	"errors"
	"fmt"
	"html/template"
	"io/fs"
	"net/http"
	"path"
	"strings"

	"github.com/yuin/goldmark"
	"github.com/yuin/goldmark/ast"
	"github.com/yuin/goldmark/extension"
	"github.com/yuin/goldmark/parser"
	markdowntext "github.com/yuin/goldmark/text"
)

//go:embed page.html docs.css
var frame embed.FS

// Handler serves the pages under /docs/: as HTML to browsers, otherwise as the Markdown that they are. HTML within
// Markdown is left out. Links to what the admin port does not have, for example to files of the repository, become
// plain text.
func Handler() http.Handler {
	page := template.Must(template.ParseFS(frame, "page.html"))
	style := http.FileServerFS(frame)
	files := http.FileServerFS(Pages)
	return http.StripPrefix("/docs/", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		name := r.URL.Path
		switch {
		case name == "":
			w.Header().Set("location", "index.md") // relative: http.Redirect does not know the prefix
			w.WriteHeader(http.StatusFound)
		case name == "docs.css":
			style.ServeHTTP(w, r)
		case path.Ext(name) != ".md":
			files.ServeHTTP(w, r)
		default:
			serve(w, r, page, name)
		}
	}))
}

// serve writes one page.
func serve(w http.ResponseWriter, r *http.Request, page *template.Template, name string) {
	source, err := fs.ReadFile(Pages, name)
	if err != nil {
		status := http.StatusInternalServerError
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, fs.ErrInvalid) {
			status = http.StatusNotFound
		}
		http.Error(w, "there is no such page", status)
		return
	}
	w.Header().Set("vary", "accept")
	w.Header().Set("x-content-type-options", "nosniff")
	if !strings.Contains(r.Header.Get("accept"), "text/html") {
		w.Header().Set("content-type", "text/plain; charset=utf-8")
		_, _ = w.Write(source) //nolint:gosec // a page that is built in, as plain text
		return
	}
	title, body, err := render(name, source)
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	var out bytes.Buffer
	err = page.Execute(&out, map[string]any{
		"Title": title, "Body": template.HTML(body), //nolint:gosec // goldmark escapes, and leaves HTML out
		"Root": strings.Repeat("../", strings.Count(name, "/")),
	})
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("content-type", "text/html; charset=utf-8")
	_, _ = out.WriteTo(w)
}

// render returns a page's first heading, and the page as HTML.
func render(name string, source []byte) (title, body string, err error) {
	markdown := goldmark.New(
		goldmark.WithExtensions(extension.Table), goldmark.WithParserOptions(parser.WithAutoHeadingID()),
	)
	root := markdown.Parser().Parse(markdowntext.NewReader(source))
	var nowhere []*ast.Link
	err = ast.Walk(root, func(n ast.Node, entering bool) (ast.WalkStatus, error) {
		switch n := n.(type) {
		case *ast.Heading:
			if entering && n.Level == 1 && title == "" {
				title = strings.ReplaceAll(string(n.Lines().Value(source)), "`", "")
			}
		case *ast.Link:
			if entering && !reachable(name, string(n.Destination)) {
				nowhere = append(nowhere, n)
			}
		}
		return ast.WalkContinue, nil
	})
	if err != nil {
		return "", "", fmt.Errorf("reading %s: %w", name, err)
	}
	for _, link := range nowhere {
		parent := link.Parent()
		for child := link.FirstChild(); child != nil; child = link.FirstChild() {
			parent.InsertBefore(parent, link, child)
		}
		parent.RemoveChild(parent, link)
	}
	var out bytes.Buffer
	if err := markdown.Renderer().Render(&out, source, root); err != nil {
		return "", "", fmt.Errorf("rendering %s: %w", name, err)
	}
	return title, out.String(), nil
}

// reachable reports whether a page's link leads to another host, within the page, or to a page that is here.
func reachable(name, to string) bool {
	to, _, _ = strings.Cut(to, "#")
	if to == "" || strings.Contains(to, "://") {
		return true
	}
	info, err := fs.Stat(Pages, path.Join(path.Dir(name), to))
	return err == nil && !info.IsDir()
}
