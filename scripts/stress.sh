#!/bin/bash
# Runs the unit tests (all packages but e2e, or those given) RUNS times beside busy loops, and lists the tests that failed
# in any run; .cache/stress has all output. The flags are CI's: what -v logs may race with a test's end, too. A test that
# fails here fails by chance: it waits for a time and not for an event, or draws without a seed.
#
# usage: RUNS=5 BUSY=4 stress.sh [PACKAGE ...]
set -uo pipefail
cd "$(dirname "$0")/.."
go=${GO:-go} runs=${RUNS:-5} busy=${BUSY:-$((2 * $(nproc)))}
packages=("$@")
[ $# -gt 0 ] || mapfile -t packages < <("$go" list ./... | grep -v /e2e)
out=.cache/stress
rm -rf "$out" && mkdir -p "$out"
loops=()
trap 'kill "${loops[@]}" 2>/dev/null' EXIT
for _ in $(seq "$busy"); do
  (while :; do :; done) &
  loops+=($!)
done
for run in $(seq "$runs"); do
  "$go" test -count 1 -race -v -parallel 8 -timeout 40m "${packages[@]}" >"$out/$run" 2>&1
  grep -E '^\s*--- FAIL|^FAIL|^panic|DATA RACE' "$out/$run" | sed "s/^/run $run: /" | tee -a "$out/failed"
  echo "run $run of $runs done" >&2
done
[ ! -s "$out/failed" ]
