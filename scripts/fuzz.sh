#!/bin/bash
# Runs every fuzz target for a time ($1, 30s) and keeps what it found: inputs that reach new code go into the package's
# testdata/fuzz/FuzzXxx, the smallest first and no more than KEEP for a target, where every `go test` tries them again.
set -euo pipefail
cd "$(dirname "$0")/.."
time=${1:-30s}
KEEP=${KEEP:-16}
found=$(go env GOCACHE)/fuzz
module=$(go list -m)

grep -rHoE --include='*_test.go' --exclude-dir='.[a-z]*' '^func Fuzz[A-Za-z0-9_]*' . | sort | while IFS=: read -r file target; do
  target=${target#func }
  dir=$(dirname "$file")
  echo "== $dir $target"
  go test -run '^$' -fuzz "^$target\$" -fuzztime "$time" -fuzzminimizetime 10x "$dir" </dev/null
  [ -d "$found/$module/${dir#./}/$target" ] || continue
  mkdir -p "$dir/testdata/fuzz/$target"
  room=$((KEEP - $(find "$dir/testdata/fuzz/$target" -type f | wc -l)))
  mapfile -t inputs < <(find "$found/$module/${dir#./}/$target" -type f -size -8k -printf '%s %p\n' | sort -n | cut -d ' ' -f 2-)
  for input in "${inputs[@]}"; do
    [ "$room" -gt 0 ] || break
    kept=$dir/testdata/fuzz/$target/$(basename "$input")
    [ -e "$kept" ] || { cp "$input" "$kept"; room=$((room - 1)); }
  done
done
