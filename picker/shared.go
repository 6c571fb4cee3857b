package picker

import "tandem/kvstate"

// A miss on a prefix that many prompts share is an investment: the work is done once, and later requests find it.
// So only a part of the delay that it causes is charged, distributed over the uses of the new copy
// (docs/decision.md, Shared prefixes).

// sharedPart is a part of the prompt that many recent prompts share.
type sharedPart struct {
	end  float64 // tokens from the beginning of the prompt
	paid float64 // 0 to 1: the part of a miss there that other uses of the copy pay for
}

// share finds the shared parts of the prompt, and how many requests pay for another copy of each.
//
// uses/holders requests of a minute use one copy. They need another one only if they wait for each other: with load
// s of this prefix on each holder, a request finds one with the same prefix running and another one waiting with
// probability s*s.
func (k *Picker) share(t *terms, v *kvstate.View) {
	t.shared = nil
	if len(v.Uses) == 0 || t.others <= 0 && t.local <= 0 || t.perBlock == 0 {
		return
	}
	var holders [kvstate.MaxUseSteps]int
	for i := range v.Endpoints {
		c := &v.Endpoints[i]
		if c.Hit == 0 || !c.Usable || c.Used()&kvstate.RolePrefill == 0 {
			continue
		}
		for step := range v.Uses {
			if c.Hit < int(v.Uses[step].Blocks) {
				break
			}
			holders[step]++
		}
	}
	k.shared = k.shared[:0]
	for step, u := range v.Uses {
		held, uses := float64(max(holders[step], 1)), float64(u.Uses)
		load := min(uses*seconds(v.Load.Work)/kvstate.UsesWindow.Seconds()/held, 1)
		if payers := uses / held * load * load; payers > 1 {
			k.shared = append(k.shared, sharedPart{min(float64(u.Blocks)*t.perBlock, t.tokens-1), 1 - 1/payers})
		} else {
			k.shared = append(k.shared, sharedPart{end: min(float64(u.Blocks)*t.perBlock, t.tokens-1)})
		}
	}
	t.shared = k.shared
}

// paid returns the seconds of work, after the cached part of the prompt, that other uses pay for.
func (t *terms) paid(cached float64) float64 {
	sum := 0.0
	for i := range t.shared {
		if p := &t.shared[i]; p.end > cached {
			sum += p.paid * t.m.between(cached, p.end)
			cached = p.end
		}
	}
	return sum
}
