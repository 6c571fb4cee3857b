#!/usr/bin/env python3
"""Has vLLM's request model and its connector for encodings (ECCPUConnector with NIXL) read what Tandem sends of a chat
with media, and Tandem's goldens hold what that connector makes. Runs in e2e-vllm's virtual environment, without an
engine. usage: judge_encode.py TESTDATA"""
import json
import sys
from types import SimpleNamespace

import goldens
import torch

from vllm.distributed.ec_transfer.ec_connector.cpu.scheduler import ECCPUScheduler
from vllm.distributed.ec_transfer.ec_connector.cpu.scheduler.embedding_cache import EmbeddingCache
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.version import __version__ as VLLM

try:
    from vllm.renderers.chat_utils.chat_message import parse_chat_message_content_mm_part as parse_part  # 0.33
except ImportError:
    from vllm.renderers.chat_utils import _parse_chat_message_content_mm_part as parse_part

BLOCK = 4096
MEDIA = ("image_url", "audio_url", "video_url", "input_audio")


class Sessions(dict):
    """The consumer's connections to encode engines: writes down what is fetched from where."""

    def __init__(self):
        super().__init__()
        self.fetched: dict = {}

    def __contains__(self, addr):
        return True

    def __getitem__(self, addr):
        return SimpleNamespace(start_xfer=lambda mm_hash, blocks, deadline: self.fetched.update({mm_hash: addr}))


def scheduler(**more):
    """The connector's scheduler half without an engine around it."""
    s = object.__new__(ECCPUScheduler)
    s.__dict__.update(
        _is_producer=False, _is_consumer=False, _nixl_enabled=True, _cache=EmbeddingCache(4096), _sessions=Sessions(),
        _region=SimpleNamespace(block_size_bytes=BLOCK), _dtype=torch.float16, _deferred_since={}, _in_flight=set(),
        _step_completed=set(), _tombstones=set(), _unrecoverable=set(), _ack_timeout_s=1.0,
        _metadata_resolver=SimpleNamespace(fields_for=lambda _: set()))
    s.__dict__.update(more)
    return s


def features(golden) -> list:
    """The golden's media as the engine has them: by the hashes that the encode engine answered."""
    told = json.loads(golden["encode answer"])["ec_transfer_params"]

    def feature(mm_hash, of):
        rows = of["shape"][0]
        return SimpleNamespace(
            identifier=mm_hash, modality=next(iter(of["metadata"])).split("_")[0],
            mm_position=SimpleNamespace(offset=0, length=rows, get_num_embeds=lambda: rows),
            data=SimpleNamespace(get_data=lambda: of["metadata"], items=lambda: {}.items()))

    return [feature(h, m) for h, m in told.items()]


def media(messages) -> list:
    return [part for m in messages if isinstance(m["content"], list) for part in m["content"] if part["type"] in MEDIA]


def encode(golden, body):
    request = ChatCompletionRequest(**body)
    assert not request.model_extra, f"the engine reads no {sorted(request.model_extra)}"
    assert not request.stream and not request.n > 1
    message, = body["messages"]
    assert message["role"] == "user"
    for part in message["content"]:
        kind, content = parse_part(part)
        assert kind in MEDIA and content, part
    assert message["content"] == media(json.loads(golden["request"])["messages"]), "not the chat's media, in their order"


def consumer(golden, body):
    """Whoever computes the prompt fetches the encoding of each of the media, from the engine that made it."""
    request = ChatCompletionRequest(**body)
    assert not request.model_extra, f"the engine reads no {sorted(request.model_extra)}"
    params = request.to_sampling_params(1, {}).extra_args.get("ec_transfer_params")
    s = scheduler(_is_consumer=True)
    r = SimpleNamespace(request_id="r", ec_transfer_params=params, mm_features=features(golden))
    s._nixl_consumer_admit(r, 0)
    told = json.loads(golden["encode answer"])["ec_transfer_params"]
    want = {h: (m["peer_host"], m["peer_port"]) for h, m in told.items()}
    assert s._sessions.fetched == want, f"it would fetch {s._sessions.fetched}, and not {want}"


def check(golden, leg, body):
    if leg == "encode":
        return encode(golden, body)
    if leg == "decode" and "prefill request" in golden:
        assert "ec_transfer_params" not in body, "D has the KV of the whole prompt"
        return False
    return consumer(golden, body)


def made(golden) -> dict:
    """What the connector of an encode engine answers for the golden's media."""
    told = json.loads(golden["encode answer"])["ec_transfer_params"]
    one = next(iter(told.values()))
    names = {name for m in told.values() for name in m["metadata"]}
    resolver = SimpleNamespace(fields_for=lambda modality: {name for name in names if name.startswith(modality)})
    s = scheduler(_is_producer=True, _peer_host=one["peer_host"], _peer_port=one["peer_port"], _metadata_resolver=resolver)
    for h, m in told.items():
        s._cache.alloc(h, s._num_blocks(m["shape"]), tuple(m["shape"]))
    _, params = s.request_finished(SimpleNamespace(request_id="r", mm_features=features(golden)))
    return params


def main():
    testdata, = sys.argv[1:]
    j = goldens.Judgement(testdata)
    told = ["ec_transfer_params", "peer_host", "peer_port", "size_bytes", "shape"]
    j.dialect(goldens.ENCODE, "vLLM " + VLLM, "request model, `ECCPUScheduler`", check, {
        "encode": ["messages", "content", MEDIA, "mm_processor_kwargs", "media_io_kwargs"], "prefill": told, "decode": told})
    for golden in goldens.of(testdata, goldens.ENCODE):
        told = json.loads(golden["encode answer"])["ec_transfer_params"]
        for entry in told.values():
            entry.pop("modality", None)  # 0.33 added it
        params = made(golden)
        for entry in params.values():
            entry.pop("modality", None)
        if params != told:
            j.wrong.append(f"{golden['name']}: the connector answers {goldens.dump(params)}")
    j.end()


if __name__ == "__main__":
    main()
