#!/bin/bash
# Starts real vLLM on this machine's CPU: 2 prefill and 2 decode engines with NIXL, and one engine without any KV transfer, the
# reference for what the text should be. Waits until all serve, runs the command (or waits for Ctrl-C), then stops them all.
# Ready in about a minute; 1.3 GiB of memory each. install.sh comes first.
#
# usage: run.sh [command [argument...]]
# The command finds the engines in TANDEM_VLLM_PREFILL, TANDEM_VLLM_DECODE (addresses, comma between) and TANDEM_VLLM_REFERENCE.
# Environment: TANDEM_VLLM  the directory of install.sh
#              CONNECTOR    NixlConnector (default), NixlPushConnector or MooncakeConnector: with these, go test -run
#                           TestRealPairs. Mooncake listens on all addresses, so run it in a network namespace of its own
#                           (mooncake.sh), with mooncake-transfer-engine-non-cuda in PYTHONPATH
#                           ExampleConnector or MultiConnector (NixlConnector and ExampleConnector): go test -run TestRealStores
#              RANKS        data-parallel ranks behind the port of each prefill and decode engine, which then publish KV events 3000
#                           above their ports (replay: 4000), rank by rank; go test -run TestRealRanks
#              BOTH         not empty: each engine computes prompts and answers (kv_both), with KV memory for two long prompts;
#                           go test -run 'TestRealBoth|TestRealMemory'
#              LEASES       not empty: P has KV memory for one long prompt, D runs 8 requests; go test -run TestRealLeases. default:
#                           vLLM's own settings; N: the recommended ones, with a lease of N seconds
#              ENGINES      how many of each role; default 2
#              DECODES      how many decode engines, if not as many: BOTH=1 ENGINES=1 DECODES=2 are three engines that do both, for
#                           go test -run TestRealRoles; they have KV memory for 30 long prompts
#              AGENT        not empty: with parsers for tool calls (hermes) and reasoning (deepseek_r1), and a model that has their
#                           tags as tokens: ENGINES=1 DECODES=2 REFERENCE=prefill, for go test -run TestRealAgents, which needs TANDEM_LIBRARY
#              MISTAKES     not empty: one engine of each role with the recommended settings that say how they were started, and two
#                           decode engines of other settings; go test -run 'TestRealMistakes|TestRealBlockSizes|TestRealCompiles'
#              REFERENCE    prefill: no engine more; what the first prefill engine answers alone is the reference
#              PORT         engines listen on PORT+1, +2 (prefill), +101, +102 (decode), +201 (reference), and NIXL's side
#                           channels 1000 above; default 28100
set -euo pipefail
dir=${TANDEM_VLLM:-${XDG_CACHE_HOME:-$HOME/.cache}/tandem/vllm}
port=${PORT:-28100}
prefill=($((port + 1)) $((port + 2)))
decode=($((port + 101)) $((port + 102)))
reference=$((port + 201))
logs=$dir/logs
. "$(dirname "$0")/../realengines/servers.sh"

# Each of these was needed:
# - V1 multiprocessing off and executor uni: the workers of the default executor stall for seconds on few cores;
# - NIXL_PTHR_DELAY_US (see install.sh): 0 burns a core per idle engine;
# - UCX and NIXL on loopback: else they take the first network device they see.
export VLLM_TARGET_DEVICE=cpu VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind OMP_NUM_THREADS=1
export VLLM_ENABLE_V1_MULTIPROCESSING=0 VLLM_HOST_IP=127.0.0.1 VLLM_NIXL_SIDE_CHANNEL_HOST=127.0.0.1
export UCX_NET_DEVICES=lo UCX_TLS=tcp,sm,self NIXL_PTHR_DELAY_US=1000 CUDA_VISIBLE_DEVICES=
unset PYTHONDONTWRITEBYTECODE # five engines start together: let them keep what they compile
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1 PYTHONHASHSEED=0

ranks() { # PORT: the arguments of an engine with data-parallel ranks
  [ -n "${RANKS:-}" ] || return 0
  printf '%s\n' --data-parallel-size "$RANKS" --data-parallel-address 127.0.0.1 --kv-events-config \
    "{\"enable_kv_cache_events\":true,\"publisher\":\"zmq\",\"endpoint\":\"tcp://*:$(($1 + 3000))\",\"replay_endpoint\":\"tcp://*:$(($1 + 4000))\"}"
}
[ -z "${RANKS:-}" ] || export VLLM_ENABLE_V1_MULTIPROCESSING=1 TANDEM_VLLM_RANKS=$RANKS # a process for each rank

# engine NAME PORT [argument...]: one vLLM in its own process group. float32, so that text does not hang on the order of additions
# in a batch; block size 32, as CPU attention refuses the default 16.
engine() {
  local name=$1 port=$2 model=${model:-$dir/model}
  shift 2
  unused "$port"
  VLLM_NIXL_SIDE_CHANNEL_PORT=$((port + 1000)) VLLM_MOONCAKE_BOOTSTRAP_PORT=$((port + 2000)) setsid "$dir/venv/bin/vllm" serve "$model" \
    --served-model-name tiny --host 127.0.0.1 --port "$port" \
    --distributed-executor-backend uni --enforce-eager --dtype float32 --block-size 32 --num-gpu-blocks-override "${blocks:-2048}" \
    --max-model-len 8192 --max-num-seqs 16 --max-num-batched-tokens 2048 \
    --enable-prompt-tokens-details --enable-request-id-headers --enable-scale-out ${whole[@]+"${whole[@]}"} \
    ${parsers[@]+"${parsers[@]}"} "$@" \
    </dev/null >"$logs/$name.log" 2>&1 &
  pids[$name]=$!
}

if [ -n "${AGENT:-}" ]; then
  model=$dir/agent-model
  [ -e "$model/config.json" ] || CUDA_VISIBLE_DEVICES='' "$dir/venv/bin/python" "$(dirname "$0")/make_model.py" "$model" agent >&2
  parsers=(--enable-auto-tool-choice --tool-call-parser "${TOOL_PARSER:-hermes}" --reasoning-parser "${REASONING_PARSER:-deepseek_r1}")
  export TANDEM_VLLM_AGENT=1
fi
prefills= decodes= more_decode=()
if [ -n "${LEASES:-}" ]; then
  blocks=260 more_decode=(--max-num-seqs 8 --num-gpu-blocks-override 2048)
  export TANDEM_VLLM_LEASES=$LEASES
  if [ "$LEASES" != default ]; then
    prefills=",\"kv_connector_extra_config\":{\"kv_lease_duration\":$LEASES}"
    decodes=',"kv_load_failure_policy":"recompute","kv_connector_extra_config":{"bidirectional_kv_xfer":true,"decoder_kv_blocks_ttl":1}'
  fi
fi
if [ -n "${MISTAKES:-}" ]; then
  ENGINES=1
  export VLLM_SERVER_DEV_MODE=1
  prefills=',"kv_connector_extra_config":{"kv_lease_duration":120}'
  decodes=',"kv_load_failure_policy":"recompute","kv_connector_extra_config":{"bidirectional_kv_xfer":true,"decoder_kv_blocks_ttl":1}'
  odd=($((port + 103)) $((port + 104)))
fi
one() {
  local more=$decodes
  [ "$2" != kv_producer ] || more=$prefills
  echo "{\"kv_connector\":\"$1\",\"kv_role\":\"$2\",\"kv_buffer_device\":\"cpu\"$more}"
}
store=$dir/store # ExampleConnector's files: a folder that all engines see
# Of a prompt that is computed in several steps ExampleConnector stores the first one alone, under the whole prompt's name, and an engine
# that loads it dies ("shape mismatch", 0.32.0): each prompt in one step.
whole=()
case ${CONNECTOR:-} in ExampleConnector | MultiConnector) whole=(--no-enable-chunked-prefill --max-num-batched-tokens 8192) ;; esac
stored() { echo "{\"kv_connector\":\"ExampleConnector\",\"kv_role\":\"kv_both\",\"kv_connector_extra_config\":{\"shared_storage_path\":\"$store\"}}"; }
transfer() {
  [ -z "${BOTH:-}" ] || set -- kv_both
  case ${CONNECTOR:-NixlConnector} in
    ExampleConnector) stored ;;
    MultiConnector) echo "{\"kv_connector\":\"MultiConnector\",\"kv_role\":\"$1\",\"kv_connector_extra_config\":{\"connectors\":[$(one NixlConnector "$1"),$(stored)]}}" ;;
    *) one "${CONNECTOR:-NixlConnector}" "$1" ;;
  esac
}

stop_at_exit INT

# ready NAME PORT: until it serves, 10 minutes at most (a busy machine needs 5).
ready() { wait_ready "$1" "$2" /health "${READY:-600}"; }

rm -rf "$store"
mkdir -p "$store"
export TANDEM_VLLM_STORE=$store
[ -z "${BOTH:-}" ] || { blocks=260 && export TANDEM_VLLM_BOTH=1; }
[ -z "${DECODES:-}" ] || { blocks=4096 && export VLLM_SERVER_DEV_MODE=1; } # the test empties their prefix caches
prefill=("${prefill[@]:0:${ENGINES:-2}}")
decode=("${decode[@]:0:${DECODES:-${ENGINES:-2}}}")
for i in "${!prefill[@]}"; do
  mapfile -t more < <(ranks "${prefill[i]}")
  engine "prefill-$i" "${prefill[i]}" --kv-transfer-config "$(transfer kv_producer)" ${more[@]+"${more[@]}"}
done
for i in "${!decode[@]}"; do
  mapfile -t more < <(ranks "${decode[i]}")
  engine "decode-$i" "${decode[i]}" --kv-transfer-config "$(transfer kv_consumer)" ${more[@]+"${more[@]}"} ${more_decode[@]+"${more_decode[@]}"}
done
if [ -n "${MISTAKES:-}" ]; then
  decodes=
  engine odd-0 "${odd[0]}" --kv-transfer-config "$(transfer kv_consumer)" --block-size 64 --no-enable-prefix-caching
  rm -rf "$dir/other-model" && cp -r "$dir/model" "$dir/other-model"
  model=$dir/other-model engine odd-1 "${odd[1]}" --kv-transfer-config "$(transfer kv_consumer)" --dtype bfloat16
fi
if [ "${REFERENCE:-}" = prefill ]; then
  reference=${prefill[0]}
else
  blocks=2048 engine reference "$reference"
fi
for i in "${!prefill[@]}"; do ready "prefill-$i" "${prefill[i]}"; done
for i in "${!decode[@]}"; do ready "decode-$i" "${decode[i]}"; done
[ "${REFERENCE:-}" = prefill ] || ready reference "$reference"
[ -z "${MISTAKES:-}" ] || { ready odd-0 "${odd[0]}" && ready odd-1 "${odd[1]}"; }

addresses() { printf '127.0.0.1:%s\n' "$@" | paste -sd, -; }
TANDEM_VLLM_PREFILL=$(addresses "${prefill[@]}")
TANDEM_VLLM_DECODE=$(addresses "${decode[@]}")
[ -z "${MISTAKES:-}" ] || TANDEM_VLLM_ODD=$(addresses "${odd[@]}")
export TANDEM_VLLM_ODD=${TANDEM_VLLM_ODD:-}
export TANDEM_VLLM_PREFILL TANDEM_VLLM_DECODE TANDEM_VLLM_DECODE_PID=${pids[decode-0]}
export TANDEM_VLLM_REFERENCE=127.0.0.1:$reference
case ${CONNECTOR:-} in
  NixlPushConnector) export TANDEM_VLLM_DIALECT=nixl-push ;;
  MooncakeConnector) export TANDEM_VLLM_DIALECT=mooncake ;;
  ExampleConnector) export TANDEM_VLLM_DIALECT=shared ;;
  MultiConnector) export TANDEM_VLLM_DIALECT=multi ;;
esac
say "ready after $SECONDS s: prefill $TANDEM_VLLM_PREFILL, decode $TANDEM_VLLM_DECODE, reference $TANDEM_VLLM_REFERENCE; logs in $logs"
run_or_wait "$@"
