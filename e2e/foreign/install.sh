#!/bin/bash
# Builds the engines of e2e/foreign: llm-d's simulator, with Go, and AIBrix's mock, a Python program with packages from
# PyPI. Repeated calls do nothing; a change of this file installs anew.
#
# The repositories come from GitHub, or from where LLM_D_SIM, LLM_D_ROUTER and AIBRIX say (a URL or a folder with git).
# The simulator takes a module from llm-d's router, which the Go proxy does not always have.
#
# usage: install.sh [DIRECTORY]      default: $TANDEM_FOREIGN, else ${XDG_CACHE_HOME:-$HOME/.cache}/tandem/foreign
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
dir=${1:-${TANDEM_FOREIGN:-${XDG_CACHE_HOME:-$HOME/.cache}/tandem/foreign}}
sim=${LLM_D_SIM:-https://github.com/llm-d/llm-d-inference-sim} sim_commit=eec055a39e6bbc1adbcb54f88f24f36b7f94e781
router=${LLM_D_ROUTER:-https://github.com/llm-d/llm-d-router} router_commit=ebab687927f5331c1b39defcb579a07951bce56c
aibrix=${AIBRIX:-https://github.com/vllm-project/aibrix} aibrix_commit=e3e10f9e4aebe9aac5e7d992fb87d2648e01628b
say() { echo "install.sh: $*" >&2; }

stamp=$(sha256sum "$here/install.sh" | cut -c1-16)
if [ "$(cat "$dir/stamp" 2>/dev/null)" = "$stamp" ]; then
  say "$dir is up to date"
  exit
fi
mkdir -p "$dir"
rm -f "$dir/stamp"

# origin NAME URL COMMIT: the repository's git directory, which is URL itself if that is a folder
origin() {
  if [ -d "$2" ]; then
    echo "$2"
    return
  fi
  say "fetching $2"
  [ -d "$dir/$1.git" ] || git init -q --bare "$dir/$1.git"
  git -C "$dir/$1.git" fetch -q --depth 1 "$2" "$3"
  echo "$dir/$1.git"
}

say "building llm-d's simulator (minutes the first time)"
for name in sim router; do
  commit=${name}_commit
  git=$(origin "$name" "${!name}" "${!commit}")
  rm -rf "${dir:?}/$name" && mkdir "$dir/$name"
  git -C "$git" archive "${!commit}" | tar -x -C "$dir/$name"
done
(cd "$dir/sim" && go mod edit -replace github.com/llm-d/llm-d-router=../router &&
  go build -mod=mod -o "$dir/llm-d-inference-sim" ./cmd/llm-d-inference-sim)

say "installing AIBrix's mock"
git=$(origin aibrix "$aibrix" "$aibrix_commit")
git -C "$git" show "$aibrix_commit:development/app/app.py" >"$dir/mock.py"
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q --disable-pip-version-check flask==3.1.3 Flask-HTTPAuth==4.8.1 tiktoken==0.14.0
echo "$stamp" >"$dir/stamp"
