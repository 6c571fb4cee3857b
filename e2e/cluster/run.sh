#!/bin/bash
# The commands of docs/kubernetes.md and of its tutorial, and the chart with engines of its own, in a cluster of one node
# on this machine (make e2e-cluster). Its data and logs are kept in .cache/cluster until the next run.
#   run.sh [argument of the test program...]       TESTS="TestModule": that one alone
set -euo pipefail
cd "$(dirname "$0")"
root=$(cd ../.. && pwd) dir=$root/.cache/cluster
export TANDEM_KUBE_BIN=${TANDEM_KUBE_BIN:-$HOME/.cache/tandem/bin}
for program in nft runc; do
  command -v $program >/dev/null || { echo "run.sh: $program is missing (Debian: apt-get install nftables runc)" >&2; exit 1; }
done
rm -rf "$dir"
mkdir -p "$dir/images"
./images.sh "$dir/images" "${ENVOY:-$root/.tools/bin/envoy}"

# Envoy Gateway's own chart, as its release makes it: the values with the names of images, and the version.
module=$(cd "$dir" && go mod download -json github.com/envoyproxy/gateway@v1.9.1 | sed -n 's/.*"Dir": "\(.*\)".*/\1/p')
cp -r "$module/charts/gateway-helm" "$dir/chart" && chmod -R u+w "$dir/chart"
sed -e 's,${GatewayImage},docker.io/envoyproxy/gateway:v1.9.1,' -e 's,${GatewayImagePullPolicy},IfNotPresent,' \
  "$dir/chart/values.tmpl.yaml" > "$dir/chart/values.yaml"
"$TANDEM_KUBE_BIN/helm" package "$dir/chart" --version v1.9.1 --app-version v1.9.1 -d "$dir"
export TANDEM_CHART=$dir/gateway-helm-v1.9.1.tgz
go test -tags cluster -c -o "$root/bin/cluster.test" . # what needs the network, before there is none
for t in ${TESTS:-TestTutorial TestFiveCommands TestFiveCommandsOnALiveRoute TestChartAlone TestModule}; do # each in a cluster of its own
  mkdir "$dir/$t" && mv "$dir/images" "$dir/$t/images"
  ./node.sh "$dir/$t" "$root/bin/cluster.test" -test.v -test.run "^$t\$" "$@"
  mv "$dir/$t/images" "$dir/images"
done
