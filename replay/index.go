package replay

// index is what is known of a prefill endpoint's cache if its engine publishes every block: the blocks it holds, and
// those of prompts on their way to it.
type index struct {
	engine  *prefiller
	pending map[uint64]int32 // number of prompts on their way that have the block
}

func newIndex(engine *prefiller) *index {
	return &index{engine: engine, pending: map[uint64]int32{}}
}

func (x *index) hit(blocks []uint64) int {
	for i, b := range blocks {
		if _, held := x.engine.cache.at[b]; !held && x.pending[b] == 0 {
			return i
		}
	}
	return len(blocks)
}

// add records blocks that are on their way.
func (x *index) add(blocks []uint64) {
	for _, b := range blocks {
		x.pending[b]++
	}
}

// done records that they have arrived.
func (x *index) done(blocks []uint64) {
	for _, b := range blocks {
		if x.pending[b]--; x.pending[b] <= 0 {
			delete(x.pending, b)
		}
	}
}
