package openai

import "encoding/json"

// Field is a top-level member that somebody needs, or one of sampling_params.
type Field uint8

// The members that are known by name. Names are those of vLLM's request models, which include OpenAI's.
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
	FieldIncludeStop
	FieldN
	FieldBestOf
	FieldLogprobs
	FieldTopLogprobs
	FieldPromptLogprobs
	FieldEcho
	FieldBeamSearch
	FieldOutputMode
	FieldMessages
	FieldPrompt
	FieldPromptEmbeds
	FieldInput
	FieldTokenIDs
	FieldSamplingParams
	FieldStore
	FieldBackground
	FieldPreviousResponseID
	FieldRequestID
	FieldTools
	FieldSystem
	FieldInstructions
	FieldChatTemplate
	FieldChatTemplateKwargs
	FieldDocuments
	FieldCacheSalt
	FieldReturnTokenIDs
	FieldKVTransferParams
	fieldControl // any other member that a client must not send
	numFields
)

// fieldOf names the field of an unescaped key.
func fieldOf(key []byte) Field {
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
	case "chat_template":
		return FieldChatTemplate
	case "chat_template_kwargs":
		return FieldChatTemplateKwargs
	case "documents":
		return FieldDocuments
	case "cache_salt":
		return FieldCacheSalt
	case "return_token_ids":
		return FieldReturnTokenIDs
	case "kv_transfer_params":
		return FieldKVTransferParams
	// What steers engines and their routers, and names internal hosts and blocks: vLLM, SGLang, TensorRT-LLM, Neuron,
	// Dynamo in this order.
	case "ec_transfer_params",
		"bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key", "routed_dp_rank",
		"disagg_prefill_dp_rank", "data_parallel_rank", "remote_kv_source",
		"disaggregated_params", "disagg_spec",
		"disagg_prefill_resp",
		"nvext":
		return fieldControl
	}
	return fieldUnknown
}

// control reports whether a member is not the client's to send.
func (f Field) control() bool { return f == FieldKVTransferParams || f == fieldControl }

// unescape undoes the escapes of a validated string's inside.
func unescape(inside []byte) []byte {
	quoted := make([]byte, 0, len(inside)+2)
	quoted = append(append(append(quoted, '"'), inside...), '"')
	var s string
	if json.Unmarshal(quoted, &s) != nil {
		return inside // cannot be: the scanner validated it
	}
	return []byte(s)
}
