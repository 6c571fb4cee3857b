package picker

import (
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"testing"
	"time"

	"tandem/kvstate"
	"tandem/kvstate/residency"
)

// pickCase is one decision for measurements.
type pickCase struct {
	name   string
	decide func() error
}

// pickCases returns picks alone, over fleets of that many endpoints.
func pickCases(endpoints int) (all []pickCase) {
	for _, groups := range []int{1, endpoints / 4} {
		for _, loaded := range []bool{false, true} {
			name, v := "idle", fleet(endpoints, groups)
			if loaded {
				name, v = "loaded", loadedFleet(endpoints, groups)
			}
			group(v)
			v.Groups, v.Uniform = groupEnds(v), true
			k := &Picker{Policy: DefaultPolicy()}
			r := &Request{PromptTokens: 55000, Blocks: 10, Split: true}
			all = append(all, pickCase{fmt.Sprintf("%d/groups=%d/%s", endpoints, groups, name), func() error {
				r.Rand += 0x9e3779b97f4a7c15
				_, err := k.Pick(r, v)
				return err
			}})
		}
	}
	return all
}

// wholeCases returns whole decisions: the view of a fleet under load, its prefix index included, and the pick.
func wholeCases() (all []pickCase) {
	for _, c := range []struct {
		endpoints, blocks int
		lengths           string // distribution of the held lengths of prompts, a quarter of which is common to all
		// as in a server: engines report loads and models, requests name a model, prompts are counted
		served bool
		words  bool // all endpoints serve both legs, and have words
	}{
		{64, 430, "whole", false, false}, {1024, 8192, "whole", false, false}, {1024, 8192, "different", false, false},
		{64, 430, "whole", true, false}, {1024, 8192, "whole", true, false}, {1024, 8192, "different", true, false},
		{64, 430, "whole", true, true}, {1024, 8192, "whole", true, true},
	} {
		s, random := kvstate.New(kvstate.Options{}), rand.New(rand.NewPCG(1, 1))
		var eps []kvstate.EndpointSpec
		var legs []kvstate.Role
		for _, at := range fleet(c.endpoints, 1).Endpoints {
			spec := at.Endpoint.EndpointSpec
			if legs = append(legs, spec.Role); c.words {
				spec.Role = kvstate.RoleBoth
			}
			eps = append(eps, spec)
		}
		s.SetPool(kvstate.PoolSpec{Name: "p", Models: []string{"*"}}, eps)
		p := s.Pool("p")
		prompts := make([][]uint64, 64)
		for i := range prompts {
			prompts[i] = make([]uint64, c.blocks)
			for k := range prompts[i] {
				if prompts[i][k] = uint64(k+1) * 0x9e3779b97f4a7c15; k >= c.blocks/4 {
					prompts[i][k] += uint64(i+1) << 20
				}
			}
		}
		order := random.Perm(c.endpoints)
		for i, e := range p.Endpoints() {
			s.SetWord(e, legs[i]) // of a fixed role: nothing
			s.Bookings.Reserve(e, kvstate.Booking{
				For: legs[i], PromptTokens: 5000, Uncached: 5000, Work: time.Duration(random.IntN(3000)) * time.Millisecond,
			})
			if c.served {
				report(s, e)
			}
			if c.lengths == "whole" {
				s.Routed(p, e, prompts[i%len(prompts)])
			} else {
				s.Routed(p, e, prompts[0][:(order[i]+1)*c.blocks/c.endpoints])
			}
		}
		if c.lengths == "different" {
			prompts = prompts[:1]
		}
		var v kvstate.View
		k := &Picker{Policy: DefaultPolicy()}
		r := &Request{PromptTokens: int64(128 * c.blocks), Blocks: c.blocks, Split: true}
		i := 0
		view := func() { s.View(p, prompts[i%len(prompts)], &v) }
		name := fmt.Sprintf("%d/blocks=%d/%s", c.endpoints, c.blocks, c.lengths)
		if c.served {
			r.Model, name = "m", name+"/served"
			if c.words {
				name += "/words"
			}
			for range 20 * len(prompts) { // popular ones
				s.CountPrompt(p, prompts[i%len(prompts)])
				i++
			}
		}
		view()
		all = append(all,
			pickCase{name + "/view", func() error { i++; view(); return nil }},
			pickCase{name + "/view+pick", func() error {
				i++
				r.Rand += 0x9e3779b97f4a7c15
				view()
				_, err := k.Pick(r, &v)
				return err
			}})
		if c.words { // and the turns of conversations, which fill the memory
			late := &Picker{Policy: DefaultPolicy()}
			late.Late = true
			all = append(all, pickCase{name + "/memory", func() error {
				i++
				r.Rand += 0x9e3779b97f4a7c15
				view()
				hashes := prompts[i%len(prompts)]
				of := s.Arrived(p, hashes, r.PromptTokens, 0, &v)
				c, err := late.Pick(r, &v)
				at := v.Endpoints[c.Decode].Endpoint
				s.Computes(p, of, at, &v)
				s.Routed(p, at, hashes)
				return err
			}})
		}
	}
	return all
}

// report has an endpoint report its load and its model, and teaches its speed.
func report(s *kvstate.State, e *kvstate.Endpoint) {
	s.SetModels(e, []kvstate.Model{{ID: "m"}})
	s.Observe(e, kvstate.Signals{Running: 1, Waiting: 0, KVUsage: .3, KVTokens: 1e6, At: time.Now(), ScrapedAt: time.Now()})
	id := s.Bookings.Reserve(e, kvstate.Booking{For: kvstate.RolePrefill, PromptTokens: 100, Uncached: 100, Work: time.Millisecond})
	s.Bookings.Release(id)
}

// fullMemory is the memory of an engine that is full of conversations, of which such a part is expected back.
func fullMemory(live float64) *residency.Memory {
	m := &residency.Memory{Tokens: 1e6, Free: 1000, Live: live * 1e6, Returns: .5}
	for i := range m.Old {
		m.Old[i] = residency.Part{Tokens: 1e6 / residency.Parts, Back: live, End: 1e5, Middle: 5e4}
	}
	return m
}

// bothCases returns picks over endpoints that all serve both legs, without words and with them, half of them busy with
// answers and the others with prompts.
func bothCases(endpoints int) (all []pickCase) {
	for _, x := range []struct {
		words bool
		live  float64 // of the memory, that conversations take which are expected back; 0: it is not known
	}{{false, 0}, {true, 0}, {false, .2}, {false, .9}} {
		v := loadedFleet(endpoints, 1)
		for i := range v.Endpoints {
			c := &v.Endpoints[i]
			if x.words {
				c.Word = c.Endpoint.Role
			}
			c.Endpoint.Role = kvstate.RoleBoth
			c.Share = float64(i%3) * .2
			if x.live > 0 {
				c.Memory = fullMemory(x.live)
			}
		}
		group(v)
		v.Groups, v.Uniform = groupEnds(v), true
		v.Load.Live = x.live * 1e6 * float64(endpoints)
		k := &Picker{Policy: DefaultPolicy()}
		k.Late = x.live > 0
		r := &Request{PromptTokens: 55000, Blocks: 10, Split: true}
		all = append(all, pickCase{fmt.Sprintf("%d/both/words=%t/live=%v", endpoints, x.words, x.live), func() error {
			r.Rand += 0x9e3779b97f4a7c15
			_, err := k.Pick(r, v)
			return err
		}})
	}
	return all
}

// allCases returns every measured decision.
func allCases() []pickCase {
	return slices.Concat(pickCases(64), pickCases(1024), bothCases(64), bothCases(1024), wholeCases())
}

func BenchmarkPick(b *testing.B) {
	for _, c := range allCases() {
		b.Run(c.name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if err := c.decide(); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// TestPickLeast prints the least time of many decisions, which is more meaningful than a mean on a busy machine:
// TANDEM_SCALING=1 go test ./picker -run PickLeast -v
func TestPickLeast(t *testing.T) {
	if os.Getenv("TANDEM_SCALING") == "" {
		t.Skip("set TANDEM_SCALING")
	}
	for _, c := range allCases() {
		least := time.Hour
		for range 3000 {
			began := time.Now()
			if err := c.decide(); err != nil {
				t.Fatal(err)
			}
			least = min(least, time.Since(began))
		}
		t.Logf("%-45s %v", c.name, least)
	}
}
