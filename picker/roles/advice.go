package roles

import (
	"fmt"
	"math"
	"time"

	"tandem/kvstate"
)

// Constants of the advice. Starting an engine takes minutes, and so does loading its model, so a number does not follow
// what passes sooner.
const (
	riseAfter = 15 * time.Second // how long the load must need more before a number rises
	fallAfter = 5 * time.Minute  // and less before it falls
	settle    = time.Minute      // nothing is advised before: the load is known as that of the last minute
	spare     = 0.3              // engines that are left over after a number fell
	catchUp   = 60.0             // s: the work that arrives in this time is what was computed in it, and what waits
)

// Needs are how many engines the load needs, as fractions. They do not depend on how many there are, as long as those
// suffice: else a fleet that is scaled by them would come to rest nowhere.
type Needs struct {
	Prompts, Answers float64
	Engines
	prefills, decodes int // that there would be if all worked
}

// Needs returns what the load needs: for prompts [fullShare] of an engine's time, and for answers steps within the
// promise and [fullKV] of its memory. On fewer engines steps take longer, so that more answers run at once: what counts
// is the rate of tokens. If steps take longer than promised already, the answers of now count, too.
func (f *Fleet) Needs() (n Needs) {
	answers, kv, capacity, waiting := 0., 0., 0., f.Waiting
	for i := range f.Engines {
		e := &f.Engines[i]
		works := 0
		if e.Usable || e.Answers > 0 || e.Queue > 0 { // one that is full works
			works = 1
		}
		n.All += works
		n.Either = n.Either || !e.Fixed
		answers, kv = answers+e.Answers, kv+e.KV
		if e.Word != kvstate.RoleDecode {
			n.prefills++
			n.Prefills += works
			waiting += e.Backlog
		}
		if e.Word != kvstate.RolePrefill {
			n.decodes++
			n.Decodes += works
			capacity += e.Capacity
		}
	}
	n.Prompts = (f.Arriving + waiting/catchUp) / fullShare
	if answers == 0 || n.Decodes == 0 {
		return n
	}
	base, tokens := f.Pace*f.Model.DecodeStep, kv/answers
	each := f.Pace * (f.Model.DecodeAnswer + f.Model.DecodeToken*tokens)
	rate := answers / (base + each*answers/float64(n.Decodes)) // steps of one answer per second
	room := max(fullKV*capacity/float64(n.decodes), 1)
	// n engines take n = rate x each at least, with steps without end: of base / (1 - rate x each / n).
	n.Answers = rate*each + rate*base*tokens/room
	if promise := f.Promise.TPOT; promise > 0 {
		limit := margin * promise
		if limit <= base { // no number of engines keeps it
			limit = 2 * base
		}
		n.Answers = max(n.Answers, rate*each/(1-base/limit), answers*each/(limit-base))
	}
	n.Answers = max(n.Answers, kv/room)
	return n
}

// Word is an endpoint's assigned role, and how it got it.
type Word struct {
	Word  string    `json:"word"` // prefill or decode
	Since time.Time `json:"since"`
	Why   string    `json:"why"`
}

// Advice is what the rule wants of a pool now.
type Advice struct {
	TTFT    float64 `json:"ttft"` // the pool's promise: s to the first token
	TPOT    float64 `json:"tpot"` // and between two tokens
	Prompts float64 `json:"prompts"`
	Answers float64 `json:"answers"` // engines that either need
	Why     string  `json:"why"`
	Engines         // that there are

	// Of the engines there are, how many should prefill, and how many decode
	Prefill int `json:"prefill"`
	Decode  int `json:"decode"`
	// Engines that serve the load, whole ones: more than there are if there are too few. 0: not known yet, or, of
	// prefill, a pool that splits nothing
	WantedPrefill int `json:"wanted_prefill"`
	WantedDecode  int `json:"wanted_decode"`

	Words map[string]Word `json:"words,omitempty"` // by address
}

// Engines are the engines of a pool that work.
type Engines struct {
	All      int  `json:"engines"`
	Prefills int  `json:"engines_prefill"` // that prefill now; those that do both count in both
	Decodes  int  `json:"engines_decode"`
	Either   bool `json:"engines_either"` // some may serve either leg, so that their sum counts
}

// Advisor gives advice that an autoscaler can follow. It is for one pool, and remembers the last minutes.
type Advisor struct {
	began time.Time
	last  []reading // of fallAfter, oldest first
	said  Advice
}

// reading is what a pool needed at a time.
type reading struct {
	at               time.Time
	prompts, answers float64
	prefills         int // of the engines there were
}

// Next returns the advice at a time, about [Every] seconds after the last one. whole says that the pool splits no
// request, so that engines that decode compute all prompts.
func (a *Advisor) Next(now time.Time, f *Fleet, whole bool) Advice {
	if a.began.IsZero() {
		a.began = now
	}
	n, w := f.Needs(), f.Want()
	if whole {
		n.Answers, n.Prompts, w = n.Answers+n.Prompts, 0, Want{Decodes: n.All}
	}
	if k := len(a.last); k > 0 { // how much half of a leg serves predicts little of how much all of it would
		if n.Decodes == 0 || 2*n.Decodes < n.decodes {
			n.Answers = max(n.Answers, a.last[k-1].answers)
		}
		if n.Prefills == 0 || 2*n.Prefills < n.prefills {
			n.Prompts = max(n.Prompts, a.last[k-1].prompts)
		}
	}
	a.last = append(a.last, reading{now, n.Prompts, n.Answers, w.Prefills})
	for now.Sub(a.last[0].at) > fallAfter || len(a.last) > int(fallAfter.Seconds()/Every) {
		a.last = a.last[1:]
	}
	said := &a.said
	said.TTFT, said.TPOT, said.Engines = f.Promise.TTFT, f.Promise.TPOT, n.Engines
	said.Prompts, said.Answers, said.Why = n.Prompts, n.Answers, w.Why.String()
	lo, hi := a.over(settle, func(r *reading) float64 { return float64(r.prefills) })
	// When engines fail, the numbers of the last minute may be all that are left: somebody has to write answers.
	said.Prefill = min(max(said.Prefill, int(lo)), int(hi), w.Prefills+w.Decodes-min(w.Decodes, 1))
	said.Decode = w.Prefills + w.Decodes - said.Prefill
	if now.Sub(a.began) < settle {
		return *said
	}
	said.WantedDecode = a.wanted(said.WantedDecode, func(r *reading) float64 { return r.answers })
	if said.WantedPrefill = a.wanted(said.WantedPrefill, func(r *reading) float64 { return r.prompts }); whole {
		said.WantedPrefill = 0
	}
	return *said
}

// over returns the least and the most of the readings of some time.
func (a *Advisor) over(window time.Duration, of func(*reading) float64) (lo, hi float64) {
	lo = math.Inf(1)
	for i := range a.last {
		if r := &a.last[i]; a.last[len(a.last)-1].at.Sub(r.at) <= window {
			lo, hi = min(lo, of(r)), max(hi, of(r))
		}
	}
	return lo, hi
}

// wanted returns a number of whole engines: the previous one, as long as it suffices and is not too high.
func (a *Advisor) wanted(before int, of func(*reading) float64) int {
	lo, _ := a.over(riseAfter, of)
	_, hi := a.over(fallAfter, of)
	least, most := max(int(math.Ceil(lo)), 1), max(int(math.Ceil(hi+spare)), 1)
	if before == 0 { // the first advice leaves nothing over
		return least
	}
	return max(min(before, most), least)
}

// Sentence says whether there are enough engines, and how many would serve the load; "" if there are as many as that,
// or nothing is known yet. short says that there are too few.
func (a *Advice) Sentence() (s string, short bool) {
	prefill, decode := a.WantedPrefill-a.Prefills, a.WantedDecode-a.Decodes
	if a.WantedPrefill == 0 || a.Either {
		prefill, decode = 0, a.WantedPrefill+a.WantedDecode-a.All
	}
	var who string
	switch {
	case a.WantedDecode == 0:
		return "", false
	case prefill > 0 && decode > 0:
		who = fmt.Sprintf("prefill is short by %d and decode by %d: ", prefill, decode)
	case prefill > 0:
		who = fmt.Sprintf("prefill is short by %d: ", prefill)
	case decode > 0 && (a.WantedPrefill == 0 || a.Either):
		who = fmt.Sprintf("the pool is short by %d: ", decode)
	case decode > 0:
		who = fmt.Sprintf("decode is short by %d: ", decode)
	case !a.Either && a.WantedPrefill > 0 && a.Prefill > 0 && a.Prefill != a.Prefills:
		s = fmt.Sprintf(", and of those that are there %d for prefill and %d for decode would be faster",
			a.Prefill, a.Decode)
	case prefill == 0 && decode == 0:
		return "", false
	}
	if a.WantedPrefill == 0 {
		return fmt.Sprintf("%s%d would serve this", who, a.WantedDecode), who != ""
	}
	s = fmt.Sprintf("%d for prefill and %d for decode would serve this", a.WantedPrefill, a.WantedDecode) + s
	return who + s, who != ""
}
