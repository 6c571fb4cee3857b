// Ledger is the prefill engine's side of NIXL pull: finished requests whose blocks it keeps for a decode engine, and
// until when (vLLM's kv_lease_duration, 30 s). A hand-over ends in exactly one of three ways: fetched, released (the
// decode engine refused the request and reported it), or expired.
//
// The outcome of past hand-overs is remembered for a while, to distinguish the second read of one from the read of an
// unknown one.
package handover
