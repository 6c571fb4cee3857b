// Package sglang tests Tandem and a real Envoy with real SGLang on a CPU: 2 prefill and 2 decode servers with NIXL,
// and one without disaggregation. Greedy text of the tiny model depends on every token of the prompt, so lost or
// foreign KV changes the text; the reference gives the right one. A client's answer is compared as a whole: every
// member but ids, times and the designed differences between the roles (answer_test.go).
//
// It needs the build tag sglang, bin/tandem, and an Envoy ($ENVOY, PATH, or .tools/bin/envoy): make e2e-sglang. Like
// all of e2e it imports no package of ours but e2e/loopback.
package sglang
