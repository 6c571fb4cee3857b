package kvstate

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
)

// After a snapshot of blocks and sessions is loaded, another state has the same knowledge: over more endpoints than a
// word has bits, and with prompts that share their beginnings.
func TestSnapshotRoundTrip(t *testing.T) {
	const endpoints = 70
	make70 := func() (*State, *Pool) {
		s := New(Options{EndpointBlocks: 400})
		var eps []EndpointSpec
		for i := range endpoints {
			eps = append(eps, EndpointSpec{Addr: fmt.Sprintf("e%02d", i), Role: RoleBoth})
		}
		s.SetPool(PoolSpec{Name: "p"}, eps)
		return s, s.Pool("p")
	}
	from, p := make70()
	to, q := make70()
	prompts := make([][]uint64, 60)
	for i := range prompts {
		for b := range uint64(50) {
			h := b + 1 // the first ten blocks are shared
			if b >= 10 {
				h += uint64(i+1) << 32
			}
			prompts[i] = append(prompts[i], h)
		}
		for j := range 3 {
			from.Routed(p, p.Endpoints()[(i*7+j*31)%endpoints], prompts[i])
		}
	}
	from.Sessions.SetAffinity(p, 5, p.Endpoint("e03"), nil)
	from.Sessions.SetAffinity(p, 6, p.Endpoint("e01"), p.Endpoint("e69"))

	copied := 0
	for _, e := range p.Endpoints() {
		p.EachBlock(e, func(parent uint64, hashes []uint64) {
			copied += len(hashes)
			q.LoadBlocks(q.Endpoint(e.Addr), parent, hashes)
		})
	}
	require.Positive(t, copied)
	from.Sessions.EachSession(p, func(name uint64, prefill, decode *Endpoint) {
		var there [2]*Endpoint
		for i, e := range []*Endpoint{prefill, decode} {
			if e != nil {
				there[i] = q.Endpoint(e.Addr)
			}
		}
		to.Sessions.ApplyAffinity(q, name, there[0], there[1])
	})
	for i, prompt := range prompts {
		var v, w View
		from.View(p, prompt, &v)
		to.View(q, prompt, &w)
		from.Sessions.MarkSession(p, uint64(i), &v)
		to.Sessions.MarkSession(q, uint64(i), &w)
		for k := range v.Endpoints {
			require.Equal(t, v.Endpoints[k].Hit, w.Endpoints[k].Hit, "prompt %d on %s", i, v.Endpoints[k].Endpoint.Addr)
			require.Equal(t, v.Endpoints[k].Session, w.Endpoints[k].Session)
		}
	}
}
