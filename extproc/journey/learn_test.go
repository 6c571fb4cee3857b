package journey

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tandem/extproc/ended"
	"tandem/extproc/kvtransfer"
	"tandem/extproc/usage"
	"tandem/kvstate"
)

// The time of an answer that several engines wrote, with the silence between them, says nothing of the last one's pace.
// Its length counts.
func TestAContinuedAnswerTeachesNoPace(t *testing.T) {
	for continued, slows := range map[bool]bool{false: true, true: false} {
		state := kvstate.New(kvstate.Options{})
		state.SetPool(kvstate.PoolSpec{Name: "chat", Models: []string{"*"}}, []kvstate.EndpointSpec{{Addr: "d1", Role: kvstate.RoleDecode}})
		pool := state.Pool("chat")
		step := func() float64 {
			var v kvstate.View
			state.View(pool, nil, &v)
			return v.Endpoints[0].Step
		}
		tokens, before := int64(200), step()
		for range 20 {
			e := &ended.Pass{Status: 200, Answered: ended.Answered{Body: 1 << 10, Continued: continued}}
			learn(state, &kvtransfer.Ticket{Pool: "chat", Decode: "d1", Stage: kvtransfer.DecodeLeg}, e,
				&usage.Used{Answer: &tokens, PerToken: time.Second})
		}
		require.Equal(t, slows, step() > 2*max(before, 1), "continued: %t, step %v", continued, step())
	}
}
