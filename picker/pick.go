package picker

import (
	"errors"
	"math"
	"slices"

	"tandem/kvstate"
)

// Request is what a decision needs to know of a request.
type Request struct {
	PromptTokens int64    // estimated
	Blocks       int      // of the prompt, the unit of a candidate's Hit; 0: unknown
	Split        bool     // may be split over two endpoints
	Excluded     []string // addresses that failed this request
	Rand         uint64   // decides between equals
}

// Choice is a decision, as positions in the view.
type Choice struct {
	Prefill int // -1: decode computes the prompt itself
	Decode  int
}

// ErrNoEndpoint says that no endpoint can decode the request.
var ErrNoEndpoint = errors.New("picker: no endpoint can decode this request")

// Pick chooses the endpoints of a request. Without a prefill endpoint that fits, decode works alone; without a decode
// endpoint it is [ErrNoEndpoint]. Endpoints that failed this request are taken only when there is no other to decode.
func Pick(r *Request, v *kvstate.View) (Choice, error) {
	if r.Split {
		if c := pair(r, v); c.Prefill >= 0 {
			return c, nil
		}
	}
	d := best(r, v, alonePrice, -1, false)
	if d < 0 {
		d = best(r, v, alonePrice, -1, true)
	}
	if d < 0 {
		return Choice{-1, -1}, ErrNoEndpoint
	}
	return Choice{-1, d}, nil
}

// PickDecode chooses a decode endpoint for a prompt whose KV is on prefill, a position in the view or -1 where that is
// not known any more.
func PickDecode(r *Request, v *kvstate.View, prefill int) (int, error) {
	d := best(r, v, decodePrice, prefill, false)
	if d < 0 {
		d = best(r, v, decodePrice, prefill, true)
	}
	if d < 0 {
		return -1, ErrNoEndpoint
	}
	return d, nil
}

// pair chooses the cheapest pair. Its price is the sum of its parts, so each P needs only the cheapest D that may pair
// with it, and that is the same for all P of a group; a price of the transfer between them would change that.
func pair(r *Request, v *kvstate.View) Choice {
	t := newTie(r.Rand)
	for from, to := 0, 0; from < len(v.Endpoints); from = to {
		group := v.Endpoints[from].Endpoint.Group
		for to = from; to < len(v.Endpoints) && v.Endpoints[to].Endpoint.Group == group; {
			to++
		}
		var own partners
		if v.Grouped {
			own = cheapest(r, v, group, from, to)
		} else {
			own = cheapest(r, v, group, 0, len(v.Endpoints))
		}
		for p := from; own.n > 0 && p < to; p++ {
			c := &v.Endpoints[p]
			if c.Endpoint.Role&kvstate.RolePrefill == 0 || !c.Usable || excluded(r, c) {
				continue
			}
			if d, ok := own.other(p); ok {
				t.offer(p, prefillPrice(r, c)+d)
			}
		}
	}
	if t.at < 0 {
		return Choice{-1, -1}
	}
	return Choice{t.at, best(r, v, decodePrice, t.at, false)}
}

// partners are the prices of the two cheapest endpoints to decode on: a P that can do both does not pair with itself.
type partners struct {
	n             int
	at            int // the cheapest
	price, second int64
}

// cheapest finds the partners in a group, in a part of the view.
func cheapest(r *Request, v *kvstate.View, group string, from, to int) (found partners) {
	for d := from; d < to; d++ {
		c := &v.Endpoints[d]
		if c.Endpoint.Role&kvstate.RoleDecode == 0 || !c.Usable || c.Endpoint.Group != group || excluded(r, c) {
			continue
		}
		price := decodePrice(r, c)
		switch {
		case found.n == 0 || price < found.price:
			found.at, found.price, found.second = d, price, found.price
		case found.n == 1 || price < found.second:
			found.second = price
		}
		found.n++
	}
	return found
}

// other is the price of the cheapest that is not p itself.
func (f *partners) other(p int) (price int64, ok bool) {
	if f.n == 0 || (f.n == 1 && f.at == p) {
		return 0, false
	}
	if f.at == p {
		return f.second, true
	}
	return f.price, true
}

// best is the cheapest endpoint to decode on. prefill is the position of the endpoint to pair with, -1 for none; desperate
// takes in those that failed this request.
func best(r *Request, v *kvstate.View, price func(*Request, *kvstate.Candidate) int64, prefill int, desperate bool) int {
	t := newTie(r.Rand >> 32)
	for d := range v.Endpoints {
		c := &v.Endpoints[d]
		if c.Endpoint.Role&kvstate.RoleDecode == 0 || !c.Usable || d == prefill {
			continue
		}
		if prefill >= 0 && c.Endpoint.Group != v.Endpoints[prefill].Endpoint.Group {
			continue
		}
		if !desperate && excluded(r, c) {
			continue
		}
		t.offer(d, price(r, c))
	}
	return t.at
}

func excluded(r *Request, c *kvstate.Candidate) bool {
	return slices.Contains(r.Excluded, c.Endpoint.Addr)
}

// tie keeps the cheapest of what it is offered, and one of the equals with equal chance.
type tie struct {
	at     int
	price  int64
	equals uint64
	chance uint64
}

func newTie(chance uint64) tie { return tie{at: -1, price: math.MaxInt64, chance: chance} }

func (t *tie) offer(at int, price int64) {
	switch {
	case t.at < 0 || price < t.price:
		t.at, t.price, t.equals = at, price, 1
	case price == t.price:
		t.equals++
		t.chance = t.chance*6364136223846793005 + 1442695040888963407 // a step of a linear congruential generator
		if (t.chance>>33)%t.equals == 0 {
			t.at = at
		}
	}
}
