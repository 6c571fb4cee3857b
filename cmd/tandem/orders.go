package main

import (
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"strings"
	"sync"
	"time"

	"tandem/internal/config"
	"tandem/kvstate"
)

// orders are what operators may tell a running replica, on its admin port: pause and resume a pool, pause, drain and
// resume an endpoint, change its weight, read the configuration again. They hold for this replica until it ends; what is
// to last, or to hold for all replicas, belongs into the configuration file.
//
//	POST   /api/pools/{pool}/pause | resume
//	POST   /api/pools/{pool}/endpoints/{endpoint}/pause | resume | drain?timeout=5m
//	PUT    /api/pools/{pool}/endpoints/{endpoint}/weight   {"weight": 50}
//	DELETE /api/pools/{pool}/endpoints/{endpoint}/weight
//	POST   /api/reload
type orders struct {
	tokenFile string // "": no orders are taken
	state     *kvstate.State
	reload    func(context.Context) ([]config.Change, error)
	log       *slog.Logger
}

func (o *orders) register(mux *http.ServeMux) {
	const pool, endpoint = "/api/pools/{pool}/", "/api/pools/{pool}/endpoints/{endpoint}/"
	mux.HandleFunc("POST "+pool+"pause", o.allowed(o.pool(true)))
	mux.HandleFunc("POST "+pool+"resume", o.allowed(o.pool(false)))
	mux.HandleFunc("POST "+endpoint+"pause", o.allowed(o.endpoint(func(e *kvstate.Override) { e.Paused = true })))
	mux.HandleFunc("POST "+endpoint+"resume", o.allowed(o.endpoint(func(e *kvstate.Override) { e.Paused = false })))
	mux.HandleFunc("DELETE "+endpoint+"weight", o.allowed(o.endpoint(func(e *kvstate.Override) { e.Weight = 0 })))
	mux.HandleFunc("PUT "+endpoint+"weight", o.allowed(o.weight))
	mux.HandleFunc("POST "+endpoint+"drain", o.allowed(o.drain))
	mux.HandleFunc("POST /api/reload", o.allowed(o.readAgain))
}

// minToken is the least length of a token that is taken for a secret, and maxTokenFile the most that is read of its file.
const (
	minToken     = 16
	maxTokenFile = 4 << 10
)

// allowed lets in who has the token. Hashes are compared, in constant time: neither the token nor its length shows in how
// long it takes.
func (o *orders) allowed(next http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		want, err := o.token()
		if err != nil {
			o.log.Warn("order refused", "path", r.URL.Path, "from", r.RemoteAddr, "err", err)
			answerError(w, http.StatusForbidden, "no orders are taken here: admin.tokenFile is not set, or holds no token of at least 16 characters")
			return
		}
		scheme, token, _ := strings.Cut(r.Header.Get("Authorization"), " ")
		if !sameToken(strings.TrimSpace(token), want) || !strings.EqualFold(scheme, "bearer") {
			o.log.Warn("order refused", "path", r.URL.Path, "from", r.RemoteAddr, "err", "wrong token")
			w.Header().Set("WWW-Authenticate", "Bearer")
			answerError(w, http.StatusUnauthorized, "the token is missing or wrong (Authorization: Bearer TOKEN)")
			return
		}
		o.log.Info("order", "method", r.Method, "path", r.URL.Path, "from", r.RemoteAddr)
		next(w, r)
	}
}

func sameToken(a, b string) bool {
	x, y := sha256.Sum256([]byte(a)), sha256.Sum256([]byte(b))
	return subtle.ConstantTimeCompare(x[:], y[:]) == 1
}

// operatorToken says whether a request bears the operator's token; nil where there is none. Anybody may send a wrong one, so
// the file is read once a second at most.
func operatorToken(file string) func([]byte) bool {
	if file == "" {
		return nil
	}
	var mu sync.Mutex
	var read time.Time
	var token string
	return func(got []byte) bool {
		mu.Lock()
		defer mu.Unlock()
		if now := time.Now(); now.Sub(read) > time.Second {
			read = now
			token, _ = readToken(file)
		}
		return token != "" && sameToken(string(got), token)
	}
}

// token reads the file for every order: orders are rare, and a token that was changed counts at once.
func (o *orders) token() (string, error) { return readToken(o.tokenFile) }

func readToken(file string) (string, error) {
	if file == "" {
		return "", errors.New("admin.tokenFile is not set")
	}
	f, err := os.Open(file)
	if err != nil {
		return "", fmt.Errorf("admin.tokenFile: %w", err)
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, maxTokenFile+1))
	if err != nil {
		return "", fmt.Errorf("admin.tokenFile: %w", err)
	}
	token := strings.TrimSpace(string(text))
	if len(token) < minToken || len(text) > maxTokenFile || strings.ContainsAny(token, "\r\n") {
		return "", fmt.Errorf("admin.tokenFile: not one line of %d to %d characters", minToken, maxTokenFile)
	}
	return token, nil
}

func answerError(w http.ResponseWriter, status int, message string) {
	w.Header().Set("content-type", contentJSON)
	w.WriteHeader(status)
	writeJSON(w, map[string]any{"error": map[string]string{"message": message}})
}

// answerUnknown turns what the state says into an answer.
func answerUnknown(w http.ResponseWriter, err error) {
	status := http.StatusConflict
	if errors.Is(err, kvstate.ErrUnknown) {
		status = http.StatusNotFound
	}
	answerError(w, status, err.Error())
}

func (o *orders) pool(paused bool) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		name := r.PathValue("pool")
		if err := o.state.PausePool(name, paused); err != nil {
			answerUnknown(w, err)
			return
		}
		writeJSON(w, map[string]any{"pool": name, "paused": paused})
	}
}

// ordered is what an order about an endpoint is answered with, for each of its addresses.
type ordered struct {
	Address  string `json:"address"`
	Paused   bool   `json:"paused"`
	Weight   int    `json:"weight"`
	Requests int64  `json:"requests"` // that run there
}

func (o *orders) endpoint(change func(*kvstate.Override)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if found, ok := o.order(w, r, change); ok {
			writeJSON(w, shown(found))
		}
	}
}

func (o *orders) order(w http.ResponseWriter, r *http.Request, change func(*kvstate.Override)) ([]*kvstate.Endpoint, bool) {
	found, err := o.state.SetOverride(r.PathValue("pool"), r.PathValue("endpoint"), change)
	if err != nil {
		answerUnknown(w, err)
	}
	return found, err == nil
}

func shown(found []*kvstate.Endpoint) (out []ordered) {
	for _, e := range found {
		requests, _ := e.Load()
		out = append(out, ordered{e.Addr, e.Paused(), e.Weight(), requests})
	}
	return out
}

func (o *orders) weight(w http.ResponseWriter, r *http.Request) {
	var body struct {
		Weight int `json:"weight"`
	}
	err := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxTokenFile)).Decode(&body)
	if err != nil || body.Weight < 1 || body.Weight > 10_000 {
		answerError(w, http.StatusBadRequest, `the body must be {"weight": N}, N from 1 to 10000 in per cent; to give no more work to an endpoint, pause it`)
		return
	}
	o.endpoint(func(e *kvstate.Override) { e.Weight = body.Weight })(w, r)
}

// Bounds of how long an order to drain waits, and how often it looks.
const (
	drainDefault = 30 * time.Second
	drainLongest = 30 * time.Minute
	drainLook    = 50 * time.Millisecond
)

// drain pauses an endpoint and waits until this replica has nothing running on it: 200. Where the time is over before, 202,
// and the endpoint stays paused.
func (o *orders) drain(w http.ResponseWriter, r *http.Request) {
	limit := drainDefault
	if text := r.URL.Query().Get("timeout"); text != "" {
		d, err := time.ParseDuration(text)
		if err != nil || d < 0 || d > drainLongest {
			answerError(w, http.StatusBadRequest, "timeout must be a duration of at most "+drainLongest.String())
			return
		}
		limit = d
	}
	found, ok := o.order(w, r, func(e *kvstate.Override) { e.Paused = true })
	if !ok {
		return
	}
	if !quiet(r.Context(), found, limit) {
		w.Header().Set("content-type", contentJSON)
		w.WriteHeader(http.StatusAccepted)
	}
	writeJSON(w, shown(found))
}

// quiet waits until nothing is booked on the endpoints; false if it gave up before.
func quiet(ctx context.Context, endpoints []*kvstate.Endpoint, limit time.Duration) bool {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	tick := time.NewTicker(drainLook)
	defer tick.Stop()
	for {
		busy := int64(0)
		for _, e := range endpoints {
			requests, _ := e.Load()
			busy += requests
		}
		if busy == 0 {
			return true
		}
		select {
		case <-ctx.Done():
			return false
		case <-tick.C:
		}
	}
}

func (o *orders) readAgain(w http.ResponseWriter, r *http.Request) {
	changes, err := o.reload(context.WithoutCancel(r.Context()))
	if err != nil {
		answerError(w, http.StatusUnprocessableEntity, err.Error())
		return
	}
	type change struct {
		Path    string `json:"path"`
		Before  string `json:"before"`
		Now     string `json:"now"`
		Restart bool   `json:"takes_restart"`
	}
	out := []change{}
	for _, c := range changes {
		out = append(out, change{c.Path, c.Before, c.After, !c.Live})
	}
	writeJSON(w, map[string]any{"changes": out})
}
