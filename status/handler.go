package status

import (
	"embed"
	"encoding/json"
	"io/fs"
	"net/http"
	"strconv"

	"tandem/status/words"
)

//go:embed page
var page embed.FS

// Handler serves the page at /, its data at /status.json?since=N&hour=M (the points after N, and of the last hour
// those after M), and the latest requests at /debug/requests?n=20, or those with an id at /debug/requests?id=ID, and
// where a prompt would go now at /debug/explain?pool=NAME&tokens=1000. Of requests both show with failed=true those that
// failed, with slow=true those that lost most time first, with search=TEXT those that have it ([Wanted]). With
// scope=replica all is about this replica only; [ScopeHeader] says so.
func Handler(f *Feed) http.Handler {
	files, err := fs.Sub(page, "page")
	if err != nil {
		panic(err) // the folder is embedded
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /status.json", func(w http.ResponseWriter, r *http.Request) {
		q := r.URL.Query()
		view := View{Requests: wantedIn(q)}
		view.Since, _ = strconv.ParseInt(q.Get("since"), 10, 64) // none: all
		if after, err := strconv.ParseInt(q.Get("hour"), 10, 64); err == nil {
			view.Hour = &after
		}
		w.Header().Set("content-type", "application/json")
		w.Header().Set("cache-control", "no-store")
		_ = json.NewEncoder(words.Escaped(w)).Encode(f.Status(r.Context(), view))
	})
	mux.HandleFunc("GET /debug/explain", f.explain)
	mux.HandleFunc("GET /debug/requests", func(w http.ResponseWriter, r *http.Request) {
		if id := r.URL.Query().Get("id"); id != "" {
			found, asked := f.Request(r.Context(), id, alone(r))
			if len(found) == 0 {
				http.Error(w, asked.missing(), http.StatusNotFound)
				return
			}
			asked.head(w)
			words.WriteJSON(w, found)
			return
		}
		n := 20
		if text := r.URL.Query().Get("n"); text != "" {
			var err error
			if n, err = strconv.Atoi(text); err != nil || n < 1 {
				http.Error(w, "n is how many requests to show: 1 or more", http.StatusBadRequest)
				return
			}
		}
		wanted := wantedIn(r.URL.Query())
		wanted.N = n
		recent, asked := f.Requests(r.Context(), wanted)
		asked.head(w)
		words.WriteJSON(w, recent)
	})
	mux.Handle("GET /", Secured(http.FileServerFS(files)))
	return mux
}

// Secured serves pages of the admin port with their Content-Security-Policy. Parts of the requests shown come from
// clients (ids, models): the page sets text, never markup, and this enforces it.
func Secured(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("content-security-policy", "default-src 'none'; script-src 'self'; style-src 'self'; "+
			"connect-src 'self'; img-src 'self' data:; frame-ancestors 'self'")
		w.Header().Set("cache-control", "no-cache")
		h.ServeHTTP(w, r)
	})
}

// head names the replicas that were asked, if they are not all.
func (a *Asked) head(w http.ResponseWriter) {
	if !a.all {
		w.Header().Set(ScopeHeader, a.Scope)
	}
}

// alone reports whether a request is about this replica only.
func alone(r *http.Request) bool { return r.URL.Query().Get("scope") == "replica" }
