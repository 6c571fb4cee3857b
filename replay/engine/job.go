package engine

// BlockTokens is the number of tokens that one block of a prompt stands for (Mooncake's format: 512).
const BlockTokens = 512

// Job is a request as engines see it.
type Job struct {
	ID     uint64   // for the caller
	Input  int      // tokens of the prompt, at least 1
	Output int      // tokens of the answer, at least 1
	Blocks []uint64 // of the prompt, BlockTokens tokens each, the last possibly shorter

	// Of the prompt and its answer, when a later prompt may contain both: Blocks are its beginning. The last block of
	// the prompt, if it is shorter, goes on with the answer. nil: nobody asks for the answer's KV.
	Kept []uint64

	// Where others share the beginning of a block of its prompt, but not all of it: a shared system prompt ends there.
	Part Part

	leg      Leg
	from     *Engine // holds its KV until it is fetched
	computed int     // tokens of the prompt that are computed or were cached
	cached   int     // of those, the ones that were cached when it was given memory the last time
	ends     int     // the step of its engine that completes the answer
	joined   int     // its place in the order in which answers began there
	written  int     // tokens of its answer when it was preempted; their KV has to be computed again
}

// Part is the beginning of a block.
type Part struct {
	Behind int    // so many whole blocks
	Tokens int    // 0: there is none
	ID     uint64 // of all that is shared
}

// CachedTokens returns the tokens of the prompt that need not be computed where so many of its blocks are cached. The
// last token is computed in any case.
func (j *Job) CachedTokens(blocks int) int { return j.cachedTokens(blocks, 0) }

// cachedTokens is CachedTokens where so many tokens of the next block are cached, too.
func (j *Job) cachedTokens(whole, tokens int) int { return min(whole*BlockTokens+tokens, j.Input-1) }

// Leg is what an engine does for a request.
type Leg uint8

// The legs.
const (
	Both    Leg = iota // compute the prompt and write the answer
	Prefill            // compute the prompt, and hold its KV until another engine has fetched it
	Decode             // fetch the KV and write the answer
)

// length returns the number of tokens to compute: the prompt, and the written part of an answer that was preempted.
func (j *Job) length() int { return j.Input + j.written }

// have returns the blocks that are computed, and the tokens of the last one.
func (j *Job) have() (blocks []uint64, last int) {
	if j.computed >= j.Input {
		return j.Blocks, j.ofLast(j.Blocks, j.Input)
	}
	return j.Blocks[:min(j.computed/BlockTokens, len(j.Blocks))], BlockTokens
}

// ofLast returns how many of so many tokens the last of their blocks has. It counts as whole if no later prompt
// continues it.
func (j *Job) ofLast(blocks []uint64, tokens int) int {
	if j.Kept == nil || len(blocks) == 0 {
		return BlockTokens
	}
	return tokens - (len(blocks)-1)*BlockTokens
}

// loose returns the tokens that its blocks do not count: those of the answer, less the empty end of the last block.
func (j *Job) loose() int { return j.length() - len(j.Blocks)*BlockTokens }

// batch is running answers, a heap: the one that ends first is first.
type batch []*Job

func (b *batch) push(j *Job) {
	*b = append(*b, j)
	all := *b
	for i := len(all) - 1; i > 0; {
		up := (i - 1) / 2
		if all[up].ends <= all[i].ends {
			break
		}
		all[up], all[i] = all[i], all[up]
		i = up
	}
}

func (b *batch) pop() *Job {
	all := *b
	top, last := all[0], len(all)-1
	all[0] = all[last]
	*b = all[:last]
	for i := 0; ; {
		least := i
		for down := 2*i + 1; down <= 2*i+2 && down < last; down++ {
			if all[down].ends < all[least].ends {
				least = down
			}
		}
		if least == i {
			return top
		}
		all[i], all[least] = all[least], all[i]
		i = least
	}
}

// popYoungest removes the answer that began last.
func (b *batch) popYoungest() *Job {
	all, at := *b, 0
	for i, j := range all {
		if j.joined > all[at].joined {
			at = i
		}
	}
	youngest := all[at]
	*b = all[:0]
	for i, j := range all {
		if i != at {
			b.push(j)
		}
	}
	return youngest
}
