// Package sglang holds Tandem and a real Envoy against real SGLang on a CPU: 2 prefill and 2 decode servers with NIXL, and one
// without disaggregation. Greedy text of the tiny model depends on every token of the prompt, so KV that was lost or somebody
// else's shows as other text; the reference says what is right. What a client sees is compared whole: every member of an
// answer but ids, times and what differs between the roles by design (answer_test.go).
//
// It needs the build tag sglang, bin/tandem, and an Envoy ($ENVOY, PATH, or .tools/bin/envoy): make e2e-sglang. Like all of
// e2e it imports no package of ours but e2e/loopback.
package sglang
