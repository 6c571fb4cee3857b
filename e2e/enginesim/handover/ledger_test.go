package handover

import (
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"tandem/e2e/enginesim/engine"
)

func TestLeases(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := engine.NewPool(64, 4)
		l := NewLedger(p, new(engine.Core), 30*time.Second)
		keep := func(id string) engine.Grant {
			g := granted(t, p, strings.Repeat(id, 10))
			l.Keep(id, "x", g.Blocks, 10)
			return g
		}
		keep("aaaa")
		time.Sleep(29 * time.Second)
		synctest.Wait()
		require.EqualValues(t, 3, l.Held.Load())
		l.Extend("aaaa") // two thirds of a lease from now
		time.Sleep(19 * time.Second)
		synctest.Wait()
		require.EqualValues(t, 3, l.Held.Load())
		time.Sleep(2 * time.Second)
		synctest.Wait()
		require.Zero(t, l.Held.Load())
		require.EqualValues(t, 1, l.Expired.Load())
		l.Extend("aaaa")

		keep("bbbb")
		require.True(t, l.Release("bbbb"))
		require.False(t, l.Release("bbbb"))
		g := keep("cccc")
		req := Question{EngineID: "e", RequestID: "cccc", Xid: "x", BlockSize: 4, Tokens: 10, Ids: g.Blocks, Want: make([]uint64, 3)}
		require.Empty(t, l.Pull("e", &req).Refused)
		require.Zero(t, l.Held.Load())
		time.Sleep(time.Minute)
		synctest.Wait()
		require.EqualValues(t, 1, l.Expired.Load())
		_, used := p.Size()
		require.Zero(t, used)
		require.Equal(t, "released", l.past["bbbb"])
		l.Forget()
		require.Empty(t, l.past)
	})
}

// P frees in its steps, and after it has taken what decode engines tell: while its core stands still, nothing expires.
func TestNothingExpiresWhilePrefillStands(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, core := engine.NewPool(64, 4), new(engine.Core)
		l := NewLedger(p, core, 2*time.Second)
		g := granted(t, p, strings.Repeat("aaaa", 10))
		l.Keep("a", "x", g.Blocks, 10)
		core.Stop()
		time.Sleep(time.Minute)
		synctest.Wait()
		require.EqualValues(t, 3, l.Held.Load())
		require.Empty(t, l.Pull("", &Question{RequestID: "a", Xid: "x", BlockSize: 4, Tokens: 10, Ids: g.Blocks, Want: make([]uint64, 3)}).Refused)
		_, used := p.Size()
		require.Equal(t, 3, used, "freed in a step")
		core.Resume()
		synctest.Wait()
		_, used = p.Size()
		require.Zero(t, used)
		require.Zero(t, l.Expired.Load())
	})
}

func TestLedgerRemembersBounded(t *testing.T) {
	l := NewLedger(engine.NewPool(4, 4), new(engine.Core), time.Minute)
	for i := range rememberedHandOvers + 100 {
		id := fmt.Sprint(i)
		l.Keep(id, "", nil, 0)
		l.Release(id)
	}
	require.Len(t, l.past, rememberedHandOvers)
}

// granted allocates blocks for a prompt of four-byte tokens.
func granted(t *testing.T, p *engine.Pool, text string) engine.Grant {
	t.Helper()
	tokens := engine.NewTokenizer(4, false)
	tokens.Piece([]byte(text))
	pr := tokens.Finish("")
	g, err := p.Admit(t.Context(), []*engine.Prompt{pr}, []int{pr.N}, func(int64) {})
	require.NoError(t, err)
	return g[0]
}
