package replay

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"sync"

	"tandem/picker"
	"tandem/recording"
	"tandem/replay/engine"
)

// Recorded is what a recording asked for, as it is played: a request that continues a conversation comes some
// time after the answer before it, whenever that ends, and all others come when they came.
type Recorded struct {
	Pool    recording.Pool // as it was last
	Turns   []RecordedTurn // by arrival
	Seconds float64        // from the first arrival to the last
	Sample  int            // each conversation stands for so many
	Usage   bool           // answers were read
	Skipped map[string]int // requests that are not played, by reason
	Guessed int            // answers whose length nobody knows: they have the mean
	Notes   []string       // what disturbed the fleet meanwhile
	// how many recordings were joined, and requests that continue a conversation of another one
	Recordings, Crossed int

	whole  bool // nobody ended it while conversations went on
	shared map[uint64]bool
	mu     sync.Mutex
	played map[string]*RecordedResult // by variant
}

// RecordedTurn is a request of a recording.
type RecordedTurn struct {
	At     float64 // s, of its arrival
	On     int     // position of the request whose answer it waits for; -1: none
	Gap    float64 // after that answer's end; below 0: so many s after that one's arrival
	Input  int     // tokens
	Output int
	Blocks []uint64
	Part   engine.Part
	Kept   []uint64 // of prompt and answer, if a later prompt has them; see engine.Job
	Was    *recording.Request
	root   int
}

// LoadRecorded returns what a recording asked of a pool; "": of the one with most requests.
func LoadRecorded(r *recording.Recording, pool string) (*Recorded, error) {
	if len(r.Fleets) == 0 {
		return nil, errors.New("the recording does not say what engines there were")
	}
	if pool == "" {
		pool = busiest(r)
	}
	out := &Recorded{Sample: r.Sample, Usage: r.Usage, Skipped: map[string]int{}, shared: map[uint64]bool{},
		Recordings: len(r.Parts), Crossed: r.Crossed}
	found := false
	for _, f := range r.Fleets {
		for _, p := range f.Pools {
			if p.Name == pool {
				found = true
			}
			if p.Name == pool && len(p.Engines) > 0 { // else they were not found yet, or had gone
				out.Pool = withLearned(p, out.Pool)
			}
		}
	}
	switch {
	case !found:
		return nil, fmt.Errorf("the recording has no pool %q", pool)
	case len(out.Pool.Engines) == 0:
		return nil, fmt.Errorf("the recording does not say what engines pool %q had", pool)
	}
	out.disturbed(r, pool)
	at := map[uint64]int{}
	for i := range r.Requests {
		q := &r.Requests[i]
		if q.Pool != pool {
			continue
		}
		if why := out.skips(q); why != "" {
			out.Skipped[why]++
			continue
		}
		t := RecordedTurn{At: q.T, On: -1, Input: max(int(q.Prompt), 1), Output: int(q.Answer), Was: q,
			root: len(out.Turns)}
		if on, ok := at[q.On]; ok && q.On > 0 {
			t.On, t.Gap, t.root = on, q.Gap, out.Turns[on].root
			if q.Gap < 0 {
				t.Gap = -max(q.T-out.Turns[on].At, 1e-9)
			}
		}
		if t.Output < 1 {
			t.Output = max(int(cmp.Or(out.Pool.Answer, 256)), 1)
			out.Guessed++
		}
		at[q.N] = len(out.Turns)
		out.Turns = append(out.Turns, t)
	}
	if len(out.Turns) < 2 {
		return nil, fmt.Errorf("the recording has %d requests of pool %s that can be played: record more",
			len(out.Turns), pool)
	}
	first := out.Turns[0].At
	for i := range out.Turns {
		out.Turns[i].At -= first
	}
	out.Seconds = max(out.Turns[len(out.Turns)-1].At, 1)
	out.cut(r.BlockBytes)
	return out, nil
}

// withLearned returns a pool, with what was learned earlier where nothing is known any more.
func withLearned(p, before recording.Pool) recording.Pool {
	p.TokenBytes, p.Answer = cmp.Or(p.TokenBytes, before.TokenBytes), cmp.Or(p.Answer, before.Answer)
	for i := range p.Engines {
		for _, b := range before.Engines {
			if e := &p.Engines[i]; b.Address == e.Address {
				e.Speed, e.Pace, e.Link = cmp.Or(e.Speed, b.Speed), cmp.Or(e.Pace, b.Pace), cmp.Or(e.Link, b.Link)
				e.KV, e.Host = cmp.Or(e.KV, b.KV), cmp.Or(e.Host, b.Host)
			}
		}
	}
	return p
}

func busiest(r *recording.Recording) (pool string) {
	counts := map[string]int{}
	for i := range r.Requests {
		counts[r.Requests[i].Pool]++
	}
	for name, n := range counts {
		if n > counts[pool] || n == counts[pool] && name < pool {
			pool = name
		}
	}
	return pool
}

// skips returns why a request is not played.
func (o *Recorded) skips(q *recording.Request) string {
	switch {
	case q.Route == "pass_through" || q.Route == "stored_response":
		return "have no prompt"
	case q.Ended != "ok" && q.Answer < 1:
		return "have no answer"
	case q.Prompt < 1:
		return "have a prompt of unknown length"
	}
	return ""
}

// disturbed notes what the replay does not play as it was: engines that came, went and were out, some roles, and load
// that came past Tandem.
func (o *Recorded) disturbed(r *recording.Recording, pool string) {
	out, outside, snapshots := map[string]bool{}, 0.0, 0
	last := len(o.Pool.Engines)
	least, most := last, last
	for _, f := range r.Fleets {
		for _, p := range f.Pools {
			if p.Name != pool {
				continue
			}
			snapshots++
			if n := len(p.Engines); n > 0 {
				least, most = min(least, n), max(most, n)
			}
			for _, e := range p.Engines {
				if e.Out {
					out[e.Address] = true
				}
				outside += float64(e.Outside)
			}
		}
	}
	roles := map[string]int{}
	for _, e := range o.Pool.Engines {
		roles[e.Role]++
	}
	if n := roles["encode"]; n > 0 {
		o.Notes = append(o.Notes, fmt.Sprintf("%d engines that encode media are not played", n))
	}
	if roles["both"] > 0 && roles["prefill"]+roles["decode"] > 0 {
		o.Notes = append(o.Notes, "engines with one role beside engines with both are replayed as if all had both")
	}
	if least < most {
		o.Notes = append(o.Notes, fmt.Sprintf("the pool had %d to %d engines, and is played with the %d that it had "+
			"last", least, most, last))
	}
	if len(out) > 0 {
		o.Notes = append(o.Notes, fmt.Sprintf("%d engines were out for a part of the time", len(out)))
	}
	if mean := outside / float64(max(snapshots, 1)); mean >= .5 {
		o.Notes = append(o.Notes, fmt.Sprintf("engines had %.1f requests on average that did not come through Tandem",
			mean))
	}
	o.Notes = append(o.Notes, joined(r)...)
	if len(r.Cut) > 0 {
		o.Notes = append(o.Notes, fmt.Sprintf("%d files have no end: their last requests are missing", len(r.Cut)))
	}
}

// joined notes what is not known of recordings that are played as one.
func joined(r *recording.Recording) (notes []string) {
	salts, end := map[string]bool{}, 0.0
	missing, until := map[string]float64{}, map[string]float64{} // by replica: s without a recording, up to its last
	for i := range r.Parts {
		p := &r.Parts[i]
		salts[p.Salt] = true
		missing[p.Replica] += max(p.Start-r.Start-until[p.Replica], 0)
		until[p.Replica], end = max(until[p.Replica], p.Last), max(end, p.Last)
	}
	if len(salts) > 1 {
		notes = append(notes, fmt.Sprintf("%d recordings have %d salts, so nobody knows what their prompts share, "+
			"and which conversations went from one to the other: less is cached here. Give all replicas one "+
			"record.saltFile", len(r.Parts), len(salts)))
	}
	for _, replica := range slices.Sorted(maps.Keys(missing)) {
		if all := missing[replica] + end - until[replica]; all > .1*end {
			notes = append(notes, fmt.Sprintf("replica %q recorded nothing for %.0f s of %.0f s, in which the load "+
				"is less than it was", replica, all, end))
		}
	}
	if r.Sample > 1 && r.Crossed > 0 {
		notes = append(notes, "conversations that went to several replicas were sampled at each by itself, so parts "+
			"of them are missing")
	}
	return notes
}

// cut makes blocks of the replay's engines of the recording's, which stand for bytes. A token has as many bytes as
// those of its model have on average, so that what is shared in the recording is shared here.
func (o *Recorded) cut(blockBytes int) {
	tokens, bytes := map[string]float64{}, map[string]float64{}
	for i := range o.Turns {
		q := o.Turns[i].Was
		tokens[q.Model] += float64(q.Prompt)
		bytes[q.Model] += float64(q.Bytes)
	}
	perBlock := func(model string) float64 {
		return tokens[model] / max(bytes[model], 1) * float64(blockBytes)
	}
	unique := uint64(1) << 62
	grown := make([]int, len(o.Turns)) // the first turn that extends it
	for i := len(o.Turns) - 1; i >= 0; i-- {
		t := &o.Turns[i]
		ofBlock := max(perBlock(t.Was.Model), 1)
		count := func(n int) int { return (n + engine.BlockTokens - 1) / engine.BlockTokens }
		var later []uint64
		if j := grown[i]; j > 0 {
			later = o.Turns[j].Blocks
		}
		for g := range count(t.Input + t.Output) {
			at := int(math.Ceil(float64((g+1)*engine.BlockTokens)/ofBlock)) - 1
			switch {
			case at < len(t.Was.Blocks) && g < t.Input/engine.BlockTokens:
				t.Kept = append(t.Kept, t.Was.Blocks[at])
			case g < len(later):
				t.Kept = append(t.Kept, later[g])
			default:
				unique++
				t.Kept = append(t.Kept, unique)
			}
		}
		t.Blocks = t.Kept[:count(t.Input)]
		if t.On >= 0 {
			grown[t.On] = i // the first one, as they come backwards
		}
	}
	o.shared = sharedBy(o.Turns, func(t *RecordedTurn) []uint64 { return t.Blocks })
	o.parts(perBlock)
}

// parts finds where the beginnings end that several conversations share, such as a system prompt: within a block of
// the recording. Where exactly is the number of tokens that most of their requests found in a cache; if the recording
// has no such numbers, the middle of the block. perBlock is how many tokens of a model a block stands for.
func (o *Recorded) parts(perBlock func(model string) float64) {
	small := sharedBy(o.Turns, func(t *RecordedTurn) []uint64 { return t.Was.Blocks })
	shared := make([]int, len(o.Turns))
	found := map[uint64]map[int]int{} // by the last shared block: how many requests found so many tokens
	for i := range o.Turns {
		q, n := o.Turns[i].Was, 0
		for n < len(q.Blocks) && small[q.Blocks[n]] {
			n++
		}
		shared[i] = n
		blocks := float64(q.Cached) / max(perBlock(q.Model), 1)
		if n > 0 && blocks >= float64(n) && blocks < float64(n+1) {
			id := q.Blocks[n-1]
			if found[id] == nil {
				found[id] = map[int]int{}
			}
			found[id][int(q.Cached)]++
		}
	}
	ends := map[uint64]int{}
	for id, counts := range found {
		ends[id] = mostFrequent(counts)
	}
	for i := range o.Turns {
		t, n := &o.Turns[i], shared[i]
		if n == 0 {
			continue
		}
		id := t.Was.Blocks[n-1]
		all, known := ends[id]
		if !known {
			all = int((float64(n) + .5) * perBlock(t.Was.Model))
		}
		if all = min(all, t.Input-1); all > 0 {
			t.Part = engine.Part{Behind: all / engine.BlockTokens, Tokens: all % engine.BlockTokens, ID: id}
		}
	}
}

// mostFrequent returns the number that was counted most often, the least of several.
func mostFrequent(counts map[int]int) (n int) {
	most := 0
	for _, value := range slices.Sorted(maps.Keys(counts)) {
		if counts[value] > most {
			n, most = value, counts[value]
		}
	}
	return n
}

// sharedBy returns the blocks that several conversations have.
func sharedBy(turns []RecordedTurn, blocks func(*RecordedTurn) []uint64) map[uint64]bool {
	of, out := map[uint64]int{}, map[uint64]bool{}
	for i := range turns {
		for _, b := range blocks(&turns[i]) {
			if root, ok := of[b]; ok && root != turns[i].root {
				out[b] = true
			}
			of[b] = turns[i].root
		}
	}
	return out
}

// Fleet returns the configuration that the pool had, with engines as Tandem had learned them, and what is not as
// it was.
func (o *Recorded) Fleet() (c Config, host float64, notes []string) {
	c = DefaultConfig()
	p := &o.Pool
	c.Late, c.Roles, c.AnswerWeight = p.Late, p.Roles, cmp.Or(p.AnswerWeight, c.AnswerWeight)
	c.MaxWait = cmp.Or(p.MaxWait, c.MaxWait)
	c.Split = map[string]picker.Split{"always": picker.SplitAlways, "never": picker.SplitNever}[p.Split]
	if p.Split == "auto" {
		c.Split = picker.SplitAuto
	}
	c.Promise = picker.Targets{TTFT: p.TTFT, TPOT: p.TPOT}
	c.TTFT, c.TPOT = cmp.Or(p.TTFT, c.TTFT), cmp.Or(p.TPOT, c.TPOT)
	c.Prefill, c.Decode = 0, 0
	var speed, pace, link, kv, kept []float64
	for _, e := range p.Engines {
		switch e.Role {
		case "encode":
			continue
		case "prefill":
			c.Prefill++
		case "decode":
			c.Decode++
		default:
			c.Both++
		}
		some := func(to *[]float64, x float64) {
			if x > 0 {
				*to = append(*to, x)
			}
		}
		some(&speed, e.Speed)
		some(&pace, e.Pace)
		some(&link, e.Link)
		some(&kv, float64(e.KV))
		some(&kept, float64(e.Host))
	}
	if c.Both > 0 && c.Prefill+c.Decode > 0 {
		c.Both, c.Prefill, c.Decode = c.Both+c.Prefill+c.Decode, 0, 0
	}
	if c.Both > 0 || c.Prefill == 0 || c.Decode == 0 {
		c.Both = cmp.Or(c.Both, c.Prefill+c.Decode)
		c.Prefill, c.Decode = 1, 1 // not used
	}
	m := &c.Engine
	times(mean(speed), &m.PrefillStep, &m.PrefillToken, &m.PrefillContext)
	times(mean(pace), &m.DecodeStep, &m.DecodeAnswer, &m.DecodeToken)
	times(mean(link), &m.TransferLag)
	m.Bandwidth /= mean(link)
	m.TokenBytes = cmp.Or(p.TokenBytes, m.TokenBytes)
	m.StepTokens = cmp.Or(p.StepTokens, m.StepTokens)
	c.LocalTokens = int(m.StepTokens)
	if len(kv) > 0 {
		m.KVTokens = mean(kv)
	} else {
		notes = append(notes, fmt.Sprintf("engines did not say how much KV they keep: each has memory for %.0f tokens "+
			"here", m.KVTokens))
	}
	if len(kept) > 0 {
		host = mean(kept)
	}
	for _, of := range [...]struct {
		what string
		all  []float64
	}{{"speeds of prefill", speed}, {"times of a decode step", pace}} {
		if len(of.all) == 0 {
			notes = append(notes, "Tandem had not learned "+of.what+": they are those of its model, so times may be "+
				"far off. tandem profile measures an engine")
		} else if slices.Max(of.all) > 1.25*slices.Min(of.all) {
			notes = append(notes, fmt.Sprintf("engines differ in their %s (%.2f to %.2f times the model's); here all "+
				"have the mean", of.what, slices.Min(of.all), slices.Max(of.all)))
		}
	}
	return c, host, notes
}

func times(factor float64, of ...*float64) {
	for _, x := range of {
		*x *= factor
	}
}

// mean returns the mean of values; 1 of none.
func mean(values []float64) float64 {
	if len(values) == 0 {
		return 1
	}
	sum := 0.0
	for _, v := range values {
		sum += v
	}
	return sum / float64(len(values))
}
