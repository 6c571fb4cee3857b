"""Requests of e2e-gateway.sh. Everything is checked; the first thing that is not so ends it.

e2e_gateway.py URL            single requests of every size, and a load
e2e_gateway.py URL TEXT N [SIZE...]     says that TEXT happened, and N requests more, of those sizes in bytes (50)
e2e_gateway.py URL ADMIN      prints the configuration that Envoy has, of which ADMIN is the admin address"""
import http.client
import json
import sys
import threading
import time
import urllib.parse
import urllib.request

gateway = urllib.parse.urlparse(sys.argv[1])
ENGINES = {"tiny": ([8101, 8102], [8201, 8202]), "pair": ([8301], [8401])}


def body(model, size, stream=False, name=""):
    """of its own from its first word on, so that no cache has any of it."""
    return json.dumps({"model": model, "max_tokens": 6, "stream": stream, "messages": [{"role": "user", "content": name + " word" * (size // 5)}]})


def post(text, request_id="", headers=None):
    """status, text and headers of the answer."""
    c = http.client.HTTPConnection(gateway.hostname, gateway.port, timeout=60)
    try:
        c.request("POST", "/v1/chat/completions", text, {"content-type": "application/json", "x-request-id": request_id, **(headers or {})})
        r = c.getresponse()
        return r.status, r.read().decode(), dict(r.getheaders())
    finally:
        c.close()


def seen(ports, request_id):
    """requests under an id that engines have recorded."""
    out = []
    for port in ports:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/sim/requests?id={urllib.parse.quote(request_id)}") as r:
            out += [q for q in json.load(r) if q["path"] == "/v1/chat/completions"]
    return out


def whole(status, text, stream):
    return status == 200 and (text.endswith("data: [DONE]\n\n") if stream else '"finish_reason"' in text)


def check(ok, *said):
    if not ok:
        sys.exit("FAILED: " + " ".join(str(s)[:600] for s in said))


def one(model, size, stream):
    rid = f"{model}-{size}-{stream}"
    text = body(model, size, stream, rid)
    forged = {"x-gateway-destination-endpoint": "127.0.0.1:1", "x-tandem-ticket": "forged", "x-tandem-leg": "pass"}
    began = time.monotonic()
    status, answer, headers = post(text, rid, forged)
    took = time.monotonic() - began
    p, d = (seen(ports, rid) for ports in ENGINES[model])
    check(whole(status, answer, stream), rid, status, answer)
    check(len(p) == 1 and len(d) == 1, rid, "prefill", len(p), "decode", len(d))
    check(d[0]["external_tokens"] > 0, rid, "decode fetched nothing", d)
    check(not any(h.lower().startswith("x-tandem") or h.lower() == "location" for h in headers), headers)
    print(f"{model}: {len(text):8d} bytes, {'streamed' if stream else 'whole   '}: 200, one prefill and one decode hop, {d[0]['external_tokens']} tokens fetched, {took * 1000:.0f} ms", flush=True)


def load(n, clients, models, sizes):
    wrong, took, at = [], [], iter(range(n))

    def work():
        for i in at:
            stream = i % 2 == 0
            began = time.monotonic()
            try:
                status, text, _ = post(body(models[i % len(models)], sizes[i % len(sizes)], stream, f"load {i}"), f"load-{i}")
                if not whole(status, text, stream):
                    wrong.append((status, text[-200:]))
            except OSError as e:
                wrong.append(repr(e))
            took.append(time.monotonic() - began)

    threads = [threading.Thread(target=work) for _ in range(clients)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    check(not wrong, len(wrong), "of", n, "failed:", wrong[:3])
    print(f"{n} requests of {clients} clients: all answered whole, the slowest after {max(took):.1f} s", flush=True)


def metric(name, ports):
    total = 0
    for port in ports:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as r:
            total += sum(float(line.split()[-1]) for line in r.read().decode().splitlines() if line.startswith((name + " ", name + "{")))
    return total


def account():
    """nothing is booked, no KV block is held, no engine was misused."""
    engines = [p for pools in ENGINES.values() for ports in pools for p in ports]
    check(metric("enginesim_violations_total", engines) == 0, "engines count violations")
    end = time.monotonic() + 10
    while held := (metric("tandem_reservations", [9000, 9010]), metric("enginesim_blocks_held", engines)):
        if held == (0, 0):
            break
        check(time.monotonic() < end, "reservations and KV blocks that are left:", held)
        time.sleep(0.05)
    print("no reservation and no KV block is left, no engine counts a violation", flush=True)


def golden(admin):
    """what Envoy Gateway has made of the resources, as one static configuration."""
    with urllib.request.urlopen(f"http://{admin}/config_dump?include_eds") as r:
        dump = json.load(r)["configs"]
    of = lambda kind: next((d for d in dump if d["@type"].endswith("." + kind)), {})
    plain = lambda d: {k: v for k, v in d.items() if k != "@type"}
    routes = {r["route_config"]["name"]: plain(r["route_config"]) for r in of("RoutesConfigDump").get("dynamic_route_configs", [])}
    endpoints = {e["endpoint_config"]["cluster_name"]: plain(e["endpoint_config"]) for e in of("EndpointsConfigDump").get("dynamic_endpoint_configs", [])}
    listeners = [plain(x["active_state"]["listener"]) for x in of("ListenersConfigDump")["dynamic_listeners"]]
    clusters = [plain(c["cluster"]) for c in of("ClustersConfigDump")["dynamic_active_clusters"]]
    for x in listeners:
        for chain in x.get("filter_chains", []) + [x.get("default_filter_chain", {})]:
            for f in chain.get("filters", []):
                rds = f.get("typed_config", {}).pop("rds", None)
                if rds:
                    f["typed_config"]["route_config"] = routes[rds["route_config_name"]]
    for c in clusters:
        if c.get("type") == "EDS":
            name = c.pop("eds_cluster_config").get("service_name") or c["name"]
            c["type"], c["load_assignment"] = "STATIC", endpoints[name]
    key = lambda x: x["name"]
    internal = {"name": "envoy.bootstrap.internal_listener", "typed_config": {"@type": "type.googleapis.com/envoy.extensions.bootstrap.internal_listener.v3.InternalListener"}}
    return json.dumps({"node": {"id": "t", "cluster": "t"}, "bootstrap_extensions": [internal], "static_resources": {"listeners": sorted(listeners, key=key), "clusters": sorted(clusters, key=key)}}, indent=1, sort_keys=True) + "\n"


if len(sys.argv) == 3:
    print(golden(sys.argv[2]), end="")
    sys.exit()
if len(sys.argv) > 3:
    print(sys.argv[2] + ": ", end="", flush=True)
    load(int(sys.argv[3]), 4, ["tiny"], [int(n) for n in sys.argv[4:]] or [50])
    sys.exit()
for model in ENGINES:
    for size in (50, 40_000, 1_200_000, 4_000_000):
        for stream in (False, True):
            one(model, size, stream)
for path, want in (("/v1/models", 200), ("/metrics", 404)):
    c = http.client.HTTPConnection(gateway.hostname, gateway.port, timeout=10)
    c.request("GET", path)
    r = c.getresponse()
    check(r.status == want, path, r.status, r.read())
    c.close()
status, text, _ = post("{")
check(status == 400 and '"error"' in text, status, text)
status, text, _ = post(body("nobody", 50))
check(status == 404 and "model_not_found" in text, status, text)
print("a body that is no JSON: 400; a model that nobody serves: 404; /metrics: 404", flush=True)
load(400, 16, list(ENGINES), [50, 2_000, 40_000, 300_000])
account()
