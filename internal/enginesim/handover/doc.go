// Package handover is how KV goes from one engine to another: the ledger of what a prefill engine keeps for whom and until when, and
// the side channel over which the other one asks for it.
package handover
