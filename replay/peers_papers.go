package replay

import (
	"cmp"
	"math"
	"slices"

	"tandem/picker"
)

// Rules of papers, as far as a router can follow them: the engines' own schedulers stay as they are. They know the
// engines' true constants.

// deflection is prefill deflection (arXiv 2607.02043): a prompt goes to the decode endpoint where its first token comes
// soonest, in chunks that keep the running answers' time per token, if that is sooner than on prefill.
type deflection struct {
	*mooncake
	tpot float64
}

func (d *deflection) alone(j *job) (decode int, ok bool) {
	soonest := func(i int) float64 {
		e := d.decodes[i]
		answers, _ := e.Requests()
		left := d.tpot - stepTime(&d.model, answers, d.kv[i])
		if left <= 0 || float64(d.kv[i]+j.Input) > d.model.KVTokens {
			return math.Inf(1)
		}
		cached := j.CachedTokens(e.Held(j.Blocks))
		work := d.prefillTime(j.Input-cached, cached) + d.model.PrefillToken*float64(e.Uncomputed())
		return work * d.tpot / left // a step of tpot has left for chunks
	}
	at := d.argmin(len(d.decodes), soonest)
	p := d.prefill(j)
	cached := j.CachedTokens(d.hit(p, j))
	return at, soonest(at) < d.work[p]+d.prefillTime(j.Input-cached, cached)
}

// ppd is PPD (arXiv 2603.13358): the second turn of a conversation and later ones stay on the decode endpoint that has
// the earlier ones; here, one that holds most of the prompt.
type ppd struct{ *mooncake }

func (d *ppd) alone(j *job) (decode int, ok bool) {
	at := d.argmin(len(d.decodes), func(i int) float64 { return -d.decodeMatch(i, j) })
	return at, d.decodeMatch(at, j) > .5 && float64(d.kv[at]+j.Input) <= d.model.KVTokens
}

// netkv is NetKV (arXiv 2606.03910): greedy over decode endpoints by the time of the transfer, which others on their
// way to the endpoint make longer, and of the first step.
type netkv struct{ *mooncake }

func (n *netkv) decode(j *job) int {
	return n.argmin(len(n.decodes), func(i int) float64 {
		e := n.decodes[i]
		missing := float64(j.Input - j.CachedTokens(e.Held(j.Blocks)))
		answers, _ := e.Requests()
		coming := float64(max(n.answers[i]-answers, 0))
		return missing*n.model.TokenBytes/n.model.Bandwidth*(1+coming) + stepTime(&n.model, n.answers[i], n.kv[i])
	})
}

func (n *netkv) late() bool { return true }

// kairos is Kairos (arXiv 2605.02329): prompts wait in the router and go by their slack, the time that is left until
// the promised first token after their own work, least first; those without any go last. Decode is the endpoint with
// the most slack per token.
type kairos struct {
	*peer
	ttft    float64
	waiting []*job
}

func (k *kairos) arrive(j *job) {
	k.waiting = append(k.waiting, j)
	k.dispatch()
}

func (k *kairos) prefilled(j *job) int {
	d := k.peer.prefilled(j)
	k.After(0, k.dispatch)
	return d
}

// dispatch gives each prefill endpoint that has less than a full step to compute the most urgent prompt.
func (k *kairos) dispatch() {
	for len(k.waiting) > 0 {
		if k.booked != nil {
			at := k.argmin(len(k.prefills), func(i int) float64 { return k.work[i] })
			if k.work[at] >= k.model.FullStep() {
				return
			}
		}
		urgent := slices.MinFunc(k.waiting, func(a, b *job) int {
			sa, sb := k.slack(a), k.slack(b)
			return cmp.Or(-cmp.Compare(min(sa, 0), min(sb, 0)), cmp.Compare(sa, sb))
		})
		k.waiting = slices.DeleteFunc(k.waiting, func(j *job) bool { return j == urgent })
		k.peer.arrive(urgent)
	}
}

func (k *kairos) slack(j *job) float64 {
	least := math.Inf(1)
	for i := range k.prefills {
		cached := j.CachedTokens(k.hit(i, j))
		least = min(least, k.prefillTime(j.Input-cached, cached))
	}
	return j.Arrival + k.ttft - k.Now - least
}

// slackest is Kairos' choice of the two endpoints.
type slackest struct{ *mooncake }

func (s *slackest) decode(*job) int {
	return s.argmin(len(s.decodes), func(i int) float64 {
		return stepTime(&s.model, s.answers[i], s.kv[i])
	})
}

func (s *slackest) late() bool { return true }

// stepTime returns the seconds of a step of so many answers with so many tokens of KV.
func stepTime(m *picker.Model, answers, kv int) float64 {
	return m.DecodeStep + m.DecodeAnswer*float64(answers) + m.DecodeToken*float64(kv)
}
