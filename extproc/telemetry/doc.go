// Package telemetry observes requests: metrics, traces, and the latest requests for operators.
//
//   - [Metrics] counts, for Prometheus; [Totals] are the same counts in a compact form that is read every second.
//   - [Meter] measures one ext_proc stream: its phases, and its span if the request is traced.
//   - [Recent] keeps the traces of the latest requests.
//   - [Observer] is all of these, and the log: handlers report to it, and to nothing else.
//
// Nothing in here changes a request.
package telemetry
