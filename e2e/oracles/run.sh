#!/bin/bash
# Has the engines' own code judge the bytes that Tandem sends (extproc/kvtransfer/testdata), and those bytes with one name changed, which it
# must refuse or take for a request that is not split. Prints a row for each dialect; fails if anything was judged otherwise. install.sh comes first.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
cache=${XDG_CACHE_HOME:-$HOME/.cache}/tandem
testdata=$here/../../extproc/kvtransfer/testdata
export CUDA_VISIBLE_DEVICES='' VLLM_TARGET_DEVICE=cpu VLLM_LOGGING_LEVEL=ERROR LMCACHE_LOG_LEVEL=ERROR
export SGLANG_USE_CPU_ENGINE=1 TORCHDYNAMO_DISABLE=1 PYTHONWARNINGS=ignore PYTHONDONTWRITEBYTECODE=1

echo '| dialect | judge | release | bodies accepted | changes noticed |'
echo '|---|---|---|---|---|'
"${TANDEM_VLLM:-$cache/vllm}/venv/bin/python" "$here/judge_vllm.py" "$testdata" "${TANDEM_ORACLES:-$cache/oracles}" 2>/dev/null
"${TANDEM_SGLANG:-$cache/sglang}/venv/bin/python" "$here/judge_sglang.py" "$testdata" 2>/dev/null
