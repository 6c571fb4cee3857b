#!/bin/bash
# Has the engines' own code judge the bytes that Tandem sends (extproc/kvtransfer/testdata), and those bytes with one name changed, which it
# must refuse or take for a request that is not split. Prints a row for each dialect; fails if anything was judged otherwise. install.sh comes first.
# Then sends the goldens' requests through the engines' own proxies, and compares the legs.
#
# usage: run.sh            the releases that are installed, and the proxies
#        run.sh newest     the newest two of vLLM and SGLang on PyPI, whatever they are by then
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

vllm=${TANDEM_VLLM:-$cache/vllm}/venv/bin/python sglang=${TANDEM_SGLANG:-$cache/sglang}/venv/bin/python oracles=${TANDEM_ORACLES:-$cache/oracles}
model=${TANDEM_SGLANG:-$cache/sglang}/model
echo '| dialect | judge | release | bodies accepted | changes noticed |'
echo '|---|---|---|---|---|'
if [ "${1:-}" = newest ]; then
  # A release's Python files stand in front of the installed one, whose compiled part no judge needs.
  fetched=$(python3 "$here/fetch.py" "$oracles/releases" vllm~2 vllm/ && python3 "$here/fetch.py" "$oracles/releases" sglang~2 sglang/)
  while read -r name version files; do
    case $name in
    vllm)
      PYTHONPATH=$files judge "$vllm" judge_vllm.py "$testdata" "$oracles"
      PYTHONPATH=$files judge "$vllm" judge_encode.py "$testdata"
      ;;
    sglang) PYTHONPATH=$files judge "$sglang" judge_sglang.py "$testdata" "$model" ;;
    esac
  done <<<"$fetched"
  exit $failed
fi
judge "$vllm" judge_vllm.py "$testdata" "$oracles"
judge "$vllm" judge_encode.py "$testdata"
judge "$sglang" judge_sglang.py "$testdata" "$model"
if [ -n "${TANDEM_TRTLLM:-}" ]; then
  judge "$vllm" judge_trtllm.py "$testdata" "$TANDEM_TRTLLM"
else
  echo "run.sh: without TensorRT-LLM: set TANDEM_TRTLLM to a checkout of its repository" >&2
fi
judge "$vllm" judge_proxies.py "$testdata" "$oracles" "$sglang" "$model"
exit $failed
