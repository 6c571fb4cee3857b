package envoyconfigs

import "strings"

// localReply is how one of Envoy's own answers reads.
type localReply struct {
	When                string // CEL over Envoy's attributes; the first that holds counts
	Status              int    // in place of Envoy's; 0: as it is
	Type, Code, Message string
	RetryAfter          int // seconds; 0: none
}

// The classes of OpenAI's errors.
const (
	clientsFault = "invalid_request_error"
	ourFault     = "api_error"
)

// LocalReplies are the answers that Envoy gives by itself on the main listener, those of Tandem excepted.
func (bootstrap) LocalReplies() []localReply {
	return []localReply{
		{details("ext_proc"), 0, ourFault, "router_unavailable", "the router did not answer; try again", 1},
		{details("mismatch_between_content_length"), 0, ourFault, "router_failed", "the router wrote a body that does not fit its headers", 0},
		{details("direct_response"), 0, ourFault, "router_undecided", "the router named no endpoint; try again", 1},
		{details("upgrade_failed"), 400, clientsFault, "upgrade_not_supported", "protocol upgrades are not supported here", 0},
		{"response.code == 400", 0, clientsFault, "bad_request", "the request is not valid HTTP", 0},
		{"response.code == 404", 0, clientsFault, "not_found", "there is nothing at this address", 0},
		{"response.code == 408", 0, clientsFault, "request_timeout", "the request did not arrive in time", 0},
		{"response.code == 413", 0, clientsFault, "body_too_large", "the request body is too large", 0},
		{"response.code == 426", 0, clientsFault, "http_version_not_supported", "HTTP/1.1 or HTTP/2 is needed", 0},
		{"response.code == 431", 0, clientsFault, "headers_too_large", "the request headers are too large", 0},
		{"response.code == 501", 0, clientsFault, "not_implemented", "this transfer encoding is not supported", 0},
		{"response.code == 502", 0, ourFault, "bad_gateway", "the endpoint's answer was not valid HTTP; try again", 1},
		{"response.code == 503", 0, ourFault, "endpoint_unavailable", "the endpoint did not answer; try again", 1},
		{"response.code == 504", 0, ourFault, "endpoint_timeout", "the endpoint did not answer in time; try again", 1},
	}
}

// details holds for answers whose response code details, Envoy's name for their cause, begin so.
func details(prefix string) string { return "response.code_details.startsWith('" + prefix + "')" }

// OtherReply is what is said where no other reply fits.
func (bootstrap) OtherReply() localReply {
	return localReply{Type: ourFault, Code: "internal_error", Message: "the request could not be carried out; its id leads to the cause in the logs"}
}

// Unfollowed is the body that takes the place of a redirect which Envoy could not follow, ready for Lua's single quotes.
func (bootstrap) Unfollowed() string {
	return strings.ReplaceAll(`{"error":{"message":"every way to answer was tried; try again","type":"api_error","param":null,"code":"attempts_exhausted"}}`, `'`, `\'`)
}
