package plan

import (
	"slices"
	"strings"

	"tandem/extproc/openai"
)

// Leg is a set of the places where engines get a request's body.
type Leg uint8

// The legs, and the requests that have only one.
const (
	OnPrefill Leg = 1 << iota // P's leg
	OnDecode                  // D's leg, with P's KV or without
	OnAlone                   // the one hop of a request that could have been split, and a gateway's
	OnStored                  // the one hop of a stored response
	OnOther                   // a path that is never split
	OnAll     = OnPrefill | OnDecode | OnAlone | OnStored | OnOther
)

// Owned is a member of request bodies that Tandem owns on some legs: engines get Tandem's value there or none, whatever
// the client has sent. On all other legs they get the client's, byte for byte. docs/security.md has the same table.
type Owned struct {
	Member string // a star at its end: all names that begin so
	Legs   Leg
	If     string       // the setting without which it is not so; "": always
	Added  bool         // only where the client sends none: the client's own value stays
	APIs   []openai.API // whose engines know the member; nil: all
}

// OwnedMembers returns all of them. The first row that names a member counts.
func OwnedMembers() []Owned {
	completions := []openai.API{openai.Chat, openai.Completions}
	texts := append([]openai.API{openai.Responses, openai.Messages}, completions...)
	return []Owned{
		// what steers KV transfer and routing: clients' are cut from every body, of all paths
		{Member: "kv_transfer_params", Legs: OnAll},
		{Member: "ec_transfer_params", Legs: OnAll},
		{Member: "bootstrap_*", Legs: OnAll},
		{Member: "disaggregated_params", Legs: OnAll},
		{Member: "disagg_*", Legs: OnAll},
		{Member: "routed_dp_rank", Legs: OnAll},
		{Member: "data_parallel_rank", Legs: OnAll},
		{Member: "do_local_prefill", Legs: OnAll},
		{Member: "prompt_token_ids", Legs: OnAll},
		{Member: "nvext", Legs: OnAll},
		// what the operator sets
		{Member: "priority", Legs: OnAll, If: "enginePriority"},
		// P computes one token, as no stream
		{Member: "max_tokens", Legs: OnPrefill, APIs: texts},
		{Member: "max_completion_tokens", Legs: OnPrefill, APIs: completions},
		{Member: "max_output_tokens", Legs: OnPrefill, APIs: []openai.API{openai.Responses}},
		{Member: "min_tokens", Legs: OnPrefill, APIs: texts},
		{Member: "min_completion_tokens", Legs: OnPrefill},
		{Member: "n", Legs: OnPrefill, APIs: completions},
		{Member: "best_of", Legs: OnPrefill},
		{Member: "stream", Legs: OnPrefill},
		{Member: "stream_options", Legs: OnPrefill},
		{Member: "stop", Legs: OnPrefill},
		{Member: "stop_token_ids", Legs: OnPrefill},
		{Member: "stop_sequences", Legs: OnPrefill},
		{Member: "include_stop_str_in_output", Legs: OnPrefill},
		{Member: "sampling_params", Legs: OnPrefill, APIs: []openai.API{openai.Generate}},
		{Member: "output_mode", Legs: OnPrefill, APIs: []openai.API{openai.Generate}},
		// P's token ids are learned
		{Member: "return_token_ids", Legs: OnPrefill, If: "kvEvents"},
		// the id of a response names the engine that stores it
		{Member: "request_id", Legs: OnStored, Added: true},
	}
}

// In reports whether it is owned on a leg of an API's requests.
func (o *Owned) In(leg Leg, api openai.API) bool {
	return o.Legs&leg != 0 && (o.APIs == nil || slices.Contains(o.APIs, api))
}

// Owns returns what is owned of a member; nil: nothing.
func Owns(member string) *Owned {
	for _, o := range OwnedMembers() {
		begin, all := strings.CutSuffix(o.Member, "*")
		if member == o.Member || all && strings.HasPrefix(member, begin) {
			return &o
		}
	}
	return nil
}
