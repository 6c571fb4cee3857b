#!/bin/bash
# Tandem in the Envoy of a real Envoy Gateway that runs standalone, with nothing but what `tandem envoy --for envoy-gateway` prints:
# both hops, engines that are killed, policies that are not valid beside routes that go on, two routes, a policy that changes.
# In a network namespace of its own, since Envoy Gateway binds every interface; so it needs root. ENVOY and ENVOY_VERSION name
# another Envoy than .tools/bin/envoy (1.40.0), such as the 1.39.1 that Envoy Gateway 1.9.1 ships; KEEP=1 keeps the logs.
set -euo pipefail
cd "$(dirname "$0")/.."
[ -n "${IN_NAMESPACE:-}" ] || exec env IN_NAMESPACE=1 unshare -n "$0" "$@"
ip link set lo up
bin=${TANDEM_KUBE_BIN:-$HOME/.cache/tandem/bin}
envoy=$(realpath "${ENVOY:-.tools/bin/envoy}") version=${ENVOY_VERSION:-1.40.0}
d=$(mktemp -d)
pids=()
finish() {
  rc=$?
  for p in "${pids[@]}"; do kill -INT "$p" 2>/dev/null || true; done
  for p in "${pids[@]}"; do wait "$p" 2>/dev/null || true; done
  if [ $rc = 0 ] && [ -z "${KEEP:-}" ]; then rm -rf "$d"; else [ $rc = 0 ] || tail -n 30 "$d"/gateway.log >&2; echo "logs: $d" >&2; fi
  exit $rc
}
trap finish EXIT
run() { local name=$1; shift; "$@" > "$d/$name.log" 2>&1 & pids+=($!); eval "pid_$name=$!"; }

for e in prefill:11 prefill:12 decode:21 decode:22 prefill:31 decode:41; do
  run "engine_${e#*:}" bin/enginesim --listen "127.0.0.${e#*:}:8000" --side-channel "127.0.0.${e#*:}:5600" --role "${e%:*}" --model tiny --decode-step 2ms
done
# Asked without Tandem: it closes no idle connection, for a plain Envoy answers 503 if a request comes at that moment.
run engine_alone bin/enginesim --keep-alive 1h --listen 127.0.0.51:8000 --side-channel 127.0.0.51:5600 --connector none --model tiny
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 1 -keyout "$d/key.pem" -out "$d/cert.pem" -subj /CN=engines.test \
  -addext subjectAltName=DNS:engines.test 2>/dev/null
for e in prefill:71 prefill:72 decode:81 decode:82; do
  run "engine_${e#*:}" bin/enginesim --listen "127.0.0.${e#*:}:8000" --side-channel "127.0.0.${e#*:}:5600" --role "${e%:*}" --model tiny \
    --tls-cert "$d/cert.pem" --tls-key "$d/key.pem"
done
cat > "$d/tandem.yaml" <<'Y'
envoy: {run: inside, listen: 0.0.0.0:18080}
pools:
- name: chat
  kvTransfer: nixl
  split: always
  decodeAlone: fallback
  endpoints:
  - {address: 127.0.0.11:8000, role: prefill}
  - {address: 127.0.0.12:8000, role: prefill}
  - {address: 127.0.0.21:8000, role: decode}
  - {address: 127.0.0.22:8000, role: decode}
Y
mkdir -p "$d"/{resources,config,state,runtime,tmp,data/envoy-versions/$version/bin}
ln -s "$envoy" "$d/data/envoy-versions/$version/bin/envoy"   # looked up before any download
export TANDEM_OPERATOR=$d/operator.yaml TMPDIR=$d/tmp
printf 'admin: 127.0.0.1:9090\nfiles: %s\nengines: [127.0.0.0/8]\n' "$d" > "$TANDEM_OPERATOR"
bin/tandem envoy -f "$d/tandem.yaml" --for envoy-gateway --standalone --name chat --library "$PWD/bin/libtandem.so" |
  sed "s/1\.40\.0/$version/" > "$d/printed.yaml"
sed -e 's/127\.0\.0\.1\([12]\)/127.0.0.7\1/; s/127\.0\.0\.2\([12]\)/127.0.0.8\1/; s/, role:/, scheme: https, serverName: engines.test, role:/' \
  -e 's,^envoy: {,envoy: {pathPrefixes: [/https]\, ,' "$d/tandem.yaml" > "$d/https-tandem.yaml"
bin/tandem envoy -f "$d/https-tandem.yaml" --for envoy-gateway --name https --gateway chat/http > "$d/https.yaml"
{
  printf -- '---\napiVersion: v1\nkind: ConfigMap\nmetadata: {name: https-ca, namespace: default}\ndata:\n  ca.crt: |\n'
  sed 's/^/    /' "$d/cert.pem"
} >> "$d/https.yaml"
cat > "$d/gateway.yaml" <<Y
apiVersion: gateway.envoyproxy.io/v1alpha1
kind: EnvoyGateway
gateway: {controllerName: gateway.envoyproxy.io/gatewayclass-controller}
provider:
  type: Custom
  custom:
    resource: {type: File, file: {paths: ["$d/resources"]}}
    infrastructure: {type: Host, host: {configHome: $d/config, dataHome: $d/data, stateHome: $d/state, runtimeDir: $d/runtime}}
extensionApis: {enableBackend: true}
Y
"$bin/envoy-gateway" certgen --local --config-home "$d/config" > "$d/certgen.log" 2>&1
run gateway "$bin/envoy-gateway" server --config-path "$d/gateway.yaml"
python3 scripts/e2e_gateway_module.py "$d" "$pid_gateway" "$pid_engine_21" "$pid_engine_11"
