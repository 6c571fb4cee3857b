#!/usr/bin/env python3
"""Has SGLang's own code read exactly what Tandem sends, from the bytes on: FastAPI's parsing, the serving classes, the tokenizer manager, and
the addresses at which prefill and decode then meet. Runs in e2e-sglang's virtual environment, without a GPU and without a server.

usage: judge_sglang.py TESTDATA MODEL"""
import sys
import types
from types import SimpleNamespace

import goldens
from pydantic import TypeAdapter

from sglang.srt.disaggregation.decode import DecodePreallocQueue, _bootstrap_addr
from sglang.srt.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from sglang.srt.entrypoints.anthropic.serving import AnthropicServing
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest, MessageProcessingResult, ResponsesRequest
from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat
from sglang.srt.entrypoints.openai.serving_completions import OpenAIServingCompletion
from sglang.srt.managers.io_struct import GenerateReqInput, TokenizedGenerateReqInput
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.runtime_context import publish
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from sglang.version import __version__ as VERSION

MODELS = {
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": AnthropicMessagesRequest,
    "/generate": GenerateReqInput,
}
FIELDS = ("bootstrap_host", "bootstrap_port", "bootstrap_room")


def without_engine(cls, **attributes):
    """An object of the engine's class with what the judged method needs, and no engine around it."""
    o = object.__new__(cls)
    o.__dict__.update(attributes)
    return o


MODEL = SimpleNamespace(is_multimodal=False, vocab_size=32000, hf_config=SimpleNamespace(architectures=["LlamaForCausalLM"], model_type="llama"))
TEMPLATES = SimpleNamespace(completion_template_name=None, chat_template_name=None, reasoning_config=None)
TIMES = SimpleNamespace(set_tokenize_finish_time=lambda: None)
SERVING = {
    "tokenizer_manager": SimpleNamespace(model_config=MODEL, server_args=SimpleNamespace(enable_lora=False, tokenizer_metrics_allowed_custom_labels=None)),
    "template_manager": TEMPLATES, "default_sampling_params": {}, "reasoning_parser": None, "is_gpt_oss": False, "chat_encoding_spec": None,
    "allowed_custom_labels": None, "_prompt_text_round_trip_is_lossy": False, "_tokenizer_auto_adds_specials": False,
}


def templated(_self, _request, _is_multimodal):
    """What the chat template would give, of which nothing is judged."""
    return MessageProcessingResult(prompt="x", prompt_ids=[1], image_data=None, audio_data=None, video_data=None, modalities=[], stop=[])


def received(golden: dict, text: str) -> GenerateReqInput:
    """What the tokenizer manager is given for a body, by the engine's own way from the bytes to it."""
    path = golden["path"]
    request = TypeAdapter(MODELS[path]).validate_json(text)
    if path == "/generate":
        return request
    if path == "/v1/messages":
        request = AnthropicServing(SimpleNamespace(supports_inline_system=False, **SERVING))._convert_to_chat_completion_request(request)
    if path == "/v1/responses":  # its serving method is one with the engine; it copies the three as they are
        return GenerateReqInput(text="x", sampling_params={}, stream=request.stream, **{name: getattr(request, name) for name in FIELDS})
    if path == "/v1/completions":
        return without_engine(OpenAIServingCompletion, **SERVING)._convert_to_internal_request(request)[0]
    chat = without_engine(OpenAIServingChat, **SERVING)
    chat._process_messages = types.MethodType(templated, chat)
    return chat._convert_to_internal_request(request)[0]


def scheduled(one: GenerateReqInput) -> TokenizedGenerateReqInput:
    """What the scheduler is given for one request."""
    manager = without_engine(TokenizerManager, preferred_sampling_params=None, sampling_params_class=SamplingParams, tokenizer=None, model_config=MODEL,
                             tokenized_generate_req_type=TokenizedGenerateReqInput, rid_to_state={one.rid: SimpleNamespace(time_stats=TIMES)})
    one.sampling_params = {"max_new_tokens": 1}  # stops need a tokenizer
    return manager._create_tokenized_object(one, "x", [1, 2, 3])


def check(golden, leg, body):
    text = golden[leg + " request"]
    if body != goldens.body(golden, leg):
        text = goldens.dump(body)  # a name was changed
    request = received(golden, text)
    assert not (leg == "prefill" and request.stream), "P would stream"
    request.normalize_batch_and_arguments()
    size = 1 if request.is_single else request.batch_size
    assert request.parallel_sample_num == 1, "choices would share a room"
    rooms = set()
    for i in range(size):
        req = scheduled(request if request.is_single else request[i])
        assert req.bootstrap_port is not None, "P's own port would be taken"
        assert req.bootstrap_room is not None, "400: a disaggregated request without a room"
        assert req.bootstrap_host, "no host"
        address = _bootstrap_addr(req)
        host = "[fd00:" if "fd00" in golden["first"] else ""
        assert address.startswith(host) and address.endswith(f":{req.bootstrap_port}"), address
        # With several ranks of P decode goes to the one that prefill put the room on.
        req.disagg_prefill_dp_rank = None
        prefill = SimpleNamespace(dp_size=4, follow_bootstrap_room=True)
        queue = SimpleNamespace(kv_manager=SimpleNamespace(prefill_info_table={address: prefill}))
        assert DecodePreallocQueue._resolve_prefill_dp_rank(queue, req) == req.bootstrap_room % 4
        assert 0 <= req.bootstrap_room < 1 << 63, "its buffer has 64 bits"
        rooms.add(req.bootstrap_room)
    assert len(rooms) == size, "two requests in one room"


def main():
    testdata, model = sys.argv[1:]
    # The configuration of a server, as e2e/sglang/run.sh starts it.
    publish(ServerArgs(model_path=model, device="cpu", disaggregation_mode="decode", disaggregation_transfer_backend="nixl",
                       attention_backend="torch_native", sampling_backend="pytorch", disable_cuda_graph=True, mem_fraction_static=0.3), role="tokenizer")
    j = goldens.Judgement(testdata)
    j.dialect("sglang", "SGLang " + VERSION, "FastAPI's parsing, serving classes, `TokenizerManager`, `DecodePreallocQueue`", check,
              {"prefill": FIELDS, "decode": FIELDS})
    j.end()


if __name__ == "__main__":
    main()
