#!/bin/bash
# Programs for the opt-in Kubernetes checks, built from Go modules into $TANDEM_KUBE_BIN (default ~/.cache/tandem/bin), once:
#   scripts/kube-tools.sh kustomize helm             small: a minute or two each
#   scripts/kube-tools.sh etcd                       likewise
#   scripts/kube-tools.sh envoy-gateway              large: some minutes, 3 GB of memory
#   scripts/kube-tools.sh kube-apiserver             large: some minutes, 2 GB of memory
#   scripts/kube-tools.sh cluster                    the rest of a cluster: kubelet, containerd, CoreDNS... (20 minutes of one core)
# Nothing is downloaded but Go modules, and nothing is written into the tree. Neither Debian, PyPI nor npm has a kube-apiserver
# of this age; who has a binary of one of these puts it into that folder.
set -euo pipefail

bin=${TANDEM_KUBE_BIN:-$HOME/.cache/tandem/bin}
gateway=v1.9.1 kustomize=v5.7.1 helm=v3.19.0 kubernetes=v1.36.3 etcd=v3.6.8 containerd=v2.2.9 cni=v1.9.1 coredns=v1.14.7
ratelimit=v1.4.1-0.20260122083618-3fb702589d36
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

# kubernetes NAME: the module's staging dependencies are replaced by folders of its own tree, which Go's proxy serves as
# modules with a version beside it.
kubernetes() {
  mkdir -p "$work/$1" && cd "$work/$1"
  go mod init tandem.build/tool >/dev/null 2>&1
  local staging=v0.${kubernetes#v1.} module package=k8s.io/component-base/version
  for module in $(go mod download -json "k8s.io/kubernetes@$kubernetes" | awk -F'"' '$2 == "GoMod" {print $4}' | xargs awk '$1 ~ /^k8s.io\// && $2 == "v0.0.0" {print $1}'); do
    go mod edit -replace="$module=$module@$staging"
  done
  CGO_ENABLED=0 build "$1" "k8s.io/kubernetes/cmd/$1" "k8s.io/kubernetes@$kubernetes" \
    "-X $package.gitVersion=$kubernetes -X $package.gitMajor=1 -X $package.gitMinor=$(cut -d. -f2 <<<"$kubernetes")"
}

# core_dns: with the three plugins that e2e/cluster uses, of many.
core_dns() {
  mkdir -p "$work/coredns" && cd "$work/coredns"
  cat > main.go <<'GO'
package main

import (
	"github.com/coredns/coredns/core/dnsserver"
	"github.com/coredns/coredns/coremain"
	_ "github.com/coredns/coredns/plugin/bind"
	_ "github.com/coredns/coredns/plugin/errors"
	_ "github.com/coredns/coredns/plugin/kubernetes"
)

func main() {
	dnsserver.Directives = []string{"bind", "errors", "kubernetes"}
	coremain.Run()
}
GO
  CGO_ENABLED=0 build coredns . github.com/coredns/coredns@$coredns
}

tools=("$@")
[ "$*" != cluster ] || tools=(helm etcd envoy-gateway kube-apiserver kubelet kube-controller-manager kube-scheduler kube-proxy kubectl
  containerd containerd-shim-runc-v2 ctr ptp host-local loopback coredns ratelimit)
for tool in "${tools[@]}"; do
  [ -x "$bin/$tool" ] && continue
  echo "building $tool into $bin" >&2
  case $tool in
  kustomize) build kustomize sigs.k8s.io/kustomize/kustomize/v5 sigs.k8s.io/kustomize/kustomize/v5@$kustomize ;;
  helm) build helm helm.sh/helm/v3/cmd/helm helm.sh/helm/v3@$helm ;;
  etcd) build etcd go.etcd.io/etcd/server/v3 go.etcd.io/etcd/server/v3@$etcd ;;
  kube-*|kubelet|kubectl) kubernetes "$tool" ;;
  containerd*|ctr) CGO_ENABLED=0 build "$tool" github.com/containerd/containerd/v2/cmd/$tool github.com/containerd/containerd/v2@$containerd ;;
  ptp) CGO_ENABLED=0 build ptp github.com/containernetworking/plugins/plugins/main/ptp github.com/containernetworking/plugins@$cni ;;
  loopback) CGO_ENABLED=0 build loopback github.com/containernetworking/plugins/plugins/main/loopback github.com/containernetworking/plugins@$cni ;;
  host-local) CGO_ENABLED=0 build host-local github.com/containernetworking/plugins/plugins/ipam/host-local github.com/containernetworking/plugins@$cni ;;
  coredns) core_dns ;;
  ratelimit) CGO_ENABLED=0 build ratelimit github.com/envoyproxy/ratelimit/src/service_cmd github.com/envoyproxy/ratelimit@$ratelimit ;;
  envoy-gateway) GOBIN=$bin go install "github.com/envoyproxy/gateway/cmd/$tool@$gateway" ;;
  *) echo "kube-tools.sh: unknown tool $tool" >&2; exit 1 ;;
  esac
done
