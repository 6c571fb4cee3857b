package pass

import (
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"tandem/extproc/kvtransfer"
	"tandem/extproc/latebinding"
	"tandem/extproc/openai"
	"tandem/extproc/plan"
	"tandem/extproc/telemetry"
	"tandem/kvstate"
	"tandem/kvstate/residency"
)

// The turns of Claude Code are one conversation, and each finds what the one before had computed, though its marks move and
// the first line of its system prompt differs. SGLang renders that line, so there nothing can be found.
func TestTurnsOfClaudeCode(t *testing.T) {
	const mark = `,"cache_control":{"type":"ephemeral"}`
	const body = `{"model":"m","metadata":{"user_id":"user_1_account_2_session_s"},"system":[` +
		`{"type":"text","text":"x-anthropic-billing-header: cc_version=2.1.107.3d9; cc_entrypoint=cli; cch=%s;"},` +
		`{"type":"text","text":"You are Claude Code."` + mark + `}],"messages":[%s],"max_tokens":32000,"stream":true}`
	long := strings.Repeat("a line of some file\\n", 200)
	user := func(mark string) string {
		return `{"role":"user","content":[{"type":"text","text":"` + long + `"` + mark + `}]}`
	}
	call := func(mark string) string {
		return `{"role":"assistant","content":[{"type":"text","text":"I read it."},{"type":"tool_use","id":"t","name":"Read","input":{}` + mark + `}]}`
	}
	result := func(mark string) string {
		return `{"role":"user","content":[{"type":"tool_result","tool_use_id":"t","content":"` + long + `"` + mark + `}]}`
	}
	unmarked := strings.Replace(user(""), `[{"type":"text","text":"`+long+`"}]`, `"`+long+`"`, 1)
	turns := []string{
		fmt.Sprintf(body, "71fea", user(mark)),
		fmt.Sprintf(body, "0c3b1", unmarked+","+call(mark)+","+result(mark)),
		fmt.Sprintf(body, "9a000", unmarked+","+call("")+","+result("")+","+call(mark)+","+result(mark)),
	}
	for _, engine := range []string{kvtransfer.EngineVLLM, kvtransfer.EngineSGLang} {
		state := kvstate.New(kvstate.Options{})
		state.SetPool(kvstate.PoolSpec{Name: "chat", Models: []string{"*"}}, []kvstate.EndpointSpec{{Addr: "10.0.1.1:8000", Role: kvstate.RoleBoth}})
		pool := state.Pool("chat")
		s := New(Options{State: state, Waiting: latebinding.Options{State: state, ShortOfMemory: func() bool { return false }}})
		s.Apply(Settings{Pools: map[string]Policy{"chat": {Policy: plan.Policy{Split: true, Dialect: kvtransfer.Dialect{Engine: engine}}}}})
		var of *residency.Conversation
		before := 0
		for _, turn := range turns {
			x := Pass{shared: s, Meter: &telemetry.Meter{}}
			require.NoError(t, x.Req.Client.Scan(openai.Messages, []byte(turn), openai.Limits{}))
			require.True(t, x.begin(pool, plan.Attempt{}))
			x.hash()
			x.look()
			c := state.Arrived(pool, x.Req.Hashes, 10_000, x.Req.Named, &x.view)
			if of != nil {
				require.Equal(t, engine == kvtransfer.EngineVLLM, of == c, engine)
			}
			if engine == kvtransfer.EngineVLLM {
				require.Equal(t, before, x.view.Endpoints[0].Hit)
			} else {
				require.Zero(t, x.view.Endpoints[0].Hit)
			}
			state.Routed(pool, pool.Endpoint("10.0.1.1:8000"), x.Req.Hashes)
			of, before = c, len(x.Req.Hashes)
		}
	}
}

// A client that leaves while its request waits does not keep its conversation busy.
func TestAConversationIsIdleOnceItsClientHasLeft(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		state := kvstate.New(kvstate.Options{})
		state.SetPool(kvstate.PoolSpec{Name: "chat", Models: []string{"*"}}, []kvstate.EndpointSpec{{Addr: "10.0.1.1:8000", Role: kvstate.RoleBoth}})
		pool := state.Pool("chat")
		e := pool.Endpoint("10.0.1.1:8000")
		g := kvstate.UnknownSignals()
		g.At, g.ScrapedAt, g.KVTokens = time.Now(), time.Now(), 1_000_000
		state.Observe(e, g)
		x := Pass{shared: New(Options{State: state})}
		arrives := func(tokens int64, prompt ...uint64) {
			x.Req.Pool, x.Req.Conversation = pool, state.Arrived(pool, prompt, tokens, 0, &x.view)
		}
		discards := func() float64 {
			time.Sleep(time.Second)
			pool.SweepMemory(time.Now())
			state.View(pool, nil, &x.view)
			return x.view.Endpoints[0].Memory.Old[0].Tokens
		}
		arrives(2000, 1, 2)
		state.Bookings.Release(state.Bookings.Reserve(e, kvstate.Booking{For: kvstate.RoleBoth, PromptTokens: 2000, Of: x.Req.Conversation}))
		require.Positive(t, discards())
		arrives(3000, 1, 2, 3)
		require.Zero(t, discards(), "it waits")
		x.Reset()
		require.Positive(t, discards())
	})
}
