package picker

import (
	"math"
	"slices"

	"tandem/kvstate"
)

// Engines on one node transfer KV faster than over the network. Few pairs share a node, so this is separate from
// the search by zone (pair.go): the endpoints on a P's own node are priced one by one.

// sameNode returns the least price of a D on the node of p, transfer included; infinite if there is none.
func (k *Picker) sameNode(v *kvstate.View, t *terms, p int) float64 {
	best := math.Inf(1)
	for _, d := range v.DecodesOnNode(p) {
		best = min(best, k.priceSameNode(v, t, p, int(d)))
	}
	return best
}

// sameNodeEach lowers the prices of the decode endpoints on p's node, which are in total by position, and returns the
// lowest of them.
func (k *Picker) sameNodeEach(v *kvstate.View, t *terms, p int, total []float64) float64 {
	best := math.Inf(1)
	if p < 0 {
		return best
	}
	for _, d := range v.DecodesOnNode(p) {
		total[d] = min(total[d], k.priceSameNode(v, t, p, int(d)))
		best = min(best, total[d])
	}
	return best
}

func (k *Picker) priceSameNode(v *kvstate.View, t *terms, p, d int) float64 {
	price, c := k.prices[d].decode, &v.Endpoints[d]
	if from := kindOf(&v.Endpoints[p]); math.IsInf(price, 1) || !from.pairsWith(c) || !k.loads(v, p, d) {
		return math.Inf(1)
	}
	return price + t.transferWithin(c)
}

// transferBetween returns the time to bring d the part of the prompt that it does not hold, from p; both are
// positions in the view.
func (t *terms) transferBetween(v *kvstate.View, p, d int) float64 {
	c := &v.Endpoints[d]
	if slices.Contains(v.DecodesOnNode(p), int32(d)) {
		return t.transferWithin(c)
	}
	return t.transfer(c, agree(v.Endpoints[p].Endpoint.Zone, c.Endpoint.Zone))
}
