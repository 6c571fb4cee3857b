package extproc

import (
	"net/http"

	"tandem/extproc/envoywire"
	"tandem/extproc/openai"
)

// Limits of the headers of a request that may be redirected. The ticket, which includes the host and the path, and
// Tandem's other headers must fit with them into the bootstrap's max_request_headers_kb and max_headers_count.
const (
	maxHeaders     = 120
	maxHeaderBytes = 64 << 10
	maxHost        = 1 << 10
	maxPath        = 8 << 10
)

// fitsRedirect refuses a request that Envoy could not redirect, before an engine works for it.
func fitsRedirect(h *envoywire.Headers) error {
	switch {
	case len(h.Authority) > maxHost:
		return openai.BadRequest("host_too_long", "", "the Host header is too long")
	case len(h.Path) > maxPath:
		return openai.HeadersTooLarge(http.StatusRequestURITooLong, "uri_too_long", "the path and query of the request are too long")
	case h.Count > maxHeaders || h.Size > maxHeaderBytes:
		return openai.HeadersTooLarge(http.StatusRequestHeaderFieldsTooLarge, "headers_too_large", "the request headers are too large")
	}
	return nil
}
