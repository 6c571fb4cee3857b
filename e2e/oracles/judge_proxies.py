#!/usr/bin/env python3
"""Sends the requests of Tandem's goldens through the engines' own proxies, as programs, and compares what the engines behind them get with
what Tandem sends for the same request. What differs must be on the list below, with the reason. The engines are stand-ins that write
down what comes. Runs in e2e-vllm's virtual environment. usage: judge_proxies.py TESTDATA ORACLES SGLANG-PYTHON MODEL [DIALECT...]

TANDEM_PRODUCTION_STACK is a checkout of production-stack, which is in no package index; without it, its router is left out. What it sends
is recorded in TESTDATA, for a test of extproc/kvtransfer; TANDEM_RECORD=1 writes that anew."""
import contextlib
import http.client
import json
import os
import pathlib
import re
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import goldens

HERE = pathlib.Path(__file__).parent


class Engine:
    """Stands in for an engine: answers what it is told to, and keeps the bodies and headers that come. SGLang's gateway loads the tokenizer
    from where the engine says that its model is: a folder, or it would ask a hub for it."""

    def __init__(self, model: str):
        self.seen: list = []
        self.about = json.dumps({"model_path": model, "tokenizer_path": model, "served_model_name": "m", "data": [{"id": "m"}]}).encode()
        self.answer, self.query = b"{}", b"{}"
        engine = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_args):
                pass

            def reply(self, body: bytes):
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_GET(self):
                self.reply(engine.query if self.path == "/query" else engine.about)

            def do_POST(self):
                if "chunked" in self.headers.get("Transfer-Encoding", ""):
                    body = b""
                    while size := int(self.rfile.readline(), 16):
                        body += self.rfile.read(size)
                        self.rfile.readline()
                    self.rfile.readline()
                else:
                    body = self.rfile.read(int(self.headers["Content-Length"]))
                engine.seen.append((self.path, dict(self.headers), json.loads(body)))
                self.reply(engine.answer)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def last(self):
        """The latest request to an API, waited for: a leg may come behind the client's answer."""
        until = time.monotonic() + 20
        while time.monotonic() < until:
            legs = [s for s in self.seen if s[0] in ("/v1/chat/completions", "/v1/completions", "/generate")]
            if legs:
                return legs[-1]
            time.sleep(0.01)
        raise TimeoutError("no leg came")


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@contextlib.contextmanager
def running(command: list, port: int, env: dict, ready: str):
    program = subprocess.Popen(command, env={**os.environ, **env}, stdin=subprocess.DEVNULL, stdout=sys.stderr, stderr=sys.stderr)
    try:
        until = time.monotonic() + 120
        while True:
            if program.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"{command}: does not serve")
            with contextlib.suppress(OSError, http.client.HTTPException):
                c = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
                c.request("GET", ready)
                if c.getresponse().status < 500:
                    break
            time.sleep(0.1)
        yield
    finally:
        program.terminate()
        try:
            program.wait(10)
        except subprocess.TimeoutExpired:
            program.kill()


def post(port: int, path: str, body: str):
    until = time.monotonic() + 30
    while True:
        c = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        c.request("POST", path, body, {"Content-Type": "application/json"})
        answer = c.getresponse()
        text = answer.read()
        if answer.status == 200:
            return
        if answer.status != 503 or time.monotonic() > until:  # 503: it has not found its engines yet
            raise RuntimeError(f"{answer.status}: {text[:300]}")
        time.sleep(0.1)


def kind(value) -> str:
    if isinstance(value, list):
        return f"list of {len(value)}: {', '.join(sorted({kind(v) for v in value}))}"
    return "number" if isinstance(value, (int, float)) and not isinstance(value, bool) else type(value).__name__


def differences(ours, theirs, own, path="") -> dict:
    """Where two bodies differ, by path: what is there. Of members in own (names and addresses of this run) only the type counts."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        out: dict = {}
        for name in {**ours, **theirs}:
            at = f"{path}.{name}" if path else name
            if name not in theirs:
                out[at] = "ours alone"
            elif name not in ours:
                out[at] = "theirs alone"
            elif name in own:
                if kind(ours[name]) != kind(theirs[name]):
                    out[at] = f"{kind(ours[name])} and {kind(theirs[name])}"
            else:
                out.update(differences(ours[name], theirs[name], own, at))
        return out
    return {} if ours == theirs else {path: f"{json.dumps(ours)} and {json.dumps(theirs)}"}


class Proxy:
    """One proxy: how it is started, and in what its legs differ from Tandem's. Of a difference the reason stands beside it."""

    def __init__(self, dialect, name, release, command, prefill=(), decode=(), own=(), env=None, ready="/none", use=None, members=None, legs=("prefill", "decode"), record=None):
        self.dialect, self.name, self.release, self.command, self.legs = dialect, name, release, command, legs
        self.allowed = {"prefill": set(prefill), "decode": set(decode), "encode": set()}
        self.own, self.env, self.ready, self.use = set(own), env or {}, ready, use
        self.members = members  # None: all
        self.record = record  # the file in TESTDATA with what it sends

    def differences(self, leg: str, ours: dict, theirs: dict) -> dict:
        if self.members:
            ours, theirs = ({k: v for k, v in body.items() if k.startswith(self.members)} for body in (ours, theirs))
        return {k: v for k, v in differences(ours, theirs, self.own).items() if k not in self.allowed[leg]}


# Tandem's own of the prefill leg, with every vLLM (docs/protocols.md, "What P is sent"): the example proxies leave limits that the client
# did not set, and what P must not stop by.
ONE_TOKEN = {"max_completion_tokens", "min_tokens", "n", "stop", "stop_token_ids", "include_stop_str_in_output", "best_of", "stream_options"}


def production_stack(p: Engine, d: Engine, port: int, oracles: pathlib.Path) -> list:
    """production-stack's own router, where there is a checkout."""
    checkout = os.environ.get("TANDEM_PRODUCTION_STACK")
    if not checkout:
        print("judge_proxies.py: without production-stack: set TANDEM_PRODUCTION_STACK to a checkout of its repository", file=sys.stderr)
        return []
    commit = subprocess.run(["git", "-C", checkout, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    backends = f"http://127.0.0.1:{p.port},http://127.0.0.1:{d.port}"
    return [Proxy("orchestrated", "vllm_router", "production-stack " + (commit.stdout.strip() or "checkout"), [
        sys.executable, "-m", "vllm_router.app", "--host", "127.0.0.1", "--port", str(port),
        "--routing-logic", "disaggregated_prefill_orchestrated", "--service-discovery", "static",
        "--static-backends", backends, "--static-models", "m,m", "--static-model-labels", "p,d",
        "--prefill-model-labels", "p", "--decode-model-labels", "d"],
        # The router puts P's address in the place of any host; Tandem does so where the host is good on P's machine alone.
        prefill=ONE_TOKEN, own={"remote_host"}, decode={"kv_transfer_params.remote_host"},
        env={"PYTHONPATH": f"{checkout}/src:{oracles}/production-stack"},
        use=lambda g: "params=yes" in g["first"], ready="/health", record="recorded-production-stack.json")]


def proxies(oracles: pathlib.Path, sglang: str, engines: dict, port: int) -> list:
    e, p, d = (engines[leg] for leg in ("encode", "prefill", "decode"))
    vllm = oracles / "vllm-0.33.0"
    examples = vllm / "examples/disaggregated"
    quart = {"PYTHONPATH": str(oracles / "quart")}
    python, serve = sys.executable, [sys.executable, str(HERE / "serve_quart.py")]
    P, D = f"127.0.0.1:{p.port}", f"127.0.0.1:{d.port}"
    register = free_port()
    hosts = ["--prefiller-hosts", "127.0.0.1", "--prefiller-ports", str(p.port), "--decoder-hosts", "127.0.0.1", "--decoder-ports", str(d.port)]
    epd = [python, str(examples / "disaggregated_encoder/disagg_epd_proxy.py"), "--host", "127.0.0.1",
           "--port", str(port), "--no-rewrite", "--encode-servers-urls", f"http://127.0.0.1:{e.port}",
           "--decode-servers-urls", f"http://{D}", "--prefill-servers-urls"]
    plain = lambda g: not re.search(r"ids=|turns=|release=0\.(9|1[01])|keys-0\.9", g["first"] + g["name"])  # noqa: E731
    return [
        Proxy("nixl", "toy_proxy_server.py", "vLLM 0.33.0", [python, str(vllm / "tests/v1/kv_connector/nixl_integration/toy_proxy_server.py"), "--port", str(port), *hosts],
              # Of a host that is good on P's machine alone Tandem makes P's address.
              prefill=ONE_TOKEN, own={"remote_host"}, use=lambda g: plain(g) and "decode request" in g and '"kv_transfer_params"' in g["decode request"], ready="/healthcheck"),
        # production-stack's route (request.py, route_orchestrated_disaggregated_request) follows this proxy, by its own words.
        Proxy("orchestrated", "toy_proxy_server.py", "vLLM 0.33.0", [python, str(vllm / "tests/v1/kv_connector/nixl_integration/toy_proxy_server.py"), "--port", str(port), *hosts],
              prefill=ONE_TOKEN, own={"remote_host"}, use=lambda g: "params=yes" in g["first"], ready="/healthcheck"),
        *production_stack(p, d, port, oracles),
        Proxy("offload", "p2p_connector_proxy.py", "vLLM 0.33.0", [python, str(vllm / "tests/v1/kv_offload/tiering/p2p/p2p_connector_proxy.py"), "--port", str(port), *hosts],
              prefill=ONE_TOKEN, own={"kv_request_id", "remote_host", "remote_port"}, use=lambda g: "source" not in g["first"], ready="/healthcheck"),
        Proxy("nixl-push", "disagg_proxy_pushconnector_demo.py", "vLLM 0.33.0", [
            python, str(examples / "disaggregated_serving/disagg_proxy_pushconnector_demo.py"), "--model", "m", "--port", str(port), "--prefill", P, "--decode", D,
            "--prefill-engine-id", "7af2de7e", "--prefill-kv-host", "127.0.0.1", "--prefill-side-channel-port", "9101"],
              # The example has P stream where the client does: its status then says nothing. 0.32.0 dies of a request without remote_block_ids.
              prefill=ONE_TOKEN | {"stream"}, decode={"kv_transfer_params.remote_block_ids"}, own={"remote_engine_id", "remote_host", "remote_port", "remote_request_id", "tp_size", "pp_size"},
              use=lambda g: plain(g) and "ranks" not in g["name"], ready="/status"),
        Proxy("mooncake", "mooncake_connector_proxy.py", "vLLM 0.33.0", [
            python, str(examples / "mooncake_connector/mooncake_connector_proxy.py"), "--port", str(port), "--prefill", f"http://{P}", str(p.port), "--decode", f"http://{D}"],
              prefill=ONE_TOKEN, own={"transfer_id", "remote_bootstrap_addr"}, use=lambda g: "list-of" not in g["name"] and "ranks" not in g["name"]),
        Proxy("moriio", "moriio_toy_proxy_server.py, WRITE", "vLLM 0.33.0",
              [*serve, str(examples / "disaggregated_serving/moriio_toy_proxy_server.py"), str(port), str(register), P, D, "WRITE", "8"],
              # The example names the engines in the request id; Tandem says it in the body, as llm-d's sidecar does. It asks D for one
              # token less than the client did, and gives the client D's answer alone.
              prefill=ONE_TOKEN | {f"kv_transfer_params.remote_{n}" for n in ("host", "handshake_port", "notify_port")},
              decode={f"kv_transfer_params.remote_{n}" for n in ("host", "handshake_port", "notify_port", "dp_rank", "engine_id", "block_ids")} | {"max_tokens"},
              own={"transfer_id"}, env=quart, use=lambda g: "tp=8" in g["first"]),
        Proxy("moriio-read", "moriio_toy_proxy_server.py, READ", "vLLM 0.33.0",
              [*serve, str(examples / "disaggregated_serving/moriio_toy_proxy_server.py"), str(port), str(register), P, D, "READ", "1"],
              prefill=ONE_TOKEN, env=quart, own={"transfer_id"},
              # Tandem hands P's object on as it is, and the example some of it beside what it knows of P.
              decode={f"kv_transfer_params.remote_{n}" for n in ("host", "handshake_port", "notify_port", "dp_rank", "dp_size", "dp_size_local", "tp_size")} | {"max_tokens"}),
        # The example sends an encode request for each sound and video; Tandem sends one for all media of a chat. It tells
        # D, too, where the encodings are, which then has the KV of the whole prompt.
        Proxy(goldens.ENCODE, "disagg_epd_proxy.py, E, P and D", "vLLM 0.33.0", [*epd, f"http://{P}"],
              legs=("encode", "prefill", "decode"), prefill=ONE_TOKEN, decode={"ec_transfer_params"}, use=lambda g: "sound" not in g["name"], ready="/v1/models"),
        Proxy(goldens.ENCODE, "disagg_epd_proxy.py, E and PD", "vLLM 0.33.0", [*epd, "none"], legs=("encode", "decode"),
              use=lambda g: "prefill request" not in g, ready="/v1/models"),
        Proxy("sglang", "sglang-router", "0.3.2", [
            sglang, "-m", "sglang_router.launch_router", "--pd-disaggregation", "--prefill", f"http://{P}", "8998", "--decode", f"http://{D}", "--host", "127.0.0.1",
            "--port", str(port), "--policy", "round_robin", "--prometheus-port", str(free_port()), "--log-level", "warn"],
              # The gateway writes the body anew, with defaults of its own, and has P stream where the client does. It takes no token ids.
              members="bootstrap_", own={"bootstrap_room", "bootstrap_host", "bootstrap_port"}, env={"PYTHONPATH": str(oracles / "router")}, ready="/readiness",
              use=lambda g: not re.search("token-ids|ipv6|not-json|sends-a-room", g["name"])),
    ]


def judge(j: goldens.Judgement, proxy: Proxy, engines: dict, port: int):
    p, d = engines["prefill"], engines["decode"]
    compared = noticed = 0
    cases = [g for g in goldens.of(j.testdata, proxy.dialect) if g["path"] in ("/v1/chat/completions", "/v1/completions", "/generate")
             and all(f"{leg} request" in g for leg in proxy.legs) and not g["name"].endswith("refused-by-prefill") and (proxy.use is None or proxy.use(g))]
    p.query = next((g["bootstrap query"].encode() for g in cases if "bootstrap query" in g), b'{"0":{"engine_id":"e"}}')
    cases = [g for g in cases if "bootstrap query" not in g or g["bootstrap query"].encode() == p.query]
    d.answer = b'{"id":"x","choices":[]}'
    recorded = []
    with running(proxy.command, port, proxy.env, proxy.ready):
        for golden in cases:
            for leg in proxy.legs:
                engines[leg].seen.clear()
                if leg != "decode":
                    engines[leg].answer = golden.get(f"{leg} answer", '{"id":"x","choices":[]}').encode()
            try:
                json.loads(p.answer)  # not all goldens have an answer that a proxy could read
                post(port, golden["path"], golden["request"])
                legs = {leg: engines[leg].last() for leg in proxy.legs}
            except (RuntimeError, TimeoutError, ValueError, OSError) as e:
                j.wrong.append(f"{golden['name']}, {proxy.name}: {e}")
                continue
            recorded.append({"golden": golden["name"], **{leg: body for leg, (_, _, body) in legs.items()}})
            for leg, (_, _, theirs) in legs.items():
                ours = goldens.body(golden, leg)
                compared += 1
                if differing := proxy.differences(leg, ours, theirs):
                    j.wrong.append(f"{golden['name']}, {leg}, beside {proxy.name}: {differing}")
                    continue
                clients = set() if leg == "encode" else set(json.loads(golden["request"]))
                names = set(ours) - clients | set(ours.get("kv_transfer_params") or {})
                names |= {name for of_one in (ours.get("ec_transfer_params") or {}).values() for name in of_one}
                for name in names:
                    if proxy.differences(leg, goldens.rename(ours, name), theirs):
                        noticed += 1
                    elif not any(a.split(".")[-1] == name for a in proxy.allowed[leg]):
                        j.wrong.append(f"{golden['name']}, {leg}: nobody noticed that {name} was renamed")
    if proxy.record:
        hold(j, proxy, recorded)
    if not noticed:
        j.wrong.append(f"{proxy.name}: nothing was compared")
    j.rows.append(f"| {goldens.cell(proxy.dialect)} | beside `{proxy.name}` | {proxy.release} | {compared} | {noticed} |")


def hold(j: goldens.Judgement, proxy: Proxy, recorded: list):
    """The recording has to be what the proxy sends now."""
    file = pathlib.Path(j.testdata, proxy.record)
    lines = ",\n  ".join(goldens.dump(r) for r in recorded)
    now = f'{{"proxy": "{proxy.name}", "release": "{proxy.release}", "legs": [\n  {lines}\n]}}\n'
    if os.environ.get("TANDEM_RECORD"):
        file.write_text(now)
    elif json.loads(file.read_text())["legs"] != recorded:
        j.wrong.append(f"{proxy.name}: sends other legs than {file.name} has")


def main():
    testdata, oracles, sglang, model, *only = sys.argv[1:]
    j = goldens.Judgement(testdata)
    engines, port = {leg: Engine(model) for leg in ("encode", "prefill", "decode")}, free_port()
    for proxy in proxies(pathlib.Path(oracles), sglang, engines, port):
        if not only or proxy.dialect in only:
            try:
                judge(j, proxy, engines, port)
            except RuntimeError as e:
                j.wrong.append(f"{proxy.name}: {e}")
    j.end()


if __name__ == "__main__":
    main()
