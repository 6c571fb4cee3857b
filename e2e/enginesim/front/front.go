// Package front is what real installations have before an engine's routes: TLS that wants a name, a key, CORS, a
// middleware that compresses, a proxy that answers conditional requests and ranges.
package front

import (
	"bytes"
	"compress/gzip"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strings"
)

// Config says what stands before the routes. The zero value: nothing.
type Config struct {
	Key               string // --api-key: paths below /v1 want it (vLLM 0.32.0, middleware/authenticate.py:59)
	Origins           bool   // CORS for any origin, as vLLM's --allowed-origins '["*"]', its default
	Forms             bool   // answers take the form that the request's headers ask for
	CertFile, KeyFile string // TLS
	Name              string // the only SNI and Host that the TLS port takes; "": any
	Uncounted         bool   // metrics say no tokens of answers, and no times between them, as TensorRT-LLM's
}

// Listener encrypts a listener, if there is a certificate.
func (c *Config) Listener(l net.Listener) (net.Listener, error) {
	if c.CertFile == "" {
		return l, nil
	}
	pair, err := tls.LoadX509KeyPair(c.CertFile, c.KeyFile)
	if err != nil {
		return nil, fmt.Errorf("the engine's certificate: %w", err)
	}
	return tls.NewListener(l, &tls.Config{
		Certificates: []tls.Certificate{pair}, NextProtos: []string{"http/1.1"}, MinVersion: tls.VersionTLS12,
		GetConfigForClient: func(hello *tls.ClientHelloInfo) (*tls.Config, error) {
			if c.Name != "" && hello.ServerName != c.Name {
				return nil, errors.New("unrecognized name")
			}
			return nil, nil //nolint:nilnil // the configuration stays
		},
	}), nil
}

// Wrap returns the routes behind what the configuration puts before them.
func (c *Config) Wrap(routes http.Handler) http.Handler {
	if *c == (Config{}) {
		return routes
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		host, _, err := net.SplitHostPort(r.Host)
		if c.Name != "" && r.Host != c.Name && (err != nil || host != c.Name) {
			http.Error(w, "no such host: "+r.Host, http.StatusMisdirectedRequest)
			return
		}
		if c.Origins && r.Header.Get("Origin") != "" {
			w.Header().Set("Access-Control-Allow-Origin", "*")
			if r.Method == http.MethodOptions && r.Header.Get("Access-Control-Request-Method") != "" {
				w.Header().Set("Access-Control-Allow-Methods", "DELETE, GET, HEAD, OPTIONS, PATCH, POST, PUT")
				w.Header().Set("Access-Control-Allow-Headers", r.Header.Get("Access-Control-Request-Headers"))
				_, _ = w.Write([]byte("OK"))
				return
			}
		}
		private := strings.HasPrefix(r.URL.Path, "/v1") || r.URL.Path == "/server_info"
		if c.Key != "" && private && !c.knows(r.Header.Get("Authorization")) {
			w.Header().Set("Content-Type", "application/json")
			w.WriteHeader(http.StatusUnauthorized)
			_, _ = w.Write([]byte(`{"error":"Unauthorized"}`))
			return
		}
		if c.Forms {
			inForm(w, r, routes)
			return
		}
		routes.ServeHTTP(w, r)
	})
}

func (c *Config) knows(authorization string) bool {
	scheme, key, _ := strings.Cut(authorization, " ")
	return strings.EqualFold(scheme, "bearer") && key == c.Key
}

// inForm answers in the form that the request's headers ask for: compressed, in part, as a stream although the body
// asks for none, or not at all.
func inForm(w http.ResponseWriter, r *http.Request, routes http.Handler) {
	h := r.Header
	switch {
	case r.Method != http.MethodPost:
		routes.ServeHTTP(w, r)
		return
	case h.Get("If-Match") != "" || h.Get("If-Unmodified-Since") != "":
		w.WriteHeader(http.StatusPreconditionFailed)
		return
	case h.Get("If-None-Match") != "" || h.Get("If-Modified-Since") != "":
		w.WriteHeader(http.StatusNotModified)
		return
	case h.Get("Prefer") != "" || h.Get("Expect") != "":
		w.WriteHeader(http.StatusAccepted)
		return
	case strings.Contains(h.Get("Te"), "trailers"):
		w.Header().Set("Trailer", "X-Digest")
		defer w.Header().Set("X-Digest", "none")
	}
	whole := &held{header: w.Header(), status: http.StatusOK}
	routes.ServeHTTP(whole, r)
	body := whole.body.Bytes()
	if whole.status != http.StatusOK {
		w.WriteHeader(whole.status)
		_, _ = w.Write(body)
		return
	}
	w.Header().Del("Content-Length")
	switch {
	case strings.Contains(h.Get("Accept-Encoding"), "gzip"), strings.Contains(h.Get("A-Im"), "gzip"):
		w.Header().Set("Content-Encoding", "gzip")
		z := gzip.NewWriter(w)
		_, _ = z.Write(body)
		_ = z.Close()
	case h.Get("Range") != "":
		w.WriteHeader(http.StatusPartialContent)
		_, _ = w.Write(body[:min(len(body), 10)])
	case strings.Contains(h.Get("Accept"), "xml"):
		w.Header().Set("Content-Type", "application/xml")
		_, _ = fmt.Fprintf(w, "<answer>%d</answer>", len(body))
	default:
		_, _ = w.Write(body)
	}
}

// held keeps an answer until it is whole.
type held struct {
	header http.Header
	status int
	body   bytes.Buffer
}

func (h *held) Header() http.Header         { return h.header }
func (h *held) WriteHeader(status int)      { h.status = status }
func (h *held) Write(b []byte) (int, error) { return h.body.Write(b) }
func (h *held) Flush()                      {}
