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
. "$(dirname "$0")/../realengines/servers.sh"

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
  unused "$port"
  setsid "$dir/venv/bin/python" -m sglang.launch_server --model-path "$dir/model" --served-model-name tiny --host 127.0.0.1 --port "$port" \
    --device cpu --attention-backend torch_native --sampling-backend pytorch --dtype float32 --disable-overlap-schedule --disable-cuda-graph \
    --mem-fraction-static 0.3 --max-total-tokens 20000 --page-size 16 --max-running-requests 16 --skip-server-warmup \
    --enable-metrics --enable-cache-report --log-level info "$@" </dev/null >"$logs/$name.log" 2>&1 &
  pids[$name]=$!
  echo "${pids[$name]}" >"$logs/$name.pid"
}

stop_at_exit TERM
rm -f "$logs"/*.pid

# ready NAME PORT: until it serves, 15 minutes at most (a busy machine needs 10).
ready() { wait_ready "$1" "$2" /v1/models 900; }

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
for p in "${prefill[@]}"; do ready "prefill-$p" "$p"; done
for p in "${decode[@]}"; do ready "decode-$p" "$p"; done
ready reference "$reference"

addresses() { printf '127.0.0.1:%s\n' "$@" | paste -sd, -; }
TANDEM_SGLANG_PREFILL=$(addresses "${prefill[@]}")
TANDEM_SGLANG_DECODE=$(addresses "${decode[@]}")
export TANDEM_SGLANG_PREFILL TANDEM_SGLANG_DECODE
export TANDEM_SGLANG_REFERENCE=127.0.0.1:$reference TANDEM_SGLANG_LOGS=$logs
say "ready after $SECONDS s: prefill $TANDEM_SGLANG_PREFILL, decode $TANDEM_SGLANG_DECODE, reference $TANDEM_SGLANG_REFERENCE; logs in $logs"
run_or_wait "$@"
