#!/bin/bash
# Programs for the opt-in Kubernetes checks, built from Go modules into $TANDEM_KUBE_BIN (default ~/.cache/tandem/bin), once:
#   scripts/kube-tools.sh kustomize helm             small: a minute or two each
#   scripts/kube-tools.sh etcd                       likewise
#   scripts/kube-tools.sh envoy-gateway              large: some minutes, 3 GB of memory
#   scripts/kube-tools.sh kube-apiserver             large: some minutes, 2 GB of memory
# Nothing is downloaded but Go modules, and nothing is written into the tree. Neither Debian, PyPI nor npm has a kube-apiserver
# of this age; who has a binary of one of these puts it into that folder.
set -euo pipefail

bin=${TANDEM_KUBE_BIN:-$HOME/.cache/tandem/bin}
gateway=v1.9.1 kustomize=v5.7.1 helm=v3.19.0 kubernetes=v1.36.3 etcd=v3.6.8
mkdir -p "$bin"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# build NAME PACKAGE MODULE@VERSION [LDFLAGS]: in a module of its own, since some of them have replace directives, which
# `go install` refuses. -mod=mod takes what that package needs and no more.
build() {
  mkdir -p "$work/$1" && cd "$work/$1"
  [ -f go.mod ] || go mod init tandem.build/tool >/dev/null 2>&1
  go mod edit -require="$3"
  # with the compiler flags of `go install`, so that packages are built once for all
  GOFLAGS="${GOFLAGS:-} -mod=mod" go build -ldflags "-s -w ${4:-}" -o "$bin/$1.new" "$2"
  mv "$bin/$1.new" "$bin/$1"
}

# kube_apiserver: the module's staging dependencies are replaced by folders of its own tree, which Go's proxy serves as
# modules with a version beside it.
kube_apiserver() {
  mkdir -p "$work/kube-apiserver" && cd "$work/kube-apiserver"
  go mod init tandem.build/tool >/dev/null 2>&1
  local staging=v0.${kubernetes#v1.} module package=k8s.io/component-base/version
  for module in $(go mod download -json "k8s.io/kubernetes@$kubernetes" | awk -F'"' '$2 == "GoMod" {print $4}' | xargs awk '$1 ~ /^k8s.io\// && $2 == "v0.0.0" {print $1}'); do
    go mod edit -replace="$module=$module@$staging"
  done
  build kube-apiserver k8s.io/kubernetes/cmd/kube-apiserver "k8s.io/kubernetes@$kubernetes" \
    "-X $package.gitVersion=$kubernetes -X $package.gitMajor=1 -X $package.gitMinor=$(cut -d. -f2 <<<"$kubernetes")"
}

for tool in "$@"; do
  [ -x "$bin/$tool" ] && continue
  echo "building $tool into $bin" >&2
  case $tool in
  kustomize) build kustomize sigs.k8s.io/kustomize/kustomize/v5 sigs.k8s.io/kustomize/kustomize/v5@$kustomize ;;
  helm) build helm helm.sh/helm/v3/cmd/helm helm.sh/helm/v3@$helm ;;
  etcd) build etcd go.etcd.io/etcd/server/v3 go.etcd.io/etcd/server/v3@$etcd ;;
  kube-apiserver) kube_apiserver ;;
  envoy-gateway) GOBIN=$bin go install "github.com/envoyproxy/gateway/cmd/$tool@$gateway" ;;
  *) echo "kube-tools.sh: unknown tool $tool" >&2; exit 1 ;;
  esac
done
