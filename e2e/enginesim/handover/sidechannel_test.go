package handover

import (
	"bufio"
	"net"
	"testing"

	"github.com/stretchr/testify/require"

	"tandem/e2e/enginesim/engine"
)

func TestAsk(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	question := Question{
		Op: OpPull, EngineID: "engine", RequestID: "id", Xid: "x", BlockSize: 16, Tokens: 33, Ids: []int32{1, 70000, 3},
		Want: []uint64{1, 1 << 63, 3},
	}
	answer := Answer{Violation: engine.Violation{Kind: "kind", Message: "message"}, Actual: []uint64{7}}
	asked := make(chan Question, 2)
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer conn.Close()
				Serve(conn, bufio.NewReader(conn), func(q *Question) *Answer {
					switch {
					case q.Op == OpWho:
						return &Answer{EngineID: "engine", Clock: 7}
					case q.EngineID != "engine":
						return nil
					}
					asked <- *q
					return &answer
				})
			}()
		}
	}()
	peers := NewPeers()
	defer peers.Close()
	for range 2 { // over one connection
		got, err := peers.Ask(t.Context(), l.Addr().String(), &question)
		require.NoError(t, err)
		require.Equal(t, answer, got)
		require.Equal(t, question, <-asked)
	}
	_, err = peers.Ask(t.Context(), l.Addr().String(), &Question{Op: OpPull})
	require.Error(t, err, "it hangs up")
	id, clock := peers.Who(t.Context(), l.Addr().String())
	require.Equal(t, "engine", id)
	require.Positive(t, clock)
}
