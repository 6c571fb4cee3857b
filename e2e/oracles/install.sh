#!/bin/bash
# Installs the engine-side code that judges Tandem's bytes (judge.py), from PyPI alone, without a GPU: vLLM and SGLang as e2e-vllm and
# e2e-sglang have them, LMCache's wheel, and the sources of two older vLLM releases, whose connectors newer ones lack. 90 MiB beside those.
# Repeated calls do nothing.
#
# usage: install.sh [DIRECTORY]      default: $TANDEM_ORACLES, else ${XDG_CACHE_HOME:-$HOME/.cache}/tandem/oracles
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
cache=${XDG_CACHE_HOME:-$HOME/.cache}/tandem
dir=${1:-${TANDEM_ORACLES:-$cache/oracles}}
vllm=${TANDEM_VLLM:-$cache/vllm}
lmcache=(lmcache==0.5.6 sortedcontainers==2.4.0)
old=(vllm==0.13.0 vllm==0.22.1)

"$here/../sglang/install.sh"
stamp=$(sha256sum "$here/install.sh" | cut -c1-16)
if [ "$(cat "$dir/stamp" 2>/dev/null)" = "$stamp" ]; then
  exit 0
fi
rm -rf "$dir"
mkdir -p "$dir"
"$vllm/uv/bin/uv" pip install -q --no-cache --no-deps -p "$vllm/venv/bin/python" --target "$dir/lmcache" "${lmcache[@]}"
# pip builds an sdist to look into it: fetch these as they are, held to the index's checksum.
"$vllm/venv/bin/python" - "$dir" "${old[@]}" <<'PY'
import hashlib, io, re, sys, tarfile, urllib.parse, urllib.request

directory, *wanted = sys.argv[1:]
for name, version in (w.split("==") for w in wanted):
    index = f"https://pypi.org/simple/{name}/"
    with urllib.request.urlopen(index) as answer:
        found = re.search(rf'href="([^"#]*/{name}-{re.escape(version)}\.tar\.gz)#sha256=([0-9a-f]{{64}})"', answer.read().decode())
    if not found:
        sys.exit(f"{index} does not list an sdist of {version}")
    with urllib.request.urlopen(urllib.parse.urljoin(index, found[1])) as answer:
        data = answer.read()
    if hashlib.sha256(data).hexdigest() != found[2]:
        sys.exit(f"{name} {version} is not what {index} lists")
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        members = [m for m in archive if "/kv_connector/v1/" in m.name and m.name.endswith(".py")]
        archive.extractall(directory, members=members, filter="data")
PY
echo "$stamp" >"$dir/stamp"
