package extproc

import (
	"log/slog"
	"strconv"
	"time"

	"tandem/extproc/answer"
	"tandem/extproc/kvtransfer"
	"tandem/extproc/openai"
	"tandem/extproc/plan"
	"tandem/internal/guard"
	"tandem/kvstate"
	"tandem/picker"
)

// In pools whose dialect has [kvtransfer.Turns], the next turn of a conversation reuses D's blocks. D's answer
// passes answer-leg, which removes D's description of its blocks and stores it under the conversation's name
// (docs/adr/0016). The next turn's prefill leg takes it from there, once, and passes it to P if the new prompt
// begins with the tokens of these blocks. If anything is missing or unclear, only the reuse is lost.

// Label values of tandem_turns_total. At the end of a turn: kept, unusable, no_room. At the next turn's first
// prefill leg: told (P was told of the blocks), failed (and its leg failed); or the reason why P was not told:
// endpoint (it is gone, or cannot pair with this P), no_ids (the prompt's tokens were not known in time),
// other_prompt (the prompt does not continue the turn, which stays stored).
const (
	conversationStored      = "kept"
	conversationUnusable    = "unusable"
	conversationFull        = "no_room"
	conversationUsed        = "used"
	conversationFailed      = "failed"
	conversationEndpoint    = "endpoint"
	conversationNoIDs       = "no_ids"
	conversationOtherPrompt = "other_prompt"
)

// conversationTimeout is how long a chat waits for an engine to return its token ids, if a turn of its conversation
// is stored.
const conversationTimeout = 500 * time.Millisecond

// readConversation finds the name under which the request's turns are stored, and takes the last turn for P, if it can
// be used. It may ask an engine for the prompt's token ids.
func (x firstPass) readConversation(policy *Policy, c picker.Choice) {
	r := &x.req
	r.Turn.Conversation, r.Turn.OwnIDs = plan.Conversation(r, &policy.Policy)
	if r.Turn.Conversation == ([16]byte{}) || r.Prefills > 0 || r.ConversationFailed {
		return
	}
	limit := plan.PrefillLimit(r, &x.view, c, &policy.Policy)
	r.LastTurn, r.TurnIDs = x.lastTurn(r.Turn.Conversation, x.view.Endpoints[c.Prefill].Endpoint, limit)
	r.Turn.Named = r.LastTurn != nil
}

// lastTurn returns the blocks of the conversation's last turn for P, an endpoint of the view, if they outlast
// limit; nil: none. ids are the prompt's, as JSON text, if P needs them too.
func (x firstPass) lastTurn(conversation [16]byte, prefill *kvstate.Endpoint, limit time.Duration) (*kvtransfer.Turn, []byte) {
	r, pool := &x.req, x.req.Pool
	text, ok := x.s.State.TakeConversation(conversation)
	if !ok {
		return nil, nil
	}
	turn, until, err := answer.ReadTurn(text, x.s.now())
	if err != nil {
		x.conversationMiss(pool, conversationUnusable, err)
		return nil, nil
	}
	if d := pool.Endpoint(turn.Decode); d == nil || d.Failed() || d == prefill || !sameEngines(d, prefill) {
		x.conversationMiss(pool, conversationEndpoint, nil)
		return nil, nil
	}
	inBody := r.PromptIDs() != nil
	if inBody {
		r.IDs, ok = openai.TokenIDs(r.IDs[:0], r.PromptIDs())
	} else {
		ok = x.renderIDs()
	}
	if !ok {
		x.conversationMiss(pool, conversationNoIDs, nil)
		return nil, nil
	}
	if !turn.Expires && time.Until(until) < limit { // P would fetch the blocks of another prompt by then
		x.conversationMiss(pool, conversationUnusable, answer.ErrTurnExpired)
		return nil, nil
	}
	if !turn.Begins(r.IDs) {
		if left := time.Until(until); left > 0 { // an engine returned the ids meanwhile
			// another request of the session may continue the turn
			_ = x.s.State.PutConversation(conversation, text, left)
		}
		x.conversationMiss(pool, conversationOtherPrompt, nil)
		return nil, nil
	}
	x.Turn(pool.Spec.Name, conversationUsed)
	if inBody {
		return turn, nil
	}
	return turn, appendIDs(nil, r.IDs)
}

// conversationMiss counts a stored turn that was not used.
func (x firstPass) conversationMiss(pool *kvstate.Pool, why string, err error) {
	x.Turn(pool.Spec.Name, why)
	if err != nil {
		x.log(slog.LevelWarn, "what was kept of a conversation's last turn is of no use", "err", err)
	}
}

// conversationFailed makes next the ticket of a request without a stored turn, after a prefill leg that used one
// failed. The pool's policy for failed prefills does not apply: the reuse caused the prefill.
func (s *Server) conversationFailed(next *kvtransfer.Ticket, requestID string, status int) {
	next.Cause, next.Turn.Named = kvtransfer.CauseTurn, false
	next.Prefills = max(next.Prefills-1, 0)
	s.observer.Turn(next.Pool, conversationFailed)
	s.Log.Warn("a prefill that was to fetch the conversation's last turn failed: again without", "request_id", requestID, "endpoint", next.Prefill, "status", status)
}

// sameEngines reports whether two endpoints are known to read each other's blocks. A pair only needs not to be
// known to be unable to.
func sameEngines(a, b *kvstate.Endpoint) bool {
	return a.Group == b.Group && a.Engine == b.Engine && a.Layout == b.Layout && a.Transfer.Release == b.Transfer.Release
}

// renderIDs asks an engine for the chat's token ids, with the request's own body, and stores them in x.req.IDs.
func (x firstPass) renderIDs() bool {
	if x.s.Tokenizer == nil {
		return false
	}
	path, body := x.tokenizeBody(RenderTokens)
	if body == nil {
		return false
	}
	var ids []uint32 // written before done is closed, and read after
	done := x.s.Tokenizer.Tokenize(guard.With(x.stream.Context(), x.s.guard), x.req.Pool, random(), path, body, func(said []uint32) { ids = said })
	if done == nil {
		return false
	}
	patience := time.NewTimer(conversationTimeout)
	defer patience.Stop()
	select {
	case <-done:
		x.req.IDs = append(x.req.IDs[:0], ids...)
		return len(ids) > 0
	case <-patience.C:
	case <-x.stream.Context().Done():
	}
	return false
}

func appendIDs(dst []byte, ids []uint32) []byte {
	dst = append(dst, '[')
	for i, id := range ids {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = strconv.AppendUint(dst, uint64(id), 10)
	}
	return append(dst, ']')
}

// recordConversation returns the rewriter that removes the description of D's blocks from its answer.
func (x answerLeg) recordConversation(t *kvtransfer.Ticket) openai.Rewriter {
	a := &openai.TurnAnswer{OwnIDs: t.Turn.OwnIDs || t.Turn.Conversation == ([16]byte{})}
	if t.Turn.Conversation != ([16]byte{}) {
		a.Kept = func(params []byte, ids []uint32) { x.storeConversation(t, params, ids) }
		a.Room = x.holdExtra
	}
	if t.Cached > 0 {
		return openai.Both{First: a, Second: answer.Cached(t)}
	}
	return a
}

func (x answerLeg) storeConversation(t *kvtransfer.Ticket, params []byte, ids []uint32) {
	policy, _ := x.s.policy(t.Pool)
	turns := policy.Dialect.Turns
	pool := x.s.State.Pool(t.Pool)
	if turns == nil || pool == nil {
		return // the configuration has changed
	}
	side := x.side(pool, t.Decode)
	turn, err := turns.Read(params, ids, &side)
	var text []byte
	if err == nil {
		text, err = answer.WriteTurn(turn, x.s.now().Add(turns.TTL))
	}
	if err != nil {
		x.Turn(t.Pool, conversationUnusable)
		x.log(slog.LevelInfo, "what decode keeps for the next turn is of no use", "endpoint", t.Decode, "err", err)
		return
	}
	if err := x.s.State.PutConversation(t.Turn.Conversation, text, turns.TTL); err != nil {
		x.Turn(t.Pool, conversationFull)
		return
	}
	x.Turn(t.Pool, conversationStored)
}
