package recorder

import "github.com/cespare/xxhash/v2"

// conversations finds the prompt that another one extends, byte for byte. What it forgot, or where too many prompts
// are alike, begins a conversation anew: none is found that is not one.
type conversations struct {
	slots []tip
	next  int
	heads map[uint64]int32 // the latest slot of a key
}

// tip is the end of a prompt.
type tip struct {
	key    uint64 // of its last whole block; of its model, if it has none
	tail   uint64 // hash of what follows that block ...
	bytes  int    // length of that prompt in bytes
	blocks int
	number uint64 // of its line
	root   uint64 // of the line that began its conversation
	ended  float64
	prev   int32 // slot of the previous one with this key; -1: none
	slot   int32
}

const (
	maxTips = 1 << 15
	// How many prompts that end in one block are compared: thousands may share a system prompt, and have no more.
	maxAlike = 16
)

func newConversations() *conversations { return &conversations{heads: map[uint64]int32{}} }

// tipOf returns the end of a prompt.
func tipOf(c *Choice) tip {
	t := tip{blocks: len(c.Blocks), key: keyAt(c, len(c.Blocks))}
	if rest := c.Text[min(t.blocks*blockBytes, len(c.Text)):]; len(rest) > 0 {
		t.tail, t.bytes = xxhash.Sum64(rest), len(rest)
	}
	return t
}

// keyAt returns the key of a prompt's first n blocks.
func keyAt(c *Choice, n int) uint64 {
	if n > 0 {
		return c.Blocks[n-1]
	}
	return xxhash.Sum64String(c.Model)
}

// extended returns the longest earlier prompt with which a prompt begins, and that it is not itself.
func (t *conversations) extended(c *Choice) (*tip, bool) {
	for n := len(c.Blocks); n >= 0; n-- {
		at, ok := t.heads[keyAt(c, n)]
		for tries := 0; ok && at >= 0 && tries < maxAlike; tries++ {
			before := &t.slots[at]
			if before.key != keyAt(c, n) || before.blocks != n {
				break // its slot is another's now
			}
			if before.begins(c) {
				return before, true
			}
			at = before.prev
		}
	}
	return nil, false
}

// begins reports whether a prompt begins with this one and goes on.
func (t *tip) begins(c *Choice) bool {
	if c.Text == nil { // it has media, so nothing but its blocks is known
		return t.blocks > 0 && t.bytes == 0 && len(c.Blocks) > t.blocks
	}
	rest := c.Text[min(t.blocks*blockBytes, len(c.Text)):]
	return len(rest) > t.bytes && (t.bytes == 0 || xxhash.Sum64(rest[:t.bytes]) == t.tail)
}

// add adds the end of a prompt in place of the oldest, and returns its slot.
func (t *conversations) add(x *tip) int32 {
	if len(t.slots) < maxTips {
		t.slots = append(t.slots, tip{})
	}
	slot := int32(t.next)
	t.next = (t.next + 1) % maxTips
	if old := &t.slots[slot]; old.number > 0 && t.heads[old.key] == slot {
		delete(t.heads, old.key)
	}
	before, ok := t.heads[x.key]
	if x.prev = -1; ok {
		x.prev = before
	}
	x.slot = slot
	t.slots[slot], t.heads[x.key] = *x, slot
	return slot
}

// ended records when the answer to a prompt ended.
func (t *conversations) ended(x *tip, at float64) {
	if s := &t.slots[x.slot]; s.number == x.number {
		s.ended = max(at, 1e-6)
	}
}
