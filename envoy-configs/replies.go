package envoyconfigs

import (
	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	hcmv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/network/http_connection_manager/v3"
	"google.golang.org/protobuf/types/known/structpb"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"tandem/envoy-configs/logwhen"
)

// localReply is one of Envoy's own answers.
type localReply struct {
	When                string // CEL over Envoy's attributes; the first that holds counts
	Status              uint32 // in place of Envoy's; 0: as it is
	Type, Code, Message string
	RetryAfter          string // seconds, or a format command of Envoy's that may give none
}

// The classes of OpenAI's errors.
const (
	clientsFault = "invalid_request_error"
	ourFault     = "api_error"
)

// envoysReplies are the answers that Envoy gives by itself on the main listener, those of Tandem excepted.
func envoysReplies() []localReply {
	return []localReply{
		{details("ext_proc"), 0, ourFault, "router_unavailable", "the router did not answer; try again", "1"},
		{details("mismatch_between_content_length"), 0, ourFault, "router_failed",
			"the router wrote a body that does not fit its headers", ""},
		{details("direct_response"), 0, ourFault, "router_undecided", "the router named no endpoint; try again", "1"},
		{details("upgrade_failed"), 426, clientsFault, "upgrade_not_supported",
			"protocol upgrades are not supported here; use plain HTTP", ""},
		{"response.code == 400", 0, clientsFault, "bad_request", "the request is not valid HTTP", ""},
		{"response.code == 404", 0, clientsFault, "not_found", "there is nothing at this address", ""},
		{"response.code == 408", 0, clientsFault, "request_timeout", "the request did not arrive in time", ""},
		{"response.code == 413", 0, clientsFault, "body_too_large", "the request body is too large", ""},
		{"response.code == 426", 0, clientsFault, "http_version_not_supported", "HTTP/1.1 or HTTP/2 is needed", ""},
		{"response.code == 431", 0, clientsFault, "headers_too_large", "the request headers are too large", ""},
		{"response.code == 501", 0, clientsFault, "not_implemented", "this transfer encoding is not supported", ""},
		{"response.code == 502", 0, ourFault, "bad_gateway", "the endpoint sent no valid answer; try again", "1"},
		{"response.code == 503", 0, ourFault, "endpoint_unavailable", "the endpoint did not answer; try again", "1"},
		{"response.code == 504", 0, ourFault, "endpoint_timeout",
			"the endpoint did not answer in time; try again", "1"},
	}
}

// details holds for answers whose response code details (Envoy's name for their cause) have a prefix.
func details(prefix string) string { return "response.code_details.startsWith('" + prefix + "')" }

// config gives Envoy's own answers OpenAI's shape.
func (m replies) config() *hcmv3.LocalReplyConfig {
	mappers := []*hcmv3.ResponseMapper{noted(m, &hcmv3.ResponseMapper{
		Filter: m.cel(details("tandem")),
		BodyFormatOverride: &corev3.SubstitutionFormatString{
			ContentType:     "application/json",
			Format:          &corev3.SubstitutionFormatString_TextFormatSource{TextFormatSource: inline("%LOCAL_REPLY_BODY%")},
			OmitEmptyValues: true,
		},
	}, notes{"": "Tandem's answers pass here too and must not change: the first entry."})}
	if m.Usage != nil { // docs/howto/limit-tokens.md has a filter of the operator's here
		mappers = append(mappers, m.mappers(tooManyTokens())...)
	}
	for _, reply := range envoysReplies() {
		mappers = append(mappers, m.mappers(reply)...)
	}
	other := localReply{Type: ourFault, Code: "internal_error",
		Message: "the request could not be carried out; its id leads to the cause in the logs"}
	other.When = "true"
	mappers = append(mappers, m.mappers(other)[0])
	return &hcmv3.LocalReplyConfig{Mappers: mappers, BodyFormat: other.format()}
}

// ownReplies marks Envoy's own answers on a leg's listener: to the main listener they look like an engine's.
func ownReplies() *hcmv3.LocalReplyConfig {
	cause := []*corev3.HeaderValueOption{setHeader("x-tandem-details", "%RESPONSE_CODE_DETAILS%", overwriteOrAdd)}
	mark := &hcmv3.ResponseMapper{Filter: logwhen.StatusFrom(400, "tandem.reply.own"), HeadersToAdd: cause}
	return &hcmv3.LocalReplyConfig{Mappers: []*hcmv3.ResponseMapper{mark}}
}

// ofMessages holds for requests to Anthropic's API, behind whatever prefix a gateway adds.
const ofMessages = "request.url_path.contains('/v1/messages')"

// mappers give an answer of Envoy's the shape of a reply: Anthropic's on the paths of its API, else OpenAI's.
func (m replies) mappers(reply localReply) []*hcmv3.ResponseMapper {
	messages := reply
	messages.When = ofMessages + " && (" + reply.When + ")"
	if messages.Type != ourFault && messages.Type != clientsFault { // these two have the same names there
		messages.Type = "rate_limit_error"
	}
	first := m.mapper(messages)
	object := first.GetBodyFormatOverride().GetJsonFormat().GetFields()
	delete(object["error"].GetStructValue().GetFields(), "param")
	object["type"] = structpb.NewStringValue("error")
	return []*hcmv3.ResponseMapper{first, m.mapper(reply)}
}

// mapper gives an answer of Envoy's the shape of a reply.
func (m replies) mapper(reply localReply) *hcmv3.ResponseMapper {
	mapper := &hcmv3.ResponseMapper{Filter: m.cel(reply.When), BodyFormatOverride: reply.format()}
	if reply.Status != 0 {
		mapper.StatusCode = wrapperspb.UInt32(reply.Status)
	}
	if reply.Status == 426 { // RFC 9110, 15.5.22; without the other header Envoy takes it away
		mapper.HeadersToAdd = []*corev3.HeaderValueOption{
			setHeader("upgrade", "HTTP/1.1", overwriteOrAdd), setHeader("connection", "upgrade", overwriteOrAdd),
		}
	}
	if reply.RetryAfter != "" {
		mapper.HeadersToAdd = []*corev3.HeaderValueOption{setHeader("retry-after", reply.RetryAfter, overwriteOrAdd)}
	}
	return mapper
}

// format is the error object of OpenAI's API.
func (r localReply) format() *corev3.SubstitutionFormatString {
	text := structpb.NewStringValue
	object := &structpb.Struct{Fields: map[string]*structpb.Value{
		"message": text(r.Message), "type": text(r.Type), "param": structpb.NewNullValue(), "code": text(r.Code),
	}}
	whole := &structpb.Struct{Fields: map[string]*structpb.Value{"error": structpb.NewStructValue(object)}}
	return &corev3.SubstitutionFormatString{ContentType: "application/json",
		Format: &corev3.SubstitutionFormatString_JsonFormat{JsonFormat: whole}}
}
