package kvstate

import (
	"time"

	"tandem/kvstate/paramstore"
)

// With NIXL pull in both directions, a turn of a conversation leaves its blocks on the decode endpoint that answered.
// The state stores the data by which the next turn finds them, under the conversation's name: the latest turn only,
// for one use, and for less time than the engine holds the blocks. With several replicas it is stored in Redis only. A
// second copy could be used a second time, and blocks are read by number: by then they may belong to another prompt. So
// where others may write to Redis, who could put a used one back, it is stored at the replica that served the turn, and
// only that one uses it ([State.KeepTurnsHere], docs/adr/0100).

// MaxConversationBytes bounds the stored state of one turn, most of which are block ids.
const MaxConversationBytes = 1 << 20

// maxConversationsBytes bounds all of them in this replica's memory.
const maxConversationsBytes = 64 << 20

// PutConversation stores a copy of the state of a conversation's last turn for ttl, and replaces the previous one.
// With [paramstore.ErrFull] nothing is stored, and the previous one is removed.
func (s *HandOvers) PutConversation(conversation [16]byte, turn []byte, ttl time.Duration) error {
	if s.link.sharesTurns() {
		if len(turn) > MaxConversationBytes {
			_, _ = s.link.replicas.TakeConversation(conversation)
			return paramstore.ErrFull
		}
		s.link.replicas.PutConversation(conversation, turn, ttl)
		return nil
	}
	s.conversations.Take(conversation)
	if len(turn) > MaxConversationBytes {
		return paramstore.ErrFull
	}
	return s.conversations.PutFor(conversation, turn, ttl)
}

// TakeConversation returns and removes the state of a conversation.
func (s *HandOvers) TakeConversation(conversation [16]byte) ([]byte, bool) {
	if s.link.sharesTurns() {
		return s.link.replicas.TakeConversation(conversation)
	}
	return s.conversations.Take(conversation)
}
