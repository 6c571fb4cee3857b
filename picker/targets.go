package picker

import (
	"errors"

	"tandem/kvstate"
)

// Targets are what a request wants of its answer, in seconds; 0: nothing.
type Targets struct {
	TTFT float64 // from its arrival to the first token
	TPOT float64 // between two tokens, on average
}

// Miss says what becomes of a request whose targets no choice meets.
type OnMiss uint8

// What may become of it.
const (
	MissGoOn OnMiss = iota // it takes the choice that is soonest for it
	MissWait               // as long as waiting may help it is to be held ([Choice.Hold])
	MissShed               // it is refused: [ErrMissed]
)

// ErrMissed says that no choice meets the request's targets. The choice beside it is the one that comes nearest.
var ErrMissed = errors.New("picker: no choice meets the request's targets")

// meets reports whether a choice whose times were estimated keeps to the request's targets.
func (c *Choice) meets(r *Request) bool {
	return (r.TTFT <= 0 || r.Waited+c.FirstToken <= r.TTFT) && (r.TPOT <= 0 || c.TokenTime <= r.TPOT)
}

// towards estimates a choice's times, and sees to a request's targets. Where the choice that is cheapest for all
// misses them, the one that is soonest for this request is taken, and where that misses them too the request's own
// word decides.
func (k *Picker) meetTargets(r *Request, v *kvstate.View, c Choice) (Choice, error) {
	idle := k.estimate(r, v, &c)
	if c.meets(r) {
		return c, nil
	}
	k.latencyOnly = true
	c, err := k.pick(r, v)
	if err == nil {
		idle = k.estimate(r, v, &c)
	}
	k.latencyOnly = false
	if err != nil || c.meets(r) {
		return c, err
	}
	switch r.OnMiss {
	case MissShed:
		return c, ErrMissed
	case MissWait:
		c.Wait = idle.meets(r) // else not even an idle fleet would do
	case MissGoOn:
	}
	return c, nil
}

// estimate fills in what a choice would be like for the request, and gives the same on endpoints with nothing else
// to do.
func (k *Picker) estimate(r *Request, v *kvstate.View, c *Choice) (idle Choice) {
	t := k.terms(r, v, 0, 0)
	d := &v.Endpoints[c.Decode]
	var runs batch
	var decode DecodePrice
	t.batch(d, &runs)
	t.decode(d, &runs, &decode)
	c.TokenTime = decode.Step
	idle.TokenTime = t.step(d, 0, t.tokens+t.out/2)
	if c.Prefill < 0 {
		var alone AlonePrice
		t.alone(d, &runs, &alone)
		c.FirstToken = alone.Queue + alone.Work + decode.Step + alone.Overflow
		idle.FirstToken = alone.Work + idle.TokenTime
		return idle
	}
	p := &v.Endpoints[c.Prefill]
	var cost PrefillPrice
	t.prefill(p, &cost)
	transfer := t.transferBetween(v, c.Prefill, c.Decode)
	c.PrefillTime = cost.Queue + cost.Work
	c.FirstToken = c.PrefillTime + transfer + decode.Step + decode.Overflow
	idle.FirstToken = cost.Work + transfer + idle.TokenTime
	return idle
}
