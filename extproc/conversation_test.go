package extproc

import (
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"tandem/extproc/core"
	"tandem/extproc/kvtransfer"
	"tandem/extproc/names"
	"tandem/extproc/pass"
	"tandem/extproc/plan"
)

// conversing is a pool whose decode endpoints keep answers for the next turn.
func conversing(t *testing.T, change func(*pass.Policy)) pass.Policy {
	dialect, err := kvtransfer.New(kvtransfer.Options{Name: "nixl", Bidirectional: true})
	require.NoError(t, err)
	p := splitting()
	p.Dialect, p.Session.Header = dialect, "x-session"
	change(&p)
	return p
}

// keptObject is what d1 reports with an answer of 40 tokens, prompt and all.
const keptObject = `{"do_remote_prefill":false,"do_remote_decode":true,"remote_block_ids":[[1,2,3]],"remote_engine_id":"e","remote_request_id":"r",` +
	`"remote_host":"10.0.0.6","remote_port":5600,"tp_size":1,"remote_num_tokens":40}`

// ids are n token ids, as they stand between brackets.
func ids(n int) string {
	var b strings.Builder
	for i := range n {
		_, _ = fmt.Fprintf(&b, ",%d", 1000+i)
	}
	return b.String()[1:]
}

// secondTurn is the second request of a conversation on its way to P, which is sent where d1 keeps the answer to the
// first.
func (s *stand) secondTurn() *request {
	s.t.Helper()
	q := s.secondTurnAfter(keptObject)
	require.True(s.t, s.ticket(q.headers[names.HeaderTicket], "r2").Turn.Named)
	require.Contains(s.t, string(q.body), `"remote_block_ids":[[1,2,3]]`)
	return q
}

// secondTurnAfter is that of a conversation of which d1 has said object.
func (s *stand) secondTurnAfter(object string) *request {
	s.t.Helper()
	turn := func(id string, n int) *request {
		q := s.newRequest("/v1/completions", id, `{"model":"m","prompt":[`+ids(n)+`],"max_tokens":20,"return_token_ids":true}`)
		q.headers["x-session"] = "s"
		q.pass()
		require.Equal(s.t, plan.LegPrefill, q.headers[names.HeaderLeg])
		return q
	}
	first := turn("r1", 20)
	told := s.ticket(first.headers[names.HeaderTicket], "r1").Turn
	require.NotZero(s.t, told.Conversation)
	require.False(s.t, told.Named)
	s.throughAnswerLeg(&kvtransfer.Ticket{
		Stage: kvtransfer.DecodeLeg, Expires: time.Now().Add(time.Minute), Pool: "chat", Decode: addressOf("d1"),
		Turn: kvtransfer.TurnLeg{Answers: true, Conversation: told.Conversation, OwnIDs: true},
	}, "200", "application/json", `{"choices":[{"index":0,"text":"x","prompt_token_ids":[`+ids(20)+`],"token_ids":[`+ids(40)[len(ids(20))+1:]+`]}],`+
		`"kv_transfer_params":`+object+`}`, 1<<20, false)
	require.InDelta(s.t, 1, s.count("tandem_turns_total", "chat", pass.TurnStored), 0)
	return turn("r2", 60)
}

// Without D's word until when it keeps the blocks, P gets them only if it will have fetched them before.
func TestTurnThatMayExpire(t *testing.T) {
	for name, c := range map[string]struct {
		object string
		ttl    time.Duration
		told   bool
	}{
		"time enough":     {keptObject, time.Minute, true},
		"too little":      {keptObject, 20 * time.Second, false},
		"P sees to it":    {keptObject[:len(keptObject)-1] + `,"remote_blocks_expiry_time":1795305037.5}`, 20 * time.Second, true},
		"nobody knows it": {keptObject[:len(keptObject)-1] + `,"remote_blocks_expiry_time":null}`, 20 * time.Second, false},
	} {
		t.Run(name, func(t *testing.T) {
			s := newStand(t, core.Options{})
			s.pool("chat", conversing(t, func(p *pass.Policy) {
				dialect, err := kvtransfer.New(kvtransfer.Options{Name: "nixl", Bidirectional: true, TurnTTL: c.ttl})
				require.NoError(t, err)
				p.Dialect = dialect
			}), "p1", "d1")
			q := s.secondTurnAfter(c.object)
			require.Equal(t, c.told, s.ticket(q.headers[names.HeaderTicket], "r2").Turn.Named)
			unusable := s.count("tandem_turns_total", "chat", pass.TurnUnusable)
			require.Equal(t, c.told, unusable == 0)
		})
	}
}

// A P that could not fetch a turn costs the reuse and nothing else, whatever the pool does about prefills that fail.
func TestTurnThatCannotBeFetched(t *testing.T) {
	for name, change := range map[string]func(*pass.Policy){
		"another prefill": func(*pass.Policy) {},
		"decode alone":    func(p *pass.Policy) { p.OnFailure = plan.DecodeAlone },
		"fail":            func(p *pass.Policy) { p.OnFailure = plan.Fail },
		"one attempt":     func(p *pass.Policy) { p.PrefillAttempts = 1 },
	} {
		t.Run(name, func(t *testing.T) {
			s := newStand(t, core.Options{})
			s.pool("chat", conversing(t, change), "p1", "d1")
			q := s.secondTurn()
			q.prefillLeg(engineAnswer{status: 500, body: []byte(`{}`)})
			q.follow()
			q.pass()
			require.Equal(t, plan.LegPrefill, q.headers[names.HeaderLeg])
			require.Equal(t, addressOf("p1"), q.headers[names.HeaderEndpoint])
			require.Contains(t, string(q.body), `"remote_block_ids":null`)
			again := s.ticket(q.headers[names.HeaderTicket], "r2")
			require.False(t, again.Turn.Named)
			require.Equal(t, 1, again.Prefills)
			require.Empty(t, again.Excluded)
			for what, n := range map[string]float64{pass.TurnUsed: 1, pass.TurnFailed: 1} {
				require.InDelta(t, n, s.count("tandem_turns_total", "chat", what), 0, what)
			}
			require.InDelta(t, 1, s.count("tandem_replans_total", "chat", kvtransfer.CauseTurn), 0)

			q.prefillLeg(engineAnswer{status: 500, body: []byte(`{}`)}) // and this time it is P's failure
			require.Equal(t, kvtransfer.CausePrefill, s.ticket(q.taken, "r2").Cause)
		})
	}
}

// A P that is cut off by the hop's time limit while it was to fetch a turn is not taken for one that hangs: it may have waited for D.
func TestTurnThatTakesTooLong(t *testing.T) {
	for name, told := range map[string]bool{"told": true, "not told": false} {
		synctest.Test(t, func(t *testing.T) {
			s := newStand(t, core.Options{})
			s.pool("chat", conversing(t, func(p *pass.Policy) { p.OnFailure = plan.Fail }), "p1", "p2", "d1")
			q := s.secondTurn()
			if !told {
				q.prefillLeg(engineAnswer{status: 500, body: []byte(`{}`)})
				q.follow()
				q.pass()
			}
			at := s.ticket(q.headers[names.HeaderTicket], "r2").Prefill
			time.Sleep(40 * time.Second)
			require.Equal(t, 307, q.replan().Code)
			next := s.ticket(q.taken, "r2")
			require.Equal(t, []string{at}, next.Excluded, name)
			require.Equal(t, !told, s.state.Pool("chat").Endpoint(at).Failed(), name)
			require.InDelta(t, 1, s.count("tandem_turns_total", "chat", pass.TurnFailed), 0, name)
			want := kvtransfer.CausePrefill
			if told {
				want = kvtransfer.CauseTurn
			}
			require.Equal(t, want, next.Cause, name)
		})
	}
}

// What is remembered of an answer under way counts as memory; where there is too little the turn is not kept, and the answer goes on.
func TestTurnOfNoMemory(t *testing.T) {
	s := newStand(t, core.Options{HeldBytes: 32 << 10})
	s.pool("chat", conversing(t, func(*pass.Policy) {}), "p1", "d1")
	var stream strings.Builder
	stream.WriteString(`data: {"choices":[],"prompt_token_ids":[` + ids(1000) + "]}\n\n")
	for range 300 {
		stream.WriteString(`data: {"choices":[{"index":0,"text":"x","token_ids":[` + ids(30) + "]}]}\n\n")
	}
	stream.WriteString(`data: {"choices":[],"kv_transfer_params":` + keptObject + "}\n\n")
	stream.WriteString("data: [DONE]\n\n")
	got := s.throughAnswerLeg(&kvtransfer.Ticket{
		Stage: kvtransfer.DecodeLeg, Expires: time.Now().Add(time.Minute), Pool: "chat", Decode: addressOf("d1"),
		Turn: kvtransfer.TurnLeg{Answers: true, Conversation: [16]byte{1}},
	}, "200", "text/event-stream", stream.String(), 4096, false)
	require.True(t, got.ended)
	require.Equal(t, 300, strings.Count(got.body, `"text":"x"`))
	for _, what := range []string{pass.TurnStored, pass.TurnUnusable, pass.TurnFull} {
		require.Zero(t, s.count("tandem_turns_total", "chat", what))
	}
	require.Eventually(t, func() bool { return s.server.Memory.Load() == 0 }, 30*time.Second, time.Millisecond)
}
