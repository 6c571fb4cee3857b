package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// send posts a chat request and reads the answer in the background.
func send(ctx context.Context, url, id, body string) *response {
	r := &response{done: make(chan struct{}), events: make(chan struct{}, 10_000)}
	go func() {
		defer close(r.done)
		began := time.Now()
		defer func() { r.took = time.Since(began) }()
		req, err := http.NewRequestWithContext(ctx, http.MethodPost, url+"/v1/chat/completions", strings.NewReader(body))
		if err != nil {
			r.err = err
			return
		}
		req.Header.Set("Content-Type", "application/json")
		req.Header.Set("X-Request-Id", id)
		resp, err := client.Do(req)
		if err != nil {
			r.err = err
			return
		}
		defer resp.Body.Close()
		r.status, r.header = resp.StatusCode, resp.Header
		buf := make([]byte, 4096)
		for r.err == nil {
			var n int
			n, r.err = resp.Body.Read(buf)
			r.body.Write(buf[:n])
			for range strings.Count(string(buf[:n]), "data: ") {
				r.events <- struct{}{}
			}
		}
		if errors.Is(r.err, io.EOF) {
			r.err = nil
		}
	}()
	return r
}

// whole returns an engine's own answer to a request, not streamed. An engine ends connections that are idle for 5 s,
// as vLLM's server does, and a request that is just being written to one is lost with it: so it is sent again until it
// is answered.
func whole(ctx context.Context, url, body string) (text string, complete bool) {
	for !complete && ctx.Err() == nil {
		r := send(ctx, url, "alone", strings.Replace(body, `"stream":true`, `"stream":false`, 1))
		<-r.done
		text, complete = r.text()
	}
	return text, complete
}

// text returns the text of the answer, and whether it is complete.
func (r *response) text() (text string, complete bool) {
	if r.header.Get("Content-Type") == "application/json" {
		var a struct {
			Choices []struct{ Message struct{ Content string } }
		}
		if json.Unmarshal([]byte(r.body.String()), &a) != nil || len(a.Choices) == 0 {
			return "", false
		}
		return a.Choices[0].Message.Content, true
	}
	for _, e := range (answer{body: r.body.String()}).events() {
		if e == "[DONE]" {
			return text, r.err == nil
		}
		var a struct {
			Choices []struct{ Delta struct{ Content string } }
		}
		if json.Unmarshal([]byte(e), &a) == nil && len(a.Choices) > 0 {
			text += a.Choices[0].Delta.Content
		}
	}
	return text, false
}

// kind describes what the client saw. want is a single engine's text.
func (r *response) kind(want string) string {
	if r.status == 0 {
		switch {
		case errors.Is(r.err, context.Canceled):
			return "left"
		default:
			return "cut before an answer"
		}
	}
	if r.status != 200 {
		var e struct {
			Error struct {
				Code json.RawMessage
				Type string
			}
		}
		_ = json.Unmarshal([]byte(r.body.String()), &e)
		code := strings.Trim(string(e.Error.Code), `"`)
		if _, err := strconv.Atoi(code); err == nil || code == "" {
			code = e.Error.Type + " of the engine"
		}
		if after := r.header.Get("Retry-After"); after != "" {
			code += ", retry after " + after
		}
		return fmt.Sprintf("%d %s", r.status, code)
	}
	text, complete := r.text()
	switch {
	case strings.Contains(r.body.String(), `data: {"error"`) && strings.HasPrefix(want, text):
		return "200 and an error event"
	case complete && text == want:
		return "200 whole"
	case complete:
		return "200 OTHER TEXT"
	case errors.Is(r.err, context.Canceled) && strings.HasPrefix(want, text):
		return "200 and left"
	case r.err != nil && strings.HasPrefix(want, text):
		return "200 and cut"
	case text == "":
		return "200 but not an answer"
	}
	return "200 CUT WITHOUT A WORD"
}
