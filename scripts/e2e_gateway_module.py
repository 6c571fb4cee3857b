"""e2e_gateway_module.py DIR PID...: what scripts/e2e-gateway-module.sh checks. DIR has the resources; PIDs are engines to kill."""
import glob, http.client, json, os, re, signal, sys, threading, time, urllib.error, urllib.request

d, pids = sys.argv[1], [int(p) for p in sys.argv[2:]]
printed = open(d + "/printed.yaml").read()
P, D = ["127.0.0.11", "127.0.0.12"], ["127.0.0.21", "127.0.0.22"]


def put(name, text):
    """Writes a file of resources; Envoy Gateway watches them."""
    with open(f"{d}/{name}.new", "w") as f:
        f.write(text)
    os.rename(f"{d}/{name}.new", f"{d}/resources/{name}.yaml")


def post(name, size=50, stream=False, path="", tokens=6, timeout=60, headers=None):
    body = json.dumps({"model": "tiny", "max_tokens": tokens, "stream": stream, "messages": [{"role": "user", "content": name + " word" * (size // 5)}]})
    c = http.client.HTTPConnection("127.0.0.1", 18080, timeout=timeout)
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
        with urllib.request.urlopen(url, timeout=5) as f:
            return f.status, f.read().decode()
    except urllib.error.HTTPError as e:
        return e.code, e.read().decode()
    except OSError as e:
        return 0, repr(e)


def log():
    """What Envoy, and Tandem in it, has written."""
    return "".join(open(f, errors="replace").read() for f in glob.glob(d + "/**/*.log", recursive=True))


def hops(ips, name):
    out = []
    for ip in ips:
        seen = json.loads(get(f"http://{ip}:8000/sim/requests?id={name}")[1])
        out += [q for q in seen if q["path"] == "/v1/chat/completions"]
    return out


def until(what, is_so, limit=60):
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
        self.path, self.name_, self.stop, self.n, self.wrong = path, name, False, 0, []
        self.start()

    def run(self):
        while not self.stop:
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


def second(config, retry=True):
    """A second route, /second, with a policy of its own."""
    text = printed[printed.index("# P's leg is a call"):]
    text = text.replace("name: chat-", "name: second-").replace("name: chat,", "name: second,").replace("name: chat}", "name: second}")
    text = text.replace("name: second, sectionName", "name: chat, sectionName").replace("value: /v1}", "value: /second}")
    text = re.sub(r"127\.0\.0\.2[12]", "127.0.0.41", text, count=1)
    text = text.replace('  - ip: {address: "127.0.0.22", port: 8000}\n', "")
    text = text.replace("    timeouts: {request: 0s}\n  # No", "    filters: [{type: URLRewrite, urlRewrite: {path: {type: ReplacePrefixMatch, replacePrefixMatch: /}}}]\n    timeouts: {request: 0s}\n  # No")
    if not retry:
        text, n = re.subn(r"  # Nothing is retried.*\n  retry: .*\n", "", text)
        assert n == 1
    head = text[:text.rindex("    config:")]
    return head + "    config: " + json.dumps(config) + "\n"


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

until("Envoy Gateway's Envoy answers", lambda: get("http://127.0.0.1:18080/v1/models")[0] == 200, 120)
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


until("the policy's change is in force", alone, 30)
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
unordered = re.sub(r"  filterOrder:.*\n(  - \{name: envoy.filters.http.dynamic_modules.*\n)+", "", printed)
assert unordered != printed
put("printed", unordered)
until("/readyz tells of a filter behind Tandem's that refuses", lambda: (denied(), "A filter behind Tandem has refused".lower() in get(READY)[1].lower())[1])
check("it names the filter", "rbac_access_denied" in get(READY)[1] and "filterOrder" in get(READY)[1], get(READY)[1])
os.remove(d + "/resources/deny.yaml")
put("printed", printed)
until("the route has no authorization", lambda: denied() is None)

wrong = many(600, 8, "killed", pids)
check("600 requests while a D and a P are killed", not wrong, str(wrong[:3]))
print("all is well")
