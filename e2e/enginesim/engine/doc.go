// Package engine is the simulated engine without HTTP and without other engines: prompts as hashes of their KV blocks
// (tokens.go), KV blocks with a prefix cache (cache.go) and the events about it (kvevents.go), answers that are a
// function of every token of the prompt (output.go), and jobs that go through admission, prefill and decode at the
// configured speeds (job.go). Its jobs call a Transfer at their stages, which moves KV between engines.
package engine
