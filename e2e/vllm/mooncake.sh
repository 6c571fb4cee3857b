#!/bin/bash
# Mooncake over TCP with real vLLM, through Envoy's mirrored leg, in a network namespace of its own: its transfer engine
# listens on all addresses. Needs root, and apt install libibverbs1 librdmacm1 libnuma1; install.sh comes first. The wheel
# (mooncake-transfer-engine-non-cuda 0.3.13.post1) goes beside vLLM's environment, not into it.
#
# usage: mooncake.sh [argument of go test...]
set -euo pipefail
dir=${TANDEM_VLLM:-${XDG_CACHE_HOME:-$HOME/.cache}/tandem/vllm}
here=$(cd "$(dirname "$0")" && pwd)
wheel=${MOONCAKE:-$dir/mooncake}
[ -e "$wheel/mooncake" ] || "$dir/uv/bin/uv" pip install -q --no-deps --target "$wheel" --python "$dir/venv/bin/python" mooncake-transfer-engine-non-cuda==0.3.13.post1
cd "$here/../.."
go test -tags vllm -c -o bin/vllm.test ./e2e/vllm # what needs the network, before there is none
cd e2e/vllm
export PYTHONPATH=$wheel MC_FORCE_TCP=1 CONNECTOR=MooncakeConnector
exec unshare -n bash -c 'ip link set lo up && exec ./run.sh ../../bin/vllm.test -test.run TestRealPairs -test.v -test.count 1 "$@"' mooncake "$@"
