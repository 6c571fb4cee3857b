// Package engine models a serving engine in virtual time, as vLLM's scheduler works: continuous batching, prompts in
// chunks that share the steps of running answers, one KV memory for running requests and cached prefixes, requests
// admitted in order of arrival. An [Engine] serves every leg of a request: it computes a prompt for another engine, and
// holds its KV until that engine has fetched it; it writes an answer whose KV it fetches; or it does both. What fleets
// give it decides which.
//
// Arrows: it imports picker for the cost model and kvstate for the counters that engines report. Package replay plays
// fleets of engines.
package engine
