// Package guard keeps a panic in one handler from ending the process.
//
// A handler of outside input recovers at its boundary: the panic is logged with its stack and counted, and only the
// current request, message or connection fails. A context carries the guard to goroutines in the background, so that
// packages need no setting for it. Without a guard in the context a panic ends the process as usual; tests rely on
// that.
package guard

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"runtime/debug"
	"time"
)

// Guard logs and counts panics.
type Guard struct {
	log   *slog.Logger
	count func(where string)
}

// New returns a guard. count is called once for each panic.
func New(log *slog.Logger, count func(where string)) *Guard { return &Guard{log, count} }

// Caught logs and counts a recovered panic and returns it as an error. Call it in the deferred function that
// recovered.
func (g *Guard) Caught(where string, v any) error {
	g.count(where)
	g.log.Error("a handler panicked", "where", where, "panic", v, "stack", string(debug.Stack()))
	return fmt.Errorf("panic in %s: %v", where, v)
}

// HTTP serves with h. A panic is answered with 500 if nothing was sent yet, and ends the connection otherwise.
func (g *Guard) HTTP(where string, h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		sent := &begun{ResponseWriter: w}
		defer func() {
			v := recover()
			if v == nil {
				return
			}
			if err, ok := v.(error); ok && errors.Is(err, http.ErrAbortHandler) {
				panic(v)
			}
			_ = g.Caught(where, v)
			if sent.is {
				panic(http.ErrAbortHandler)
			}
			w.Header().Set("content-type", "application/json")
			w.WriteHeader(http.StatusInternalServerError)
			_, _ = w.Write([]byte(`{"error":{"message":"internal error; the log has the cause","type":"api_error",` +
				`"param":null,"code":"internal_error"}}`))
		}()
		h.ServeHTTP(sent, r)
	})
}

// begun records whether an answer has begun.
type begun struct {
	http.ResponseWriter
	is bool
}

func (b *begun) WriteHeader(status int) {
	b.is = true
	b.ResponseWriter.WriteHeader(status)
}

func (b *begun) Write(p []byte) (int, error) {
	b.is = true
	return b.ResponseWriter.Write(p)
}

// Unwrap is for http.ResponseController.
func (b *begun) Unwrap() http.ResponseWriter { return b.ResponseWriter }

type key struct{}

// With returns a context that carries the guard.
func With(ctx context.Context, g *Guard) context.Context { return context.WithValue(ctx, key{}, g) }

// Recover stops a panic of the calling goroutine if the context carries a guard. Defer it directly, not within another
// function.
func Recover(ctx context.Context, where string) {
	g, ok := ctx.Value(key{}).(*Guard)
	if !ok {
		return
	}
	if v := recover(); v != nil {
		_ = g.Caught(where, v)
	}
}

// Try runs work that returns a value, and returns a panic of it as an error.
func Try[T any](ctx context.Context, where string, work func() (T, error)) (out T, err error) {
	g, ok := ctx.Value(key{}).(*Guard)
	if !ok {
		return work()
	}
	defer func() {
		if v := recover(); v != nil {
			err = g.Caught(where, v)
		}
	}()
	return work()
}

// restartAfter is the pause before work that panicked starts again.
const restartAfter = time.Second

// Keep runs work that lasts until the context ends, and restarts it after a panic.
func Keep(ctx context.Context, where string, work func()) {
	for !finished(ctx, where, work) {
		select {
		case <-time.After(restartAfter):
		case <-ctx.Done():
			return
		}
	}
}

// finished reports whether work returned without a panic.
func finished(ctx context.Context, where string, work func()) (ok bool) {
	defer Recover(ctx, where)
	work()
	return true
}
