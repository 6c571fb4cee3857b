// Package api is the simulator's HTTP side: the generating APIs (openai_*.go, anthropic.go, generate.go, sglang.go;
// sse.go sends streams), the small ones (small.go), and those for tests and benchmarks (record.go, inject.go,
// metrics.go). A Server is a connector.Node behind an HTTP port, a call is one generating request, and an answer is
// its output.
package api
