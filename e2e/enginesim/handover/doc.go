// Package handover moves KV from one engine to another: the ledger of the blocks that a prefill engine keeps, for whom
// and until when, and the side channel over which the other engine asks for them.
package handover
