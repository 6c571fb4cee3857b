package extproc

import (
	"slices"
	"strings"

	"tandem/extproc/openai"
)

// ownLeg is a set of the places where engines get a request's body.
type ownLeg uint8

// The legs, and the requests that have only one.
const (
	onPrefill ownLeg = 1 << iota // P's leg
	onDecode                     // D's leg, with P's KV or without
	onAlone                      // the one hop of a request that could have been split, and a gateway's
	onStored                     // the one hop of a stored response
	onOther                      // a path that is never split
	onAll     = onPrefill | onDecode | onAlone | onStored | onOther
)

// ownedMember is a member of request bodies that Tandem owns on some legs: engines get Tandem's value there or none, whatever
// the client has sent. On all other legs they get the client's, byte for byte. docs/security.md has the same table.
type ownedMember struct {
	Member string // a star at its end: all names that begin so
	Legs   ownLeg
	If     string       // the setting without which it is not so; "": always
	Added  bool         // only where the client sends none: the client's own value stays
	APIs   []openai.API // whose engines know the member; nil: all
}

// ownedMembers returns all of them. The first row that names a member counts.
func ownedMembers() []ownedMember {
	completions := []openai.API{openai.Chat, openai.Completions}
	texts := append([]openai.API{openai.Responses, openai.Messages}, completions...)
	return []ownedMember{
		// what steers KV transfer and routing: clients' are cut from every body, of all paths
		{Member: "kv_transfer_params", Legs: onAll},
		{Member: "ec_transfer_params", Legs: onAll},
		{Member: "bootstrap_*", Legs: onAll},
		{Member: "disaggregated_params", Legs: onAll},
		{Member: "disagg_*", Legs: onAll},
		{Member: "routed_dp_rank", Legs: onAll},
		{Member: "data_parallel_rank", Legs: onAll},
		{Member: "do_local_prefill", Legs: onAll},
		{Member: "prompt_token_ids", Legs: onAll},
		{Member: "nvext", Legs: onAll},
		// what the operator sets
		{Member: "priority", Legs: onAll, If: "enginePriority"},
		// P computes one token, as no stream
		{Member: "max_tokens", Legs: onPrefill, APIs: texts},
		{Member: "max_completion_tokens", Legs: onPrefill, APIs: completions},
		{Member: "max_output_tokens", Legs: onPrefill, APIs: []openai.API{openai.Responses}},
		{Member: "min_tokens", Legs: onPrefill, APIs: texts},
		{Member: "min_completion_tokens", Legs: onPrefill},
		{Member: "n", Legs: onPrefill, APIs: completions},
		{Member: "best_of", Legs: onPrefill},
		{Member: "stream", Legs: onPrefill},
		{Member: "stream_options", Legs: onPrefill},
		{Member: "stop", Legs: onPrefill},
		{Member: "stop_token_ids", Legs: onPrefill},
		{Member: "stop_sequences", Legs: onPrefill},
		{Member: "include_stop_str_in_output", Legs: onPrefill},
		{Member: "sampling_params", Legs: onPrefill, APIs: []openai.API{openai.Generate}},
		{Member: "output_mode", Legs: onPrefill, APIs: []openai.API{openai.Generate}},
		// P's token ids are learned
		{Member: "return_token_ids", Legs: onPrefill, If: "kvEvents"},
		// the id of a response names the engine that stores it
		{Member: "request_id", Legs: onStored, Added: true},
	}
}

// in reports whether it is owned on a leg of an API's requests.
func (o *ownedMember) in(on ownLeg, api openai.API) bool {
	return o.Legs&on != 0 && (o.APIs == nil || slices.Contains(o.APIs, api))
}

// owns returns what is owned of a member; nil: nothing.
func owns(member string) *ownedMember {
	for _, o := range ownedMembers() {
		begin, all := strings.CutSuffix(o.Member, "*")
		if member == o.Member || all && strings.HasPrefix(member, begin) {
			return &o
		}
	}
	return nil
}
