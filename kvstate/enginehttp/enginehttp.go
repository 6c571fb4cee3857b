// Package enginehttp is the HTTP client for Tandem's own calls to engines: probes, metrics, token ids, cleanup
// decodes, and the prefill hop if Envoy does not make it. It uses the endpoint's scheme and follows no redirect to
// another host. Callers set deadlines and content. It also reads the load that an engine reports in a header of its
// answer.
package enginehttp

import (
	"bytes"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"tandem/kvstate"
)

// maxHeaders bounds the headers of an answer, in bytes.
const maxHeaders = 64 << 10

// Client speaks HTTP/1, HTTP/2 without TLS (scheme h2c) and TLS. It sends an endpoint's API key, unless the caller sets
// Authorization, and its name. It is safe for concurrent use.
type Client struct {
	plain, h2c, secure *http.Client

	mu      sync.Mutex
	byName  map[string]*http.Client // TLS to engines with a name
	newName func(name string) *http.Client
}

// maxNamed bounds the number of names. A configuration has few.
const maxNamed = 1024

// named returns the client that wants a name of an engine, as SNI.
func (c *Client) named(name string) *http.Client {
	if c.newName == nil {
		return c.secure
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.byName[name] == nil {
		if len(c.byName) >= maxNamed {
			clear(c.byName)
		}
		c.byName[name] = c.newName(name)
	}
	return c.byName[name]
}

// MaxKey is the length of an API key, in bytes.
const MaxKey = 4096

// ReadKey reads the API key in a file: its only line.
func ReadKey(file string) (string, error) {
	f, err := os.Open(file)
	if err != nil {
		return "", err //nolint:wrapcheck // names the file
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, MaxKey+1))
	if err != nil {
		return "", fmt.Errorf("reading %s: %w", file, err)
	}
	key := strings.TrimSpace(string(text))
	if key == "" || len(text) > MaxKey || strings.ContainsFunc(key, func(r rune) bool { return r <= ' ' || r > '~' }) {
		return "", fmt.Errorf("%s is not one line with a key", file)
	}
	return key, nil
}

// authorize adds the key in a file. Without one the engine refuses the request, which says more than no request would.
func authorize(r *http.Request, file string) {
	if key, err := ReadKey(file); err == nil {
		r.Header.Set("Authorization", "Bearer "+key)
	}
}

// New returns a client whose calls take at most timeout; 0 means as long as their contexts. tune sets the caller's
// options of the transport.
func New(timeout time.Duration, tune func(*http.Transport)) *Client {
	client := func(t *http.Transport) *http.Client {
		t.MaxResponseHeaderBytes = maxHeaders
		tune(t)
		return over(t, timeout)
	}
	h2c := &http.Transport{Protocols: new(http.Protocols)}
	h2c.Protocols.SetUnencryptedHTTP2(true)
	named := func(name string) *http.Client {
		// As Envoy does by default: engines' certificates are their own.
		//nolint:gosec // see above
		return client(&http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true, ServerName: name}})
	}
	return &Client{plain: client(&http.Transport{}), h2c: client(h2c), secure: named(""),
		byName: map[string]*http.Client{}, newName: named}
}

// Over returns a client that reaches every endpoint through t, for tests without a network.
func Over(t http.RoundTripper, timeout time.Duration) *Client {
	c := over(t, timeout)
	return &Client{plain: c, h2c: c, secure: c}
}

func over(t http.RoundTripper, timeout time.Duration) *http.Client {
	return &http.Client{Transport: t, Timeout: timeout,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
}

// CloseIdle closes unused connections.
func (c *Client) CloseIdle() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, one := range slices.AppendSeq([]*http.Client{c.plain, c.h2c, c.secure}, maps.Values(c.byName)) {
		one.CloseIdleConnections()
	}
}

// Get requests a path of an endpoint.
func (c *Client) Get(ctx context.Context, e *kvstate.Endpoint, path string) (*http.Response, error) {
	return c.do(ctx, e, http.MethodGet, path, nil, nil)
}

// GetAll requests a path of an endpoint, and reads the answer of at most limit bytes; a longer one is an error.
func (c *Client) GetAll(
	ctx context.Context, e *kvstate.Endpoint, path string, limit int64,
) (status int, body []byte, err error) {
	resp, err := c.Get(ctx, e, path)
	if err != nil {
		return 0, nil, err
	}
	if body, err = ReadAll(resp, limit); err != nil {
		return 0, nil, fmt.Errorf("asking %s: %w", e.Addr, err)
	}
	return resp.StatusCode, body, nil
}

// Post sends JSON to a path of an endpoint, with additional headers.
func (c *Client) Post(ctx context.Context, e *kvstate.Endpoint, path string, body []byte,
	header http.Header) (*http.Response, error) {
	return c.do(ctx, e, http.MethodPost, path, body, header)
}

func (c *Client) do(ctx context.Context, e *kvstate.Endpoint, method, path string, body []byte,
	header http.Header) (*http.Response, error) {
	scheme, client := "http", c.plain
	switch e.Scheme {
	case "https":
		scheme, client = "https", c.secure
	case "h2c":
		client = c.h2c
	}
	r, err := http.NewRequestWithContext(ctx, method, scheme+"://"+e.HostPort()+path, bytes.NewReader(body))
	if err != nil {
		return nil, fmt.Errorf("asking %s: %w", e.Addr, err)
	}
	if _, own := header["Authorization"]; !own && e.KeyFile != "" {
		authorize(r, e.KeyFile)
	}
	maps.Copy(r.Header, header)
	if e.Scheme == "https" && e.ServerName != "" {
		r.Host, client = e.ServerName, c.named(e.ServerName)
	}
	if method == http.MethodPost {
		r.Header.Set("Content-Type", "application/json")
	}
	resp, err := client.Do(r)
	if err != nil {
		return nil, fmt.Errorf("asking %s: %w", e.Addr, err)
	}
	return resp, nil
}

// ReadAll reads an answer of at most limit bytes and closes it; a longer one is an error.
func ReadAll(resp *http.Response, limit int64) ([]byte, error) {
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, limit+1))
	if err != nil {
		return nil, fmt.Errorf("reading an answer: %w", err)
	}
	if int64(len(body)) > limit {
		return nil, fmt.Errorf("an answer of more than %d bytes", limit)
	}
	return body, nil
}
