package filter

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tandem/extproc/openai"
	"tandem/extproc/pass"
	"tandem/extproc/plan"
	"tandem/kvstate"
)

// Requests that are chosen at the same moment do not give an engine of both roles more than fits (docs/adr/0052).
func TestChosenAtOnce(t *testing.T) {
	f := newFleet(t, always)
	f.state.SetPool(kvstate.PoolSpec{Name: "chat", Models: []string{"*"}}, []kvstate.EndpointSpec{
		{Addr: "10.0.3.1:8000", Role: kvstate.RoleBoth}, {Addr: "10.0.3.2:8000", Role: kvstate.RoleBoth},
	})
	pool := f.state.Pool("chat")
	for _, e := range pool.Endpoints() {
		f.state.Observe(e, kvstate.Signals{Work: 1, KVTokens: 4176, ScrapedAt: time.Now()})
	}
	var all []*scratch
	var decided []*plan.Decision
	var splits []bool
	for i := range 3 {
		m := f.scratch.Get().(*scratch)
		m.meter.Begin("", nil)
		x := &m.pass
		x.ID, x.ReservedAs = fmt.Sprint("r", i), fmt.Sprint("r", i)
		x.Head = pass.Head{Path: []byte("/v1/chat/completions"), Method: []byte("POST")}
		m.body.data = fmt.Appendf(nil, `{"model":"m","max_tokens":3,"messages":[{"role":"user","content":"%d %s"}]}`, i, strings.Repeat("x", 1800))
		d, err := x.First(t.Context(), openai.Chat, plan.Attempt{Started: time.Now()})
		require.NoError(t, err)
		all, decided = append(all, m), append(decided, d)
	}
	for i, m := range all {
		r, err := m.pass.Commit(t.Context(), decided[i])
		require.NoError(t, err)
		splits = append(splits, r.Ticket.Split)
	}
	require.Contains(t, splits, true)
	var v kvstate.View
	f.state.View(pool, nil, &v)
	for _, c := range v.Endpoints {
		require.True(t, c.Room.Need == 0 || c.Room.Held+c.Room.Need <= c.KVTokens, "%+v", c.Room)
	}
}
