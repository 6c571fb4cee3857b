#!/bin/bash
# Both hops through a real Envoy Gateway that runs standalone (resources from a file, Envoy as a process), with nothing but what
# `tandem envoy --for envoy-gateway` prints. In a network namespace of its own, since Envoy Gateway binds ports of its choice
# on every interface; so it needs root. See docs/kubernetes.md for its output.
set -euo pipefail
cd "$(dirname "$0")/.."
[ -n "${IN_NAMESPACE:-}" ] || exec env IN_NAMESPACE=1 unshare -n "$0" "$@"
ip link set lo up
bin=${TANDEM_KUBE_BIN:-$HOME/.cache/tandem/bin}
envoy=$(realpath "${ENVOY:-.tools/bin/envoy}")
d=$(mktemp -d)
pids=()
finish() {
  rc=$?
  for p in "${pids[@]}"; do kill -INT "$p" 2>/dev/null || true; done
  for p in "${pids[@]}"; do wait "$p" 2>/dev/null || true; done
  [ $rc = 0 ] && rm -rf "$d" || { tail -n 20 "$d"/*.log >&2; echo "logs: $d" >&2; }
  exit $rc
}
trap finish EXIT
run() { local name=$1; shift; "$@" > "$d/$name.log" 2>&1 & pids+=($!); }

run p1 bin/enginesim --listen 127.0.0.1:8101 --side-channel 127.0.0.1:5601 --role prefill --model tiny
run p2 bin/enginesim --listen 127.0.0.1:8102 --side-channel 127.0.0.1:5602 --role prefill --model tiny
run d1 bin/enginesim --listen 127.0.0.1:8201 --side-channel 127.0.0.1:5603 --role decode --model tiny
run d2 bin/enginesim --listen 127.0.0.1:8202 --side-channel 127.0.0.1:5604 --role decode --model tiny
cat > "$d/tandem.yaml" <<Y
extProc: {listen: 127.0.0.1:9002}
replan: {listen: 127.0.0.1:9003}
admin: {listen: 127.0.0.1:9090}
envoy: {listen: 127.0.0.1:18080, admin: 127.0.0.1:9901}
pools:
- name: chat
  kvTransfer: nixl
  split: always
  endpoints:
  - {address: 127.0.0.1:8101, role: prefill}
  - {address: 127.0.0.1:8102, role: prefill}
  - {address: 127.0.0.1:8201, role: decode}
  - {address: 127.0.0.1:8202, role: decode}
Y
run tandem bin/tandem serve -f "$d/tandem.yaml"
mkdir -p "$d"/{resources,data/envoy-versions/1.40.0/bin,state,runtime,config}
ln -s "$envoy" "$d/data/envoy-versions/1.40.0/bin/envoy"   # looked up before any download
bin/tandem envoy -f "$d/tandem.yaml" --for envoy-gateway --standalone > "$d/resources/tandem.yaml"
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
for _ in $(seq 600); do [ "$(curl -s -o /dev/null -m 2 -w '%{http_code}' $u/v1/models)" = 200 ] && break; sleep 0.2; done
body() { python3 -c 'import json,sys; print(json.dumps({"model":"tiny","max_tokens":6,"stream":sys.argv[2]=="stream","messages":[{"role":"user","content":"word "*(int(sys.argv[1])//5)}]}))' "$1" "$2"; }
for size in 50 40000 1200000 4000000; do
  for kind in plain stream; do
    body "$size" "$kind" > "$d/body"
    code=$(curl -s -o "$d/answer" -w '%{http_code}' -H 'content-type: application/json' -H "x-request-id: e2e-$size-$kind" -H 'x-gateway-destination-endpoint: 127.0.0.1:1' -H 'x-tandem-ticket: forged' --data-binary @"$d/body" $u/v1/chat/completions)
    hops=0
    for port in 8101 8102 8201 8202; do
      hops=$((hops + $(curl -s "127.0.0.1:$port/sim/requests?id=e2e-$size-$kind" | grep -o '"path":"/v1/chat/completions"' | wc -l)))
    done
    printf '%-7s %8d bytes: status %s, %d hops, %d bytes answered\n' "$kind" "$(stat -c %s "$d/body")" "$code" "$hops" "$(stat -c %s "$d/answer")"
    [ "$code" = 200 ] && [ "$hops" = 2 ]
  done
done
kill -9 "${pids[0]}"   # one prefill engine is gone
for i in $(seq 10); do
  [ "$(body 50 plain | curl -s -o "$d/answer" -w '%{http_code}' -H 'content-type: application/json' --data-binary @- $u/v1/chat/completions)" = 200 ]
done
echo "prefill engine killed: 10 of 10 answered"
