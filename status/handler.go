package status

import (
	"embed"
	"encoding/json"
	"io/fs"
	"net/http"
	"strconv"
)

//go:embed page
var page embed.FS

// Handler serves the page at / and what it draws at /status.json?since=N (the points after N).
func Handler(f *Feed) http.Handler {
	files, err := fs.Sub(page, "page")
	if err != nil {
		panic(err) // the folder is embedded
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /status.json", func(w http.ResponseWriter, r *http.Request) {
		since, _ := strconv.ParseInt(r.URL.Query().Get("since"), 10, 64) // none: all
		w.Header().Set("content-type", "application/json")
		w.Header().Set("cache-control", "no-store")
		_ = json.NewEncoder(w).Encode(f.Status(since))
	})
	static := http.FileServerFS(files)
	mux.HandleFunc("GET /", func(w http.ResponseWriter, r *http.Request) {
		// What is shown of requests is partly the client's (ids, models): the page sets text, never markup, and
		// this holds it to that.
		w.Header().Set("content-security-policy", "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; frame-ancestors 'self'")
		w.Header().Set("cache-control", "no-cache")
		static.ServeHTTP(w, r)
	})
	return mux
}
