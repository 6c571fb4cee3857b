package extproc

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"strconv"
	"time"

	"tandem/extproc/envoywire"
	"tandem/extproc/kvtransfer"
	"tandem/extproc/openai"
	"tandem/extproc/plan"
	"tandem/internal/guard"
	"tandem/kvstate"
)

// This file is the reuse of D's blocks in a conversation's next turn, where the pool's dialect has [kvtransfer.Turns]: D's
// answer comes through answer-leg, where what it says of its blocks is taken out and kept under the conversation's name
// (docs/adr/0016); the next turn's prefill leg takes it from there, once, and tells P, if its prompt is known to begin with the
// tokens of these blocks. Whatever is missing or unclear on that way costs the reuse and nothing else.

// Label values of tandem_turns_total: what became of a turn that D kept (kept, unusable, no_room), and of one at the next turn's
// first prefill leg: told to P (told), and then lost together with the leg (failed); or not told, because its endpoint has gone or is
// no pair of this P (endpoint), nobody said the prompt's tokens in time (no_ids), or these are not how the turn went on
// (other_prompt: it is kept on for one that is).
const (
	turnKept        = "kept"
	turnUnusable    = "unusable"
	turnNoRoom      = "no_room"
	turnTold        = "told"
	turnFailed      = "failed"
	turnEndpoint    = "endpoint"
	turnNoIDs       = "no_ids"
	turnOtherPrompt = "other_prompt"
)

// turnPatience is how long a chat waits for an engine to say its token ids, where a turn of its conversation is kept.
const turnPatience = 500 * time.Millisecond

// conversation is the name under which the turns of the request's session are kept, and whether the client itself has asked for token
// ids; zero where its turns are not. Model and salt are part of it, as they are of what KV is: the same tokens under another adapter
// have other blocks, and another salt's are another tenant's. Of media the ids say nothing but that there are some, so a chat with any is
// of no conversation.
func (x firstPass) conversation(pool *kvstate.Pool, policy *Policy) (name [16]byte, ownIDs bool) {
	turns := policy.Dialect.Turns
	if turns == nil || x.session == 0 || policy.Handoff != plan.HandoffEnvoy || !turns.Takes(x.req.API(), x.req.PromptIDs() != nil) || !x.req.PromptIsAll() {
		return name, false
	}
	ownIDs = x.req.True(openai.FieldReturnTokenIDs)
	if x.req.Has(openai.FieldReturnTokenIDs) && !ownIDs { // a second one would be a fault
		return name, false
	}
	h := sha256.New()
	text := func(b []byte) {
		_, _ = h.Write(binary.LittleEndian.AppendUint64(nil, uint64(len(b))))
		_, _ = h.Write(b)
	}
	text([]byte("turn"))
	text([]byte(pool.Spec.Name))
	text(binary.LittleEndian.AppendUint64(nil, x.session))
	text([]byte(x.req.Model()))
	text(x.req.Raw(openai.FieldCacheSalt))
	return [16]byte(h.Sum(nil)), ownIDs
}

// lastTurn is what P, an endpoint of the view, can be told of the conversation's last turn, where its leg may take so long; nil:
// nothing. The ids are the prompt's, as JSON text, where P has to be told of them too.
func (x firstPass) lastTurn(pool *kvstate.Pool, conversation [16]byte, prefill *kvstate.Endpoint, limit time.Duration) (*kvtransfer.Turn, []byte) {
	if conversation == ([16]byte{}) {
		return nil, nil
	}
	text, ok := x.s.State.TakeConversation(conversation)
	if !ok {
		return nil, nil
	}
	turn, until, err := readTurn(text)
	if err != nil {
		x.turnLost(pool, turnUnusable, err)
		return nil, nil
	}
	if d := pool.Endpoint(turn.Decode); d == nil || d.Failed() || d == prefill || !sameEngines(d, prefill) {
		x.turnLost(pool, turnEndpoint, nil)
		return nil, nil
	}
	inBody := x.req.PromptIDs() != nil
	if inBody {
		x.ids, ok = openai.TokenIDs(x.ids[:0], x.req.PromptIDs())
	} else {
		ok = x.renderIDs(pool)
	}
	if !ok {
		x.turnLost(pool, turnNoIDs, nil)
		return nil, nil
	}
	if !turn.Expires && time.Until(until) < limit { // P would fetch what is another prompt's by then
		x.turnLost(pool, turnUnusable, errTurnOver)
		return nil, nil
	}
	if !turn.Begins(x.ids) {
		if left := time.Until(until); left > 0 { // an engine was asked for the ids meanwhile
			_ = x.s.State.PutConversation(conversation, text, left) // another request of the session may be the one
		}
		x.turnLost(pool, turnOtherPrompt, nil)
		return nil, nil
	}
	x.s.metrics.Turn(pool.Spec.Name, turnTold)
	if inBody {
		return turn, nil
	}
	return turn, appendIDs(nil, x.ids)
}

// turnLost counts a turn that P is not told of.
func (x firstPass) turnLost(pool *kvstate.Pool, why string, err error) {
	x.s.metrics.Turn(pool.Spec.Name, why)
	if err != nil {
		x.s.Log.Warn("what was kept of a conversation's last turn is of no use", "request_id", x.requestID, "err", err)
	}
}

// turnFailed makes next, of a prefill leg that was told of a turn and failed, the ticket of a request without one: whatever the pool
// does about failed prefills, this was none but for the reuse.
func (s *Server) turnFailed(next *kvtransfer.Ticket, requestID string, status int) {
	next.Cause, next.Turn.Told = kvtransfer.CauseTurn, false
	next.Prefills = max(next.Prefills-1, 0)
	s.metrics.Turn(next.Pool, turnFailed)
	s.Log.Warn("a prefill that was to fetch the conversation's last turn failed: again without", "request_id", requestID, "endpoint", next.Prefill, "status", status)
}

// sameEngines reports whether two endpoints are known to read each other's blocks, which for a pair need only be not known to be
// wrong.
func sameEngines(a, b *kvstate.Endpoint) bool {
	return a.Group == b.Group && a.Engine == b.Engine && a.Layout == b.Layout && a.Transfer.Release == b.Transfer.Release
}

// renderIDs has an engine say what the chat's token ids are, from the very body, into x.ids.
func (x firstPass) renderIDs(pool *kvstate.Pool) bool {
	if x.s.Tokenizer == nil {
		return false
	}
	path, body := x.tokenizeBody(RenderTokens)
	if body == nil {
		return false
	}
	var ids []uint32 // written before done is closed, and read after
	done := x.s.Tokenizer.Tokenize(guard.With(x.stream.Context(), x.s.guard), pool, random(), path, body, func(said []uint32) { ids = said })
	if done == nil {
		return false
	}
	patience := time.NewTimer(turnPatience)
	defer patience.Stop()
	select {
	case <-done:
		x.ids = append(x.ids[:0], ids...)
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

// tellTurn has D's answer come by where it says what D keeps, if it may say that at all, and D asked for what that is good for.
func (x nextPass) tellTurn(r *plan.Decision, t *kvtransfer.Ticket, policy *Policy, told bool) (turn kvtransfer.TurnLeg, more []byte) {
	if policy.Dialect.Turns == nil || !told || r.Leg == envoywire.LegPass {
		return turn, nil
	}
	r.Leg = envoywire.LegAnswer
	turn = kvtransfer.TurnLeg{Answers: true, Conversation: t.Turn.Conversation, OwnIDs: t.Turn.OwnIDs}
	if turn.Conversation != ([16]byte{}) && !turn.OwnIDs {
		more = []byte(`"return_token_ids":true,`)
	}
	return turn, more
}

// turnAnswer takes what D keeps out of its answer.
func (x answerLeg) turnAnswer(t *kvtransfer.Ticket) openai.Rewriter {
	a := &openai.TurnAnswer{OwnIDs: t.Turn.OwnIDs || t.Turn.Conversation == ([16]byte{})}
	if t.Turn.Conversation != ([16]byte{}) {
		a.Kept = func(params []byte, ids []uint32) { x.keepTurn(t, params, ids) }
		a.Room = x.holdBeside
	}
	if t.Cached > 0 {
		return openai.Both{First: a, Second: openai.CachedTokens{N: t.Cached - 1}}
	}
	return a
}

func (x answerLeg) keepTurn(t *kvtransfer.Ticket, params []byte, ids []uint32) {
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
		text, err = writeTurn(turn, time.Now().Add(turns.TTL))
	}
	if err != nil {
		x.s.metrics.Turn(t.Pool, turnUnusable)
		x.s.Log.Info("what decode keeps for the next turn is of no use", "request_id", x.requestID, "endpoint", t.Decode, "err", err)
		return
	}
	if err := x.s.State.PutConversation(t.Turn.Conversation, text, turns.TTL); err != nil {
		x.s.metrics.Turn(t.Pool, turnNoRoom)
		return
	}
	x.s.metrics.Turn(t.Pool, turnKept)
}

// keptTurn is a turn as it is kept.
type keptTurn struct {
	Until int64           `json:"until"` // Unix time in milliseconds
	Turn  json.RawMessage `json:"turn"`
}

func writeTurn(turn *kvtransfer.Turn, until time.Time) ([]byte, error) {
	text, err := turn.Marshal()
	if err != nil {
		return nil, err
	}
	return json.Marshal(keptTurn{until.UnixMilli(), text})
}

var errTurnOver = errors.New("its time is over")

func readTurn(text []byte) (turn *kvtransfer.Turn, until time.Time, err error) {
	var kept keptTurn
	if err := json.Unmarshal(text, &kept); err != nil {
		return nil, until, err
	}
	if until = time.UnixMilli(kept.Until); !time.Now().Before(until) {
		return nil, until, errTurnOver
	}
	turn, err = kvtransfer.UnmarshalTurn(kept.Turn)
	return turn, until, err
}
