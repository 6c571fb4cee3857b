package openai

import "strings"

// Field is a member that Tandem reads or edits, of the body itself or of its sampling_params.
type Field uint8

// The known members, under the names of vLLM's request models, which include OpenAI's and Anthropic's.
const (
	fieldUnknown Field = iota
	FieldModel
	FieldStream
	FieldStreamOptions
	FieldMaxTokens
	FieldMaxCompletionTokens
	FieldMaxOutputTokens
	FieldMinTokens
	FieldMinCompletionTokens
	FieldStop
	FieldStopTokenIDs
	FieldStopSequences
	FieldIncludeStop // include_stop_str_in_output
	FieldSeed
	FieldN
	FieldBestOf
	FieldLogprobs
	FieldTopLogprobs
	FieldPromptLogprobs
	FieldEcho
	FieldBeamSearch // use_beam_search
	FieldOutputMode
	FieldMessages
	FieldPrompt
	FieldPromptEmbeds
	FieldInput
	FieldTokenIDs
	FieldText     // SGLang's /generate
	FieldInputIDs // likewise
	FieldSamplingParams
	FieldStore
	FieldBackground
	FieldPreviousResponseID
	FieldRequestID
	FieldTools
	FieldSystem
	FieldInstructions
	FieldReasoningEffort
	FieldChatTemplate
	FieldChatTemplateKwargs
	FieldDocuments
	FieldCacheSalt
	FieldReturnTokenIDs
	FieldKVTransferParams
	FieldBootstrapHost // SGLang's; a client must not send these three
	FieldBootstrapPort
	FieldBootstrapRoom
	FieldDisaggregatedParams
	FieldReturnLogprob // SGLang
	FieldPriority
	fieldControl   // any other member that a client must not send
	fieldVLLMXArgs // vllm_xargs: becomes extra_args in vLLM
	fieldExtraArgs // extra_args of sampling_params
	numFields
)

// fields maps names to members.
var fields = map[string]Field{
	"model":                      FieldModel,
	"stream":                     FieldStream,
	"stream_options":             FieldStreamOptions,
	"max_tokens":                 FieldMaxTokens,
	"max_completion_tokens":      FieldMaxCompletionTokens,
	"max_output_tokens":          FieldMaxOutputTokens,
	"min_tokens":                 FieldMinTokens,
	"min_completion_tokens":      FieldMinCompletionTokens,
	"stop":                       FieldStop,
	"stop_token_ids":             FieldStopTokenIDs,
	"stop_sequences":             FieldStopSequences,
	"include_stop_str_in_output": FieldIncludeStop,
	"seed":                       FieldSeed,
	"n":                          FieldN,
	"best_of":                    FieldBestOf,
	"logprobs":                   FieldLogprobs,
	"top_logprobs":               FieldTopLogprobs,
	"prompt_logprobs":            FieldPromptLogprobs,
	"echo":                       FieldEcho,
	"use_beam_search":            FieldBeamSearch,
	"output_mode":                FieldOutputMode,
	"messages":                   FieldMessages,
	"prompt":                     FieldPrompt,
	"prompt_embeds":              FieldPromptEmbeds,
	"input":                      FieldInput,
	"token_ids":                  FieldTokenIDs,
	"text":                       FieldText,
	"input_ids":                  FieldInputIDs,
	"sampling_params":            FieldSamplingParams,
	"store":                      FieldStore,
	"background":                 FieldBackground,
	"previous_response_id":       FieldPreviousResponseID,
	"request_id":                 FieldRequestID,
	"tools":                      FieldTools,
	"system":                     FieldSystem,
	"instructions":               FieldInstructions,
	"reasoning_effort":           FieldReasoningEffort,
	"chat_template":              FieldChatTemplate,
	"chat_template_kwargs":       FieldChatTemplateKwargs,
	"documents":                  FieldDocuments,
	"cache_salt":                 FieldCacheSalt,
	"priority":                   FieldPriority,
	"return_token_ids":           FieldReturnTokenIDs,
	"kv_transfer_params":         FieldKVTransferParams,
	"bootstrap_host":             FieldBootstrapHost,
	"bootstrap_port":             FieldBootstrapPort,
	"bootstrap_room":             FieldBootstrapRoom,
	"return_logprob":             FieldReturnLogprob,
	"disaggregated_params":       FieldDisaggregatedParams,
	"vllm_xargs":                 fieldVLLMXArgs,
	"extra_args":                 fieldExtraArgs,
}

// fieldOf returns the field of an unescaped key.
func fieldOf(key []byte) Field {
	if f, ok := fields[string(key)]; ok { // does not allocate
		return f
	}
	if isControl(string(key)) {
		return fieldControl
	}
	return fieldUnknown
}

// isControl reports whether a key other than kv_transfer_params is one that a client must not send: it steers engines
// or their routers, or names internal hosts, ranks and blocks. The names are vLLM's, SGLang's, TensorRT-LLM's, Neuron's
// and Dynamo's, in this order.
func isControl(key string) bool {
	switch key {
	case "ec_transfer_params",
		"routed_dp_rank", "data_parallel_rank",
		"do_local_prefill", // D computes the prompt itself: sglang#34773, a draft, which Dynamo sends already
		// with messages it takes their place: the engine would compute another prompt than Tandem routed
		"prompt_token_ids",
		"nvext":
		return true
	}
	// SGLang's host, port, room and later additions; its disagg_prefill_dp_rank; TensorRT-LLM's disagg_request_id; and
	// the members of orchestrated pools, such as disagg_prefill_resp.
	return strings.HasPrefix(key, "bootstrap_") || strings.HasPrefix(key, "disagg_")
}

// control reports whether a client must not send the member.
func (f Field) control() bool {
	switch f {
	case FieldKVTransferParams, FieldDisaggregatedParams, FieldBootstrapHost, FieldBootstrapPort, FieldBootstrapRoom,
		fieldControl:
		return true
	}
	return false
}
