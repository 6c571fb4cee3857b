#!/bin/bash
# Both hops through a real Envoy Gateway that runs standalone (resources from a file, Envoy as a process), with nothing but what
# `tandem envoy --for envoy-gateway` prints. In a network namespace of its own, since Envoy Gateway binds ports of its choice
# on every interface; so it needs root. See docs/kubernetes.md for its output. UPSTREAM says how Envoy gets to endpoints
# (original-dst), UPDATE=1 keeps what Envoy Gateway made of the resources, KEEP=1 the logs.
set -euo pipefail
cd "$(dirname "$0")/.."
[ -n "${IN_NAMESPACE:-}" ] || exec env IN_NAMESPACE=1 unshare -n "$0" "$@"
ip link set lo up
upstream=${UPSTREAM:-original-dst}
bin=${TANDEM_KUBE_BIN:-$HOME/.cache/tandem/bin}
envoy=$(realpath "${ENVOY:-.tools/bin/envoy}")
d=$(mktemp -d)
declare -A pids
finish() {
  rc=$?
  for p in "${pids[@]}"; do kill -INT "$p" 2>/dev/null || true; done
  for p in "${pids[@]}"; do wait "$p" 2>/dev/null || true; done
  if [ $rc = 0 ] && [ -z "${KEEP:-}" ]; then rm -rf "$d"; else [ $rc = 0 ] || tail -n 20 "$d"/*.log >&2; echo "logs: $d" >&2; fi
  exit $rc
}
trap finish EXIT
run() { local name=$1; shift; "$@" > "$d/$name.log" 2>&1 & pids[$name]=$!; }

# Two replicas of Tandem share their state through a Redis, without which a hand-over of a million tokens would be known to one.
run redis "${REDIS_SERVER:-redis-server}" --port 6379 --save '' --appendonly no
# Two pools: of NIXL, whose legs come one after the other, and of SGLang, whose legs run at once.
run p1 bin/enginesim --listen 127.0.0.1:8101 --side-channel 127.0.0.1:5601 --role prefill --model tiny
run p2 bin/enginesim --listen 127.0.0.1:8102 --side-channel 127.0.0.1:5602 --role prefill --model tiny
run d1 bin/enginesim --listen 127.0.0.1:8201 --side-channel 127.0.0.1:5603 --role decode --model tiny
run d2 bin/enginesim --listen 127.0.0.1:8202 --side-channel 127.0.0.1:5604 --role decode --model tiny
run sp bin/enginesim --listen 127.0.0.1:8301 --side-channel 127.0.0.1:5605 --role prefill --model pair --connector sglang --bootstrap 127.0.0.1:8998
run sd bin/enginesim --listen 127.0.0.1:8401 --side-channel 127.0.0.1:5606 --role decode --model pair --connector sglang
# config N: the configuration of replica N of two.
config() {
  cat <<Y
extProc: {listen: 127.0.0.1:90${1}2}
replan: {listen: 127.0.0.1:90${1}3}
admin: {listen: 127.0.0.1:90${1}0}
envoy: {listen: 127.0.0.1:18080, admin: 127.0.0.1:9901, extProcs: [127.0.0.1:9002, 127.0.0.1:9012], replans: [127.0.0.1:9003, 127.0.0.1:9013]}
tickets: {keyFile: $d/ticket.key}
state: {redis: {url: "redis://127.0.0.1:6379/0"}}
pools:
- name: chat
  models: [tiny]
  kvTransfer: nixl
  split: always
  decodeAlone: fallback
  prefillTimeout: {base: 1s}
  endpoints:
  - {address: 127.0.0.1:8101, role: prefill}
  - {address: 127.0.0.1:8102, role: prefill}
  - {address: 127.0.0.1:8201, role: decode}
  - {address: 127.0.0.1:8202, role: decode}
- name: pairs
  models: [pair]
  kvTransfer: sglang
  split: always
  decodeAlone: fallback
  endpoints:
  - {address: 127.0.0.1:8301, role: prefill, transfer: {bootstrapPort: 8998}}
  - {address: 127.0.0.1:8401, role: decode}
Y
}
(umask 077; head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n' > "$d/ticket.key")
for i in 0 1; do
  config $i > "$d/tandem-$i.yaml"
  run tandem-$i bin/tandem serve -f "$d/tandem-$i.yaml"
done
mkdir -p "$d"/{resources,data/envoy-versions/1.40.0/bin,state,runtime,config}
ln -s "$envoy" "$d/data/envoy-versions/1.40.0/bin/envoy"   # looked up before any download
bin/tandem envoy -f "$d/tandem-0.yaml" --for envoy-gateway --upstream "$upstream" --standalone > "$d/resources/tandem.yaml"
cat > "$d/gateway.yaml" <<Y
apiVersion: gateway.envoyproxy.io/v1alpha1
kind: EnvoyGateway
gateway: {controllerName: gateway.envoyproxy.io/gatewayclass-controller}
provider:
  type: Custom
  custom:
    resource: {type: File, file: {paths: ["$d/resources"]}}
    infrastructure: {type: Host, host: {configHome: $d/config, dataHome: $d/data, stateHome: $d/state, runtimeDir: $d/runtime}}
extensionApis: {enableBackend: true, enableEnvoyPatchPolicy: true}
Y
"$bin/envoy-gateway" certgen --local --config-home "$d/config" > "$d/certgen.log" 2>&1
run envoy-gateway "$bin/envoy-gateway" server --config-path "$d/gateway.yaml"

u=http://127.0.0.1:18080
up=
for _ in $(seq 600); do [ "$(curl -s -o /dev/null -m 2 -w '%{http_code}' $u/v1/models)" = 200 ] && { up=1; break; }; sleep 0.2; done
[ -n "$up" ] || { echo "Envoy Gateway's Envoy does not answer" >&2; exit 1; }
echo "Envoy Gateway $(go version -m "$bin/envoy-gateway" | awk '$1 == "mod" {print $3}'), Envoy $("$envoy" --version | grep -o '[0-9]*\.[0-9]*\.[0-9]*/' | head -1 | tr -d /)"

# What Envoy Gateway makes of the resources is kept: the tests hold it against the real Envoy where there is no Envoy Gateway.
python3 scripts/e2e_gateway.py $u "$(cat "$d"/runtime/*/admin-address.txt)" > "$d/envoy.json"
golden=deploy/envoy-gateway/envoy.json
[ "$upstream" = original-dst ] || golden=deploy/envoy-gateway/envoy-$upstream.json
if [ -n "${UPDATE:-}" ]; then cp "$d/envoy.json" $golden; fi
cmp "$d/envoy.json" $golden || { echo "Envoy Gateway makes another configuration than $golden: make e2e-gateway UPDATE=1" >&2; exit 1; }

echo "--upstream $upstream"
python3 scripts/e2e_gateway.py $u
# reload EDIT: both replicas with their files edited so.
reload() { sed -i "$1" "$d"/tandem-?.yaml; kill -HUP "${pids[tandem-0]}" "${pids[tandem-1]}"; }
if [ "$upstream" = override-host ]; then
  run d3 bin/enginesim --listen 127.0.0.1:8203 --side-channel 127.0.0.1:5607 --role decode --model tiny
  reload '/8202/a\  - {address: 127.0.0.1:8203, role: decode}'
  for port in 9000 9010; do
    for _ in $(seq 100); do curl -sf http://127.0.0.1:$port/debug/state | grep 127.0.0.1:8203 >/dev/null && break; sleep 0.1; done
  done
  python3 scripts/e2e_gateway.py $u "a decode engine comes that Envoy Gateway does not know" 60
  replans=$(for port in 9000 9010; do curl -sf http://127.0.0.1:$port/metrics; done | awk '/^tandem_replans_total.*cause="decode"/ {n += $2} END {print n + 0}')
  served=$(curl -sf http://127.0.0.1:8203/sim/requests | { grep -o '"path":"/v1/chat' || true; } | wc -l)
  echo "$replans requests were planned again for it, and it served $served"
  [ "$replans" -gt 0 ] && [ "$served" = 0 ]
  reload '/8203/d'
fi
kill_it() { kill -9 "${pids[$1]}"; wait "${pids[$1]}" 2>/dev/null || true; unset "pids[$1]"; }
curl -sf -o /dev/null -d '{"mode": "hang", "leg": "prefill", "count": 1}' http://127.0.0.1:8102/sim/fail
python3 scripts/e2e_gateway.py $u "a prefill engine hangs, with a limit of 1 s" 60
kill_it p1
python3 scripts/e2e_gateway.py $u "a prefill engine is killed" 60
kill_it d1
python3 scripts/e2e_gateway.py $u "a decode engine is killed" 60
kill -STOP "${pids[tandem-0]}"
python3 scripts/e2e_gateway.py $u "one of two replicas of Tandem hangs" 60 50 2000 100000 300000
kill -CONT "${pids[tandem-0]}"
kill_it tandem-0
python3 scripts/e2e_gateway.py $u "one of two replicas of Tandem is killed" 200
kill_it p2
python3 scripts/e2e_gateway.py $u "no prefill engine is left" 20
kill_it tandem-1
began=$(date +%s%N)
code=$(curl -s -o "$d/answer" -m 10 -w '%{http_code}' -H 'content-type: application/json' -d '{"model":"tiny","messages":[]}' $u/v1/chat/completions)
echo "the other is killed too: $code after $((($(date +%s%N) - began) / 1000000)) ms: $(cat "$d/answer")"
[ "$code" = 503 ]
run tandem-0 bin/tandem serve -f "$d/tandem-0.yaml"
for _ in $(seq 100); do [ "$(curl -s -o /dev/null -m 2 -w '%{http_code}' $u/v1/models)" = 200 ] && break; sleep 0.1; done
python3 scripts/e2e_gateway.py $u "Tandem is back" 20
