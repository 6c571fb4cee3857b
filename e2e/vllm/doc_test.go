//go:build vllm

// Package vllm checks Tandem against real vLLM engines with NIXL, on this machine's CPU.
//
// install.sh installs vLLM, run.sh starts two prefill and two decode engines and a fifth without KV transfer, the
// reference, and runs these tests, which start Envoy and Tandem in front of the four. Everything is compared with the
// reference: the model is small and random, but its greedy text depends on every token of the prompt, so lost, stale
// or foreign KV changes the text. The engines' own metrics show whether P/D took place at all.
//
// More runs have engines of their own, for example NIXL push and Mooncake, whose legs run at once (TestRealPairs;
// mooncake.sh), ExampleConnector, and MultiConnector of NIXL and it (TestRealStores).
// TestRealInsured has Tandem inside Envoy, and kills an engine at its end: it runs only if TANDEM_LIBRARY is set.
//
// It needs the build tag vllm, bin/tandem, and an Envoy ($ENVOY, PATH, or .tools/bin/envoy): make e2e-vllm. Like all
// of e2e it imports no package of ours.
package vllm
