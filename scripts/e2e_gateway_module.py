"""e2e_gateway_module.py DIR GATEWAY PID...: what scripts/e2e-gateway-module.sh checks. DIR has the resources, GATEWAY is the process of
Envoy Gateway, and PIDs are engines to kill."""
import base64, collections, glob, hashlib, hmac, http.client, itertools, json, os, re, signal, ssl, statistics, sys, threading, time, urllib.error, urllib.request

d, gateway, pids = sys.argv[1], int(sys.argv[2]), [int(p) for p in sys.argv[3:]]
# Envoy's overload manager as Envoy Gateway sets it for a container whose memory is limited to 250 MB.
HEAP = """  bootstrap:
    type: JSONPatch
    jsonPatches:
    - {op: add, path: /overload_manager/resource_monitors/-, value: {name: envoy.resource_monitors.fixed_heap, typed_config: {
        "@type": type.googleapis.com/envoy.extensions.resource_monitors.fixed_heap.v3.FixedHeapConfig, max_heap_size_bytes: 200000000}}}
    - {op: add, path: /overload_manager/actions, value: [
        {name: envoy.overload_actions.shrink_heap, triggers: [{name: envoy.resource_monitors.fixed_heap, threshold: {value: 0.95}}]},
        {name: envoy.overload_actions.stop_accepting_requests, triggers: [{name: envoy.resource_monitors.fixed_heap, threshold: {value: 0.98}}]}]}
"""
printed = open(d + "/printed.yaml").read().replace("  provider:", HEAP + "  provider:", 1)
P, D, ALONE = ["127.0.0.11", "127.0.0.12"], ["127.0.0.21", "127.0.0.22"], "127.0.0.51"


def put(name, text):
    """Writes a file of resources; Envoy Gateway watches them."""
    with open(f"{d}/{name}.new", "w") as f:
        f.write(text)
    os.rename(f"{d}/{name}.new", f"{d}/resources/{name}.yaml")


def post(name, size=50, stream=False, path="", tokens=6, timeout=60, headers=None, to=("127.0.0.1", 18080)):
    body = json.dumps({"model": "tiny", "max_tokens": tokens, "stream": stream, "messages": [{"role": "user", "content": name + " word" * (size // 5)}]})
    c = http.client.HTTPConnection(*to, timeout=timeout)
    try:
        c.request("POST", path + "/v1/chat/completions", body, {"content-type": "application/json", "x-request-id": name, **(headers or {})})
        r = c.getresponse()
        return r.status, r.read().decode(), dict(r.getheaders())
    finally:
        c.close()


def whole(status, text, stream):
    return status == 200 and (text.endswith("data: [DONE]\n\n") if stream else '"finish_reason"' in text)


def get(url):
    try:
        with urllib.request.urlopen(url, timeout=5, context=ssl._create_unverified_context()) as f:
            return f.status, f.read().decode()
    except urllib.error.HTTPError as e:
        return e.code, e.read().decode()
    except OSError as e:
        return 0, repr(e)


def log():
    """What Envoy, and Tandem in it, has written."""
    return "".join(open(f, errors="replace").read() for f in glob.glob(d + "/**/*.log", recursive=True))


def hops(ips, name, scheme="http"):
    """What engines have got of a request."""
    out = []
    for ip in ips:
        status, seen = get(f"{scheme}://{ip}:8000/sim/requests?id={name}")
        out += [q for q in (json.loads(seen) if status else []) if q["path"] == "/v1/chat/completions"]
    return out


def until(what, is_so, limit=300):
    # for each change Envoy Gateway reads and validates all resources again: seconds of a core
    end = time.monotonic() + limit
    while time.monotonic() < end:
        if is_so():
            return
        time.sleep(0.2)
    sys.exit(f"FAIL: {what}")


def check(what, ok, more=""):
    print("ok  " if ok else "FAIL", what, more, flush=True)
    if not ok:
        sys.exit(1)


class Load(threading.Thread):
    """Requests of a route, until it is stopped."""

    def __init__(self, path, name):
        super().__init__(daemon=True)
        self.path, self.name_, self.stop, self.paused, self.n, self.wrong = path, name, False, False, 0, []
        self.start()

    def run(self):
        while not self.stop:
            if self.paused:
                time.sleep(0.1)
                continue
            self.n += 1
            try:
                status, text, _ = post(f"{self.name_}-{self.n}", path=self.path)
                if not whole(status, text, False):
                    self.wrong.append((status, text[-200:]))
            except OSError as e:
                self.wrong.append(repr(e))

    def end(self):
        self.stop = True
        self.join()
        return self.wrong


def many(n, clients, name, kill=()):
    wrong, it, lock, kill = [], iter(range(n)), threading.Lock(), list(kill)

    def work():
        while True:
            with lock:
                i = next(it, None)
            if i is None:
                return
            if kill and i and i % (n // 3) == 0:
                os.kill(kill.pop(0), signal.SIGKILL)
            stream = i % 2 == 0
            try:
                status, text, _ = post(f"{name}-{i}", [50, 2000, 40000, 300000][i % 4], stream)
                if not whole(status, text, stream):
                    wrong.append((i, status, text[-200:]))
            except OSError as e:
                wrong.append((i, repr(e)))

    threads = [threading.Thread(target=work) for _ in range(clients)]
    [t.start() for t in threads], [t.join() for t in threads]
    return wrong


def at(name, text):
    """Printed resources as those of another route of the same Gateway, which has a path of its own."""
    text = text.replace("name: chat-calls", f"name: {name}-calls").replace("name: chat,", f"name: {name},").replace("name: chat}", f"name: {name}}}")
    text = text.replace(f"name: {name}, sectionName", "name: chat, sectionName").replace("value: /v1}", f"value: /{name}}}")
    return text.replace("    timeouts: {request: 0s}\n  # No", "    filters: [{type: URLRewrite, urlRewrite: {path: {type: ReplacePrefixMatch, replacePrefixMatch: /}}}]\n    timeouts: {request: 0s}\n  # No")


def second(config, retry=True):
    """A second route, /second, with a policy of its own. Policies have another name each time: Envoy Gateway 1.9.1 merges a file
    of resources into those that it has (internal/provider/file/store.go), so what a file no longer says would stay in force."""
    text = at("second", printed[printed.index("# P's leg is a call"):]).replace("name: chat-decode", "name: second-decode")
    text = re.sub(r"127\.0\.0\.2[12]", "127.0.0.41", text, count=1)
    text = text.replace('  - ip: {address: "127.0.0.22", port: 8000}\n', "")
    if not retry:
        text, n = re.subn(r"  # Nothing is retried.*\n  retry: .*\n", "", text)
        assert n == 1
    text, n = re.subn(r"(kind: (?:BackendTraffic|EnvoyExtension)Policy\nmetadata: {name: second)", rf"\1-{next(numbers)}", text)
    assert n == 2
    head = text[:text.rindex("    config:")]
    return head + "    config: " + json.dumps(config) + "\n"


numbers = itertools.count()


# The failure matrix in brief (e2e/matrix_test.go): what an engine of two does to a request, of which no client may know.
# name: the rule of enginesim, how long it lasts (0: one request meets it), and whether answers that have begun may end in it.
ON = {"path": "/v1/chat/completions"}
FAULTS = {
    "429, retry after 1 s": ({"mode": "status", "status": 429, "retry_after": 1, **ON}, 0, False),
    "503": ({"mode": "status", "status": 503, **ON}, 0, False),
    "503 twice": ({"mode": "status", "status": 503, "count": 2, **ON}, 0, False),
    "500 of one request": ({"mode": "status", "status": 500, "contains": "poison", **ON}, 0, False),
    "reset": ({"mode": "reset-before-headers", **ON}, 0, False),
    "reset in the answer": ({"mode": "reset-mid-body", **ON}, 0, True),
    "keep-alive race": ({"mode": "keep-alive-race", "count": 1, **ON}, 0, False),
    "full for 4 s": ({"mode": "status", "status": 429, "retry_after": 1, "for": "4s", **ON}, 4, False),
    "restart": ({"mode": "restart", "delay": "1s"}, 1, True),
    "slow start": ({"mode": "restart", "delay": "1s", "warmup": "4s"}, 5, True),
    "core stands for 5 s": ({"mode": "stall", "delay": "5s"}, 5, True),
}


def words(text, stream):
    """The text of an answer, and whether all of it is there."""
    try:
        if not stream:
            return json.loads(text)["choices"][0]["message"]["content"], True
        events = [e[6:] for e in text.split("\n\n") if e.startswith("data: {")]
        return "".join(c["delta"].get("content") or "" for e in events for c in json.loads(e).get("choices", [])[:1]), whole(200, text, True)
    except (ValueError, KeyError, IndexError):
        return "", False


def ask(name, i, may_break):
    """Sends a request and returns what is wrong with the answer; "": it is the text that an engine alone gives."""
    stream = i % 2 == 1
    try:
        status, text, _ = post(name, 16_000, stream, tokens=9)
    except (OSError, http.client.HTTPException) as e:
        return "" if may_break and (stream or isinstance(e, http.client.IncompleteRead)) else repr(e)
    if status != 200:
        return "" if may_break and status == 502 and not stream else f"{status} {text[-200:]}"
    got, complete = words(text, stream)
    want = words(post(name, 16_000, to=(ALONE, 8000), tokens=9)[1], False)[0]
    if complete:
        return "" if got == want else f"OTHER TEXT {got!r}, not {want!r}"
    return "" if may_break and want.startswith(got) else f"cut: {text[-200:]}"


def metric(url, name):
    """The sum of a metric's values."""
    lines = [line for line in get(url)[1].splitlines() if re.match(name + r"[{ ]", line)]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def fail(ip, rule):
    """Has an engine fail; None: no longer."""
    r = urllib.request.Request(f"http://{ip}:8000/sim/fail", json.dumps(rule).encode() if rule else None, method="POST" if rule else "DELETE")
    urllib.request.urlopen(r, timeout=5).close()


def latest(ips):
    """The engine that the last request came to."""
    return max(ips, key=lambda ip: max((q["time"] for q in json.loads(get(f"http://{ip}:8000/sim/requests?n=1")[1])), default=""))


def strike(fault, role, ips):
    rule, lasts, may_break = FAULTS[fault]
    base = re.sub(r"\W+", "-", f"{fault}-{role}-")
    asks = [ask(f"{base}before-{i}", i, False) for i in range(2)]
    e = latest(ips)
    counter = lambda: metric(f"http://{e}:8000/metrics", "enginesim_injected_failures_total")
    struck = counter()
    fail(e, rule)
    began, i, met = time.monotonic(), 0, False
    while time.monotonic() - began < lasts if lasts else i < 16 and not met:
        batch = [threading.Thread(target=lambda j=j: asks.append(ask(f"{base}{'poison-' if not lasts and j == 0 else ''}{i}-{j}", j, may_break))) for j in range(4)]
        [t.start() for t in batch], [t.join() for t in batch]
        met, i = lasts or counter() > struck, i + 1
    until(f"{fault}: the engine is back", lambda: get(f"http://{e}:8000/ping")[0] == 200)
    fail(e, None)
    time.sleep(1)  # it is over: within this time everybody is served
    asks += [ask(f"{base}after-{i}", i, False) for i in range(2)]
    return [a for a in asks if a] + ([] if met else ["no request met it"])


def matrix():
    wrong = {}
    for fault in FAULTS:
        for role, ips in (("prefill", P), ("decode", D)):
            if bad := strike(fault, role, ips):
                wrong[f"{fault}, {role}"] = bad
                print("FAIL", fault, role, bad[:3], flush=True)
    check(f"failure matrix in brief: {len(FAULTS)} faults of a P and of a D", not wrong)
    left = lambda: {n: v for n in ("enginesim_blocks_held", "enginesim_violations_total", "vllm:num_requests_running", "vllm:num_requests_waiting")
                    if (v := sum(metric(f"http://{ip}:8000/metrics", n) for ip in P + D))}
    until("no engine holds KV, runs anything or counted a violation", lambda: not left())
    until("nothing is reserved", lambda: metric("http://127.0.0.1:9090/metrics", "tandem_reservations") == 0)


def plain():
    """The same route without Tandem, /plain."""
    begin, end = printed.index("apiVersion: gateway.networking.k8s.io/v1\nkind: HTTPRoute"), printed.index("apiVersion: gateway.envoyproxy.io/v1alpha1\nkind: EnvoyExtensionPolicy")
    return at("plain", printed[begin:end]).replace("plain-calls", "chat-calls")


def envoy_process():
    """The Envoy that Envoy Gateway has started, or that this one has."""
    parents = {}
    for p in glob.glob("/proc/[0-9]*/stat"):
        try:
            fields = open(p).read()
            parents[int(fields.split()[0])] = int(fields[fields.rindex(")"):].split()[2])
        except OSError:
            pass
    def below(p):
        while p in parents and p != gateway:
            p = parents[p]
        return p == gateway
    for p in parents:
        try:
            if p != gateway and below(p) and os.path.basename(os.readlink(f"/proc/{p}/exe")) == "envoy":
                return p
        except OSError:
            pass
    sys.exit("FAIL: Envoy Gateway has started no Envoy")


def cpu(paths, n=400, rounds=5):
    """Microseconds of Envoy's CPU a request of each path, as the median of rounds that take turns. One client, 1 KB."""
    pid, tick = envoy_process(), os.sysconf("SC_CLK_TCK")
    spent = lambda: sum(int(v) for v in open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()[11:13]) / tick
    out = {p: [] for p in paths}
    for turn in range(-1, rounds):
        for p in paths:
            c = http.client.HTTPConnection("127.0.0.1", 18080, timeout=60)
            before = spent()
            for i in range(n):
                body = json.dumps({"model": "tiny", "max_tokens": 6, "messages": [{"role": "user", "content": f"{p} {turn} {i}" + " word" * 200}]})
                c.request("POST", p + "/v1/chat/completions", body, {"content-type": "application/json"})
                r = c.getresponse()
                text = r.read()
                # without Tandem nobody repeats a request on a connection that the engine closes
                assert r.status == 200 or p == "/plain", (p, r.status, text[-200:])
            c.close()
            if turn >= 0:
                out[p].append((spent() - before) / n * 1e6)
    return {p: statistics.median(v) for p, v in out.items()}


good = {"name": "second", "route": {"rule": 1, "strict": True}, "tandem": {"envoy": {"pathPrefixes": ["/second"]}, "pools": [
    {"name": "second", "kvTransfer": "nixl", "split": "always", "endpoints": [
        {"address": "127.0.0.31:8000", "role": "prefill"}, {"address": "127.0.0.41:8000", "role": "decode"}]}]}}


def bad(change):
    out = json.loads(json.dumps(good))
    change(out)
    return out


invalid = {
    "a pool without a dialect, kvTransfer: is missing": bad(lambda c: c["tandem"]["pools"][0].pop("kvTransfer")),
    "a dialect of another name, nixel": bad(lambda c: c["tandem"]["pools"][0].update(kvTransfer="nixel")),
    "no pool, at least one pool": bad(lambda c: c["tandem"].update(pools=[])),
    "an unknown setting, kvTransport": bad(lambda c: c["tandem"]["pools"][0].update(kvTransport="x")),
    "an unknown member, unknown field": bad(lambda c: c.update(rule="1")),
    "a port, admin: is not for a policy": bad(lambda c: c["tandem"].update(admin={"listen": "0.0.0.0:9999"})),
    "a file, apiKeyFile: is not for a policy": bad(lambda c: c["tandem"]["pools"][0].update(apiKeyFile="/etc/shadow")),
    "a Redis, state: is not for a policy": bad(lambda c: c["tandem"].update(state={"redis": {"url": "redis://127.0.0.1:1"}})),
    "an engine elsewhere, in none of the networks": bad(lambda c: c["tandem"]["pools"][0]["endpoints"][0].update(address="169.254.169.254:80")),
    "a file that is not there, no such file": {"file": d + "/none.yaml", "route": {"rule": 1, "strict": True}},
    "nothing, neither tandem nor file": {},
    "a rule that is none, route.rule is the number": bad(lambda c: c["route"].update(rule=-1)),
}

# A Gateway that serves another route, of an engine without Tandem. It is asked all the time.
gateways = printed[:printed.index("# P's leg is a call")]
proxy = re.search(r"  dynamicModules:\n(?:  .*\n)*", gateways)[0]
OTHER = """apiVersion: gateway.envoyproxy.io/v1alpha1
kind: Backend
metadata: {name: other, namespace: default}
spec: {endpoints: [{ip: {address: 127.0.0.51, port: 8000}}]}
---
apiVersion: gateway.networking.k8s.io/v1
kind: HTTPRoute
metadata: {name: other, namespace: default}
spec:
  parentRefs: [{name: chat, sectionName: http}]
  rules:
  - matches: [{path: {type: PathPrefix, value: /other}}]
    backendRefs: [{group: gateway.envoyproxy.io, kind: Backend, name: other}]
    filters: [{type: URLRewrite, urlRewrite: {path: {type: ReplacePrefixMatch, replacePrefixMatch: /}}}]
"""


def admin():
    """The address of Envoy's own administration."""
    return open(max(glob.glob(d + "/**/admin-address.txt", recursive=True), key=os.path.getmtime)).read().strip()


def dump():
    """Envoy's configuration, without when it came, and without old listeners, whose connections may last for drainTimeout."""
    def plain(v):
        if isinstance(v, dict):
            return {k: plain(w) for k, w in v.items() if k not in ("last_updated", "version_info", "client_status", "draining_state")}
        return sorted((plain(w) for w in v), key=str) if isinstance(v, list) else v
    return plain(json.loads(get(f"http://{admin()}/config_dump")[1]))


put("other", OTHER)
without = gateways.replace(proxy, "").replace("kind: EnvoyProxy\nmetadata: {name: chat", "kind: EnvoyProxy\nmetadata: {name: without")
without = without.replace("kind: EnvoyProxy, name: chat", "kind: EnvoyProxy, name: without")
put("printed", without)
until("Envoy Gateway's Envoy answers", lambda: get("http://127.0.0.1:18080/other/v1/models")[0] == 200)
before, other = dump(), Load("/other", "other")
check("before Tandem", "libtandem" not in json.dumps(before))
put("printed", printed)
until("the route that Tandem is attached to answers", lambda: post("attached")[0] == 200)
for size in (50, 40_000, 400_000, 4_000_000):
    for stream in (False, True):
        name = f"one-{size}-{stream}"
        status, text, headers = post(name, size, stream, headers={"x-gateway-destination-endpoint": "127.0.0.1:1", "x-tandem-leg": "pass"})
        p, q = hops(P, name), hops(D, name)
        check(f"{size} bytes, {'streamed' if stream else 'whole'}", whole(status, text, stream) and len(p) == 1 and len(q) == 1 and q[0].get("external_tokens", 0) > 0,
              f"{status} P {len(p)} D {len(q)} {text[-200:] if status != 200 else ''}")
        check("no header of ours reaches the client", not [h for h in headers if h.lower().startswith(("x-tandem", "x-gateway"))])
status, text, _ = post("{")
wrong = many(400, 16, "load")
check("400 requests of 16 clients", not wrong, str(wrong[:3]))

put("second", second(good))
until("the second route answers", lambda: post("second", path="/second")[0] == 200)
check("a replica for each route", all(get(f"http://127.0.0.1:9090/{n}/status.json")[0] == 200 for n in ("default.chat", "second")))

put("plain", plain())
until("the route without Tandem answers", lambda: post("plain", path="/plain")[0] == 200)
never = json.loads(json.dumps(good))
never["tandem"]["pools"][0]["split"] = "never"
put("second", second(never))
until("the second route splits nothing", lambda: post(name := f"never-{time.monotonic()}", path="/second")[0] == 200 and not hops(["127.0.0.31"], name))
other.paused = True
time.sleep(1)
spent = cpu(["/plain", "/second", ""])
other.paused = False
print(f"CPU of Envoy for a request of 1 KB, us: {spent['/plain']:.0f} without Tandem, {spent['/second']:.0f} with Tandem and one hop, {spent['']:.0f} with both hops", flush=True)
put("second", second(good))
matrix()
check("both in the metrics of one port", all(f'replica_name="{n}"' in get("http://127.0.0.1:9090/metrics")[1] for n in ("default.chat", "second")))

for name, config in invalid.items():
    load = Load("", "beside-" + re.sub(r"\W", "-", name))
    # under a name of its own: what runs goes on with the configuration before
    fresh = dict(config, **({"name": "fresh"} if "name" in config else {}))
    put("second", second(fresh))
    why = name.split(", ")[1]
    until(f"{name}: requests are refused with the reason", lambda: (lambda a: a[0] == 503 and why in a[1])(post("refused", path="/second")))
    status, text, _ = post("refused", path="/second")
    check(f"policy not valid: {name}", "the configuration of this route is not valid" in text and not load.end(), f"{load.n} requests beside it, wrong {load.wrong[:2]}")
    check("/readyz says so", get("http://127.0.0.1:9090/readyz")[0] == 503)
put("second", second(dict(good, name="fresh")))
until("the second route answers again", lambda: post("second", path="/second")[0] == 200)
until("/readyz has no word of a mended policy", lambda: "fresh" not in get("http://127.0.0.1:9090/readyz")[1])
put("second", second(good))
until("the second route has its first replica again", lambda: post("second", path="/second")[0] == 200)

stream = {}
t = threading.Thread(target=lambda: stream.update(zip(("status", "text", "headers"), post("long", stream=True, tokens=4000, timeout=120))))
t.start()
put("printed", printed.replace("split: always", "split: never"))
tried = iter(f"after-{i}" for i in range(10_000))


def alone():
    name = next(tried)
    return post(name)[0] == 200 and not hops(P, name)


until("the policy's change is in force", alone)
put("printed", printed)
t.join()
check("a stream outlives two changes of its policy", whole(stream["status"], stream["text"], True))

READY = "http://127.0.0.1:9090/readyz"
put("second", second(good, retry=False))
tried = iter(f"keeps-{i}" for i in range(10_000))
until("/readyz tells of a route without a retry policy", lambda: (post(next(tried), path="/second"), "retry policy" in get(READY)[1])[1])
check("a route without a retry policy is in the log", "this route keeps no request's body" in log())
put("second", second(good))
until("/readyz has no word of it when it is mended", lambda: (post(next(tried), path="/second"), get(READY)[0] == 200)[1])

# Who sends this header is refused by the route's authorization.
DENY = """apiVersion: gateway.envoyproxy.io/v1alpha1
kind: SecurityPolicy
metadata: {name: chat, namespace: default}
spec:
  targetRefs: [{group: gateway.networking.k8s.io, kind: HTTPRoute, name: chat}]
  authorization:
    defaultAction: Allow
    rules: [{name: denied, action: Deny, principal: {headers: [{name: x-denied, values: ["yes"]}]}}]
"""
put("deny", DENY)
tried = iter(f"denied-{i}" for i in range(10_000))


def denied():
    """A request that is refused: its id; None if it was answered."""
    name = next(tried)
    return name if post(name, headers={"x-denied": "yes"})[0] == 403 else None


last = []
until("authorization refuses", lambda: last.append(denied()) or last[-1])
check("with the printed order of filters no engine has seen what is refused", not hops(P, last[-1]) and get(READY)[0] == 200)
unordered = re.sub(r"  filterOrder:.*\n(  - \{name: envoy.filters.http.dynamic_modules.*\n)+",
                   "  filterOrder: [{name: envoy.filters.http.dynamic_modules, before: envoy.filters.http.rbac}]\n", printed)
assert unordered != printed
put("printed", unordered)
until("/readyz tells of a filter behind Tandem's that refuses", lambda: (denied(), "A filter behind Tandem has refused".lower() in get(READY)[1].lower())[1])
check("it names the filter", "rbac_access_denied" in get(READY)[1] and "filterOrder" in get(READY)[1], get(READY)[1])
os.remove(d + "/resources/deny.yaml")
put("printed", printed)
until("the route has no authorization", lambda: denied() is None)

# Who has no token, or has used up a limit, costs no engine a prompt. Both hops of a request count once.
def b64(data):
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def token(key):
    signed = b64(b'{"alg":"HS256","kid":"1"}') + "." + b64(b'{"iss":"tester","sub":"user"}')
    return "Bearer " + signed + "." + b64(hmac.new(key, signed.encode(), hashlib.sha256).digest())


KEY = b"a key that only this test knows, of 32 bytes or more"
JWT = """apiVersion: gateway.envoyproxy.io/v1alpha1
kind: SecurityPolicy
metadata: {name: chat, namespace: default}
spec:
  targetRefs: [{group: gateway.networking.k8s.io, kind: HTTPRoute, name: chat}]
  jwt: {providers: [{name: tester, issuer: tester, localJWKS: {type: Inline, inline: '%s'}}]}
""" % json.dumps({"keys": [{"kty": "oct", "alg": "HS256", "kid": "1", "k": b64(KEY)}]})
LIMIT = '  rateLimit: {local: {rules: [{clientSelectors: [{headers: [{name: x-user, value: limited}]}], limit: {requests: 3, unit: Hour}}]}}\n'
put("jwt", JWT)
bearer = {"authorization": token(KEY)}
tried = iter(f"token-{i}" for i in range(10_000))
until("no request without a token is answered", lambda: post(next(tried))[0] == 401)
name = next(tried)
check("JWT: a request without a token, or with a forged one, has reached no engine",
      post(name)[0] == 401 and post(name, headers={"authorization": token(b"another")})[0] == 401 and not hops(P + D, name))
status, text, _ = post(name, headers=bearer)
check("JWT: one with a token is split", whole(status, text, False) and len(hops(P, name)) == len(hops(D, name)) == 1, f"{status} {text[-200:]}")
put("printed", printed.replace("  # Nothing is retried", LIMIT + "  # Nothing is retried", 1))
until("a local rate limit is in force", lambda: post(next(tried), headers={**bearer, "x-user": "limited"})[0] == 429)
put("printed", printed.replace("  # Nothing is retried", LIMIT.replace("limited", "again") + "  # Nothing is retried", 1))
until("the limit is another user's", lambda: post(next(tried), headers={**bearer, "x-user": "limited"})[0] == 200)
names = [f"again-{i}" for i in range(5)]
got = [post(n, headers={**bearer, "x-user": "again"})[0] for n in names]
check("local rate limit: both hops count once, and what is refused has reached no engine",
      got == [200, 200, 200, 429, 429] and [len(hops(P, n)) for n in names] == [1, 1, 1, 0, 0], f"{got}")
os.remove(d + "/resources/jwt.yaml")
put("printed", printed)
until("the route takes requests without a token", lambda: post(next(tried))[0] == 200)

# More bodies at once than Envoy may hold: its overload manager refuses requests, and nothing else is lost.
other.paused = True
got = collections.Counter()


def large(i):
    try:
        status, text, _ = post(f"large-{i}", 4_000_000, timeout=120)
        got["whole" if whole(status, text, False) else "refused" if text == "envoy overloaded" else (status, text[-200:])] += 1
    except (BrokenPipeError, ConnectionResetError):
        got["refused"] += 1  # Envoy closes the connection, of which the client still writes the body
    except (OSError, http.client.HTTPException) as e:
        got[repr(e)] += 1


def overload():
    batch = [threading.Thread(target=large, args=(i,)) for i in range(64)]
    [t.start() for t in batch], [t.join() for t in batch]
    return int(re.search(r"http-18080.downstream_rq_overload_close: (\d+)", get(f"http://{admin()}/stats?filter=overload_close")[1])[1])


for ip in D:
    fail(ip, {"mode": "slow", "delay": "8s", **ON})  # bodies stay in Envoy meanwhile
until("the overload manager refuses requests", overload)
for ip in D:
    fail(ip, None)
check("memory under an overload manager", set(got) == {"whole", "refused"}, str(dict(got)))
until("all is served again", lambda: post(next(tried))[0] == 200)
memory = json.loads(get(f"http://{admin()}/memory")[1])
status = dict(line.split(":\t", 1) for line in open(f"/proc/{envoy_process()}/status") if ":\t" in line)
go = metric("http://127.0.0.1:9090/metrics", "go_memstats_sys_bytes")
print(f"Envoy has allocated {int(memory['allocated']) >> 20} MiB, Go has {int(go) >> 20} MiB; resident {status['VmRSS'].strip()}, at most {status['VmHWM'].strip()}", flush=True)
other.paused = False

# Headers that the route adds come once, also to an engine whose request was planned again.
ADDS = "    filters: [{type: RequestHeaderModifier, requestHeaderModifier: {add: [{name: x-route, value: chat}, {name: x-team, value: route}]}}]\n"
put("printed", printed.replace("    timeouts: {request: 0s}\n  # No", ADDS + "    timeouts: {request: 0s}\n  # No", 1))
tried = iter(f"adds-{i}" for i in range(10_000))


def added():
    """How often engines that decode got a request, and the headers of the route that the last one got."""
    name = next(tried)
    status, text, _ = post(name, headers={"x-team": "client"})
    got = sorted(hops(D, name), key=lambda q: q["time"])
    return (len(got), *(got[-1]["headers"].get(h) for h in ("X-Team", "X-Route"))) if whole(status, text, False) else (0, status, text[-200:])


until("the route adds headers", lambda: added() == (1, ["client", "route"], ["chat"]))
fail(D[0], {"mode": "status", "status": 503, "count": 1, **ON})
got = []
until("a request is planned again", lambda: got.append(added()) or got[-1][0] != 1)
check("headers that the route adds come once, also when a request is planned again", got[-1] == (2, ["client", "route"], ["chat"]), f"{got[-1]}")
put("printed", printed)

# Engines with https, which Envoy verifies by a BackendTLSPolicy. Calls are not strict there.
put("https", at("https", open(d + "/https.yaml").read()))
tried = iter(f"https-{i}" for i in range(10_000))
until("a route to https engines answers", lambda: post(next(tried), path="/https")[0] == 200)
for i in range(20):
    name = next(tried)
    status, text, _ = post(name, 40_000, i % 2 == 1, path="/https")
    p, q = (hops([f"127.0.0.{role}{n}" for n in (1, 2)], name, "https") for role in (7, 8))
    if not whole(status, text, i % 2 == 1) or len(p) != 1 or len(q) != 1 or not q[0].get("external_tokens"):
        check(f"https engines: request {i}", False, f"{status} P {len(p)} D {len(q)} {text[-200:]}")
check("https engines: 20 requests, both hops each", True)
put("https", at("https", open(d + "/https.yaml").read()).replace("hostname: engines.test", "hostname: other.test"))
until("https engines whose certificate has another name are not used", lambda: post(next(tried), path="/https")[0] == 503)
os.remove(d + "/resources/https.yaml")

wrong = many(600, 8, "killed", pids)
# A stream whose engine dies between the answer's head and its first event gets Envoy's 502, and Tandem is not asked
# (docs/howto/envoy-gateway-module.md). At most one of each client, for one D is killed.
lost = [w for w in wrong if w[0] % 2 == 0 and w[1] == 502 and "protocol error" in w[2]]
check("600 requests while a D and a P are killed", len(wrong) == len(lost) <= 8, f"502 before the first event: {len(lost)}; {wrong[:3]}")

for name in ("second", "plain"):
    os.remove(f"{d}/resources/{name}.yaml")
put("printed", re.sub(r"---\napiVersion: gateway.envoyproxy.io/v1alpha1\nkind: EnvoyExtensionPolicy\n(?:.|\n)*", "", printed))
tried = iter(f"without-{i}" for i in range(10_000))
until("without the policy D answers alone", alone)
put("printed", without)
until("Envoy's configuration is as before Tandem", lambda: dump() == before)
check("the other route, while Tandem was attached, used and taken off again", not other.end(), f"{other.n} requests, wrong {other.wrong[:2]}")
print("all is well")
