#!/bin/bash
# Writes an OCI image archive with Go, tar and sha256sum alone: no daemon, no base image, since the binary is static and
# brings its own roots of trust where it needs any (none today).
#   deploy/oci.sh OUT.tar [GOARCH...]         default amd64 and arm64
# Load it with `docker load`, `podman load`, `ctr images import` or `skopeo copy oci-archive:OUT.tar docker://...`.
set -euo pipefail
out=$(realpath -m "${1:?the archive to write}"); shift
archs=("$@"); [ ${#archs[@]} -gt 0 ] || archs=(amd64 arm64)
cd "$(dirname "$0")/.."
version=$(scripts/version.sh)
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
blobs=$work/blobs/sha256; mkdir -p "$blobs"

# blob FILE: moves it to the blobs; prints "digest size" after that, because the caller goes on at once
blob() { local d; d=$(sha256sum "$1" | cut -d' ' -f1); mv "$1" "$blobs/$d"; echo "sha256:$d $(stat -c %s "$blobs/$d")"; }

manifests=()
for arch in "${archs[@]}"; do
  root=$work/root-$arch; mkdir -p "$root/etc/tandem"
  CGO_ENABLED=0 GOOS=linux GOARCH=$arch go build -trimpath -ldflags "-s -w -X 'main.builtAs=$(scripts/version.sh built)'" -o "$root/tandem" ./cmd/tandem
  cp LICENSE NOTICE "$root/"
  tar --sort=name --owner=0 --group=0 --numeric-owner --mtime=@0 -C "$root" -cf "$work/layer" .
  read -r layer layer_size < <(blob "$work/layer")
  printf '{"architecture":"%s","os":"linux","config":{"User":"65532:65532","Entrypoint":["/tandem"],"Cmd":["serve","-f","/etc/tandem/tandem.yaml"],"ExposedPorts":{"9002/tcp":{},"9003/tcp":{},"9090/tcp":{}},"Labels":{"org.opencontainers.image.title":"tandem","org.opencontainers.image.version":"%s","org.opencontainers.image.licenses":"Apache-2.0"}},"rootfs":{"type":"layers","diff_ids":["%s"]}}' "$arch" "$version" "$layer" > "$work/config"
  read -r config config_size < <(blob "$work/config")
  printf '{"schemaVersion":2,"mediaType":"application/vnd.oci.image.manifest.v1+json","config":{"mediaType":"application/vnd.oci.image.config.v1+json","digest":"%s","size":%d},"layers":[{"mediaType":"application/vnd.oci.image.layer.v1.tar","digest":"%s","size":%d}]}' "$config" "$config_size" "$layer" "$layer_size" > "$work/manifest"
  read -r manifest manifest_size < <(blob "$work/manifest")
  manifests+=("$(printf '{"mediaType":"application/vnd.oci.image.manifest.v1+json","digest":"%s","size":%d,"platform":{"architecture":"%s","os":"linux"}}' "$manifest" "$manifest_size" "$arch")")
done
printf '{"schemaVersion":2,"mediaType":"application/vnd.oci.image.index.v1+json","manifests":[%s]}' "$(IFS=,; echo "${manifests[*]}")" > "$work/index.json"
printf '{"imageLayoutVersion":"1.0.0"}' > "$work/oci-layout"
tar --sort=name --owner=0 --group=0 --numeric-owner --mtime=@0 -C "$work" -cf "$out" blobs index.json oci-layout
echo "$out: $(stat -c %s "$out") bytes, ${archs[*]}"
