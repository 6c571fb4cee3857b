package guard

import (
	"bytes"
	"context"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/require"
)

// newGuard returns a guard with its log and the places of the panics that it counted.
func newGuard() (g *Guard, log *bytes.Buffer, counted *[]string) {
	log, counted = new(bytes.Buffer), new([]string)
	return New(slog.New(slog.NewTextHandler(log, nil)), func(where string) { *counted = append(*counted, where) }), log, counted
}

func TestHTTPAnswersAPanic(t *testing.T) {
	g, log, counted := newGuard()
	mux := http.NewServeMux()
	mux.HandleFunc("/panics", func(http.ResponseWriter, *http.Request) { panic("broken") })
	mux.HandleFunc("/begun", func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusOK)
		_ = http.NewResponseController(w).Flush()
		panic("broken later")
	})
	mux.HandleFunc("/aborts", func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) })
	mux.HandleFunc("/works", func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("fine")) })
	s := httptest.NewServer(g.HTTP("test", mux))
	defer s.Close()
	get := func(path string) (int, string, error) {
		r, err := http.Get(s.URL + path)
		if err != nil {
			return 0, "", err
		}
		defer r.Body.Close()
		body, err := io.ReadAll(r.Body)
		return r.StatusCode, string(body), err
	}
	status, body, err := get("/panics")
	require.NoError(t, err)
	require.Equal(t, 500, status)
	require.Contains(t, body, `"code":"internal_error"`)
	_, _, err = get("/begun")
	require.Error(t, err, "half an answer does not look complete")
	_, _, err = get("/aborts")
	require.Error(t, err)
	status, body, err = get("/works")
	require.NoError(t, err)
	require.Equal(t, 200, status)
	require.Equal(t, "fine", body)
	require.Equal(t, []string{"test", "test"}, *counted)
	require.Contains(t, log.String(), "guard_test.go", "the stack leads to the place")
}

func TestKeepRestarts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, _, counted := newGuard()
		runs := 0
		Keep(With(t.Context(), g), "loop", func() {
			if runs++; runs < 3 {
				panic("broken")
			}
		})
		require.Equal(t, 3, runs)
		require.Equal(t, []string{"loop", "loop"}, *counted)
	})
}

func TestTryReturnsAPanic(t *testing.T) {
	g, _, counted := newGuard()
	_, err := Try(With(t.Context(), g), "question", func() (int, error) { panic("broken") })
	require.ErrorContains(t, err, "panic in question: broken")
	require.Equal(t, []string{"question"}, *counted)
	n, err := Try(t.Context(), "question", func() (int, error) { return 7, nil })
	require.NoError(t, err)
	require.Equal(t, 7, n)
}

func TestKeepEndsWithTheContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, _, counted := newGuard()
		ctx, cancel := context.WithCancel(With(t.Context(), g))
		Keep(ctx, "loop", func() { cancel(); panic("broken") })
		require.Len(t, *counted, 1)
	})
}

func TestWithoutAGuardAPanicEndsTheProcess(t *testing.T) {
	require.PanicsWithValue(t, "broken", func() { Keep(t.Context(), "loop", func() { panic("broken") }) })
}
