#!/bin/bash
# Programs for the opt-in Kubernetes checks, built from Go modules into $TANDEM_KUBE_BIN (default ~/.cache/tandem/bin), once:
#   scripts/kube-tools.sh kustomize helm             small: a minute or two each
#   scripts/kube-tools.sh envoy-gateway              large: some minutes, 3 GB of memory
# Nothing is downloaded but Go modules, and nothing is written into the tree.
set -euo pipefail

bin=${TANDEM_KUBE_BIN:-$HOME/.cache/tandem/bin}
gateway=v1.9.1 kustomize=v5.7.1 helm=v3.19.0
mkdir -p "$bin"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# build NAME PACKAGE MODULE@VERSION: in a module of its own, since some of them have replace directives, which `go install` refuses.
build() {
  mkdir -p "$work/$1" && cd "$work/$1"
  go mod init tandem.build/tool >/dev/null 2>&1
  go mod edit -require="$3"
  printf 'package tool\n\nimport _ "%s"\n' "$2" > tool.go
  go mod tidy -e >tidy.log 2>&1 || { cat tidy.log >&2; return 1; }
  go build -ldflags "-s -w" -o "$bin/$1.new" "$2" # with the flags of `go install`, so that packages are built once for all
  mv "$bin/$1.new" "$bin/$1"
}

for tool in "$@"; do
  [ -x "$bin/$tool" ] && continue
  echo "building $tool into $bin" >&2
  case $tool in
  kustomize) build kustomize sigs.k8s.io/kustomize/kustomize/v5 sigs.k8s.io/kustomize/kustomize/v5@$kustomize ;;
  helm) build helm helm.sh/helm/v3/cmd/helm helm.sh/helm/v3@$helm ;;
  envoy-gateway) GOBIN=$bin go install "github.com/envoyproxy/gateway/cmd/$tool@$gateway" ;;
  *) echo "kube-tools.sh: unknown tool $tool" >&2; exit 1 ;;
  esac
done
