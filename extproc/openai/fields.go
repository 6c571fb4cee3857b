package openai

import "strings"

// Field is a member that somebody needs, of the body itself or of its sampling_params.
type Field uint8

// The members that are known by name, under the names of vLLM's request models, which include OpenAI's and Anthropic's.
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
	FieldText     // of SGLang's /generate
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

// fieldOf names the field of a key, unescaped.
func fieldOf(key []byte) Field { //nolint:funlen // one line a name
	switch string(key) { // does not allocate
	case "model":
		return FieldModel
	case "stream":
		return FieldStream
	case "stream_options":
		return FieldStreamOptions
	case "max_tokens":
		return FieldMaxTokens
	case "max_completion_tokens":
		return FieldMaxCompletionTokens
	case "max_output_tokens":
		return FieldMaxOutputTokens
	case "min_tokens":
		return FieldMinTokens
	case "min_completion_tokens":
		return FieldMinCompletionTokens
	case "stop":
		return FieldStop
	case "stop_token_ids":
		return FieldStopTokenIDs
	case "stop_sequences":
		return FieldStopSequences
	case "include_stop_str_in_output":
		return FieldIncludeStop
	case "n":
		return FieldN
	case "best_of":
		return FieldBestOf
	case "logprobs":
		return FieldLogprobs
	case "top_logprobs":
		return FieldTopLogprobs
	case "prompt_logprobs":
		return FieldPromptLogprobs
	case "echo":
		return FieldEcho
	case "use_beam_search":
		return FieldBeamSearch
	case "output_mode":
		return FieldOutputMode
	case "messages":
		return FieldMessages
	case "prompt":
		return FieldPrompt
	case "prompt_embeds":
		return FieldPromptEmbeds
	case "input":
		return FieldInput
	case "token_ids":
		return FieldTokenIDs
	case "text":
		return FieldText
	case "input_ids":
		return FieldInputIDs
	case "sampling_params":
		return FieldSamplingParams
	case "store":
		return FieldStore
	case "background":
		return FieldBackground
	case "previous_response_id":
		return FieldPreviousResponseID
	case "request_id":
		return FieldRequestID
	case "tools":
		return FieldTools
	case "system":
		return FieldSystem
	case "instructions":
		return FieldInstructions
	case "reasoning_effort":
		return FieldReasoningEffort
	case "chat_template":
		return FieldChatTemplate
	case "chat_template_kwargs":
		return FieldChatTemplateKwargs
	case "documents":
		return FieldDocuments
	case "cache_salt":
		return FieldCacheSalt
	case "priority":
		return FieldPriority
	case "return_token_ids":
		return FieldReturnTokenIDs
	case "kv_transfer_params":
		return FieldKVTransferParams
	case "bootstrap_host":
		return FieldBootstrapHost
	case "bootstrap_port":
		return FieldBootstrapPort
	case "bootstrap_room":
		return FieldBootstrapRoom
	case "return_logprob":
		return FieldReturnLogprob
	case "disaggregated_params":
		return FieldDisaggregatedParams
	case "vllm_xargs":
		return fieldVLLMXArgs
	case "extra_args":
		return fieldExtraArgs
	}
	if isControl(string(key)) {
		return fieldControl
	}
	return fieldUnknown
}

// isControl reports whether a key, beside kv_transfer_params, is one that a client must not send: it steers engines or
// their routers, and names internal hosts, ranks and blocks. vLLM, SGLang, TensorRT-LLM, Neuron and Dynamo, in this order.
func isControl(key string) bool {
	switch key {
	case "ec_transfer_params",
		"routed_dp_rank", "data_parallel_rank",
		"prompt_token_ids", // beside messages it takes their place, so what was routed would not be what is computed
		"nvext":
		return true
	}
	// SGLang's host, port, room and what will follow; its disagg_prefill_dp_rank, TensorRT-LLM's disagg_request_id, and
	// disagg_prefill_resp or whatever else an orchestrated pool calls it.
	return strings.HasPrefix(key, "bootstrap_") || strings.HasPrefix(key, "disagg_")
}

// control reports whether a member is not the client's to send.
func (f Field) control() bool {
	switch f {
	case FieldKVTransferParams, FieldDisaggregatedParams, FieldBootstrapHost, FieldBootstrapPort, FieldBootstrapRoom, fieldControl:
		return true
	}
	return false
}
