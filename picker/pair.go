package picker

import (
	"math"

	"tandem/kvstate"
)

// pair chooses the cheapest pair without pricing each one. Besides its two ends a pair costs only its transfer,
// which depends on no more than the other end's zone. So for each P it needs the cheapest D of its own zone and the
// cheapest of all, for each kind of D that it may pair with; these are the same for all P of a kind and zone.
func (k *Picker) pair(r *Request, v *kvstate.View, t *terms) Choice {
	n := len(v.Endpoints)
	total := grown(&k.total, n)
	best := math.Inf(1)
	for from, to := 0, 0; from < n; from = to {
		_, to = v.GroupAt(from)
		best = min(best, k.group(v, t, from, to))
	}
	tie := tie{at: -1, limit: best + sameTime, chance: r.Rand}
	for p, price := range total {
		if price <= tie.limit {
			tie.offer(p, price, v.Endpoints[p].Hit)
		}
	}
	if tie.at < 0 {
		return none()
	}
	price := total[tie.at]
	return k.choice(t, v, tie.at, k.partner(r, v, t, tie.at), price)
}

// group prices the pairs of the endpoints from..to of the view, which pair only with each other. It stores in
// k.total the price of each P with its cheapest D, and returns the least of these.
func (k *Picker) group(v *kvstate.View, t *terms, from, to int) float64 {
	k.kinds, k.zones = append(k.kinds[:0], kind{group: v.Endpoints[from].Endpoint.Group}), append(k.zones[:0], "")
	for i := from; i < to && !(v.Uniform && v.Grouped); i++ {
		c, p := &v.Endpoints[i], &k.prices[i]
		p.kind, p.zone = 0, 0
		// usually nothing is known that distinguishes them
		if !v.Grouped || c.Endpoint.Engine != "" || c.Endpoint.Zone != "" || c.Report != nil || c.Awaits {
			k.intern(c, p)
		}
	}
	k.findPartners(v, t, from, to)
	best, total := math.Inf(1), k.total[from:to]
	for i, p := range k.prices[from:to] {
		total[i] = math.Inf(1)
		if p.prefill == math.Inf(1) {
			continue
		}
		partner, at := 0.0, from+i
		switch {
		case p.faults && len(k.faults(&v.Endpoints[at]).Decodes) > 0: // one of the partners is missing: rare
			partner = k.partnersOf(v, t, at, grown(&k.of, len(v.Endpoints)))
		case v.SameNode != nil:
			partner = min(k.cheapest(at), k.sameNode(v, t, at))
		default:
			partner = k.cheapest(at)
		}
		total[i] = p.prefill + partner
		best = min(best, total[i])
	}
	return best
}

// intern numbers the kind and the zone of an endpoint. A group has few of either.
func (k *Picker) intern(c *kvstate.Candidate, p *prices) {
	at := 0
	for at < len(k.kinds) && !k.kinds[at].is(c) {
		at++
	}
	if at == len(k.kinds) {
		k.kinds = append(k.kinds, kindOf(c))
	}
	where := 0
	for where < len(k.zones) && k.zones[where] != c.Endpoint.Zone {
		where++
	}
	if where == len(k.zones) {
		k.zones = append(k.zones, c.Endpoint.Zone)
	}
	p.kind, p.zone = int16(at), int16(where)
}

// partners are the two cheapest decode endpoints: a P that can do both does not pair with itself.
type partners struct {
	at             int // the cheapest
	price, another float64
}

func (f *partners) offer(at int, price float64) {
	switch {
	case price < f.price:
		f.at, f.price, f.another = at, price, f.price
	case price < f.another:
		f.another = price
	}
}

// other returns the price of the cheapest one except p itself.
func (f *partners) other(p int) float64 {
	if f.at == p {
		return f.another
	}
	return f.price
}

// findPartners finds, for every kind, the partners in each zone (with the transfer within a zone), and then those
// in any zone, with the transfer between zones and within one.
func (k *Picker) findPartners(v *kvstate.View, t *terms, from, to int) {
	width := len(k.zones) + 2
	table := grown(&k.partners, len(k.kinds)*width)
	for i := range table {
		table[i] = partners{at: -1, price: math.Inf(1), another: math.Inf(1)}
	}
	for d := from; d < to; d++ {
		price := &k.prices[d]
		if math.IsInf(price.decode, 1) {
			continue
		}
		if price.faults && k.faults(&v.Endpoints[d]).Excludes(kvstate.RoleDecode) {
			continue
		}
		row := table[int(price.kind)*width:][:width]
		row[width-1].offer(d, price.near)
		if len(k.zones) > 1 { // else all are in one zone
			row[price.zone].offer(d, price.near)
			row[width-2].offer(d, price.decode+t.transfer(&v.Endpoints[d], false))
		}
	}
}

// cheapest returns the price of the cheapest D for p, transfer included.
func (k *Picker) cheapest(p int) float64 {
	width := len(k.zones) + 2
	best := math.Inf(1)
	zone := k.prices[p].zone
	for other := range k.kinds {
		if len(k.kinds) > 1 && !k.kinds[k.prices[p].kind].pairs(&k.kinds[other]) {
			continue
		}
		row := k.partners[other*width:][:width]
		if zone == 0 {
			best = min(best, row[width-1].other(p))
			continue
		}
		best = min(best, row[zone].other(p), row[0].other(p), row[width-2].other(p))
	}
	return best
}
