// Package usage has Envoy read the tokens of answers as they pass, and report them in its access log
// (docs/adr/0067). Names are those that extproc/envoywire reads.
package usage

import (
	jsonv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/json_to_metadata/v3"
	tracingv3 "github.com/envoyproxy/go-control-plane/envoy/type/tracing/v3"
)

// PlainFilter reads answers that are not streamed. Streams are read by a script (envoy-configs/lua).
const PlainFilter = "envoy.filters.http.json_to_metadata"

// PlainLength matches the content-length of answers that are read whole. Envoy keeps such an answer until it is
// complete, and answers 500 where it exceeds the listener's buffer, which is never below 8 MiB: so what is longer, or
// does not say how long it is, passes unread.
const PlainLength = "[1-7]?[0-9]{1,6}"

// member is where an answer has a number of tokens, and the key that the number gets.
type member struct {
	key  string
	path []string
}

// members are those of all APIs. The last one that is there counts. lua/usage.lua has the same of streams.
func members() []member {
	at := func(key string, path ...string) member { return member{key, path} }
	return []member{
		// chat, completions, embeddings, vLLM's generate
		at("in", "usage", "prompt_tokens"), at("out", "usage", "completion_tokens"),
		at("cached", "usage", "prompt_tokens_details", "cached_tokens"),
		// messages and responses
		at("in", "usage", "input_tokens"), at("out", "usage", "output_tokens"),
		at("cached", "usage", "input_tokens_details", "cached_tokens"),
		at("cache_read", "usage", "cache_read_input_tokens"),
		at("cache_write", "usage", "cache_creation_input_tokens"),
		// SGLang's generate
		at("in", "meta_info", "prompt_tokens"), at("out", "meta_info", "completion_tokens"),
		at("cached", "meta_info", "cached_tokens"),
	}
}

// namespace is that of the dynamic metadata.
const namespace = "tandem.usage"

func rule(m member) *jsonv3.JsonToMetadata_Rule {
	r := &jsonv3.JsonToMetadata_Rule{OnPresent: &jsonv3.JsonToMetadata_KeyValuePair{
		MetadataNamespace: namespace, Key: m.key, Type: jsonv3.JsonToMetadata_NUMBER,
	}}
	for _, key := range m.path {
		r.Selectors = append(r.Selectors, &jsonv3.JsonToMetadata_Selector{
			Selector: &jsonv3.JsonToMetadata_Selector_Key{Key: key},
		})
	}
	return r
}

// Plain reads answers that are not streamed.
func Plain() *jsonv3.JsonToMetadata {
	rules := &jsonv3.JsonToMetadata_MatchRules{}
	for _, m := range members() {
		rules.Rules = append(rules.Rules, rule(m))
	}
	return &jsonv3.JsonToMetadata{ResponseRules: rules}
}

// FirstBody has the access log say when the first byte of an answer's body came, which is its first token: engines may
// send headers before. In microseconds from the request's start.
func FirstBody() *tracingv3.CustomTag {
	return &tracingv3.CustomTag{Tag: "first_body",
		Type: &tracingv3.CustomTag_Value{Value: "%COMMON_DURATION(DS_RX_BEG:US_RX_BODY_BEG:us)%"}}
}
