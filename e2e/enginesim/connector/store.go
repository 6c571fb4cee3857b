package connector

import (
	"context"
	"sync"
	"time"

	"tandem/e2e/enginesim/handover"
)

// store is a KV store that engines share: a block's name is its content. It lives in one engine, on its side channel;
// the others get that address (-store).
type store struct {
	s    *Node
	addr string // "": this engine has it

	mu     sync.Mutex
	blocks map[uint64]struct{}
}

const maxStored = 4 << 20 // blocks; beyond that the store is emptied

func newStore(s *Node, addr string) *store {
	return &store{s: s, addr: addr, blocks: map[uint64]struct{}{}}
}

func (t *store) put(blocks []uint64) {
	if t.addr != "" {
		_, _ = t.ask(handover.OpStorePut, blocks)
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.blocks)+len(blocks) > maxStored {
		clear(t.blocks)
	}
	for _, b := range blocks {
		t.blocks[b] = struct{}{}
	}
}

// has reports whether all of the blocks are there. A store that does not answer has none.
func (t *store) has(blocks []uint64) bool {
	if t.addr != "" {
		answer, err := t.ask(handover.OpStoreHas, blocks)
		return err == nil && answer.Blocks == 1
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, b := range blocks {
		if _, ok := t.blocks[b]; !ok {
			return false
		}
	}
	return true
}

func (t *store) ask(op byte, blocks []uint64) (handover.Answer, error) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	return t.s.peers.Ask(ctx, t.addr, &handover.Question{Op: op, Want: blocks})
}
