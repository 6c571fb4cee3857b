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
	"time"

	"tandem/kvstate"
)

// maxHeaders bounds the headers of an answer, in bytes.
const maxHeaders = 64 << 10

// Client speaks HTTP/1, HTTP/2 without TLS (scheme h2c) and TLS. It is safe for concurrent use.
type Client struct{ plain, h2c, secure *http.Client }

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
	return &Client{
		plain: client(&http.Transport{}),
		h2c:   client(h2c),
		// As Envoy does by default: engines' certificates are their own.
		//nolint:gosec // see above
		secure: client(&http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}),
	}
}

// Over returns a client that reaches every endpoint through t, for tests without a network.
func Over(t http.RoundTripper, timeout time.Duration) *Client {
	c := over(t, timeout)
	return &Client{c, c, c}
}

func over(t http.RoundTripper, timeout time.Duration) *http.Client {
	return &http.Client{Transport: t, Timeout: timeout,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
}

// CloseIdle closes unused connections.
func (c *Client) CloseIdle() {
	for _, one := range []*http.Client{c.plain, c.h2c, c.secure} {
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
	maps.Copy(r.Header, header)
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
