package picker

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"tandem/kvstate"
)

// twin is Pick by brute force: every pair, every price, and all that are equally good.
func twin(r *Request, v *kvstate.View) []Choice {
	ok := func(i int, role kvstate.Role) bool {
		c := v.Endpoints[i]
		return c.Endpoint.Role&role != 0 && c.Usable && !slices.Contains(r.Excluded, c.Endpoint.Addr)
	}
	best, winners := int64(math.MaxInt64), []Choice(nil)
	offer := func(c Choice, price int64) {
		if price < best {
			best, winners = price, nil
		}
		if price == best {
			winners = append(winners, c)
		}
	}
	for p := range v.Endpoints {
		for d := range v.Endpoints {
			if r.Split && p != d && ok(p, kvstate.RolePrefill) && ok(d, kvstate.RoleDecode) && v.Endpoints[p].Endpoint.Group == v.Endpoints[d].Endpoint.Group {
				offer(Choice{p, d}, prefillPrice(r, &v.Endpoints[p])+decodePrice(r, &v.Endpoints[d]))
			}
		}
	}
	if winners != nil {
		return winners
	}
	for d := range v.Endpoints {
		if ok(d, kvstate.RoleDecode) {
			offer(Choice{-1, d}, alonePrice(r, &v.Endpoints[d]))
		}
	}
	if winners == nil && r.Excluded != nil {
		again := *r
		again.Excluded, again.Split = nil, false
		return twin(&again, v)
	}
	return winners
}

// randomCase makes a small fleet with many ties, and a request.
func randomCase(r *rand.Rand) (*Request, *kvstate.View) {
	v := &kvstate.View{}
	for i := range r.IntN(9) {
		v.Endpoints = append(v.Endpoints, kvstate.Candidate{
			Endpoint: &kvstate.Endpoint{EndpointSpec: kvstate.EndpointSpec{
				Addr: fmt.Sprint("10.0.0.", i, ":80"), Role: kvstate.Role(1 + r.IntN(3)), Group: string(rune('a' + r.IntN(3)/2)),
			}},
			Usable: r.IntN(6) > 0, Requests: r.Int64N(3), PromptTokens: 500 * r.Int64N(4), Hit: r.IntN(5),
		})
	}
	q := &Request{PromptTokens: 1000 * r.Int64N(3), Blocks: 4 * r.IntN(2), Split: r.IntN(4) > 0}
	for _, c := range v.Endpoints {
		if r.IntN(5) == 0 {
			q.Excluded = append(q.Excluded, c.Endpoint.Addr)
		}
	}
	return q, v
}

// winners is what Pick answers, over many values of chance.
func winners(t *testing.T, r *Request, v *kvstate.View, chances int) []Choice {
	seen := map[Choice]bool{}
	for i := range uint64(chances) {
		r.Rand = (i + 1) * 0x9e3779b97f4a7c15
		c, err := Pick(r, v)
		again, _ := Pick(r, v)
		require.Equal(t, c, again, "the same question has the same answer")
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
	for seed := range uint64(2000) {
		r, v := randomCase(rand.New(rand.NewPCG(seed, 7)))
		if seed%2 == 0 {
			group(v)
		}
		want := sorted(twin(r, v))
		got := winners(t, r, v, 40*max(len(want), 1))
		require.Equal(t, want, got, "seed %d: %+v", seed, r)
	}
}

func FuzzPick(f *testing.F) {
	f.Add(uint64(1), uint64(2))
	f.Fuzz(func(t *testing.T, seed, chance uint64) {
		r, v := randomCase(rand.New(rand.NewPCG(seed, seed)))
		r.Rand = chance
		want := twin(r, v)
		got, err := Pick(r, v)
		if len(want) == 0 {
			require.ErrorIs(t, err, ErrNoEndpoint)
			return
		}
		require.NoError(t, err)
		require.Contains(t, want, got)
	})
}

// group puts the endpoints of a group next to each other, as kvstate does.
func group(v *kvstate.View) {
	slices.SortStableFunc(v.Endpoints, func(a, b kvstate.Candidate) int { return strings.Compare(a.Endpoint.Group, b.Endpoint.Group) })
	v.Grouped = true
}

// What must not matter does not matter, and what must does.
func TestPickRelations(t *testing.T) {
	for seed := range uint64(400) {
		random := rand.New(rand.NewPCG(seed, 8))
		r, v := randomCase(random)
		before := twin(r, v)
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
		pick := func(v *kvstate.View) []string { return names(winners(t, r, v, 300), v) }
		changed := func(change func(i int, c *kvstate.Candidate)) *kvstate.View {
			next := &kvstate.View{Endpoints: slices.Clone(v.Endpoints)}
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
		require.Equal(t, names(before, v), pick(shuffled), "seed %d: the order of endpoints", seed)
		require.Equal(t, names(before, v), pick(changed(func(i int, c *kvstate.Candidate) {
			if !chosen(i) {
				c.PromptTokens += 3000
				c.Requests++
			}
		})), "seed %d: more load on those who were not chosen", seed)
		require.Equal(t, names(before, v), pick(changed(func(i int, c *kvstate.Candidate) {
			if !chosen(i) && !slices.Contains(r.Excluded, c.Endpoint.Addr) {
				c.Usable = false
			}
		})), "seed %d: those who were not chosen fail", seed)
		if one := before[0]; len(before) == 1 {
			less := changed(func(i int, c *kvstate.Candidate) {
				if i == one.Decode || i == one.Prefill {
					c.PromptTokens -= min(c.PromptTokens, 250)
				}
			})
			require.Equal(t, names(before, v), pick(less), "seed %d: less load on who was chosen", seed)
		}
	}
}

// Equals are chosen equally often, P and D independently of each other.
func TestTiesAreFair(t *testing.T) {
	v := fleet(8, 1)
	count := map[Choice]int{}
	random := rand.New(rand.NewPCG(1, 1))
	const n = 32000
	for range n {
		c, err := Pick(&Request{PromptTokens: 1000, Split: true, Rand: random.Uint64()}, v)
		require.NoError(t, err)
		count[c]++
	}
	require.Len(t, count, 16)
	var chi2 float64
	for _, k := range count {
		chi2 += float64(k-n/16) * float64(k-n/16) / (n / 16)
	}
	require.Less(t, chi2, 37.7, "15 degrees of freedom, p = 0.001") // deterministic: the seed is fixed
}

func TestPickDecode(t *testing.T) {
	v := fleet(8, 2) // groups g0 and g1, alternating; 0 to 3 prefill
	v.Endpoints[4].PromptTokens = 100
	for chance := range uint64(20) {
		d, err := PickDecode(&Request{Rand: chance << 40}, v, 0)
		require.NoError(t, err)
		require.Equal(t, 6, d, "the cheaper of the group")
	}
	d, err := PickDecode(&Request{Excluded: []string{v.Endpoints[6].Endpoint.Addr}}, v, 0)
	require.NoError(t, err)
	require.Equal(t, 4, d)
	d, err = PickDecode(&Request{Excluded: []string{v.Endpoints[6].Endpoint.Addr, v.Endpoints[4].Endpoint.Addr}}, v, 0)
	require.NoError(t, err)
	require.Equal(t, 6, d, "better one that failed this request than none")
	_, err = PickDecode(&Request{}, &kvstate.View{}, -1)
	require.ErrorIs(t, err, ErrNoEndpoint)
	v.Endpoints[4].Usable, v.Endpoints[6].Usable = false, false
	d, err = PickDecode(&Request{}, v, 0)
	require.ErrorIs(t, err, ErrNoEndpoint)
	require.Equal(t, -1, d)
	d, err = PickDecode(&Request{}, v, -1)
	require.NoError(t, err, "where P is not known any more, the group is not either")
	require.Contains(t, []int{5, 7}, d)
}

// fleet is n idle endpoints, the first half of which prefills, in so many groups.
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
		v := fleet(64, groups)
		group(v)
		r := &Request{PromptTokens: 1000, Blocks: 10, Split: true, Excluded: []string{"10.0.0.3:8000"}}
		require.Zero(t, testing.AllocsPerRun(100, func() {
			r.Rand++
			if _, err := Pick(r, v); err != nil {
				t.Error(err)
			}
			if _, err := PickDecode(r, v, 1); err != nil {
				t.Error(err)
			}
		}))
	}
	r, none := &Request{Split: true}, &kvstate.View{}
	require.Zero(t, testing.AllocsPerRun(100, func() {
		if _, err := Pick(r, none); !errors.Is(err, ErrNoEndpoint) {
			t.Error(err)
		}
	}))
}

func BenchmarkPick(b *testing.B) {
	for _, n := range []int{64, 512} {
		for _, groups := range []int{1, n / 4} {
			for _, load := range []string{"idle", "loaded"} {
				b.Run(fmt.Sprintf("%d/groups=%d/%s", n, groups, load), func(b *testing.B) {
					v, random := fleet(n, groups), rand.New(rand.NewPCG(1, 1))
					group(v)
					for i := range v.Endpoints {
						if load == "loaded" {
							v.Endpoints[i].PromptTokens, v.Endpoints[i].Requests = random.Int64N(50000), random.Int64N(30)
						}
					}
					r := &Request{PromptTokens: 10000, Blocks: 80, Split: true}
					b.ReportAllocs()
					for b.Loop() {
						r.Rand += 0x9e3779b97f4a7c15
						if _, err := Pick(r, v); err != nil {
							b.Fatal(err)
						}
					}
				})
			}
		}
	}
}

// BenchmarkViewAndPick is the whole decision: the view of a fleet under load, its prefix index included, and the pick.
func BenchmarkViewAndPick(b *testing.B) {
	for _, n := range []int{64, 512} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			s, random := kvstate.New(kvstate.Options{}), rand.New(rand.NewPCG(1, 1))
			var eps []kvstate.EndpointSpec
			for _, c := range fleet(n, 1).Endpoints {
				eps = append(eps, c.Endpoint.EndpointSpec)
			}
			s.SetPool(kvstate.PoolSpec{Name: "p", Models: []string{"*"}}, eps)
			p := s.Pool("p")
			prompts := make([][]uint64, 64) // 430 blocks, of which a quarter is common to all
			for i := range prompts {
				prompts[i] = make([]uint64, 430)
				for k := range prompts[i] {
					if prompts[i][k] = uint64(k+1) * 0x9e3779b97f4a7c15; k >= 107 {
						prompts[i][k] += uint64(i+1) << 20
					}
				}
			}
			for i, e := range p.Endpoints() {
				s.Reserve(e, random.Int64N(50000))
				s.Routed(p, e, prompts[i%len(prompts)])
			}
			var v kvstate.View
			r := &Request{PromptTokens: 55000, Blocks: 430, Split: true}
			s.View(p, prompts[0], &v)
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				r.Rand += 0x9e3779b97f4a7c15
				s.View(p, prompts[i%len(prompts)], &v)
				if _, err := Pick(r, &v); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
