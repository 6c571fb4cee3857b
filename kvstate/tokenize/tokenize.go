// Package tokenize asks engines to tokenize prompts, concurrently with the requests: a few at a time, each with a
// deadline, because tokenizing takes time from computing. An engine without the route is not asked again for a
// while.
package tokenize

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net/http"
	"sync"
	"time"

	"tandem/internal/guard"
	"tandem/kvstate"
	"tandem/kvstate/enginehttp"
)

// Bounds of the calls.
const (
	atOnce    = 8               // concurrent calls, over all pools
	deadline  = 2 * time.Second // of a call
	pauseTime = time.Minute     // for an engine without the route
	maxAnswer = 64 << 20        // bytes
	maxAsked  = 16 << 20        // bytes of a prompt
)

// Tokenizer asks engines for token ids. It is safe for concurrent use.
type Tokenizer struct {
	log    *slog.Logger
	client *enginehttp.Client

	mu     sync.Mutex
	asking map[uint64]chan struct{} // by prompt
	paused map[routeOf]time.Time    // until when
}

// routeOf is a route of one engine.
type routeOf struct{ addr, path string }

// New returns a tokenizer.
func New(log *slog.Logger) *Tokenizer {
	return &Tokenizer{
		log: log, asking: map[uint64]chan struct{}{}, paused: map[routeOf]time.Time{},
		client: enginehttp.New(deadline, func(t *http.Transport) {
			t.MaxIdleConnsPerHost, t.IdleConnTimeout = 1, 4*time.Second
		}),
	}
}

// Tokenize sends body to path of an endpoint of the pool, and calls learned with the token ids of its answer. The
// channel is closed when the call has ended; nil means that no call was made. The call continues when ctx ends; ctx
// only carries a guard.
func (t *Tokenizer) Tokenize(ctx context.Context, pool *kvstate.Pool, key uint64, path string, body []byte,
	learned func(ids []uint32)) <-chan struct{} {
	if len(body) > maxAsked {
		return nil
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if done := t.asking[key]; done != nil {
		return done
	}
	if len(t.asking) >= atOnce {
		return nil
	}
	endpoint := t.choose(pool, path)
	if endpoint == nil {
		return nil
	}
	done := make(chan struct{})
	t.asking[key] = done
	go func() {
		defer guard.Recover(ctx, "tokenizing")
		defer t.over(key, done)
		ids, err := t.ask(endpoint, path, body)
		if err != nil {
			t.log.Debug("tokenizing", "endpoint", endpoint.Addr, "path", path, "err", err)
			if errors.Is(err, errNoRoute) {
				t.pause(endpoint.Addr, path)
			}
			return
		}
		learned(ids)
	}()
	return done
}

func (t *Tokenizer) over(key uint64, done chan struct{}) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.asking, key)
	close(done)
}

// pause stops asking a route of one engine for a while.
func (t *Tokenizer) pause(addr, path string) {
	now := time.Now()
	t.mu.Lock()
	defer t.mu.Unlock()
	maps.DeleteFunc(t.paused, func(_ routeOf, until time.Time) bool { return now.After(until) })
	t.paused[routeOf{addr, path}] = now.Add(pauseTime)
	t.log.Warn("an engine has no route to tokenize by; not asking it for a while", "endpoint", addr, "path", path,
		"for", pauseTime)
}

// choose returns the less loaded of two random endpoints, among those that have not failed and are not known to
// lack the route.
func (t *Tokenizer) choose(pool *kvstate.Pool, path string) *kvstate.Endpoint {
	var best *kvstate.Endpoint
	now, all := time.Now(), pool.Endpoints()
	for _, i := range rand.Perm(len(all)) {
		e := all[i]
		if e.Failed() || now.Before(t.paused[routeOf{e.Addr, path}]) {
			continue
		}
		if best == nil {
			best = e
			continue
		}
		if requests, _ := e.Load(); requests < first(best.Load()) {
			best = e
		}
		break
	}
	return best
}

func first(requests, _ int64) int64 { return requests }

// errNoRoute means that an engine lacks the path itself, for every request.
var errNoRoute = errors.New("no such route")

func (t *Tokenizer) ask(e *kvstate.Endpoint, path string, body []byte) ([]uint32, error) {
	resp, err := t.client.Post(context.Background(), e, path, body, nil) //nolint:bodyclose // ReadAll closes it
	if err != nil {
		return nil, err
	}
	text, err := enginehttp.ReadAll(resp, maxAnswer)
	if err != nil {
		return nil, err
	}
	if lacksRoute(resp.StatusCode, text) {
		return nil, fmt.Errorf("%w: status %d", errNoRoute, resp.StatusCode)
	}
	if resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("status %d", resp.StatusCode)
	}
	return readIDs(text)
}

// lacksRoute reports whether an answer means that the engine lacks the route, rather than that it refuses this
// request. An unknown model is a 404 too, and any client can name one: vLLM 0.32.0 answers {"error": {"type":
// "NotFoundError", ...}}, releases before 0.11 the same without the outer object, while a missing route is
// FastAPI's {"detail": "Not Found"}, or a proxy's page.
func lacksRoute(status int, text []byte) bool {
	switch status {
	case http.StatusMethodNotAllowed:
		return true
	case http.StatusNotFound:
	default:
		return false
	}
	var answer struct {
		Error json.RawMessage `json:"error"`
		Type  string          `json:"type"`
	}
	return json.Unmarshal(text, &answer) != nil || len(answer.Error) == 0 && answer.Type == ""
}

// readIDs parses an answer: of /tokenize {"tokens": [...]} (vLLM, SGLang), of render {"token_ids": [...]}, or for
// completions a list of those, one for each prompt.
func readIDs(text []byte) ([]uint32, error) {
	type answer struct {
		Tokens   []uint32 `json:"tokens"`
		TokenIDs []uint32 `json:"token_ids"`
	}
	var all []answer
	if text = bytes.TrimSpace(text); len(text) > 0 && text[0] == '[' {
		if err := json.Unmarshal(text, &all); err != nil {
			return nil, fmt.Errorf("reading token ids: %w", err)
		}
	} else {
		all = make([]answer, 1)
		if err := json.Unmarshal(text, &all[0]); err != nil {
			return nil, fmt.Errorf("reading token ids: %w", err)
		}
	}
	if len(all) != 1 || len(all[0].Tokens)+len(all[0].TokenIDs) == 0 {
		return nil, errors.New("reading token ids: there are none, or of several prompts")
	}
	if len(all[0].Tokens) > 0 {
		return all[0].Tokens, nil
	}
	return all[0].TokenIDs, nil
}
