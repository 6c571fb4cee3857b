#!/bin/bash
# Mooncake over TCP with real vLLM, through Envoy's mirrored leg, in a network namespace of its own: its transfer engine
# listens on all addresses. Needs root; install.sh comes first. The wheel (mooncake-transfer-engine-non-cuda 0.3.13.post1) goes
# beside vLLM's environment, not into it, and what it is linked with is installed from Debian.
#
# usage: mooncake.sh [argument of go test...]
set -euo pipefail
dir=${TANDEM_VLLM:-${XDG_CACHE_HOME:-$HOME/.cache}/tandem/vllm}
here=$(cd "$(dirname "$0")" && pwd)
wheel=${MOONCAKE:-$dir/mooncake}
[ -e "$wheel/mooncake" ] || "$dir/uv/bin/uv" pip install -q --no-deps --target "$wheel" --python "$dir/venv/bin/python" mooncake-transfer-engine-non-cuda==0.3.13.post1

# Without its libraries vLLM says no more than that Mooncake is not available.
loads() { PYTHONPATH=$wheel "$dir/venv/bin/python" -c 'import mooncake.engine' 2>&1; }
if ! loads >/dev/null; then
  libraries=(libibverbs1 librdmacm1 libnuma1)
  if command -v apt-get >/dev/null; then
    echo "mooncake.sh: installing ${libraries[*]}" >&2
    { apt-get install -qqy --no-install-recommends "${libraries[@]}" || { apt-get update -qq && apt-get install -qqy --no-install-recommends "${libraries[@]}"; }; } >/dev/null
  fi
  why=$(loads) || { echo "mooncake.sh: Mooncake does not load (Debian: apt-get install ${libraries[*]}): ${why##*$'\n'}" >&2; exit 1; }
fi

# torch of PyPI is built for CUDA, and Mooncake's connector asks it which GPU is the current one: without any that is an error
# (vLLM 0.32.0, mooncake_connector.py). A plugin of vLLM's own kind answers 0.
plugin=$wheel/tandem_e2e-0.dist-info
mkdir -p "$plugin"
printf 'Metadata-Version: 2.1\nName: tandem-e2e\nVersion: 0\n' >"$plugin/METADATA"
printf '[vllm.general_plugins]\nno_gpu = tandem_e2e:register\n' >"$plugin/entry_points.txt"
cat >"$wheel/tandem_e2e.py" <<'PY'
def register():
    import torch

    if not torch.accelerator.is_available():
        torch.accelerator.current_device_index = lambda: 0
PY

cd "$here/../.."
go test -tags vllm -c -o bin/vllm.test ./e2e/vllm # what needs the network, before there is none
cd e2e/vllm
# What nobody fetches is kept for 480 s otherwise, and the tests wait for its end.
export VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT=${VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT:-20}
export PYTHONPATH=$wheel MC_FORCE_TCP=1 CONNECTOR=MooncakeConnector
exec unshare -n bash -c 'ip link set lo up && exec ./run.sh ../../bin/vllm.test -test.run TestRealPairs -test.v -test.count 1 "$@"' mooncake "$@"
