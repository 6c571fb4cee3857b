package kvstate

import "time"

// A conversation's turn leaves its blocks on the decode endpoint that answered, where the engines hand KV over both ways (NIXL
// pull, bidirectional). What the next turn needs to find them is kept here under the conversation's name: the latest turn
// alone, for one use, and for less time than the engine keeps the blocks. With other replicas it is kept where all of them
// find it and nowhere else, for a copy that one of them still had after another's use would be a second use: blocks are read
// by number, and may be another prompt's by then.

// MaxTurnBytes bounds what is kept of one turn: its block ids are most of it.
const MaxTurnBytes = 1 << 20

// maxTurnBytes bounds all of them in this replica's memory.
const maxTurnBytes = 64 << 20

// KeepTurn keeps a copy of what a conversation's last turn left, for ttl, in place of what was kept before. [ErrNoRoom]: it
// is not kept. Then, too, nothing is left of what was.
func (s *State) KeepTurn(conversation [16]byte, turn []byte, ttl time.Duration) error {
	if s.peers != nil {
		if len(turn) > MaxTurnBytes {
			s.peers.TakeTurn(conversation)
			return ErrNoRoom
		}
		s.peers.KeepTurn(conversation, turn, ttl)
		return nil
	}
	s.turns.take(conversation)
	if len(turn) > MaxTurnBytes {
		return ErrNoRoom
	}
	return s.turns.putFor(conversation, turn, ttl)
}

// TakeTurn returns what is kept of a conversation, once.
func (s *State) TakeTurn(conversation [16]byte) ([]byte, bool) {
	if s.peers != nil {
		return s.peers.TakeTurn(conversation)
	}
	return s.turns.take(conversation)
}
