#!/bin/bash
# Images of one program each, in the OCI layout, for containerd to import: no registry is asked.
#   images.sh DIRECTORY ENVOY     writes DIRECTORY/NAME.tar, where % stands for / in an image's name
set -euo pipefail
dir=$(realpath "${1:?a directory}") envoy=$(realpath "${2:?the program envoy}") bin=${TANDEM_KUBE_BIN:-$HOME/.cache/tandem/bin}
root=$(cd "$(dirname "$0")/../.." && pwd)

# image NAME ENTRYPOINT FILE[=NAME]...: the files, with the libraries that they are linked with. A NAME with a / is a path.
image() {
  local name=$1 entrypoint=$2 work layer config manifest file to
  shift 2
  work=$(mktemp -d)
  mkdir -p "$work"/root/{tmp,usr/local/bin,etc} "$work/layout/blobs/sha256"
  chmod 1777 "$work/root/tmp"
  ln -s usr/local/bin "$work/root/bin"
  for file in "$@"; do
    to=${file#*=}
    [[ $file == *=/* ]] || to=/usr/local/bin/$(basename "$to")
    mkdir -p "$work/root$(dirname "$to")"
    cp -L "${file%=*}" "$work/root$to"
    { ldd "${file%=*}" 2>/dev/null || true; } | { grep -o '/[^ ]*' || true; } | while read -r library; do
      mkdir -p "$work/root$(dirname "$library")" && cp -L "$library" "$work/root$library"
    done
  done
  blob() { # FILE: moves it to the blobs, prints a descriptor's digest and size
    local digest; digest=$(sha256sum "$1" | cut -d' ' -f1)
    printf '"digest":"sha256:%s","size":%d' "$digest" "$(stat -c %s "$1")"
    mv "$1" "$work/layout/blobs/sha256/$digest"
  }
  tar --owner=0 --group=0 -C "$work/root" -cf "$work/layer" .
  layer=$(blob "$work/layer")
  printf '{"architecture":"amd64","os":"linux","config":{"Env":["PATH=/usr/local/bin","ENVOY_DYNAMIC_MODULES_SEARCH_PATH=/usr/lib/tandem"],"Entrypoint":%s},"rootfs":{"type":"layers","diff_ids":["%s"]}}' \
    "$entrypoint" "$(cut -d'"' -f4 <<<"$layer")" > "$work/config"
  config=$(blob "$work/config")
  printf '{"schemaVersion":2,"mediaType":"application/vnd.oci.image.manifest.v1+json","config":{"mediaType":"application/vnd.oci.image.config.v1+json",%s},"layers":[{"mediaType":"application/vnd.oci.image.layer.v1.tar",%s}]}' \
    "$config" "$layer" > "$work/manifest"
  manifest=$(blob "$work/manifest")
  printf '{"schemaVersion":2,"manifests":[{"mediaType":"application/vnd.oci.image.manifest.v1+json",%s,"platform":{"architecture":"amd64","os":"linux"}}]}' \
    "$manifest" > "$work/layout/index.json"
  printf '{"imageLayoutVersion":"1.0.0"}' > "$work/layout/oci-layout"
  tar -C "$work/layout" -cf "$dir/${name//\//%}.tar" .
  rm -rf "$work"
}

image tandem.test/pause:1 '["sleep","infinity"]' /bin/sleep
image tandem.test/envoy:1.40.0 '["envoy"]' "$envoy=envoy"
# As deploy/Dockerfile --target inside makes it, but of this machine's libraries.
image registry.test/tandem-envoy:v1 '["envoy"]' "$envoy=envoy" "$root/bin/libtandem.so=/usr/lib/tandem/libtandem.so" "$root/bin/tandem"
image tandem.test/enginesim:1 '["enginesim"]' "$root/bin/enginesim"
image tandem.test/redis:1 '["redis-server"]' "$(command -v "${REDIS_SERVER:-redis-server}")=redis-server"
image tandem.test/ratelimit:1 '["ratelimit"]' "$bin/ratelimit"
# The last is the name that a build of Envoy Gateway from modules has for the helper beside each Envoy.
image docker.io/envoyproxy/gateway:v1.9.1 '["envoy-gateway"]' "$bin/envoy-gateway"
cp "$dir/docker.io%envoyproxy%gateway:v1.9.1.tar" "$dir/docker.io%envoyproxy%gateway-dev:latest.tar"
"$root/deploy/oci.sh" "$dir/registry.test%tandem:v1.tar" amd64
