package prefixindex

// walk visits the blocks of a prompt at which the holders change.
type walk struct {
	reading
	hashes []uint64
	ahead  ahead
}

// blockAt is a block of the prompt: its position, its number, and its tally, which is 0 without holders.
type blockAt struct {
	depth int
	id    uint32
	tally uint32
}

// block returns block id, 0 for none, at that depth.
func (w *walk) block(depth int, id uint32) blockAt {
	if id == 0 {
		return blockAt{depth: depth}
	}
	return blockAt{depth, id, w.tally(id)}
}

// touch loads the holders of a block into the cache while the search for the next change goes on.
func (r *reading) touch(id uint32) {
	n := r.at(id)
	if n == nil {
		return
	}
	if holders := uint32(n.rest.Load()); holders&isSet != 0 {
		if set := r.setAt(holders &^ isSet); len(set) > 2*cacheLine {
			set[0].Load()
			set[cacheLine].Load()
			set[2*cacheLine].Load()
		}
	}
}

// cacheLine is the number of words of a set that one memory access reads.
const cacheLine = 16

// leap finds the next block with other holders (bad) and the block before it (good), in growing steps and a search
// within the last one. The first step is as long as the leap before it. After the prompt's end there is a block
// without holders.
func (w *walk) leap(from blockAt, step int) (good, bad blockAt) {
	good, bad = from, blockAt{depth: len(w.hashes)}
	if step <= shortLeap {
		var found bool
		if good, bad, found = w.stride(from, min(from.depth+2*step, len(w.hashes)-1)); found {
			return good, bad
		}
	}
	for ; good.depth+1 < bad.depth && bad.depth == len(w.hashes); step *= 2 {
		at := min(good.depth+step, len(w.hashes)-1)
		w.try(at, good.plus(at-good.depth).id, &good, &bad)
	}
	for bad.depth-good.depth > 1 {
		half := (bad.depth - good.depth) / 2
		w.try(good.depth+half, good.plus(half).id, &good, &bad)
	}
	return good, bad
}

// try moves one of two blocks to a depth between them: good if the same members hold the block there, else bad. guess
// may be the block's number.
func (w *walk) try(depth int, guess uint32, good, bad *blockAt) {
	if at := w.block(depth, w.find(w.hashes[depth], guess)); at.tally == good.tally {
		*good = at
	} else {
		*bad = at
	}
}

// shortLeap is the distance up to which it is faster to look at one block after the other.
const shortLeap = 16

// stride reads one block after the other up to about the one at end. If found, good and bad are as in leap; else
// good is the last block read.
func (w *walk) stride(from blockAt, end int) (good, bad blockAt, found bool) {
	good, bad = from, blockAt{depth: len(w.hashes)}
	for good.depth < end && !found {
		if good, bad, found = w.row(good, end); !found && good.depth < end {
			good, bad, found = w.apart(good)
		}
	}
	return good, bad, found
}

// row is stride as long as the blocks' numbers are consecutive.
func (w *walk) row(from blockAt, end int) (good, bad blockAt, found bool) {
	bad.depth = len(w.hashes)
	i := from.id % chunkBlocks
	if int(from.id/chunkBlocks) >= len(w.chunks) {
		return from, bad, false
	}
	c := w.chunks[from.id/chunkBlocks]
	hashes := w.hashes[from.depth+1 : end+1]
	hashes = hashes[:min(len(hashes), int(chunkBlocks-1-i))]
	for k, hash := range hashes {
		j := i + 1 + uint32(k)
		if c.blocks[j].hash.Load() != hash {
			return from.plus(k), bad, false
		}
		if t := c.tallies[j].Load(); t != from.tally {
			bad = from.plus(k + 1)
			bad.tally = t
			return from.plus(k), bad, true
		}
	}
	return from.plus(len(hashes)), bad, false
}

// plus returns the block n places on, with a consecutive number and the same tally.
func (b blockAt) plus(n int) blockAt {
	return blockAt{b.depth + n, b.id + uint32(n), b.tally}
}

// ahead are later blocks whose numbers are not consecutive: every fourth after the one at depth from. The blocks
// between are found backwards from the next of them, because every block has the number of its predecessor.
type ahead struct {
	from int
	ids  [findAtOnce]uint32
	n    int
}

const aheadStep = 4

// apart is stride for blocks whose numbers are not consecutive: it moves to the next block that can be found without
// those between.
func (w *walk) apart(from blockAt) (good, bad blockAt, found bool) {
	if from.depth < w.ahead.from || from.depth >= w.ahead.from+w.ahead.n*aheadStep {
		w.lookAhead(from.depth)
	}
	good, bad = from, blockAt{depth: len(w.hashes)}
	if k := (from.depth - w.ahead.from) / aheadStep; k < w.ahead.n {
		at := w.block(w.ahead.from+(k+1)*aheadStep, w.ahead.ids[k])
		if at.tally == good.tally {
			return at, bad, false
		}
		bad = at
	}
	for bad.depth-good.depth > 1 {
		w.try(bad.depth-1, w.before(bad.id), &good, &bad)
	}
	return good, bad, true
}

// lookAhead finds blocks after the one at that depth.
func (w *walk) lookAhead(from int) {
	var hashes [findAtOnce]uint64
	n := 0
	for at := from + aheadStep; at < len(w.hashes) && n < findAtOnce; at += aheadStep {
		hashes[n] = w.hashes[at]
		n++
	}
	w.ahead.from, w.ahead.n = from, n
	w.findAll(hashes[:n], &w.ahead.ids)
}
