package handover

import (
	"testing"

	"github.com/stretchr/testify/require"

	"tandem/internal/enginesim/engine"
)

func FuzzSideChannel(f *testing.F) {
	w := WireWriter{}
	(&PullRequest{EngineID: "e", RequestID: "r", Ids: []int32{1, 2}, Want: []uint64{3}}).encode(&w)
	f.Add(w.B)
	f.Fuzz(func(_ *testing.T, b []byte) {
		r := WireReader{B: b}
		var req PullRequest
		req.Decode(&r)
		r = WireReader{B: b}
		var a PullAnswer
		a.Decode(&r)
	})
}

func TestWireRoundTrip(t *testing.T) {
	req := PullRequest{EngineID: "engine", RequestID: "id", Xid: "x", BlockSize: 16, Tokens: 33, Ids: []int32{1, 70000, 3}, Want: []uint64{1, 1 << 63, 3}}
	w := WireWriter{}
	req.encode(&w)
	r := WireReader{B: w.B[1:]}
	back := PullRequest{EngineID: r.String(), RequestID: r.String()}
	back.Decode(&r)
	require.NoError(t, r.Err)
	require.Equal(t, req, back)
	answer := PullAnswer{Violation: engine.Violation{Kind: "kind", Message: "message"}, Actual: []uint64{7}}
	w = WireWriter{}
	answer.Encode(&w)
	r = WireReader{B: w.B}
	var got PullAnswer
	got.Decode(&r)
	require.Equal(t, answer, got)
}
