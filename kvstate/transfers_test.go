package kvstate

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// mover is a fleet of decode endpoints whose engines report their transfers.
type mover struct {
	*testing.T
	s     *State
	now   time.Time
	moved map[string]TransferCounters
}

func newMover(t *testing.T, specs ...EndpointSpec) *mover {
	m := &mover{T: t, now: time.Unix(1e9, 0), moved: map[string]TransferCounters{}}
	m.s = New(Options{Now: func() time.Time { return m.now }})
	m.s.SetPool(PoolSpec{Name: "chat", Models: []string{"*"}}, specs)
	return m
}

func decoders(addrs ...string) (out []EndpointSpec) {
	for _, a := range addrs {
		out = append(out, EndpointSpec{Addr: a, Role: RoleDecode})
	}
	return out
}

// fetch makes the next scrape of an endpoint report n more transfers of that many tokens of 100 KB, each at that many
// bytes/s.
func (m *mover) fetch(addr string, n, tokens int64, bandwidth float64) {
	m.now = m.now.Add(2 * time.Second)
	d := m.moved[addr]
	d.Transfers, d.Tokens, d.Bytes = d.Transfers+n, d.Tokens+n*tokens, d.Bytes+n*tokens*100e3
	each := TransferLag.Seconds() + float64(tokens)*100e3/bandwidth
	d.Time += time.Duration(float64(n) * each * float64(time.Second))
	m.observe(addr, d)
}

func (m *mover) observe(addr string, d TransferCounters) {
	m.moved[addr] = d
	g := UnknownSignals()
	g.At, g.Transfers = m.now, d
	m.s.Observe(m.s.Pool("chat").Endpoint(addr), g)
}

func (m *mover) bandwidth(addr string) float64 {
	p := m.s.Pool("chat")
	return m.s.Bandwidth(p, p.Endpoint(addr))
}

// view returns the views' learned transfer times, in the pool's order.
func (m *mover) view() (out []float64, tokenBytes float64) {
	var v View
	m.s.View(m.s.Pool("chat"), nil, &v)
	for _, c := range v.Endpoints {
		out = append(out, c.Transfer)
	}
	return out, v.Load.TokenBytes
}

// Engines' reports about transfers are learned, for each endpoint and for the pool, whatever the initial assumption.
func TestTransfersAreLearned(t *testing.T) {
	m := newMover(t, decoders("fast", "slow", "new")...)
	all, bytes := m.view()
	require.Equal(t, []float64{1, 1, 1}, all)
	require.Zero(t, bytes)
	require.Zero(t, m.bandwidth("slow"))
	for range 40 {
		m.fetch("fast", 10, 4000, 25e9)
		m.fetch("slow", 10, 4000, 1e9)
	}
	all, bytes = m.view()
	require.InEpsilon(t, 100e3, bytes, 0.01)
	require.InDelta(t, 1, all[0], 0.3)              // it starts from the pool's ratio, of which half is slow
	require.InEpsilon(t, 0.410/0.026, all[1], 0.05) // 10 ms and 400 instead of 10 and 16
	require.Greater(t, all[2], 2.0, "an endpoint of which nothing is known is taken for one of its pool")
	require.Less(t, all[2], all[1])
	require.InEpsilon(t, 25e9/all[1], m.bandwidth("slow"), 1e-9)
	require.Zero(t, m.bandwidth("new"))

	m.now = m.now.Add(transferKept + time.Second)
	all, bytes = m.view()
	require.Equal(t, []float64{1, 1, 1}, all, "who was slow long ago gets another chance")
	require.InEpsilon(t, 100e3, bytes, 0.01)
	m.fetch("slow", 10, 4000, 25e9)
	all, _ = m.view()
	require.InEpsilon(t, 1, all[1], 0.05)
}

// Two equal endpoints, one of which had bad luck with its first transfers, stay equal.
func TestFewTransfersDistinguishNoEndpoint(t *testing.T) {
	m := newMover(t, decoders("lucky", "unlucky")...)
	for range transfersSeen/30 - 1 {
		m.fetch("lucky", 30, 4000, 25e9)
		m.fetch("unlucky", 30, 4000, 5e9)
	}
	all, _ := m.view()
	require.InDelta(t, all[0], all[1], 0)
	require.Greater(t, all[0], 1.25, "the pool's are slower than assumed")
	for range 3 {
		m.fetch("unlucky", 30, 4000, 5e9)
	}
	all, _ = m.view()
	require.Greater(t, all[1], all[0])
}

// Few observations count little, a stalled transfer does not affect the next, and absurd values are bounded.
func TestTransfersAreLearnedWithCare(t *testing.T) {
	m := newMover(t, decoders("a")...)
	m.fetch("a", 1, 100, 1e6)
	all, bytes := m.view()
	require.Equal(t, []float64{1}, all, "the first count is where others are counted from")
	require.Zero(t, bytes)
	m.fetch("a", 1, 100, 1e6)
	all, bytes = m.view()
	require.Less(t, all[0], 1.25, "one transfer, of 10 s")
	require.Zero(t, bytes)

	m = newMover(t, decoders("a")...)
	for range 40 {
		m.fetch("a", 10, 4000, 25e9)
	}
	m.fetch("a", 1, 4000, 1e6) // it took 400 s
	all, _ = m.view()
	require.InEpsilon(t, 1, all[0], 0.05)
	for range 200 {
		m.fetch("a", 10, 4000, 1e3)
	}
	all, _ = m.view()
	require.InDelta(t, transferBound, all[0], 1e-9)
}

// A network that is fifty times as slow as assumed is known after two transfers, whatever a prompt's KV has of bytes: each
// request that is split until then waits for its KV longer than its prompt takes to compute.
func TestASlowNetworkIsKnownSoon(t *testing.T) {
	for _, tokens := range []int64{100, 4000, 32000} {
		m := newMover(t, decoders("a")...)
		m.fetch("a", 1, tokens, .46e9)
		for range 2 {
			m.fetch("a", 1, tokens, .46e9)
		}
		truth := (.01 + float64(tokens)*100e3/.46e9) / (.01 + float64(tokens)*100e3/25e9)
		all, _ := m.view()
		require.Less(t, all[0], truth)
		m.fetch("a", 1, tokens, .46e9)
		all, _ = m.view()
		require.Greater(t, all[0], 1+truth/12, "%d tokens, truth %.1f", tokens, truth)
	}
}

// Bytes per token stay right when old samples fade, in a busy fleet as after hours without a scrape.
func TestTokenBytesOfABusyFleet(t *testing.T) {
	for _, each := range []int64{50_000, 1_000_000, 1_000_000_000} { // tokens between two scrapes
		m := newMover(t, decoders("a")...)
		for range 200 {
			m.fetch("a", 10, each/10, 25e9)
		}
		_, bytes := m.view()
		require.InEpsilon(t, 100e3, bytes, 1e-6, each)
	}
}

// A count over hours without a scrape does not outweigh all later ones.
func TestTransfersOfHours(t *testing.T) {
	m := newMover(t, decoders("a")...)
	m.fetch("a", 10, 4000, 25e9)
	m.now = m.now.Add(5 * time.Hour)
	m.fetch("a", 1_000_000, 4000, 1e9) // sixteen times as slow as assumed, and a scrape counts for at most four
	for range 200 {
		m.fetch("a", 10, 4000, 1e9)
	}
	all, _ := m.view()
	require.InEpsilon(t, 0.410/0.026, all[0], 0.1)
}

// A restarted engine counts from 0, and a missing report does not count as less.
func TestTransfersOfAnEngineThatStartsAnew(t *testing.T) {
	m := newMover(t, decoders("a")...)
	for range 40 {
		m.fetch("a", 10, 4000, 1e9)
	}
	before, _ := m.view()
	m.now = m.now.Add(2 * time.Second)
	m.observe("a", TransferCounters{})
	m.now = m.now.Add(2 * time.Second)
	m.observe("a", TransferCounters{Transfers: 3, Bytes: 3 * 400e6, Time: time.Second, Tokens: 12_000})
	after, _ := m.view()
	require.Equal(t, before, after)
	m.fetch("a", 10, 4000, 1e9)
	after, _ = m.view()
	require.InEpsilon(t, before[0], after[0], 0.01)
}

// Tensor-parallel ranks fetch at the same time: the request takes as long as each of them.
func TestTransfersOfRanks(t *testing.T) {
	spec := decoders("a")
	spec[0].Transfer.TP = 8
	m := newMover(t, spec...)
	for i := range int64(40) { // each request: eight transfers of 50 MB, 26 ms each
		m.now = m.now.Add(2 * time.Second)
		n := i + 1
		m.observe("a", TransferCounters{Transfers: 80 * n, Bytes: 10 * 400e6 * n, Time: time.Duration(80*n) * 26 * time.Millisecond, Tokens: 40_000 * n})
	}
	all, bytes := m.view()
	require.InEpsilon(t, 1, all[0], 0.05)
	require.InEpsilon(t, 100e3, bytes, 0.01)
}

// Between several zones the distance of a transfer is unknown: times are as modelled, bytes are learned.
func TestTransfersBetweenZones(t *testing.T) {
	spec := decoders("a", "b")
	spec[0].Zone, spec[1].Zone = "x", "y"
	m := newMover(t, spec...)
	for range 40 {
		m.fetch("a", 10, 4000, 1e9)
	}
	all, bytes := m.view()
	require.Equal(t, []float64{1, 1}, all)
	require.InEpsilon(t, 100e3, bytes, 0.01)
}
