#!/bin/bash
# A Kubernetes cluster of one node on this machine, for as long as a command runs: etcd, kube-apiserver, controller manager,
# scheduler, kubelet, kube-proxy (nftables), containerd, runc, CNI's ptp, CoreDNS. All of it lives in namespaces of its own
# (mounts, network, processes), so nothing of it is left after the command. Needs root, and nft and runc.
#   node.sh DIRECTORY COMMAND...     DIRECTORY holds data and logs; the command gets $KUBECONFIG
set -euo pipefail
dir=$(realpath "${1:?a directory}") bin=${TANDEM_KUBE_BIN:-$HOME/.cache/tandem/bin}
group=/tandem-cluster node=10.200.0.1
if [ -z "${IN_NODE:-}" ]; then
  clean() { # cgroups outlive the processes; they are empty once these are gone
    find /sys/fs/cgroup -depth -path "*$group*" -type d -exec rmdir {} + 2>/dev/null || true
  }
  trap clean EXIT
  clean
  IN_NODE=1 unshare --mount --propagation private --net --pid --fork --kill-child --mount-proc "$0" "$@"
  exit
fi
shift

# What is written outside of DIRECTORY is written to memory, and the kubelet changes no setting of this machine.
mount --make-rshared /
mount -t tmpfs tmpfs /run
for setting in vm/overcommit_memory vm/panic_on_oom kernel/panic kernel/panic_on_oops kernel/keys/root_maxkeys kernel/keys/root_maxbytes; do
  cat /proc/sys/$setting > "$dir/${setting//\//.}" && mount --bind "$dir/${setting//\//.}" /proc/sys/$setting # the kubelet writes these
done
printf '127.0.0.1 localhost registry-1.docker.io docker.io\n' > "$dir/hosts" && mount --bind "$dir/hosts" /etc/hosts
ip link set lo up
ip link add node type bridge && ip addr add $node/24 dev node && ip link set node up && ip route add default dev node
echo 1 > /proc/sys/net/ipv4/ip_forward
for controller in /sys/fs/cgroup/*/; do mkdir -p "$controller$group" 2>/dev/null || true; done
if [ -e /sys/fs/cgroup/cpuset$group ]; then # a new group of version 1 has no CPU
  for file in cpuset.cpus cpuset.mems; do cat /sys/fs/cgroup/cpuset/$file > /sys/fs/cgroup/cpuset$group/$file; done
fi

mkdir -p "$dir"/{logs,pods,cni,etcd,certs}
run() { local name=$1; shift; "$@" > "$dir/logs/$name.log" 2>&1 & }
await() { # NAME COMMAND...
  local name=$1; shift
  for _ in $(seq 600); do "$@" >/dev/null 2>&1 && { echo "$name: $SECONDS s"; return; }; sleep 0.2; done
  echo "node.sh: $name does not come up" >&2
  tail -n 20 "$dir"/logs/*.log >&2
  exit 1
}

# The control plane. Its certificate is its own; the administrator, the node's programs and DNS share one token.
token=$(openssl rand -hex 16)
echo "$token,admin,1,system:masters" > "$dir/tokens.csv"
openssl genrsa -out "$dir/account.key" 2048 2>/dev/null
run etcd "$bin/etcd" --data-dir "$dir/etcd" --unsafe-no-fsync --listen-client-urls http://127.0.0.1:2379 --advertise-client-urls http://127.0.0.1:2379
run kube-apiserver "$bin/kube-apiserver" --etcd-servers=http://127.0.0.1:2379 --advertise-address=$node --secure-port=6443 \
  --cert-dir="$dir/certs" --service-account-issuer=https://kubernetes.default.svc --service-account-key-file="$dir/account.key" \
  --service-account-signing-key-file="$dir/account.key" --service-cluster-ip-range=10.96.0.0/16 --token-auth-file="$dir/tokens.csv" \
  --authorization-mode=RBAC --allow-privileged --kubelet-preferred-address-types=InternalIP
export KUBECONFIG=$dir/kubeconfig
cat > "$KUBECONFIG" <<Y
apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: "https://$node:6443", certificate-authority: "$dir/certs/apiserver.crt"}}]
users: [{name: u, user: {token: $token}}]
contexts: [{name: x, context: {cluster: c, user: u}}]
current-context: x
Y
await kube-apiserver "$bin/kubectl" get --raw /readyz
run kube-controller-manager "$bin/kube-controller-manager" --kubeconfig="$KUBECONFIG" --leader-elect=false --bind-address=127.0.0.1 \
  --service-account-private-key-file="$dir/account.key" --root-ca-file="$dir/certs/apiserver.crt"
run kube-scheduler "$bin/kube-scheduler" --kubeconfig="$KUBECONFIG" --leader-elect=false --bind-address=127.0.0.1

# The node. Pods have addresses of 10.201.0.0/24, each on a wire of its own to the node, which routes between them.
cat > "$dir/containerd.toml" <<T
version = 3
root = "$dir/containerd"
state = "/run/containerd"
[grpc]
address = "/run/containerd/containerd.sock"
[plugins.'io.containerd.cri.v1.images'.pinned_images]
sandbox = "tandem.test/pause:1"
[plugins.'io.containerd.cri.v1.runtime']
restrict_oom_score_adj = true # a machine may forbid what a node would set
[plugins.'io.containerd.cri.v1.runtime'.cni]
bin_dirs = ["$bin"]
conf_dir = "$dir/cni"
T
cat > "$dir/cni/pods.conflist" <<J
{"cniVersion": "1.0.0", "name": "pods", "plugins": [{"type": "ptp", "ipam": {"type": "host-local", "dataDir": "/run/cni",
  "ranges": [[{"subnet": "10.201.0.0/24"}]], "routes": [{"dst": "0.0.0.0/0"}]}}]}
J
PATH=$bin:$PATH run containerd "$bin/containerd" --config "$dir/containerd.toml"
await containerd "$bin/ctr" version
for image in "$dir"/images/*.tar; do
  name=$(basename "$image" .tar)
  await "image ${name//%//}" "$bin/ctr" -n k8s.io images import --index-name "${name//%//}" "$image"
done
cat > "$dir/kubelet.yaml" <<Y
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
address: $node
authentication: {anonymous: {enabled: true}, webhook: {enabled: false}}
authorization: {mode: AlwaysAllow}
cgroupDriver: cgroupfs
cgroupRoot: $group
clusterDNS: [$node]
clusterDomain: cluster.local
containerRuntimeEndpoint: unix:///run/containerd/containerd.sock
enforceNodeAllocatable: []
evictionHard: {memory.available: 100Mi}
failCgroupV1: false
failSwapOn: false
imageGCHighThresholdPercent: 100
localStorageCapacityIsolation: false
podLogsDir: $dir/pods
resolvConf: ""
volumePluginDir: $dir/plugins
Y
run kubelet "$bin/kubelet" --config="$dir/kubelet.yaml" --kubeconfig="$KUBECONFIG" --root-dir="$dir/kubelet" --cert-dir="$dir/kubelet-pki" \
  --hostname-override=node --node-ip=$node
cat > "$dir/kube-proxy.yaml" <<Y
apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
clientConnection: {kubeconfig: "$KUBECONFIG"}
clusterCIDR: 10.201.0.0/24
conntrack: {maxPerCore: 0, tcpEstablishedTimeout: 0s, tcpCloseWaitTimeout: 0s}
hostnameOverride: node
mode: nftables
Y
run kube-proxy "$bin/kube-proxy" --config="$dir/kube-proxy.yaml"
cat > "$dir/Corefile" <<C
.:53 {
  bind $node
  errors
  kubernetes cluster.local {
    kubeconfig $KUBECONFIG
  }
}
C
run coredns "$bin/coredns" -conf "$dir/Corefile"
await node "$bin/kubectl" wait --for=condition=Ready node/node --timeout=1s
await 'the namespace default' "$bin/kubectl" get serviceaccount default
rc=0
"$@" || rc=$?
[ $rc = 0 ] || echo "node.sh: logs are in $dir/logs and $dir/pods" >&2
exit $rc
