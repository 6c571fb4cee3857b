#!/usr/bin/env python3
"""Has vLLM's own request models and connectors, and LMCache's, read exactly what Tandem sends, and Tandem's goldens hold what they make.
Runs in e2e-vllm's virtual environment, without a GPU and without an engine. usage: judge_vllm.py TESTDATA ORACLES"""
import importlib
import pathlib
import re
import sys
import types
from types import SimpleNamespace

import goldens

from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector import MooncakeConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.moriio.moriio_common import MoRIIOConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import NixlPullConnectorScheduler
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_scheduler import NixlPushConnectorScheduler
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest
from vllm.v1.kv_offload.tiering.p2p import manager as p2p
from vllm.version import __version__ as VLLM

MODELS = {
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": AnthropicMessagesRequest,
    "/inference/v1/generate": GenerateRequest,
}


def parsed(golden: dict, body: dict):
    """The body as the engine's API has it, and what of it reaches the connector."""
    path = "/v1/completions" if "prompt" in body else golden["path"]
    request = MODELS[path](**body)
    return request, request.kv_transfer_params


def one_token(request):
    limit = getattr(request, "max_output_tokens", None) or getattr(request, "max_completion_tokens", None) or getattr(request, "max_tokens", None)
    if limit is None:
        limit = request.sampling_params.max_tokens
    assert limit == 1, f"P would make {limit} tokens"
    assert not request.stream, "P would stream"


def engine_request(params):
    return SimpleNamespace(request_id="r", kv_transfer_params=params, prompt_token_ids=list(range(64)), num_prompt_tokens=64, num_tokens=64)


def scheduler(cls):
    """A connector's scheduler half without an engine around it."""
    s = object.__new__(cls)
    s.__dict__.update(
        is_bidirectional_kv_xfer_enabled=False, use_host_buffer=False, kv_recompute_threshold=0, _has_mamba=False,
        _reqs_in_batch=set(), _reqs_need_save={}, _reqs_need_recv={}, _push_pending_registrations={}, _push_registration_deadlines={},
        _push_registration_timeout=1, engine_id="d", side_channel_host="h", side_channel_port=1,
        vllm_config=SimpleNamespace(parallel_config=SimpleNamespace(tensor_parallel_size=1)),
    )
    s._get_remote_prefill_token_count = lambda n: n
    s.get_exchange_clipped_blocks = lambda blocks: blocks
    return s


BLOCKS = SimpleNamespace(get_unhashed_block_ids_all_groups=lambda: ([1],))


def nixl(golden, leg, body):
    request, params = parsed(golden, body)
    if leg == "prefill":
        one_token(request)
        assert params["do_remote_decode"] is True
        return scheduler(NixlPullConnectorScheduler).get_num_new_matched_tokens(engine_request(params), 0)
    if params is None:
        return False
    tokens, deferred = scheduler(NixlPullConnectorScheduler).get_num_new_matched_tokens(engine_request(params), 0)
    assert tokens > 0 and deferred, "D would compute the prompt"
    meta = NixlConnectorMetadata()
    meta.add_new_req_to_recv("r", ([1],), params)
    remote = meta.reqs_to_recv["r"].remote
    ids = remote.block_ids
    assert ids and all(isinstance(i, int) for group in ids for i in (group if isinstance(group, list) else [group])), ids
    assert isinstance(remote.port, int) and remote.host and remote.engine_id and remote.request_id


def nixl_push(golden, leg, body):
    request, params = parsed(golden, body)
    if leg == "prefill":
        one_token(request)
        assert params["do_remote_decode"] is True
        return None
    if params is None:
        return False
    s, r = scheduler(NixlPushConnectorScheduler), engine_request(params)
    tokens, deferred = s.get_num_new_matched_tokens(r, 0)
    assert tokens > 0 and deferred, "D would compute the prompt"
    s.update_state_after_alloc(r, BLOCKS, tokens)
    assert s._push_pending_registrations["r"]["remote_port"] == params["remote_port"]
    NixlConnectorMetadata().add_new_req_to_recv("r", ([1],), params)


def mooncake(golden, leg, body):
    request, params = parsed(golden, body)
    assert params.get("transfer_id"), "no transfer id"
    if leg == "prefill":
        one_token(request)
        assert params.get("do_remote_decode"), "P would not keep the blocks"
    else:
        assert params.get("do_remote_prefill"), "D would compute the prompt"
        assert re.match(r"https?://", params["remote_bootstrap_addr"])
    MooncakeConnectorMetadata().add_new_req("r", [[1]], params, load_remote_cache=leg == "decode")


def moriio(golden, leg, body):
    request, params = parsed(golden, body)
    assert params.get("do_remote_decode" if leg == "prefill" else "do_remote_prefill"), "no leg of two"
    if leg == "prefill":
        one_token(request)
        if golden["name"].startswith("moriio-read"):
            assert params["transfer_id"].startswith("tx")
            return
        params = {**params, "remote_block_ids": [], "remote_engine_id": "d"}  # the scheduler fills them in (WRITE)
    meta = MoRIIOConnectorMetadata()
    meta.add_new_req("r", [1], params, write_mode=leg == "prefill")
    seen = {**meta.reqs_to_recv, **meta.reqs_to_save}["r"]
    assert seen.transfer_id.startswith("tx") and seen.tp_size > 0, "which rank writes where is not known"


def offload(golden, leg, body):
    request, params = parsed(golden, body)
    source, dest = p2p._parse_source(params), p2p._parse_dest(params)
    if leg == "prefill":
        one_token(request)
        assert dest is not None and dest.kv_request_id, "P would store for itself"
        assert (source is not None) == ("remote_kv_source" in golden["prefill request"])
    else:
        assert source is not None and not source.do_probe, "D would compute the prompt"
        assert dest is None


def multi(golden, leg, body):
    _, params = parsed(golden, body)
    if params is None:
        return False
    if "nixl" in golden["first"]:
        nixl(golden, leg, body)
    if "offload" in golden["first"]:
        offload(golden, leg, body)
    return None


def shared(golden, leg, body):
    request, params = parsed(golden, body)
    assert params is None
    if leg == "prefill":
        one_token(request)


def lmcache_adapter(oracles: str):
    """LMCache's connector. What only its storage backends import is absent, and stands in for itself."""
    sys.path.insert(0, str(pathlib.Path(oracles, "lmcache")))

    class Absent(types.ModuleType):
        __path__: list = []

        def __getattr__(self, name):
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (), {})

    for _ in range(60):
        try:
            return importlib.import_module("lmcache.integration.vllm.vllm_v1_adapter"), importlib.import_module("lmcache.v1.storage_backend.pd_backend")
        except ModuleNotFoundError as e:
            sys.modules[e.name] = Absent(e.name)
    raise SystemExit("lmcache: too much is absent")


def lmcache(adapter, golden, leg, body):
    request, params = parsed(golden, body)
    if leg == "decode":
        assert params is None, "the engine that receives is told nothing"
        return None
    one_token(request)
    if golden["path"] == "/v1/messages" and "disagg_spec" not in (params or {}):
        raise AssertionError("no disagg_spec")
    impl = object.__new__(adapter.LMCacheConnectorV1Impl)
    impl.__dict__.update(_unfinished_requests={}, load_specs={})
    try:
        impl.lookup_client = SimpleNamespace(clear_lookup_status=lambda _: None)
    except AttributeError:  # a property, of the manager's
        impl._manager = SimpleNamespace(lookup_client=SimpleNamespace(clear_lookup_status=lambda _: None))
    adapter.tmp_disagg_tracker.clear()
    impl.update_state_after_alloc(engine_request(params), 0)
    spec = adapter.tmp_disagg_tracker["r"]
    assert isinstance(spec.receiver_init_port, list) and isinstance(spec.receiver_alloc_port, list) and spec.receiver_host
    return None


def main():
    testdata, oracles = sys.argv[1:]
    j = goldens.Judgement(testdata)
    release = "vLLM " + VLLM
    pull = ["kv_transfer_params", "do_remote_prefill", "remote_block_ids", "remote_engine_id", "remote_host", "remote_port", "remote_request_id"]
    ask = ["kv_transfer_params", "do_remote_decode"]
    limits = ("max_tokens", "max_completion_tokens", "max_output_tokens")
    # Releases before 0.13 name no request: today's engine does not take them. And two bodies whose clients' own part it refuses.
    old = ["keys-0.9.2", "keys-0.9.2-short-prompt", "release-0.9.2", "generate-0.12.0", "keys-0.29.0"]
    j.dialect("nixl", release, "request models, `NixlPullConnectorScheduler`, `NixlConnectorMetadata`", nixl, {"prefill": [*ask, limits], "decode": pull}, old)
    j.dialect("nixl-push", release, "request models, `NixlPushConnectorScheduler`", nixl_push, {
        "prefill": [*ask, limits], "decode": ["kv_transfer_params", "do_remote_prefill", "remote_engine_id", "remote_host", "remote_port", "tp_size", "remote_request_id"]})
    j.dialect("mooncake", release, "request models, `MooncakeConnectorMetadata`", mooncake, {
        "prefill": ["kv_transfer_params", "do_remote_decode", "transfer_id"],
        "decode": ["kv_transfer_params", "do_remote_prefill", "transfer_id", "remote_engine_id", "remote_bootstrap_addr"]})
    address = ["remote_host", "remote_handshake_port", "remote_notify_port", "transfer_id"]
    j.dialect("moriio", release, "request models, `MoRIIOConnectorMetadata`", moriio, {
        "prefill": ["kv_transfer_params", "do_remote_decode", "remote_tp_size", *address],
        "decode": ["kv_transfer_params", "do_remote_prefill", "remote_tp_size", "remote_engine_id", "remote_block_ids", *address]})
    j.dialect("moriio-read", release, "request models, `MoRIIOConnectorMetadata`", moriio, {
        "prefill": ["kv_transfer_params", "do_remote_decode", "transfer_id"],
        "decode": ["kv_transfer_params", "do_remote_prefill", "remote_engine_id", "remote_block_ids", *address]})
    j.dialect("offload", release, "request models, the P2P tier's `_parse_source` and `_parse_dest`", offload, {
        "prefill": ["kv_transfer_params", "remote_decoder", "kv_request_id", "remote_kv_source"],
        "decode": ["kv_transfer_params", "remote_prefiller", "kv_request_id", "remote_host", "remote_port"]})
    j.dialect("multi", release, "as its members", multi, {"prefill": ["do_remote_decode", "remote_decoder"], "decode": ["remote_engine_id", "remote_prefiller"]}, ["nixl-has-nothing"])
    j.dialect("shared", release, "request models", shared, {"prefill": [limits], "decode": []})

    adapter, backend = lmcache_adapter(oracles)
    version = importlib.import_module("importlib.metadata").version("lmcache")
    j.dialect("lmcache", "LMCache " + version, "`LMCacheConnectorV1Impl.update_state_after_alloc`", lambda g, leg, b: lmcache(adapter, g, leg, b), {
        "prefill": ["disagg_spec", "req_id", "receiver_host", "receiver_init_port", "receiver_alloc_port"], "decode": []})
    # And what LMCache makes: the notice, byte for byte what kvstate/notices is tested with.
    import msgspec

    notice = msgspec.msgpack.encode(backend.ProxyNotif(req_id="1")).hex()
    tests = pathlib.Path(testdata, "../../../kvstate/notices/notices_test.go").read_text()
    if notice not in tests:
        j.wrong.append(f"lmcache: its notice is {notice}, which no test of kvstate/notices reads")
    j.end()


if __name__ == "__main__":
    main()
