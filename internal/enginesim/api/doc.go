// Package api is the simulator's HTTP side: the generating APIs (openai_*.go, anthropic.go, generate.go, sglang.go; sse.go sends streams),
// the small ones (small.go), and what tests and benchmarks ask (record.go, inject.go, metrics.go). A Server is a connector.Node behind
// an HTTP port, a call one generating request, an answer what is written of it.
package api
