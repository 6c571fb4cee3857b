#!/bin/bash
# Installs the engine-side code that judges Tandem's bytes (judge_*.py), from PyPI alone, without a GPU: vLLM and SGLang as e2e-vllm and
# e2e-sglang have them, LMCache's wheel, vLLM's example proxies, and SGLang's gateway.
# Repeated calls do nothing.
#
# usage: install.sh [DIRECTORY]      default: $TANDEM_ORACLES, else ${XDG_CACHE_HOME:-$HOME/.cache}/tandem/oracles
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
cache=${XDG_CACHE_HOME:-$HOME/.cache}/tandem
dir=${1:-${TANDEM_ORACLES:-$cache/oracles}}
vllm=${TANDEM_VLLM:-$cache/vllm}
lmcache=(lmcache==0.5.6 sortedcontainers==2.4.0)
proxies=vllm==0.33.0 # whose example proxies are run
quart=(quart==0.20.0 msgpack==1.1.1 hypercorn==0.17.3 werkzeug==3.1.3 blinker==1.9.0 flask==3.1.1 itsdangerous==2.2.0 aiofiles==24.1.0 h2==4.2.0 hpack==4.1.0 hyperframe==6.1.0 wsproto==1.2.0 priority==2.0.0)
router=(sglang-router==0.3.2)
# What production-stack's router imports and vLLM does not. The router itself is in no package index.
stack=(kubernetes==36.0.3 uhashring==2.3 xxhash==3.5.0 aiofiles==24.1.0 six==1.17.0 python-dateutil==4.0.0 oauthlib==4.0.1 requests-oauthlib==2.0.0 websocket-client==1.9.2 durationpy==0.11)

"$here/../sglang/install.sh"
stamp=$(cat "$here/install.sh" "$here/fetch.py" | sha256sum | cut -c1-16)
if [ "$(cat "$dir/stamp" 2>/dev/null)" = "$stamp" ]; then
  exit 0
fi
rm -rf "$dir"
mkdir -p "$dir"
"$vllm/uv/bin/uv" pip install -q --no-cache --no-deps -p "$vllm/venv/bin/python" --target "$dir/lmcache" "${lmcache[@]}"
"$vllm/venv/bin/python" "$here/fetch.py" "$dir" "$proxies" proxy >/dev/null
"$vllm/uv/bin/uv" pip install -q --no-cache --no-deps -p "$vllm/venv/bin/python" --target "$dir/quart" "${quart[@]}"
"$vllm/uv/bin/uv" pip install -q --no-cache --no-deps -p "$vllm/venv/bin/python" --target "$dir/router" "${router[@]}"
"$vllm/uv/bin/uv" pip install -q --no-cache --no-deps -p "$vllm/venv/bin/python" --target "$dir/production-stack" "${stack[@]}"
echo "$stamp" >"$dir/stamp"
