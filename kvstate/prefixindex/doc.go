// Package prefixindex records which engines hold the KV cache of which prompt prefixes.
//
//  1. An engine becomes an [Owner] of an [Index] by [Index.Join]. Prompts that are routed to it are added
//     ([Owner.Add]): a guess, in blocks of text.
//  2. KV events of an engine go into a [Feed] ([Owner.NewFeed]): exact, in blocks of tokens. The hashes are ours
//     (tokenblocks.go); a block whose predecessor is unknown waits as an orphan (orphans.go).
//  3. [TokenMemory] connects the two: the token blocks of prompts whose text was seen before.
//  4. [Lookup.Find] returns the number of leading blocks of a prompt that each candidate holds. It takes no lock and
//     allocates nothing.
//
// The index knows members by slots, not endpoints: package kvstate maps one to the other. Memory is bounded
// ([Limits]): each member forgets by generations within its share.
package prefixindex
