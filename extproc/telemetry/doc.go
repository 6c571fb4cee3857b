// Package telemetry is what observes requests: metrics, traces, and the latest requests for people who look.
//
//   - [Metrics] counts, for Prometheus; [Totals] are the same counts, small enough to be read every second.
//   - [Meter] measures one ext_proc stream: its phases, and its span where the request is traced.
//   - [Recent] keeps the traces of the latest requests.
//
// Nothing in here changes a request.
package telemetry
