// Package discovery says who exists and who is well: it writes endpoints and their health into the state, beside the
// request path and never inside it.
//
// [Static] keeps a configured list, resolving names again and again, because Envoy connects to addresses only. [Prober]
// asks endpoints for their health and models: those that failed a request every second, the others seldom.
//
// [Kubernetes] and [InferencePool] follow a cluster's pods, [File] a list that others write, [DNS] names. [Facts] asks engines of
// pods for what labels do not say: their role, their release, their bootstrap port.
package discovery
