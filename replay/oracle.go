package replay

import (
	"cmp"
	"math"
	"slices"

	"tandem/replay/sessions"
)

// Oracles returns names that [RunClosed] takes beside those of policies, which say what limits all of them:
//
//	idle     every turn as an idle engine serves it that has all KV of its session
//	lru      no queues either, but one KV memory of the fleet's size (or that of its host memory, which has copies),
//	         which discards what was not used for longest
//	belady   the same, but it knows the future: it discards what is needed last
func Oracles() []string { return []string{"idle", "lru", "belady"} }

// oracle serves every turn at once. The KV of sessions that are served is in memory whatever it takes.
type oracle struct {
	*fleet
	limit   int // tokens; 0: none
	discard func(*remembered) float64
	of      map[*playing]*remembered
	idle    []*remembered
	used    int // tokens
}

// remembered is a session's KV.
type remembered struct {
	session    *playing
	tokens     int
	used, next float64 // when its last answer ended, and when it asks again
}

func newOracle(f *fleet, name string, host float64) *oracle {
	o := &oracle{fleet: f, of: map[*playing]*remembered{}}
	if kv := max(f.model.KVTokens, host); name != "idle" && !math.IsInf(kv, 1) {
		o.limit = int(kv) * len(f.engines())
	}
	if o.discard = func(r *remembered) float64 { return r.used }; name == "belady" {
		o.discard = func(r *remembered) float64 { return -r.next }
	}
	return o
}

func (o *oracle) arrive(j *job) {
	s, t := j.turn.of, j.turn.turn
	j.decode = 0 // an engine, of many
	r := o.of[s]
	if r == nil {
		r = &remembered{session: s}
		o.of[s] = r
	}
	has := min(t.Had, r.tokens)
	if o.limit == 0 {
		has = t.Had
	}
	o.idle = slices.DeleteFunc(o.idle, func(i *remembered) bool { return i == r })
	o.used += t.Input + t.Output - r.tokens
	r.tokens = t.Input + t.Output
	o.makeRoom()
	o.fleet.started(j, has, t.Input-has)
	o.After(prefillTime(&o.model, t.Input-has, has), func() {
		j.firstAt = o.Now
		o.After(idleAnswer(o.fleet, t), func() { o.fleet.done(&j.Job) })
	})
}

// makeRoom discards KV, beginning at the end of a session's.
func (o *oracle) makeRoom() {
	for o.limit > 0 && o.used > o.limit && len(o.idle) > 0 {
		first := slices.MinFunc(o.idle, func(a, b *remembered) int { return cmp.Compare(o.discard(a), o.discard(b)) })
		n := min(first.tokens, o.used-o.limit)
		first.tokens -= n
		if o.used -= n; first.tokens == 0 {
			o.idle = slices.DeleteFunc(o.idle, func(i *remembered) bool { return i == first })
		}
	}
}

func (o *oracle) done(j *job) {
	s := j.turn.of
	r := o.of[s]
	r.used, r.next = o.Now, math.Inf(1)
	if s.next+1 < len(s.session.Turns) {
		r.next = o.Now + s.session.Turns[s.next+1].Think
	}
	o.idle = append(o.idle, r)
	o.makeRoom()
}

func (*oracle) prefilled(*job) int { return 0 }

// idleAnswer returns the time from the first to the last token of an answer on an idle engine.
func idleAnswer(f *fleet, t *sessions.Turn) float64 {
	kv := float64(t.Input) + float64(t.Output)/2
	return float64(t.Output-1) * (f.model.DecodeStep + f.model.DecodeAnswer + f.model.DecodeToken*kv)
}
