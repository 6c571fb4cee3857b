// Package cluster runs the commands of docs/kubernetes.md and of its tutorial in a Kubernetes cluster of one node that
// node.sh starts on this machine: real containers from real images, the real Envoy Gateway and its own chart.
package cluster
