package picker

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tandem/internal/budget"
	"tandem/kvstate"
	"tandem/kvstate/residency"
)

// sameNodePairs returns the same-node pairs of a view, computed in a simple way.
func sameNodePairs(v *kvstate.View) [][]int32 {
	out := make([][]int32, len(v.Endpoints))
	for p := range v.Endpoints {
		for d := range v.Endpoints {
			if v.Endpoints[d].Endpoint.Role&kvstate.RoleDecode != 0 && p != d && sameNode(v, p, d) {
				out[p] = append(out[p], int32(d))
			}
		}
	}
	return out
}

func sameNode(v *kvstate.View, p, d int) bool {
	a, b := v.Endpoints[p].Endpoint.Node, v.Endpoints[d].Endpoint.Node
	return a == b && a != ""
}

// randomCase makes a small fleet with many ties, and a request.
func randomCase(r *rand.Rand) (*Request, *kvstate.View, Policy) {
	v := &kvstate.View{}
	odd := r.IntN(3) // amount of differences between endpoints
	name := func(prefix string) string {
		if odd == 0 {
			return ""
		}
		return []string{"", prefix + "a", prefix + "b"}[r.IntN(3)]
	}
	groups := [][]string{{""}, {"a", "a", "b"}}[r.IntN(2)]
	for i := range r.IntN(9) {
		c := kvstate.Candidate{
			Endpoint: &kvstate.Endpoint{EndpointSpec: kvstate.EndpointSpec{
				Addr: fmt.Sprint("10.0.0.", i, ":80"), Role: kvstate.Role(1 + r.IntN(3)), Group: groups[r.IntN(len(groups))], Zone: name("z"),
			}},
			Usable: r.IntN(6) > 0, PromptTokens: 500 * r.Int64N(4), Hit: r.IntN(5),
		}
		if odd == 2 {
			c.Endpoint.Engine, c.Awaits = name("e"), r.IntN(8) == 0
			if size := name("l"); size != "" {
				c.Report = &kvstate.Report{kvstate.FactBlockSize: size}
			}
			c.Transfer, c.Step = []float64{0, 1, 5}[r.IntN(3)], []float64{0, 1, .5, 3}[r.IntN(4)]
			c.Share, c.Speed = float64(r.IntN(2))*.6, []float64{0, 1, 3}[r.IntN(3)]
		}
		if c.Endpoint.Role&kvstate.RolePrefill != 0 {
			c.Jobs = r.Int64N(3)
			c.Queue = time.Duration(c.Jobs) * 200 * time.Millisecond
		}
		if c.Endpoint.Role&kvstate.RoleDecode != 0 {
			c.Local = time.Duration(r.IntN(2)) * 100 * time.Millisecond
			c.PromptTokens += int64(r.IntN(8)/7) * 990_000
			c.KVTokens = []int64{0, 0, 1200, 40_000, 3_000_000}[r.IntN(5)]
		}
		c.Requests = c.Jobs + r.Int64N(3)
		if c.Endpoint.Role == kvstate.RoleBoth {
			c.Word = kvstate.Role(r.IntN(4)) // none: used for both
		}
		if r.IntN(3) == 0 {
			c.Signals, c.Trust = &kvstate.Signals{KVUsage: []float64{-1, 0, .4, .9}[r.IntN(4)]}, []float64{0, .5, 1}[r.IntN(3)]
		}
		if c.Hit > 0 && r.IntN(3) == 0 { // some of the hit is in slower tiers
			for range c.Hit {
				c.Loads[r.IntN(len(c.Loads))] += int32(r.IntN(2))
			}
		}
		if odd > 0 {
			c.Endpoint.Node = []string{"", "na", "nb"}[(odd*i+len(groups))%3]
		}
		v.Endpoints = append(v.Endpoints, c)
	}
	if r.IntN(3) == 0 {
		for i := range v.Endpoints {
			v.Endpoints[i].Faults = randomFaults(r, v)
		}
	}
	v.SameNode = sameNodePairs(v)
	v.Load = kvstate.Utilisation{Prefill: []float64{0, .5, .8, 1}[r.IntN(4)], Local: []float64{0, .3}[r.IntN(2)], Work: time.Duration(r.IntN(2)) * 300 * time.Millisecond}
	v.Load.TokenBytes, v.Load.LoadBandwidth = []float64{0, 0, 2e6}[r.IntN(3)], []float64{0, 0, 1e9}[r.IntN(3)]
	v.Load.Answer, v.Load.Step = []float64{0, 0, 20, 4000}[r.IntN(4)], []float64{0, 1, 2, .5}[r.IntN(4)]
	for blocks := 1 + r.IntN(3); blocks < 5 && r.IntN(2) > 0; blocks += 1 + r.IntN(2) {
		v.Uses = append(v.Uses, kvstate.UseStep{Blocks: int32(blocks), Uses: float32(1000 / blocks)})
	}
	q := &Request{PromptTokens: []int64{0, 20, 1000, 2000, 30_000}[r.IntN(5)], Blocks: 4 * r.IntN(2), Split: r.IntN(4) > 0}
	q.MinAnswer, q.MaxAnswer = int64(r.IntN(2))*30, []int64{0, 0, 100, 10_000}[r.IntN(4)]
	for _, c := range v.Endpoints {
		if r.IntN(5) == 0 {
			q.Excluded = append(q.Excluded, c.Endpoint.Addr)
		}
	}
	policy := DefaultPolicy()
	policy.Split, policy.Late = Split(r.IntN(3)), r.IntN(2) == 0
	policy.MinPrefillTokens = int64(r.IntN(2)) * 500
	policy.AnswerWeight = []float64{.1, .5, 1}[r.IntN(3)]
	for i := range v.Endpoints {
		if c := &v.Endpoints[i]; r.IntN(3) == 0 { // KV that nobody has fetched
			c.Room.Held, c.Room.Need = []int64{0, 64, 640, 25_600}[r.IntN(4)], []int64{0, 320, 25_600}[r.IntN(3)]
			c.KVTokens = max(c.KVTokens, []int64{0, 40_000}[r.IntN(2)])
		}
	}
	q.Waited = []float64{0, 0, 4.9, 7}[r.IntN(4)]
	if r.IntN(2) == 0 { // conversations are known
		v.Load.Live = float64(r.IntN(2)) * 5e6
		for i := range v.Endpoints {
			m := &residency.Memory{Tokens: 1e6, Free: 500 * float64(r.IntN(5)), Returns: float64(r.IntN(3)) * .1}
			for at := range r.IntN(3) {
				end := 1000 * float64(1+r.IntN(3))
				m.Old[at] = residency.Part{Tokens: 600, End: end, Middle: end - 300, Back: []float64{0, .5, 1}[r.IntN(3)]}
			}
			m.Live = float64(r.IntN(3)) * 4e5
			v.Endpoints[i].Memory = m
		}
	}
	return q, v, policy
}

// randomFaults returns failed loads of an endpoint of the view; mostly none.
func randomFaults(r *rand.Rand, v *kvstate.View) *kvstate.LoadFaults {
	if r.IntN(2) == 0 {
		return nil
	}
	f := &kvstate.LoadFaults{}
	for i := range v.Endpoints {
		if r.IntN(4) == 0 {
			f.Decodes = append(f.Decodes, v.Endpoints[i].Endpoint.Addr)
		}
	}
	if r.IntN(6) == 0 {
		f.Parts = kvstate.Role(1 + r.IntN(3))
	}
	return f
}

// winners returns what Pick answers, over many values of chance.
func winners(t *testing.T, k *Picker, r *Request, v *kvstate.View, chances int) []Choice {
	seen := map[Choice]bool{}
	for i := range uint64(chances) {
		r.Rand = (i + 1) * 0x9e3779b97f4a7c15
		c, err := k.Pick(r, v)
		again, _ := k.Pick(r, v)
		require.Equal(t, c, again, "the same question has the same answer")
		c = Choice{Prefill: c.Prefill, Decode: c.Decode}
		if err != nil {
			require.ErrorIs(t, err, ErrNoEndpoint)
			return nil
		}
		seen[c] = true
	}
	var all []Choice
	for c := range seen {
		all = append(all, c)
	}
	return sorted(all)
}

func sorted(all []Choice) []Choice {
	slices.SortFunc(all, func(a, b Choice) int { return 100*(a.Prefill-b.Prefill) + a.Decode - b.Decode })
	return all
}

func TestPickAgainstTwin(t *testing.T) {
	for seed := range uint64(4000) {
		r, v, policy := randomCase(rand.New(rand.NewPCG(seed, 7)))
		if seed%2 == 0 {
			group(v)
			if seed%4 == 0 {
				v.Groups = groupEnds(v)
			}
			v.SameNode = sameNodePairs(v)
			v.Uniform = !slices.ContainsFunc(v.Endpoints, func(c kvstate.Candidate) bool {
				return c.Endpoint.Engine+c.Endpoint.Zone != "" || c.Report != nil || c.Awaits
			})
		}
		want := sorted((&twin{r: r, v: v, p: policy}).pick())
		got := winners(t, &Picker{Policy: policy}, r, v, 40*max(len(want), 1))
		require.Equal(t, want, got, "seed %d: %+v %+v", seed, r, policy)
	}
}

func FuzzPick(f *testing.F) {
	for seed := range uint64(500) {
		f.Add(seed, seed+1)
	}
	var k Picker
	f.Fuzz(func(t *testing.T, seed, chance uint64) {
		r, v, policy := randomCase(rand.New(rand.NewPCG(seed, seed)))
		k.Policy = policy
		r.Rand = chance
		w := &twin{r: r, v: v, p: policy}
		want := w.pick()
		got, err := k.Pick(r, v)
		if len(want) == 0 {
			require.ErrorIs(t, err, ErrNoEndpoint)
			return
		}
		require.NoError(t, err)
		require.Contains(t, want, Choice{Prefill: got.Prefill, Decode: got.Decode})
		if math.IsInf(w.other, 1) {
			require.True(t, math.IsInf(got.Other, 1))
		} else {
			require.InDelta(t, w.other, got.Other, sameTime*1.001)
		}
	})
}

// group puts the endpoints of a group next to each other, as kvstate does.
func group(v *kvstate.View) {
	slices.SortStableFunc(v.Endpoints, func(a, b kvstate.Candidate) int { return strings.Compare(a.Endpoint.Group, b.Endpoint.Group) })
	v.Grouped = true
}

// groupEnds returns the groups of a view whose endpoints are grouped.
func groupEnds(v *kvstate.View) (ends []int32) {
	for i := range v.Endpoints {
		if i+1 == len(v.Endpoints) || v.Endpoints[i+1].Endpoint.Group != v.Endpoints[i].Endpoint.Group {
			ends = append(ends, int32(i+1))
		}
	}
	return ends
}

// Irrelevant changes have no effect: the order of endpoints, and the state of those that were not chosen anyway.
func TestPickRelations(t *testing.T) {
	for seed := range uint64(400) {
		random := rand.New(rand.NewPCG(seed, 8))
		r, v, policy := randomCase(random)
		k := &Picker{Policy: policy}
		before := (&twin{r: r, v: v, p: policy}).pick()
		if len(before) == 0 {
			continue
		}
		names := func(c []Choice, v *kvstate.View) (out []string) {
			for _, c := range c {
				p := ""
				if c.Prefill >= 0 {
					p = v.Endpoints[c.Prefill].Endpoint.Addr
				}
				out = append(out, p+" "+v.Endpoints[c.Decode].Endpoint.Addr)
			}
			slices.Sort(out)
			return out
		}
		pick := func(v *kvstate.View) []string { return names(winners(t, k, r, v, 300), v) }
		changed := func(change func(i int, c *kvstate.Candidate)) *kvstate.View {
			next := &kvstate.View{Endpoints: slices.Clone(v.Endpoints), Load: v.Load, Uses: v.Uses, SameNode: v.SameNode}
			for i := range next.Endpoints {
				change(i, &next.Endpoints[i])
			}
			return next
		}
		chosen := func(i int) bool {
			return slices.ContainsFunc(before, func(c Choice) bool { return c.Prefill == i || c.Decode == i })
		}
		shuffled := changed(func(int, *kvstate.Candidate) {})
		random.Shuffle(len(shuffled.Endpoints), func(i, j int) {
			shuffled.Endpoints[i], shuffled.Endpoints[j] = shuffled.Endpoints[j], shuffled.Endpoints[i]
		})
		shuffled.SameNode = sameNodePairs(shuffled)
		require.Equal(t, names(before, v), pick(shuffled), "seed %d: the order of endpoints", seed)
		require.Equal(t, names(before, v), pick(changed(func(i int, c *kvstate.Candidate) {
			if !chosen(i) {
				if c.PromptTokens > 0 { // else its requests have no length, and get one
					c.PromptTokens += 3000
				}
				c.Queue += time.Second
				c.Local += time.Second
			}
		})), "seed %d: more load on those who were not chosen", seed)
	}
}

// Equals are chosen equally often, P and D independently of each other.
func TestTiesAreFair(t *testing.T) {
	v, k := fleet(8, 1), always()
	count := map[Choice]int{}
	random := rand.New(rand.NewPCG(1, 1))
	const n = 32000
	for range n {
		c, err := k.Pick(&Request{PromptTokens: 1000, Split: true, Rand: random.Uint64()}, v)
		require.NoError(t, err)
		count[Choice{Prefill: c.Prefill, Decode: c.Decode}]++
	}
	require.Len(t, count, 16)
	var chi2 float64
	for _, k := range count {
		chi2 += float64(k-n/16) * float64(k-n/16) / (n / 16)
	}
	require.Less(t, chi2, 37.7, "15 degrees of freedom, p = 0.001") // deterministic: the seed is fixed
}

func TestPickDecode(t *testing.T) {
	k := always()
	v := fleet(8, 2) // groups g0 and g1, alternating; 0 to 3 prefill
	v.Endpoints[4].PromptTokens = 10_000
	v.Endpoints[4].Requests = 20
	for chance := range uint64(20) {
		d, err := k.PickDecode(&Request{Rand: chance << 40}, v, 0)
		require.NoError(t, err)
		require.Equal(t, 6, d, "the cheaper of the group")
	}
	d, err := k.PickDecode(&Request{Faults: Faults{Excluded: []string{v.Endpoints[6].Endpoint.Addr}}}, v, 0)
	require.NoError(t, err)
	require.Equal(t, 4, d)
	d, err = k.PickDecode(&Request{Faults: Faults{Excluded: []string{v.Endpoints[6].Endpoint.Addr, v.Endpoints[4].Endpoint.Addr}}}, v, 0)
	require.NoError(t, err)
	require.Equal(t, 6, d, "better one that failed this request than none")
	_, err = k.PickDecode(&Request{}, &kvstate.View{}, -1)
	require.ErrorIs(t, err, ErrNoEndpoint)
	v.Endpoints[4].Usable, v.Endpoints[6].Usable = false, false
	d, err = k.PickDecode(&Request{}, v, 0)
	require.ErrorIs(t, err, ErrNoEndpoint)
	require.Equal(t, -1, d)
	d, err = k.PickDecode(&Request{}, v, -1)
	require.NoError(t, err, "where P is not known any more, the group is not either")
	require.Contains(t, []int{5, 7}, d)

	v = fleet(8, 2)
	group(v)
	v.Groups, v.Uniform = groupEnds(v), true
	require.Equal(t, []int32{4, 8}, v.Groups)
	for chance := range uint64(20) {
		for prefill, want := range map[int][]int{0: {2, 3}, 5: {6, 7}} {
			d, err = k.PickDecode(&Request{Rand: chance << 40}, v, prefill)
			require.NoError(t, err)
			require.Contains(t, want, d, "of the group that begins where the other ends")
		}
	}
}

// always returns a picker that splits everything.
func always() *Picker {
	k := &Picker{Policy: DefaultPolicy()}
	k.Split = SplitAlways
	return k
}

// fleet returns n idle endpoints, the first half of which prefills, in so many groups.
func fleet(n, groups int) *kvstate.View {
	v := &kvstate.View{}
	for i := range n {
		role := kvstate.RolePrefill
		if i >= n/2 {
			role = kvstate.RoleDecode
		}
		v.Endpoints = append(v.Endpoints, kvstate.Candidate{Usable: true, Endpoint: &kvstate.Endpoint{EndpointSpec: kvstate.EndpointSpec{
			Addr: fmt.Sprintf("10.0.%d.%d:8000", i/256, i%256), Role: role, Group: fmt.Sprint("g", i%groups),
		}}})
	}
	return v
}

func TestPickAllocates(t *testing.T) {
	for _, groups := range []int{1, 16} {
		for _, split := range []Split{SplitAlways, SplitAuto, SplitNever} {
			v, k := loadedFleet(64, groups), &Picker{Policy: DefaultPolicy()}
			for i := range v.Endpoints[:32] { // half of them serve both legs
				v.Endpoints[i].Endpoint.Role, v.Endpoints[i].Word = kvstate.RoleBoth, kvstate.Role(i%4)
			}
			k.Split = split
			r := &Request{PromptTokens: 1000, Blocks: 10, Split: true, Faults: Faults{Excluded: []string{"10.0.0.3:8000"}}}
			budget.Allocs(t, 100, 0, func() {
				r.Rand++
				if _, err := k.Pick(r, v); err != nil {
					t.Error(err)
				}
				if _, err := k.PickDecode(r, v, 1); err != nil {
					t.Error(err)
				}
			})
		}
	}
	r, none, k := &Request{Split: true}, &kvstate.View{}, always()
	budget.Allocs(t, 100, 0, func() {
		if _, err := k.Pick(r, none); !errors.Is(err, ErrNoEndpoint) {
			t.Error(err)
		}
	})
}

// loadedFleet returns a fleet at work.
func loadedFleet(n, groups int) *kvstate.View {
	v, random := fleet(n, groups), rand.New(rand.NewPCG(1, 1))
	group(v)
	for i := range v.Endpoints {
		c := &v.Endpoints[i]
		c.PromptTokens, c.Requests, c.Hit = random.Int64N(50000), random.Int64N(30), random.IntN(4)
		c.Loads[0] = int32(c.Hit / 2)
		c.Queue = time.Duration(random.IntN(3000)) * time.Millisecond
	}
	v.Load = kvstate.Utilisation{Prefill: .7, Work: 300 * time.Millisecond, Speed: 1}
	return v
}
