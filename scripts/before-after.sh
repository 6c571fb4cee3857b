#!/bin/bash
# Measures this tree beside the commit BEFORE, in one run for each question: BEFORE=COMMIT scripts/before-after.sh. The
# programs of that commit are built into .cache/before, and run as a variant beside those in bin/.
set -euo pipefail
cd "$(dirname "$0")/.."
commit=$(git rev-parse --short "${BEFORE:?name the commit to compare with: BEFORE=COMMIT}")
before=$PWD/.cache/before/$commit
inside=$([ ! -e bin/libtandem.so ] || echo yes)
if [ ! -x "$before/tandem" ] || { [ -n "$inside" ] && [ ! -e "$before/libtandem.so" ]; }; then
  rm -rf "$before"
  git worktree prune
  git worktree add --detach "$before/tree" "$commit"
  (cd "$before/tree"
   CGO_ENABLED=0 go build -trimpath -o ../tandem ./cmd/tandem
   [ -z "$inside" ] || go build -trimpath -buildmode=c-shared -ldflags '-s -w' -o ../libtandem.so ./carrier)
  git worktree remove --force "$before/tree"
fi

variants=(-variant "before: bin=$before/tandem")
[ -z "$inside" ] || variants+=(-variant "inside: inside=$PWD/bin" -variant "before inside: inside=$before")
peers=()
[ ! -x .tools/peers/bin/smg ] || peers+=(-smg .tools/peers/bin/smg)
[ ! -e .tools/llm-d/commit ] || peers+=(-llm-d .tools/llm-d)
[ ${#peers[@]} -gt 0 ] || echo 'left out, for they are not installed (make bench-peers): smg, llm-d' >&2
ulimit -n "$(ulimit -Hn)"
bench() { go run ./e2e/bench -bin bin -rounds "${ROUNDS:-3}" "${variants[@]}" "$@"; }

echo "## Prompts of 100k tokens over 100 engines, ${RATE:-20} a second, then as many as each can"
long=(-shapes json400k -endpoints 100 -kv-events -documents 200 -peer-policy cache_aware)
bench "${long[@]}" "${peers[@]}" -clients 32 -rate "${RATE:-20}" -requests "${REQUESTS:-200}" -idle 10s
bench "${long[@]}" "${peers[@]}" -clients 16 -requests "${REQUESTS:-200}"
echo '## 1 KB, 220 KB and streams, 16 clients'
bench "${peers[@]}" -shapes json1k,json220k,sse256 -clients 16
echo '## 100 and 1,000 endpoints, idle and under load, and open streams'
bench -shapes json1k -clients 1,16,64 -capacity 100,1000 -idle 20s
echo '## Sizes'
ls -l bin/tandem "$before/tandem" bin/libtandem.so "$before/libtandem.so" 2>/dev/null | awk '{print $5, $9}'
