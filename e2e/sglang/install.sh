#!/bin/bash
# Installs real SGLang for CPU, prefill and decode apart over NIXL, from PyPI alone: no GPU, no model hub. It stands on vLLM's install
# (e2e/vllm/install.sh, which runs first): torch, transformers, NIXL and the tiny model are used where they lie.
# 1.2 GiB more, outside the tree. Repeated calls do nothing; a change of the pins installs anew.
#
# usage: install.sh [DIRECTORY]      default: $TANDEM_SGLANG, else ${XDG_CACHE_HOME:-$HOME/.cache}/tandem/sglang
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
cache=${XDG_CACHE_HOME:-$HOME/.cache}/tandem
dir=${1:-${TANDEM_SGLANG:-$cache/sglang}}
vllm=${TANDEM_VLLM:-$cache/vllm}

say() { echo "install.sh: $*" >&2; }
site() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }

"$here/../vllm/install.sh" "$vllm"
stamp=$(cat "$here/install.sh" "$here/requirements.txt" "$here/patch.py" "$vllm/stamp" | sha256sum | cut -c1-16)
if [ "$(cat "$dir/stamp" 2>/dev/null)" = "$stamp" ]; then
  exit 0
fi
say "SGLang $(sed -n 's/^sglang==//p' "$here/requirements.txt") for CPU into $dir (once, about a minute and 1.2 GiB)"
rm -rf "$dir/venv" "$dir/stamp"
mkdir -p "$dir"
"$vllm/uv/bin/uv" venv -q -p "$vllm/venv/bin/python" "$dir/venv"
"$vllm/uv/bin/uv" pip install -q --no-cache --no-deps -p "$dir/venv/bin/python" -r "$here/requirements.txt"
packages=$(site "$dir/venv")
site "$vllm/venv" >"$packages/vllm.pth"
"$dir/venv/bin/python" "$here/patch.py" "$packages"
ln -sfn "$vllm/model" "$dir/model"
echo "$stamp" >"$dir/stamp"
say "ready: $dir/venv, $dir/model"
