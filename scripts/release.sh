#!/bin/bash
# Writes the files of a release: for each platform an archive of both programs, licence and notices, and a wheel
# (scripts/wheel.py); and SHA256SUMS.
#   scripts/release.sh DIR [GOARCH...]         default amd64 and arm64
# WHEEL=only writes wheels alone. The same commit, Go and zlib give the same bytes.
set -euo pipefail
mkdir -p "${1:?the directory to write to}"; out=$(realpath "$1"); shift
archs=("$@"); [ ${#archs[@]} -gt 0 ] || archs=(amd64 arm64)
cd "$(dirname "$0")/.."
version=$(scripts/version.sh)
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
rm -f "$out"/tandem_pd-*.whl # of other commits: `uvx --from dist/*.whl` takes one
for arch in "${archs[@]}"; do
  name=tandem-$version-linux-$arch; mkdir -p "$work/$name"
  CGO_ENABLED=0 GOOS=linux GOARCH=$arch go build -trimpath -ldflags "-s -w -X 'main.builtAs=$(scripts/version.sh built)'" -o "$work/$name/" ./cmd/tandem ./cmd/enginesim
  python3 scripts/wheel.py "$out" "$version" "$arch" "$work/$name"
  [ "${WHEEL:-}" != only ] || continue
  cp LICENSE NOTICE README.md CHANGELOG.md "$work/$name/"
  tar --sort=name --owner=0 --group=0 --numeric-owner --mtime=@0 -C "$work" -c "$name" | gzip -9n > "$out/$name.tar.gz"
done
[ "${WHEEL:-}" = only ] || { cd "$out" && sha256sum -- *.tar.gz *.whl > SHA256SUMS && cat SHA256SUMS; }
