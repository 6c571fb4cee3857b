#!/bin/bash
# Has the engines' own code judge the bytes that Tandem sends (extproc/kvtransfer/testdata), and those bytes with one name changed, which it
# must refuse or take for a request that is not split. Prints a row for each dialect; fails if anything was judged otherwise. install.sh comes first.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
cache=${XDG_CACHE_HOME:-$HOME/.cache}/tandem
testdata=$here/../../extproc/kvtransfer/testdata
export CUDA_VISIBLE_DEVICES='' VLLM_TARGET_DEVICE=cpu VLLM_LOGGING_LEVEL=ERROR LMCACHE_LOG_LEVEL=ERROR
export SGLANG_USE_CPU_ENGINE=1 TORCHDYNAMO_DISABLE=1 PYTHONWARNINGS=ignore PYTHONDONTWRITEBYTECODE=1

log=$(mktemp)
trap 'rm -f "$log"' EXIT
failed=0
# judge PYTHON SCRIPT [argument...]: its rows, and what it says beside them where anything was judged otherwise.
judge() {
  if ! "$1" "$here/$2" "${@:3}" 2>"$log"; then
    failed=1
    tail -n 30 "$log" >&2
  fi
}

echo '| dialect | judge | release | bodies accepted | changes noticed |'
echo '|---|---|---|---|---|'
judge "${TANDEM_VLLM:-$cache/vllm}/venv/bin/python" judge_vllm.py "$testdata" "${TANDEM_ORACLES:-$cache/oracles}"
judge "${TANDEM_SGLANG:-$cache/sglang}/venv/bin/python" judge_sglang.py "$testdata" "${TANDEM_SGLANG:-$cache/sglang}/model"
exit $failed
