#!/usr/bin/env python3
"""Has SGLang's own request models read exactly what Tandem sends, and make of it the requests that its scheduler gets: one room for each,
none twice. Runs in e2e-sglang's virtual environment, without a GPU and without a server. usage: judge_sglang.py TESTDATA"""
import sys
from importlib.metadata import version

import goldens

from sglang.srt.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest, ResponsesRequest
from sglang.srt.managers.io_struct import GenerateReqInput

MODELS = {
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": AnthropicMessagesRequest,
}
FIELDS = ("bootstrap_host", "bootstrap_port", "bootstrap_room")


def scheduled(golden: dict, body: dict) -> GenerateReqInput:
    """What the tokenizer manager is given for a body, as serving_chat.py, serving_completions.py and http_server.py make it."""
    if golden["path"] == "/generate":
        return GenerateReqInput(**body)
    request = MODELS[golden["path"]](**body)
    rooms = {name: getattr(request, name) for name in FIELDS}
    prompt = getattr(request, "prompt", None) or "x"
    ids = isinstance(prompt, list) and (isinstance(prompt[0], int) or isinstance(prompt[0], list))
    return GenerateReqInput(**{"input_ids" if ids else "text": prompt}, sampling_params={"n": getattr(request, "n", 1) or 1}, **rooms)


def check(golden, leg, body):
    assert not (leg == "prefill" and body.get("stream")), "P would stream"
    request = scheduled(golden, body)
    request.normalize_batch_and_arguments()
    one = request.is_single
    hosts, ports, rooms = ([v] if one else v for v in (request.bootstrap_host, request.bootstrap_port, request.bootstrap_room))
    size = 1 if one else request.batch_size
    assert request.parallel_sample_num == 1, "choices would share a room"
    assert len(hosts) == len(ports) == len(rooms) == size, (hosts, ports, rooms, size)
    assert all(isinstance(h, str) and h for h in hosts), "no host"
    assert all(isinstance(p, int) for p in ports), "P's own port would be taken"
    assert all(isinstance(r, int) and 0 <= r < 1 << 63 for r in rooms), "400: a disaggregated request without a room"
    assert len(set(rooms)) == size, "two requests in one room"
    for i in range(0 if one else size):
        assert request[i].bootstrap_room == rooms[i]


def main():
    j = goldens.Judgement(sys.argv[1])
    j.dialect("sglang", "SGLang " + version("sglang"), "request models, `GenerateReqInput`", check, {"prefill": FIELDS, "decode": FIELDS})
    j.end()


if __name__ == "__main__":
    main()
