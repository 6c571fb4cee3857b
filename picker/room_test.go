package picker

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"tandem/kvstate"
)

// bothView returns n endpoints of both roles, with so many tokens of KV memory; 0: they do not report it.
func bothView(n int, capacity int64) *kvstate.View {
	v := &kvstate.View{}
	for i := range n {
		spec := kvstate.EndpointSpec{Addr: fmt.Sprintf("10.0.0.%d:80", i), Role: kvstate.RoleBoth}
		v.Endpoints = append(v.Endpoints, kvstate.Candidate{
			Usable: true, Endpoint: &kvstate.Endpoint{EndpointSpec: spec}, KVTokens: capacity,
		})
	}
	return v
}

// What an engine holds for others, and what it answers, decide what else it gets.
func TestRoom(t *testing.T) {
	const prompt, answer = 1000, 100
	for name, test := range map[string]struct {
		room     [2]kvstate.Room
		capacity int64
		never    bool // decode alone is not allowed
		densest  float64
		want     string
	}{
		"nothing there":                        {capacity: 4000, want: "pair"},
		"a prompt of more than half":           {capacity: 1900, want: "pair"},
		"one of more than half, beside others": {room: [2]kvstate.Room{{Held: 64}, {}}, capacity: 1900, want: "1>0"},
		"one of more than all, never alone":    {capacity: 900, never: true, want: "alone full"},
		"one holds half":                       {room: [2]kvstate.Room{{Held: 2000}, {}}, capacity: 4000, want: "1>0"},
		"one answers too much":                 {room: [2]kvstate.Room{{Need: 3500}, {}}, capacity: 4000, want: "1>0"},
		"both hold half, and have room":        {room: [2]kvstate.Room{{Held: 2000}, {Held: 2000}}, capacity: 4000, want: "alone full"},
		"the same, if it must be split":        {room: [2]kvstate.Room{{Held: 2000}, {Held: 2000}}, capacity: 4000, never: true, want: "alone full wait"},
		"neither has room":                     {room: [2]kvstate.Room{{Held: 3000}, {Held: 3100}}, capacity: 4000, want: "0 full wait"},
		"neither, and one has too much":        {room: [2]kvstate.Room{{Held: 3000}, {Held: 3100, Need: 1000}}, capacity: 4000, want: "1 full wait"},
		"one holds nothing, so it can answer":  {room: [2]kvstate.Room{{Held: 3500}, {Need: 3000}}, capacity: 4000, want: "1 full"},
		"it may be longer, and none does else": {capacity: 1900, densest: .5, want: "pair"},
		"it may be longer, and one answers":    {room: [2]kvstate.Room{{Need: 1100}, {}}, capacity: 3000, densest: .5, want: "1>0"},
		"it may be longer, and one holds":      {room: [2]kvstate.Room{{Held: 900}, {}}, capacity: 4000, densest: .5, want: "1>0"},
		"unknown memory":                       {want: "pair"},
		"unknown memory, one holds":            {room: [2]kvstate.Room{{Held: 64}, {}}, want: "0>1"},
		"unknown memory, one answers":          {room: [2]kvstate.Room{{}, {Need: 64}}, want: "0>1"},
		"unknown memory, one does the other's": {room: [2]kvstate.Room{{Held: 64}, {Need: 64}}, want: "0>1"},
		"unknown memory, both hold":            {room: [2]kvstate.Room{{Held: 64}, {Held: 128}}, want: "0 full wait"},
		"unknown memory, both answer":          {room: [2]kvstate.Room{{Need: 64}, {Need: 64}}, want: "alone full"},
	} {
		t.Run(name, func(t *testing.T) {
			v, k := bothView(2, test.capacity), always()
			k.PairsOnly, v.Load.Densest = test.never, test.densest
			for i := range test.room {
				v.Endpoints[i].Room = test.room[i]
			}
			r := &Request{PromptTokens: prompt, Bytes: 4 * prompt, MinAnswer: answer, MaxAnswer: answer, Split: true}
			seen := map[string]bool{}
			for range 50 {
				r.Rand = rand.Uint64()
				c, err := k.Pick(r, v)
				require.NoError(t, err)
				got := fmt.Sprint(c.Decode)
				if c.Prefill >= 0 {
					got = fmt.Sprintf("%d>%d", c.Prefill, c.Decode)
				}
				if c.Full {
					got += " full"
				}
				if c.NoRoom {
					got += " wait"
				}
				seen[got] = true
			}
			switch kind, more, _ := strings.Cut(test.want, " "); kind {
			case "pair":
				require.Equal(t, map[string]bool{"0>1": true, "1>0": true}, seen)
			case "alone":
				require.Equal(t, map[string]bool{"0 " + more: true, "1 " + more: true}, seen)
			default:
				require.Equal(t, map[string]bool{test.want: true}, seen)
			}
		})
	}
}

// A prefill endpoint that is full is dearer than another one, unless more of a prompt is cached there than is computed in
// four seconds. In late binding the request waits for it; otherwise it goes there: decode does not depend on its memory.
// An engine of both roles whose word is prefill is one, too, once it has answered all that it had.
func TestFullPrefill(t *testing.T) {
	for name, test := range map[string]struct {
		held   [2]int64 // tokens that the two hold for others, of 200,000
		usage  float64  // of the first one, as it reports; below 0: it does not
		cached int      // per cent of the prompt there
		need   int64    // tokens of its largest answer
		want   string
	}{
		"the other one has room":         {held: [2]int64{100_000, 0}, usage: -1, want: "1"},
		"both are full":                  {held: [2]int64{100_000, 100_000}, usage: -1, cached: 10, want: "0 wait"},
		"its cache is worth more":        {held: [2]int64{100_000, 0}, usage: -1, cached: 90, want: "0 wait"},
		"it is not worth as much":        {held: [2]int64{100_000, 0}, usage: -1, cached: 10, want: "1"},
		"it reports that all is fetched": {held: [2]int64{100_000, 0}, usage: .1, cached: 10, want: "0"},
		"it answers still":               {held: [2]int64{100_000, 0}, usage: .1, cached: 90, need: 64, want: "1"},
		"it reports that it is full":     {held: [2]int64{100_000, 0}, usage: .9, cached: 10, want: "1"},
	} {
		t.Run(name, func(t *testing.T) {
			for _, words := range []bool{false, true} {
				v, k := fleet(4, 1), always()
				for i := range v.Endpoints {
					c := &v.Endpoints[i]
					if c.KVTokens, c.Trust, c.Signals = 200_000, 1, (&kvstate.Signals{KVUsage: -1}); words {
						c.Word, c.Endpoint.Role = c.Endpoint.Role, kvstate.RoleBoth
					}
				}
				first := &v.Endpoints[0]
				first.Hit, first.Signals.KVUsage, first.Room.Need = test.cached, test.usage, test.need
				first.Room.Held, v.Endpoints[1].Room.Held = test.held[0], test.held[1]
				c, err := k.Pick(&Request{PromptTokens: 120_000, Blocks: 100, Split: true, Rand: 7}, v) // 17 s of work
				require.NoError(t, err)
				got := fmt.Sprint(c.Prefill)
				if c.NoRoom {
					got += " wait"
				}
				if test.need == 0 || words { // an endpoint that only prefills has no answers
					require.Equal(t, test.want, got, "words: %v", words)
				}
			}
		})
	}
}

// Pass 2: the D with room, and the engine that computed the prompt if there is none.
func TestPickDecodeRoom(t *testing.T) {
	v, k := bothView(3, 4000), always()
	r := &Request{PromptTokens: 1000, MinAnswer: 100, MaxAnswer: 100}
	v.Endpoints[0].Room.Held, v.Endpoints[1].Room.Held = 1000, 3000
	for chance := range uint64(20) {
		r.Rand = chance << 40
		d, err := k.PickDecode(r, v, 0)
		require.NoError(t, err)
		require.Equal(t, 2, d)
	}
	v.Endpoints[2].Room.Held = 3000
	_, err := k.PickDecode(r, v, 0)
	require.ErrorIs(t, err, ErrNoRoom)
	v.Endpoints[0].Usable = false // it has failed: any other that may get room
	d, err := k.PickDecode(r, v, 0)
	require.NoError(t, err)
	require.NotZero(t, d)
}

// small is a model of engines of both roles, to be searched through: every order of events, and every choice that the
// rule allows, not only the cheapest. Memory is a few units of unit tokens. An engine serves what waits there first
// come, first served, and whatever does not fit blocks what is behind it, as in vLLM.
type small struct {
	t        *testing.T
	engines  int
	capacity int64 // units
	sizes    []int64
	late     bool // a request without room waits; else it goes where Pick sends it
	blind    bool // without the rule
	seen     map[string]bool
	stuck    string // a deadlock; "": none was found
}

const unit = 1024 // tokens; of each prompt one unit is its answer's

// at is where a request is.
type at struct {
	stage byte // 'n'ew, waits for 'p'refill, is 'c'omputed, waits to 'f'etch, waits 'a'lone, waits at its P ('s'ame), 'x' ended
	p, d  int8
	after int8 // position in its engine's queue
	left  bool // its P still holds it (after 's' until the lease ends)
}

func (m *small) key(all []at) string { return fmt.Sprint(all) }

// memory returns what requests hold of an engine's memory: the account is exact here.
func (m *small) room(all []at, i int8) (used int64, room kvstate.Room) {
	for r, x := range all {
		prompt, need := m.sizes[r]-1, m.sizes[r]
		switch {
		case x.stage == 'p' && x.p == i:
			room.Held += prompt * unit
		case (x.stage == 'c' || x.stage == 'f') && x.p == i, x.left && x.p == i:
			room.Held, used = room.Held+prompt*unit, used+prompt
		}
		coming := (x.stage == 'p' || x.stage == 'c' || x.stage == 'f') && x.d == i
		if coming || (x.stage == 'a' || x.stage == 's') && x.d == i {
			room.Need = max(room.Need, need*unit)
		}
	}
	return used, room
}

// queue returns the next position in an engine's queue, and whether a request is first in it.
func queue(all []at, i int8) (first int, next int8) {
	first = -1
	for r, x := range all {
		where := x.d
		switch x.stage {
		case 'p':
			where = x.p
		case 'f', 'a', 's':
		default:
			continue
		}
		if where != i {
			continue
		}
		next = max(next, x.after+1)
		if first < 0 || x.after < all[first].after {
			first = r
		}
	}
	return first, next
}

// search tries every event in a state, and records a state without any that is not the end.
func (m *small) search(all []at) {
	if m.stuck != "" || m.seen[m.key(all)] {
		return
	}
	m.seen[m.key(all)] = true
	var next [][]at
	step := func(r int, x at) {
		after := slices.Clone(all)
		after[r] = x
		next = append(next, after)
	}
	v := bothView(m.engines, m.capacity*unit)
	for i := range v.Endpoints {
		_, v.Endpoints[i].Room = m.room(all, int8(i))
		if m.blind {
			v.Endpoints[i].Room, v.Endpoints[i].KVTokens = kvstate.Room{}, 0
		}
	}
	ended := true
	for r, x := range all {
		ended = ended && x.stage == 'x'
		k, want := always(), &Request{PromptTokens: (m.sizes[r] - 1) * unit, MinAnswer: unit, MaxAnswer: unit, Split: true}
		t := k.terms(want, v, m.engines, m.engines)
		switch x.stage {
		case 'n':
			for p := range v.Endpoints {
				_, behind := queue(all, int8(p))
				if t.takes(&v.Endpoints[p]) { // the picker prefers pairs; also without, there must be no deadlock
					step(r, at{stage: 'a', d: int8(p), p: -1, after: behind})
				}
				for d := range v.Endpoints {
					if p != d && t.keeps(&v.Endpoints[p]) && t.takes(&v.Endpoints[d]) {
						step(r, at{stage: 'p', p: int8(p), d: int8(d), after: behind})
					}
				}
			}
			if c, err := k.Pick(want, v); !m.late && c.NoRoom {
				require.NoError(m.t, err)
				_, behind := queue(all, int8(c.Decode))
				step(r, at{stage: 'a', d: int8(c.Decode), p: -1, after: behind})
			}
		case 'c': // pass 2
			none := true
			for d := range v.Endpoints {
				if int8(d) == x.p || !t.takes(&v.Endpoints[d]) {
					continue
				}
				none = false
				_, behind := queue(all, int8(d))
				step(r, at{stage: 'f', p: x.p, d: int8(d), after: behind})
			}
			if none {
				_, behind := queue(all, x.p)
				step(r, at{stage: 's', p: x.p, d: x.p, after: behind, left: true})
			}
		}
		if x.left { // the lease ends; while it waits, what the prefix cache keeps may be lost
			y := x
			y.left = false
			if y.stage == 's' {
				y.stage = 'a'
			}
			step(r, y)
		}
	}
	for i := range int8(m.engines) { // the first in each queue, if it fits. Answers end by themselves, so at once
		r, _ := queue(all, i)
		if r < 0 {
			continue
		}
		used, _ := m.room(all, i)
		x, free := all[r], m.capacity-used
		switch {
		case x.stage == 'p' && free >= m.sizes[r]-1:
			x.stage, x.after = 'c', 0
			step(r, x)
		case x.stage == 'f' && free >= m.sizes[r], x.stage == 'a' && free >= m.sizes[r]:
			step(r, at{stage: 'x'})
		case x.stage == 's' && free >= 1:
			step(r, at{stage: 'x', p: x.p, left: true})
		}
	}
	if len(next) == 0 && !ended {
		m.stuck = fmt.Sprintf("%d engines of %d, requests of %v: %v", m.engines, m.capacity, m.sizes, all)
	}
	for _, state := range next {
		m.search(state)
	}
}

// Brute force: two or three engines, up to four requests, late and immediate binding, every size of prompt: no order of
// events leads to a state from which nothing can go on. Without the rule some does, so the model can find it.
func TestNoDeadlockInSmallFleets(t *testing.T) {
	deadlocks := 0
	var try func(engines, n int, capacity int64, sizes []int64)
	try = func(engines, n int, capacity int64, sizes []int64) {
		if len(sizes) < n {
			from := int64(2)
			if len(sizes) > 0 {
				from = sizes[len(sizes)-1]
			}
			for size := from; size <= capacity; size++ {
				try(engines, n, capacity, append(slices.Clip(sizes), size))
			}
			return
		}
		for _, late := range []bool{false, true} {
			m := small{t: t, engines: engines, capacity: capacity, sizes: sizes, late: late, seen: map[string]bool{}}
			all := make([]at, len(sizes))
			for i := range all {
				all[i].stage = 'n'
			}
			m.search(all)
			require.Empty(t, m.stuck, "late %v", late)
			m.blind, m.seen = true, map[string]bool{}
			m.search(all)
			if m.stuck != "" {
				deadlocks++
			}
		}
	}
	try(2, 2, 4, nil)
	try(2, 3, 4, nil)
	try(2, 4, 4, nil)
	try(2, 3, 6, nil)
	try(3, 3, 4, nil)
	require.Positive(t, deadlocks, "without the rule the model finds deadlocks")
	t.Logf("%d fleets have deadlocks without the rule", deadlocks)
}

// A request that waits keeps its estimate, while what a byte may have is learned: room is made for the bytes.
func TestRoomForOldEstimates(t *testing.T) {
	v, k := bothView(2, 8000), always()
	v.Load.Densest = .8
	r := &Request{PromptTokens: 1500, Bytes: 6000, MinAnswer: 100, MaxAnswer: 100, Split: true}
	c, err := k.Pick(r, v)
	require.NoError(t, err)
	require.EqualValues(t, 4800, c.MostTokens)
	v.Endpoints[0].Room.Held, v.Endpoints[1].Room.Held = 1500, 1500 // half is 4000
	c, err = k.Pick(r, v)
	require.NoError(t, err)
	require.Equal(t, []any{-1, true}, []any{c.Prefill, c.Full})
	r.Bytes = 0 // counted
	c, err = k.Pick(r, v)
	require.NoError(t, err)
	require.Equal(t, []any{true, false}, []any{c.Prefill >= 0, c.Full})
}
