#!/bin/bash
# Builds llm-d's endpoint picker (epp) and routing sidecar (pd-sidecar), for `make bench-peers`. Repeated calls do nothing.
# The repository comes from GitHub, or from where LLM_D_ROUTER says (a URL or a folder with git); the Go proxy does not
# always have it. Its modules come from the Go proxy.
#
# usage: llm-d.sh DIRECTORY
set -euo pipefail
router=${LLM_D_ROUTER:-https://github.com/llm-d/llm-d-router} commit=ebab687927f5331c1b39defcb579a07951bce56c
mkdir -p "$1"
dir=$(cd "$1" && pwd)
[ "$(cat "$dir/commit" 2>/dev/null)" != "$commit" ] || exit 0
git=$router
if [ ! -d "$router" ]; then
  git=$dir/git
  [ -d "$git" ] || git init -q --bare "$git"
  git -C "$git" fetch -q --depth 1 "$router" "$commit"
fi
echo "llm-d.sh: building llm-d's endpoint picker and sidecar into $1 (minutes, once)" >&2
rm -rf "$dir/source" && mkdir "$dir/source"
git -C "$git" archive "$commit" | tar -x -C "$dir/source"
(cd "$dir/source" && go build -o "$dir/" ./cmd/epp ./cmd/pd-sidecar)
rm -rf "$dir/source"
echo "$commit" >"$dir/commit"
