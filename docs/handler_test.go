package docs

import (
	"io/fs"
	"net/http"
	"net/http/httptest"
	"path"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func get(t *testing.T, at, accept string) *httptest.ResponseRecorder {
	t.Helper()
	r := httptest.NewRequest(http.MethodGet, at, nil)
	r.Header.Set("Accept", accept)
	w := httptest.NewRecorder()
	Handler().ServeHTTP(w, r)
	return w
}

// A browser gets HTML, a terminal Markdown.
func TestHandler(t *testing.T) {
	w := get(t, "/docs/howto/prefill-idles.md", "text/html,*/*")
	require.Equal(t, http.StatusOK, w.Code)
	require.Equal(t, "text/html; charset=utf-8", w.Header().Get("Content-Type"))
	require.Contains(t, w.Body.String(), "<title>Find out why prefill idles</title>")
	require.Contains(t, w.Body.String(), `<link rel="stylesheet" href="../docs.css">`)
	require.Contains(t, w.Body.String(), `<td><code>no_prefill</code></td>`)

	w = get(t, "/docs/howto/prefill-idles.md", "*/*")
	require.Equal(t, "text/plain; charset=utf-8", w.Header().Get("Content-Type"))
	require.True(t, strings.HasPrefix(w.Body.String(), "# Find out why prefill idles\n"))

	require.Equal(t, "text/css; charset=utf-8", get(t, "/docs/docs.css", "*/*").Header().Get("Content-Type"))
	require.Equal(t, "index.md", get(t, "/docs/", "text/html").Header().Get("Location"))
	for _, at := range []string{"/docs/nowhere.md", "/docs/../go.md", "/docs/handler.go", "/docs/howto/nowhere.svg"} {
		require.Equal(t, http.StatusNotFound, get(t, at, "text/html").Code, at)
	}
}

// HTML within Markdown is left out, and so are links that lead nowhere or run something.
func TestRender(t *testing.T) {
	_, body, err := render("howto/x.md", []byte("# T `x`\n\n<script>alert(1)</script>\n\n"+
		"[run](javascript:alert) [code](../../cmd/tandem/main.go) **[d](drain.md#x)** [out](https://example.org) <b>bold</b>\n"))
	require.NoError(t, err)
	require.Equal(t, "<h1 id=\"t-x\">T <code>x</code></h1>\n<!-- raw HTML omitted -->\n<p>run code <strong><a href=\"drain.md#x\">d</a></strong> "+
		"<a href=\"https://example.org\">out</a> <!-- raw HTML omitted -->bold<!-- raw HTML omitted --></p>\n", body)
}

// Every page can be rendered, every picture is there, and every link within and between pages finds its heading.
func TestRenderedLinks(t *testing.T) {
	pages := map[string]string{}
	require.NoError(t, fs.WalkDir(Pages, ".", func(name string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || !strings.HasSuffix(name, ".md") {
			return err
		}
		w := get(t, "/docs/"+name, "text/html")
		require.Equal(t, http.StatusOK, w.Code, name)
		pages[name] = w.Body.String()
		return nil
	}))
	require.Greater(t, len(pages), 30)
	picture, seen := regexp.MustCompile(`<img src="([^"]+)" alt="[^"]`), 0
	for name, text := range pages {
		source, err := fs.ReadFile(Pages, name)
		require.NoError(t, err)
		require.NotContains(t, string(source), "<img", "%s: HTML is left out: ![...](...)", name)
		for _, img := range picture.FindAllStringSubmatch(text, -1) {
			at := "/docs/" + path.Join(path.Dir(name), img[1])
			require.Equal(t, http.StatusOK, get(t, at, "image/*").Code, "%s: %s", name, at)
			seen++
		}
	}
	require.Greater(t, seen, 8)
	anchor := regexp.MustCompile(`href="([^":#]*)#([^"]+)"`)
	for name, text := range pages {
		for _, link := range anchor.FindAllStringSubmatch(text, -1) {
			target := name
			if link[1] != "" {
				target = path.Join(path.Dir(name), link[1])
			}
			require.Contains(t, pages[target], `id="`+link[2]+`"`, "%s: %s", name, link[0])
		}
	}
}
