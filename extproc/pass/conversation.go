package pass

import (
	"context"
	"log/slog"
	"math/rand/v2"
	"strconv"
	"time"

	"tandem/extproc/answer"
	"tandem/extproc/kvtransfer"
	"tandem/extproc/openai"
	"tandem/extproc/plan"
	"tandem/internal/guard"
	"tandem/kvstate"
)

// In pools whose dialect has [kvtransfer.Turns], the next turn of a conversation reuses D's blocks. D's answer
// passes answer-leg, which removes D's description of its blocks and stores it under the conversation's name
// (docs/adr/0016). The next turn's prefill leg takes it from there, once, and passes it to P if the new prompt
// begins with the tokens of these blocks. If anything is missing or unclear, only the reuse is lost.

// Label values of tandem_turns_total. At the end of a turn: kept, unusable, no_room. At the next turn's first
// prefill leg: used (P got the ids of the blocks), failed (and its leg failed); or the reason why P did not get them:
// endpoint (it is gone, or cannot pair with this P), no_ids (the prompt's tokens were not known in time),
// other_prompt (the prompt does not continue the turn, which stays stored).
const (
	TurnStored      = "kept"
	TurnUnusable    = "unusable"
	TurnFull        = "no_room"
	TurnUsed        = "used"
	TurnFailed      = "failed"
	TurnEndpoint    = "endpoint"
	TurnNoIDs       = "no_ids"
	TurnOtherPrompt = "other_prompt"
)

// conversationTimeout is how long a chat waits for an engine to return its token ids, if a turn of its conversation
// is stored.
const conversationTimeout = 500 * time.Millisecond

// conversation is that of a request.
type conversation struct{ pass *Pass }

// read finds the name under which the request's turns are stored, and takes the last turn for P, if it can
// be used. It may ask an engine for the prompt's token ids.
func (k conversation) read(ctx context.Context) {
	x := k.pass
	r, c, p := &x.Req, x.choice, &x.policy.Policy
	r.Turn.Conversation, r.Turn.OwnIDs = plan.Conversation(r, p)
	if r.Turn.Conversation == ([16]byte{}) || r.Attempt.Prefills > 0 || r.Attempt.ConversationFailed {
		return
	}
	limit := plan.PrefillLimit(r, &x.view, c, p)
	r.LastTurn, r.TurnIDs = k.lastTurn(ctx, r.Turn.Conversation, x.view.Endpoints[c.Prefill].Endpoint, limit)
	r.Turn.Named = r.LastTurn != nil
}

// lastTurn returns the blocks of the conversation's last turn for P, an endpoint of the view, if they outlast
// limit; nil: none. ids are the prompt's, as JSON text, if P needs them too.
func (k conversation) lastTurn(
	ctx context.Context, name [16]byte, prefill *kvstate.Endpoint, limit time.Duration,
) (*kvtransfer.Turn, []byte) {
	x := k.pass
	r, pool := &x.Req, x.Req.Pool
	text, ok := x.shared.State.HandOvers.TakeConversation(name)
	if !ok {
		return nil, nil
	}
	turn, until, err := answer.ReadTurn(text, x.shared.Now())
	if err != nil {
		return k.unused(TurnUnusable, err)
	}
	if d := pool.Endpoint(turn.Decode); d == nil || d.Failed() || d == prefill || !sameEngines(d, prefill) {
		return k.unused(TurnEndpoint, nil)
	}
	inBody := r.Client.PromptIDs() != nil
	if inBody {
		r.IDs, ok = openai.TokenIDs(r.IDs[:0], r.Client.PromptIDs())
	} else {
		ok = k.renderIDs(ctx)
	}
	if !ok {
		return k.unused(TurnNoIDs, nil)
	}
	if !turn.Expires && time.Until(until) < limit { // P would fetch the blocks of another prompt by then
		return k.unused(TurnUnusable, answer.ErrTurnExpired)
	}
	if !turn.Begins(r.IDs) {
		if left := time.Until(until); left > 0 { // an engine returned the ids meanwhile
			// another request of the session may continue the turn
			_ = x.shared.State.HandOvers.PutConversation(name, text, left)
		}
		return k.unused(TurnOtherPrompt, nil)
	}
	x.Meter.Observer.Turn(pool.Spec.Name, TurnUsed)
	if inBody {
		return turn, nil
	}
	return turn, appendIDs(nil, r.IDs)
}

// unused counts a stored turn that is not used.
func (k conversation) unused(why string, err error) (*kvtransfer.Turn, []byte) {
	x := k.pass
	x.Meter.Observer.Turn(x.Req.Pool.Spec.Name, why)
	if err != nil {
		x.log(slog.LevelWarn, "what was kept of a conversation's last turn is of no use", "err", err)
	}
	return nil, nil
}

// sameEngines reports whether two endpoints are known to read each other's blocks. A pair needs less: it is enough that
// nothing is known against it.
func sameEngines(a, b *kvstate.Endpoint) bool {
	return a.Group == b.Group && a.Engine == b.Engine && a.Report() == b.Report() &&
		a.Transfer.Release == b.Transfer.Release
}

// renderIDs asks an engine for the chat's token ids, with the request's own body, and stores them in x.Req.IDs.
func (k conversation) renderIDs(ctx context.Context) bool {
	x := k.pass
	if x.shared.Tokenizer == nil {
		return false
	}
	path, body := tokenizeBody(&x.Req, RenderTokens)
	if body == nil {
		return false
	}
	var ids []uint32 // written before done is closed, and read after
	done := x.shared.Tokenizer.Tokenize(guard.With(ctx, x.shared.Guard), x.Req.Pool, rand.Uint64(), path, body,
		func(said []uint32) { ids = said })
	if !await(ctx, done, conversationTimeout) {
		return false
	}
	x.Req.IDs = append(x.Req.IDs[:0], ids...)
	return len(ids) > 0
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

// StoreTurn keeps what decode's answer says of its blocks for the conversation's next turn.
func (s *Shared) StoreTurn(requestID string, t *kvtransfer.Ticket, params []byte, ids []uint32) {
	policy, _ := s.Policy(t.Pool)
	turns := policy.Dialect.Turns
	pool := s.State.Pool(t.Pool)
	if turns == nil || pool == nil {
		return // the configuration has changed
	}
	side := Side(pool, t.Decode)
	turn, err := turns.Read(params, ids, &side)
	var text []byte
	if err == nil {
		text, err = answer.WriteTurn(turn, s.Now().Add(turns.TTL))
	}
	if err != nil {
		s.Observer.Turn(t.Pool, TurnUnusable)
		s.Log.Info("what decode keeps for the next turn is of no use",
			"request_id", requestID, "endpoint", t.Decode, "err", err)
		return
	}
	if err := s.State.HandOvers.PutConversation(t.Turn.Conversation, text, turns.TTL); err != nil {
		s.Observer.Turn(t.Pool, TurnFull)
		return
	}
	s.Observer.Turn(t.Pool, TurnStored)
}
