#!/usr/bin/env python3
"""Holds why Tandem leaves SGLang's servers their roles (docs/adr/0085): a decode server that knows a prefill server keeps sending to
the port that it had before it was switched to decode and back. SGLang's own registry and receiver, over real sockets. Once this
fails, SGLang has mended it, and roles auto can be built for it. Runs in e2e-sglang's virtual environment."""
import os
import socket
import sys
import threading
import time
from types import SimpleNamespace

import requests
import zmq

from sglang.srt.disaggregation.common.conn import CommonKVBootstrapServer, CommonKVReceiver
from sglang.srt.utils.network import get_zmq_socket_on_host
from sglang.version import __version__ as VERSION

CommonKVReceiver.__abstractmethods__ = frozenset()  # 0.5.22 leaves what is not needed here to the dialects


def registry():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    server = CommonKVBootstrapServer(host="127.0.0.1", port=port)
    for _ in range(100):
        try:
            if requests.get(f"http://127.0.0.1:{port}/health", timeout=1).ok:
                return server, f"127.0.0.1:{port}"
        except requests.ConnectionError:
            time.sleep(0.1)
    raise SystemExit("the registry does not start")


def prefill(addr):
    """What each switch to prefill does: a random port, registered (common/conn.py:400, 1562). Returns what ends it, and the socket."""
    context = zmq.Context()
    port, pull = get_zmq_socket_on_host(context, zmq.PULL, host="127.0.0.1")
    ranks = {f"{kind}_{of}": of == "size" for kind in ("attn_tp", "attn_cp", "attn_dp", "pp", "system_dp") for of in ("size", "rank")}
    requests.put(f"http://{addr}/route", timeout=5, json={
        **{name: int(one) for name, one in ranks.items()}, "rank_ip": "127.0.0.1", "rank_port": port, "page_size": 16, "kv_cache_dtype": "auto",
        "load_balance_method": "follow_bootstrap_room", "prefill_http_port": 1,
    }).raise_for_status()
    return context, pull


class Decode:
    """A decode server's view of prefill servers, and its requests."""

    def __init__(self, addr):
        self.addr, self.failed = addr, []
        self.manager = SimpleNamespace(
            connection_lock=threading.Lock(), connection_pool={}, is_mla_backend=False,
            record_failure=lambda *why: self.failed.append(why), update_status=lambda *_: None)

    def request(self, room):
        r = object.__new__(CommonKVReceiver)
        r.__dict__.update(
            kv_mgr=self.manager, bootstrap_addr=self.addr, bootstrap_room=room, _connection_pool_entries={}, conclude_state=None, prefill_dp_rank=0,
            _register_kv_args=lambda: True, target_tp_rank=0, target_cp_ranks=[0], target_tp_ranks=[0], target_pp_ranks=[0])
        r._setup_bootstrap_infos()
        push, lock = r._connect_to_bootstrap_server(r.bootstrap_infos[0])
        with lock:
            try:
                push.send_multipart([b"metadata"])
            except zmq.ZMQError as e:
                self.failed.append(e)
        return r


def arrives(pull):
    return bool(pull.poll(5000)) and bool(pull.recv_multipart())


def main():
    _server, addr = registry()
    decode = Decode(addr)
    context, pull = prefill(addr)
    decode.request(1)
    if not arrives(pull):
        return "the first request does not arrive"
    context.destroy(linger=0)  # to decode, and back
    _, pull = prefill(addr)
    stale = decode.request(2)
    if arrives(pull):
        return "decode asks for the new port: ADR 85 can be decided again"
    if decode.failed:
        return "decode notices the closed port: ADR 85 can be decided again"
    stale.invalidate_cached_bootstrap_infos()  # as when it has waited for SGLANG_DISAGGREGATION_WAITING_TIMEOUT (common/conn.py:2904)
    decode.request(3)
    return "" if arrives(pull) else "after the timeout the request does not arrive, either"


if __name__ == "__main__":
    wrong = main()
    if os.environ.get("TANDEM_MATRIX"):
        print(f"| SGLang {VERSION} | a server that changes roles | {wrong or 'passed'} |")
    else:
        print(f"| `sglang`, a server that changes roles | its registry and receiver | SGLang {VERSION} | {wrong or 'decode keeps the old port'} | |")
    sys.stdout.flush()
    os._exit(bool(wrong))  # the registry's thread does not end
