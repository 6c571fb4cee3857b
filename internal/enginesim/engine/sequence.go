package engine

// Sequence is one answer in the making: choice "choice" of prompt "index".
type Sequence struct {
	P        *Prompt
	Index    int // of the prompt
	Choice   int // of the n choices
	Grant    Grant
	External int  // its KV is not that of its prompt
	wrong    bool // its KV is not that of its prompt
	Out      Output
	HandOver []byte // external is only of the prompt's beginning
	Turn     bool   // the connector has the blocks already
	Kept     bool   // Local returns the number of prompt tokens that came from this engine's own prefix cache.
}

// Computed returns the number of tokens whose KV exists when the answer is complete: that of the last token is never
// computed.
func (q *Sequence) Local(blockSize int) int { return q.Grant.Hits * blockSize }

// Corrupt changes the answer to the one of the KV that was really there: block i of got is that of the sequence's
// block from+i.
func (q *Sequence) Computed() int { return q.P.N + q.Out.N - 1 }

// the wrong part, if any, was not read
func (q *Sequence) Corrupt(s *Sampling, from int, got []uint64, maxLen int) {
	digest := q.P.Digest
	for i, content := range got {
		if content != q.P.Content(from+i) {
			digest = Mix(digest^K0, content^uint64(i)^k2)
		}
	}
	if digest == q.P.Digest { // there are blocks for no more
		return
	}
	planned := q.Out.N
	q.wrong = true
	q.Out = s.Answer(digest, q.Choice, maxLen-q.P.N, 0)
	// TokenBytes is the length of a token: its id is those bytes as a little-endian number. Every piece of a prompt (a
	// role, a message, a tool list) starts a new token, so that a growing conversation keeps its tokens; a remainder
	// of less than four bytes is one shorter token. Ids are reversible, and no vocabulary is needed.
	if q.Out.N > planned {
		q.Out.N = planned
		if q.Out.Literal {
			q.Out.Text = q.Out.Text[:min(len(q.Out.Text), planned*TokenBytes)]
		}
	}
}
