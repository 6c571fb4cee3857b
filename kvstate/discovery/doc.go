// Package discovery writes endpoints and their health into the state, concurrently with the request path.
//
// [Static] holds a configured list and resolves its names regularly, because Envoy connects to addresses only.
// [Prober] checks endpoints' health and asks for their models: often those that failed a request, seldom the others.
//
// [Kubernetes] and [InferencePool] follow a cluster's pods, [File] a list that others write, [DNS] names. [Facts] asks
// the engines of pods for properties that labels do not contain: their role, their release, their bootstrap port.
package discovery
