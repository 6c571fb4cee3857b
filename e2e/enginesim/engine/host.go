package engine

import "container/list"

// hostTier is CPU memory behind the GPU's, as vLLM's OffloadingConnector uses it: what is stored in GPU memory is
// copied there, and stays when GPU memory needs the room. The least recently used block goes first. The pool's lock
// guards it. Nil: there is none.
type hostTier struct {
	most   int // blocks
	byKey  map[uint64]*list.Element
	recent list.List // of hostBlock, the last used first
}

type hostBlock struct{ key, full uint64 }

func newHostTier(blocks int) *hostTier {
	if blocks == 0 {
		return nil
	}
	return &hostTier{most: blocks, byKey: map[uint64]*list.Element{}}
}

// put copies a block, and returns the key of the one that makes room for it; 0 for none. It is stored if it is new.
func (h *hostTier) put(key, full uint64) (stored bool, gone uint64) {
	if at, ok := h.byKey[key]; ok {
		h.recent.MoveToFront(at)
		return false, 0
	}
	if h.recent.Len() == h.most {
		gone = h.recent.Remove(h.recent.Back()).(hostBlock).key
		delete(h.byKey, gone)
	}
	h.byKey[key] = h.recent.PushFront(hostBlock{key, full})
	return true, gone
}

// get returns a block's content.
func (h *hostTier) get(key uint64) (full uint64, ok bool) {
	if h == nil {
		return 0, false
	}
	at, ok := h.byKey[key]
	if !ok {
		return 0, false
	}
	h.recent.MoveToFront(at)
	return at.Value.(hostBlock).full, true
}

func (h *hostTier) clear() {
	if h != nil {
		*h = *newHostTier(h.most)
	}
}
