package picker

import (
	"errors"

	"tandem/kvstate"
)

// Targets are a request's latency targets, in seconds; 0: none.
type Targets struct {
	TTFT float64 // from its arrival to the first token
	TPOT float64 // between two tokens, on average
}

// OnMiss says what to do with a request if no choice meets its targets.
type OnMiss uint8

// The values of OnMiss.
const (
	MissGoOn OnMiss = iota // take the choice with the lowest latency for it
	MissWait               // hold it as long as waiting may help ([Choice.Wait])
	MissShed               // refuse it: [ErrMissed]
)

// ErrMissed means that no choice meets the request's targets. The returned choice comes closest.
var ErrMissed = errors.New("picker: no choice meets the request's targets")

// meets reports whether a choice's estimated times meet the request's targets.
func (c *Choice) meets(r *Request) bool {
	return (r.TTFT <= 0 || r.Waited+c.FirstToken <= r.TTFT) && (r.TPOT <= 0 || c.TokenTime <= r.TPOT)
}

// meetTargets estimates a choice's times. If the cheapest choice misses the request's targets, it takes the one
// with the lowest latency for this request, and if that misses them too, the request's OnMiss decides.
func (k *Picker) meetTargets(r *Request, v *kvstate.View, c Choice) (Choice, error) {
	idle := k.estimate(r, v, &c)
	if c.meets(r) {
		return c, nil
	}
	k.latencyOnly = true
	c, err := k.pick(r, v)
	if err == nil {
		idle = k.estimate(r, v, &c)
		c.Other = 0 // a price of this request's time alone
	}
	k.latencyOnly = false
	if err != nil || c.meets(r) {
		return c, err
	}
	switch r.OnMiss {
	case MissShed:
		return c, ErrMissed
	case MissWait:
		c.Wait = idle.meets(r) // else not even an idle fleet would meet them
	case MissGoOn:
	}
	return c, nil
}

// estimate sets a choice's estimated times, and returns the same choice on idle endpoints.
func (k *Picker) estimate(r *Request, v *kvstate.View, c *Choice) (idle Choice) {
	t := k.terms(r, v, 0, 0)
	d := &v.Endpoints[c.Decode]
	var runs batch
	var decode DecodePrice
	t.batch(d, &runs)
	t.decode(d, &runs, &decode)
	c.TokenTime = runs.step
	idle.TokenTime = t.step(d, 0, t.tokens+t.out/2)
	if c.Prefill < 0 {
		var alone AlonePrice
		t.alone(d, &runs, &alone)
		c.FirstToken = alone.Queue + alone.Work + alone.Load + runs.step + alone.Overflow
		idle.FirstToken = alone.Work + alone.Load + idle.TokenTime
		return idle
	}
	p := &v.Endpoints[c.Prefill]
	var cost PrefillPrice
	t.batch(p, &runs)
	t.prefill(p, &runs, &cost)
	transfer := t.transferBetween(v, c.Prefill, c.Decode)
	c.PrefillTime = cost.Queue + cost.Work + cost.Load
	c.FirstToken = c.PrefillTime + transfer + decode.Step + decode.Overflow
	idle.FirstToken = cost.Work + cost.Load + transfer + idle.TokenTime
	return idle
}
