package replan

import (
	"bytes"
	"net/http"
	"slices"

	"tandem/extproc/ended"
	"tandem/extproc/kvtransfer"
	"tandem/extproc/names"
	"tandem/extproc/openai"
)

// redirectHost is the host of every redirect. It is not the client's, because Envoy's URL parser refuses some legal
// ones (my_service:8080). The query is omitted for the same reason. Pass 2 restores both from the ticket.
const redirectHost = "http://tandem"

// Location returns the URL of a redirect for a request with this path.
func Location(path []byte) []byte {
	path, _, _ = bytes.Cut(path, []byte("?"))
	return slices.Concat([]byte(redirectHost), path)
}

// Limits of the headers of a request that may be redirected. The ticket, which includes the host and the path, and
// Tandem's other headers must fit with them into the bootstrap's max_request_headers_kb and max_headers_count.
const (
	maxHeaders     = 120
	maxHeaderBytes = 64 << 10
	maxHost        = 1 << 10
	maxPath        = 8 << 10
)

// Fits refuses a request that Envoy could not redirect, before an engine works for it.
// count and size are those of all its headers.
func Fits(authority, path []byte, count, size int) error {
	switch {
	case len(authority) > maxHost:
		return openai.BadRequest("host_too_long", "", "the Host header is too long")
	case len(path) > maxPath:
		return openai.HeadersTooLarge(http.StatusRequestURITooLong, "uri_too_long",
			"the path and query of the request are too long")
	case count > maxHeaders || size > maxHeaderBytes:
		return openai.HeadersTooLarge(http.StatusRequestHeaderFieldsTooLarge, "headers_too_large",
			"the request headers are too large")
	}
	return nil
}

// If Envoy did not follow a redirect, the client would get it as its answer. A script in the bootstrap replaces it
// by a 503 (attempts_exhausted) and tags the access log entry. Envoy reports the reason only in its stats; here it
// is derived from the entry.

// NotFollowed returns the reason for the metric: one of those that Envoy (1.40, Filter::setupRedirect of its
// router) can have on the routes of our bootstrap. t is the ticket of the pass that the answer ended.
func NotFollowed(t *kvtransfer.Ticket, e *ended.Pass, maxRedirects int) string {
	body := int64(e.Sent) - int64(e.SentHeaders) // frames included
	switch {
	case string(e.Unfollowed) == names.UnfollowedLocation:
		return "no_location"
	case t.Redirects >= maxRedirects:
		return "too_many"
	case body < int64(t.BodyBytes):
		return "incomplete"
	}
	return "not_kept"
}
