//go:build vllm

package vllm

import (
	"log/slog"
	"maps"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// door stands before an engine and admits requests, at once or after a delay: so the order in which two legs reach
// their engines does not depend on chance.
type door struct {
	addr  string
	delay atomic.Int64 // ns

	mu     sync.Mutex
	let    map[string]time.Time // time of a request's admission, by its x-request-id
	engine engine
}

// newDoor opens a door to an engine for as long as the test runs.
func newDoor(t *testing.T, e engine) *door {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	d := &door{addr: l.Addr().String(), let: map[string]time.Time{}, engine: e}
	proxy := httputil.NewSingleHostReverseProxy(&url.URL{Scheme: "http", Host: e.addr})
	proxy.FlushInterval = -1
	proxy.Transport = &http.Transport{DisableKeepAlives: true}               // uvicorn closes idle connections after 5 s, and a POST is not sent again
	proxy.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelError) // clients that leave
	server := &http.Server{ReadHeaderTimeout: time.Minute, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodPost {
			d.wait(r)
		}
		proxy.ServeHTTP(w, r)
	})}
	go func() { _ = server.Serve(l) }()
	t.Cleanup(func() { _ = server.Close() })
	return d
}

func (d *door) wait(r *http.Request) {
	select {
	case <-time.After(time.Duration(d.delay.Load())):
	case <-r.Context().Done():
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.let[r.Header.Get("X-Request-Id")] = time.Now()
}

// doors are the doors of some engines.
type doors []*door

func newDoors(t *testing.T, engines []engine) (all doors) {
	t.Helper()
	for _, e := range engines {
		all = append(all, newDoor(t, e))
	}
	return all
}

func (d doors) delay(by time.Duration) {
	for _, one := range d {
		one.delay.Store(int64(by))
	}
}

// forget clears the record of admitted requests.
func (d doors) forget() {
	for _, one := range d {
		one.mu.Lock()
		clear(one.let)
		one.mu.Unlock()
	}
}

// letIn returns the time at which each request was admitted, at whichever door.
func (d doors) letIn() map[string]time.Time {
	all := map[string]time.Time{}
	for _, one := range d {
		one.mu.Lock()
		maps.Copy(all, one.let)
		one.mu.Unlock()
	}
	return all
}
