// Engine is the engine: KV blocks, a prefill that computes one prompt after another, decode steps that all answers
// share, and the counts of all of it.
package engine
