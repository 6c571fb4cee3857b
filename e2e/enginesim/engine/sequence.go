package engine

// Sequence is one answer in progress: choice "choice" of prompt "index".
type Sequence struct {
	P        *Prompt
	Index    int // of the prompt
	Choice   int // of the n choices
	Grant    Grant
	External int  // tokens fetched from another engine
	wrong    bool // its KV is not that of its prompt
	Out      Output
	HandOver []byte // kv_transfer_params of the answer, nil for none
	Turn     bool   // external is only of the prompt's beginning
	Kept     bool   // the connector has the blocks already
}

// Local returns the number of prompt tokens that came from this engine's own prefix cache.
func (q *Sequence) Local(blockSize int) int { return q.Grant.Hits * blockSize }

// Computed returns the number of tokens whose KV exists when the answer is complete: that of the last token is never
// computed.
func (q *Sequence) Computed() int { return q.P.N + q.Out.N - 1 }

// Corrupt changes the answer to the one of the KV that was really there: block i of got is that of the sequence's
// block from+i.
func (q *Sequence) Corrupt(s *Sampling, from int, got []uint64, maxLen int) {
	digest := q.P.Digest
	for i, content := range got {
		if content != q.P.Content(from+i) {
			digest = Mix(digest^K0, content^uint64(i)^k2)
		}
	}
	if digest == q.P.Digest { // the wrong part, if any, was not read
		return
	}
	planned := q.Out.N
	q.wrong = true
	q.Out = s.Answer(digest, q.Choice, maxLen-q.P.N, 0)
	if q.Out.N > planned { // there are blocks for no more
		q.Out.N = planned
		if q.Out.Literal {
			q.Out.Text = q.Out.Text[:min(len(q.Out.Text), planned*TokenBytes)]
		}
	}
}
