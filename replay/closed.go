package replay

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"

	"tandem/replay/engine"
	"tandem/replay/sessions"
	"tandem/replay/traces"
)

// Closed is how sessions are played: a session asks again some time after its answer, not at a time of its own.
type Closed struct {
	Sessions []sessions.Session // of which each that begins is one, drawn at random

	// So many are active at a time: when one ends, another begins. Most above it: their number follows a day, between
	// Active and Most and back in Day seconds. Those who are too many leave after an answer.
	Active, Most int
	Day          float64
	// Above 0: Active sessions are there at first, and so many come in an hour, however many others are active.
	PerHour float64
	// Users whose first token does not come in so many seconds give up: their session ends. 0: they wait for ever.
	Patience float64

	Warm, Measured, Drain float64 // s before, in and after the time whose turns count

	HostTokens float64 // of host memory at each engine
	HostRate   float64 // tokens/s from there
}

// DefaultClosed measures an hour.
func DefaultClosed() Closed { return Closed{Warm: 900, Measured: 3600, Drain: 300} }

// hostSpeed is the bandwidth from host memory in bytes/s.
const hostSpeed = 20e9

// Host returns the settings with host memory of so many times the engines' KV memory.
func (o Closed) Host(c *Config, times float64) Closed {
	o.HostTokens, o.HostRate = times*c.Engine.KVTokens, hostSpeed/c.Engine.TokenBytes
	return o
}

// Check returns an error for invalid settings.
func (o *Closed) Check() error {
	switch {
	case len(o.Sessions) == 0:
		return errors.New("no sessions")
	case o.Active < 1 || max(o.Active, o.Most) > 1<<16:
		return fmt.Errorf("%d sessions at a time: between 1 and %d", o.Active, 1<<16)
	case o.Most > 0 && (o.Most < o.Active || !(o.Day > 0) || o.PerHour > 0):
		return fmt.Errorf("a day of %d to %d sessions in %v s", o.Active, o.Most, o.Day)
	case !(o.Warm >= 0) || !(o.Measured > 0) || !(o.Drain >= 0) || math.IsInf(o.Warm+o.Measured+o.Drain, 1):
		return errors.New("times must be above 0")
	}
	return nil
}

// wanted returns how many sessions should be active at a time.
func (o *Closed) wanted(at float64) int {
	if o.Most == 0 {
		return o.Active
	}
	share := (1 - math.Cos(2*math.Pi*max(at-o.Warm, 0)/o.Day)) / 2
	return o.Active + int(math.Round(share*float64(o.Most-o.Active)))
}

// player plays sessions.
type player struct {
	*fleet
	plan   Closed
	config Config
	draw   *sessions.Draw
	begun  uint64 // sessions
	active int
	blocks uint64 // used so far
	counts *counts
}

// playing is a session that is played.
type playing struct {
	session *sessions.Session
	number  uint64
	next    int        // turn
	kept    [][]uint64 // blocks of the turns so far, their answers included
	counts  sessionCounts
}

// playedTurn is a turn of a session on its way.
type playedTurn struct {
	turn  *sessions.Turn
	of    *playing
	again againTokens
}

// RunClosed plays sessions under a policy.
func RunClosed(ctx context.Context, name string, c Config, o Closed) (*ClosedResult, error) {
	if err := errors.Join(c.Check(), o.Check()); err != nil {
		return nil, err
	}
	p := &player{fleet: newFleet(c, nil, rand.New(rand.NewPCG(c.Seed, 3))), plan: o, config: c,
		draw: sessions.NewDraw(o.Sessions, c.Seed), blocks: 1 << 32}
	p.counts = newCounts(p)
	p.fleet.answered, p.fleet.started = p.ended, p.counts.started
	for _, e := range p.engines() {
		if o.HostTokens > 0 {
			engine.Host(e, o.HostTokens, o.HostRate)
		}
	}
	var err error
	if p.policy, err = p.newPolicy(name); err != nil {
		return nil, err
	}
	for range p.plan.wanted(0) {
		p.begin(true)
	}
	if o.PerHour > 0 {
		p.come()
	}
	if o.Most > 0 {
		p.follow()
	}
	end := o.Warm + o.Measured + o.Drain
	for n := 0; p.Now < end && p.Step(); n++ {
		if n%8192 == 0 {
			if err := ctx.Err(); err != nil {
				return nil, err
			}
			if c.Progress != nil {
				c.Progress(min(int(p.Now), int(end)-1), int(end))
			}
		}
	}
	if c.Progress != nil {
		c.Progress(int(end), int(end))
	}
	return p.counts.result(name), nil
}

// newPolicy returns the policy of that name, or an oracle.
func (p *player) newPolicy(name string) (policy, error) {
	if slices.Contains(Oracles(), name) {
		return newOracle(p.fleet, name, p.plan.HostTokens), nil
	}
	return newPolicy(name, p.fleet, p.config)
}

// come lets sessions come at the rate.
func (p *player) come() {
	p.After(p.draw.Random.ExpFloat64()*3600/p.plan.PerHour, func() { p.begin(false); p.come() })
}

// follow begins sessions while there are fewer than the time of day wants.
func (p *player) follow() {
	for p.active < p.plan.wanted(p.Now) {
		p.begin(false)
	}
	p.After(10, p.follow)
}

// begin begins a session: within its recording, at a time that is drawn at random, or at its first turn.
func (p *player) begin(within bool) {
	p.begun++
	p.active++
	s := &playing{number: p.begun}
	p.counts.sessions = append(p.counts.sessions, &s.counts)
	var first int
	var wait float64
	if within {
		s.session, first, wait = p.draw.Within()
	} else {
		s.session, wait = p.draw.Anew(s.number)
	}
	for ; s.next < first; s.next++ {
		p.grow(s)
	}
	p.After(wait, func() { p.ask(s) })
}

// grow appends the blocks of a session's next turn, and returns those of its prompt.
func (p *player) grow(s *playing) []uint64 {
	t := &s.session.Turns[s.next]
	var blocks []uint64
	if t.Back > 0 {
		from := s.kept[s.next-t.Back]
		before := &s.session.Turns[s.next-t.Back]
		if t.Had >= before.Input+before.Output {
			blocks = from // its last block goes on
		} else {
			blocks = slices.Clip(from[:t.Had/engine.BlockTokens])
		}
		if t.Back > 1 {
			blocks = slices.Clip(blocks)
		}
	} else if s.next == 0 {
		for i := range min(s.session.PrefixTokens, t.Input-1) / engine.BlockTokens {
			blocks = append(blocks, 1<<62|s.session.Prefix<<16|uint64(i))
		}
	}
	count := func(tokens int) int { return (tokens + engine.BlockTokens - 1) / engine.BlockTokens }
	for len(blocks) < count(t.Input+t.Output) {
		p.blocks++
		blocks = append(blocks, p.blocks)
	}
	s.kept = append(s.kept, blocks)
	return blocks[:count(t.Input)]
}

// ask makes a session's next request.
func (p *player) ask(s *playing) {
	t := &playedTurn{turn: &s.session.Turns[s.next], of: s}
	q := &traces.Request{Arrival: p.Now, Input: t.turn.Input, Output: t.turn.Output, Program: s.number,
		Last: s.next == len(s.session.Turns)-1, Blocks: p.grow(s)}
	j := newJob(len(p.jobs), q)
	j.turn, j.Kept = t, s.kept[s.next]
	p.jobs = append(p.jobs, j)
	if p.plan.Patience > 0 {
		p.After(p.plan.Patience, func() { p.loseHope(j) })
	}
	p.policy.arrive(j)
}

// loseHope ends a session whose user has waited for too long.
func (p *player) loseHope(j *job) {
	if j.firstAt > 0 || j.endAt > 0 {
		return
	}
	j.asked.Last, j.gone = true, true
	p.counts.turn(j, false)
	p.close()
	p.giveUp(j)
}

// ended goes on with a session whose request has ended.
func (p *player) ended(j *job) {
	s := j.turn.of
	if !j.gone {
		p.counts.turn(j, true)
		switch s.next++; {
		case s.next == len(s.session.Turns), p.plan.Most > 0 && p.active > p.plan.wanted(p.Now):
			p.close()
		default:
			p.After(s.session.Turns[s.next].Think, func() { p.ask(s) })
		}
	}
	j.Blocks, j.Kept, j.hits, j.asked.Blocks = nil, nil, nil, nil
}

// close ends a session, after which another begins if their number is fixed.
func (p *player) close() {
	if p.active--; p.plan.PerHour == 0 && p.active < p.plan.wanted(p.Now) {
		p.begin(false)
	}
}
