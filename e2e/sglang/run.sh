#!/bin/bash
# Starts real SGLang on this machine's CPU: 2 prefill and 2 decode servers with NIXL, and one without disaggregation, the reference
# for what the text should be. Waits until all serve, runs the command (or waits for Ctrl-C), then stops them all.
# Ready in 2 minutes or more on two cores; about 1.6 GiB of memory each. install.sh comes first.
#
# usage: run.sh [command [argument...]]
# The command finds the servers in TANDEM_SGLANG_PREFILL, TANDEM_SGLANG_DECODE (addresses, comma between) and TANDEM_SGLANG_REFERENCE,
# and their logs and process ids in TANDEM_SGLANG_LOGS.
# Environment: TANDEM_SGLANG  the directory of install.sh
#              PREFILLS, DECODES  how many of each role; default 2
#              PORT           servers listen on PORT+1, +2 (prefill, their bootstrap servers 1000 above), +101, +102 (decode),
#                             +201 (reference); default 29100
set -euo pipefail
dir=${TANDEM_SGLANG:-${XDG_CACHE_HOME:-$HOME/.cache}/tandem/sglang}
port=${PORT:-29100}
logs=$dir/logs
declare -A pids=()

say() { echo "run.sh: $*" >&2; }

# Each of these was needed:
# - SGLANG_USE_CPU_ENGINE: else it looks for a GPU; TORCHDYNAMO_DISABLE: else it compiles with Triton;
# - NIXL_PTHR_DELAY_US (e2e/vllm/install.sh): 0 burns a core per idle server;
# - UCX, NIXL and SGLang on loopback: else they take the first network device they see.
export SGLANG_USE_CPU_ENGINE=1 SGLANG_CPU_OMP_THREADS_BIND= OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES=
export TORCHINDUCTOR_DISABLE=1 TORCHDYNAMO_DISABLE=1
export SGLANG_LOCAL_IP_NIC=lo SGLANG_HOST_IP=127.0.0.1 HOST_IP=127.0.0.1
export UCX_NET_DEVICES=lo UCX_TLS=tcp,sm,self NIXL_PTHR_DELAY_US=1000
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 PYTHONWARNINGS=ignore
unset PYTHONDONTWRITEBYTECODE # five servers start together: let them keep what they compile

# server NAME PORT [argument...]: one SGLang in its own process group. float32, so that text does not hang on the order of additions
# in a batch; 0.3 of the memory, as a decode server refuses less than 0.124, and no more of it than 20,000 tokens take.
server() {
  local name=$1 port=$2
  shift 2
  setsid "$dir/venv/bin/python" -m sglang.launch_server --model-path "$dir/model" --served-model-name tiny --host 127.0.0.1 --port "$port" \
    --device cpu --attention-backend torch_native --sampling-backend pytorch --dtype float32 --disable-overlap-schedule --disable-cuda-graph \
    --mem-fraction-static 0.3 --max-total-tokens 20000 --page-size 16 --max-running-requests 16 --skip-server-warmup \
    --enable-metrics --enable-cache-report --log-level info "$@" </dev/null >"$logs/$name.log" 2>&1 &
  pids[$name]=$!
  echo "${pids[$name]}" >"$logs/$name.pid"
}

# stop_all asks politely, once, and after 10 s not.
stop_all() {
  trap '' INT TERM
  local pid
  for pid in "${pids[@]}"; do kill -TERM -- "-$pid" 2>/dev/null || true; done
  for _ in $(seq 100); do
    local left=0
    for pid in "${pids[@]}"; do if kill -0 -- "-$pid" 2>/dev/null; then left=1; fi; done
    [ $left = 0 ] && return
    sleep 0.1
  done
  for pid in "${pids[@]}"; do kill -KILL -- "-$pid" 2>/dev/null || true; done
}

# wait_ready NAME PORT: until it answers /v1/models, 15 minutes at most (a busy machine needs 10).
wait_ready() {
  local name=$1 port=$2
  until curl -sf -o /dev/null "http://127.0.0.1:$port/v1/models"; do
    kill -0 "${pids[$name]}" 2>/dev/null || { say "$name ended:"; tail -n 5 "$logs/$name.log" >&2; exit 1; }
    [ $SECONDS -lt 900 ] || { say "$name is not ready after $SECONDS s: $logs/$name.log"; exit 1; }
    sleep 0.5
  done
}

[ -e "$dir/stamp" ] || { say "nothing in $dir: run install.sh first"; exit 1; }
mkdir -p "$logs"
rm -f "$logs"/*.pid
trap stop_all EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

prefill=() decode=() reference=$((port + 201))
for i in $(seq "${PREFILLS:-2}"); do prefill+=($((port + i))); done
for i in $(seq "${DECODES:-2}"); do decode+=($((port + 100 + i))); done
for p in "${prefill[@]}"; do
  server "prefill-$p" "$p" --disaggregation-mode prefill --disaggregation-transfer-backend nixl --disaggregation-bootstrap-port $((p + 1000))
done
for p in "${decode[@]}"; do
  server "decode-$p" "$p" --disaggregation-mode decode --disaggregation-transfer-backend nixl --disaggregation-decode-retraction-backup cpu_tensor
done
server reference "$reference"
for p in "${prefill[@]}"; do wait_ready "prefill-$p" "$p"; done
for p in "${decode[@]}"; do wait_ready "decode-$p" "$p"; done
wait_ready reference "$reference"

addresses() { printf '127.0.0.1:%s\n' "$@" | paste -sd, -; }
TANDEM_SGLANG_PREFILL=$(addresses "${prefill[@]}")
TANDEM_SGLANG_DECODE=$(addresses "${decode[@]}")
export TANDEM_SGLANG_PREFILL TANDEM_SGLANG_DECODE
export TANDEM_SGLANG_REFERENCE=127.0.0.1:$reference TANDEM_SGLANG_LOGS=$logs
say "ready after $SECONDS s: prefill $TANDEM_SGLANG_PREFILL, decode $TANDEM_SGLANG_DECODE, reference $TANDEM_SGLANG_REFERENCE; logs in $logs"
if [ $# -gt 0 ]; then
  "$@"
else
  say "Ctrl-C stops them"
  sleep infinity & wait $!
fi
