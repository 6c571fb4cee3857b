package picker

import (
	"cmp"
	"math"
	"slices"
	"strings"

	"tandem/kvstate"
)

// twin is Pick by brute force, with the formula of docs/decision.md: every pair, every endpoint alone, and among all
// whose price is the least to a millisecond those that hold most of the prompt.
type twin struct {
	r *Request
	v *kvstate.View
	p Policy

	other float64 // price of the other kind of choice, set by pick
}

// offers are a twin's choices and their prices.
type offers struct {
	choices []Choice
	prices  []float64
}

func (o *offers) add(p, d int, price float64) {
	o.choices = append(o.choices, Choice{Prefill: p, Decode: d})
	o.prices = append(o.prices, price)
}

func (o *offers) least() float64 {
	if len(o.prices) == 0 {
		return math.Inf(1)
	}
	return slices.Min(o.prices)
}

// How far a choice may go: endpoints for what they are used for, then for whatever they may serve, then also those that
// failed the request.
const (
	asUsed = iota
	anyWord
	desperate
)

func (w *twin) ok(i int, role kvstate.Role, how int) bool {
	c := &w.v.Endpoints[i]
	has := w.used(i)
	if how >= anyWord {
		has = c.Endpoint.Role
	}
	return has&role != 0 && c.Usable && (how == desperate || !slices.Contains(w.r.Excluded, c.Endpoint.Addr))
}

// used returns the legs that an endpoint has: those of its word, if it has one.
func (w *twin) used(i int) kvstate.Role {
	if c := &w.v.Endpoints[i]; c.Word == 0 {
		return c.Endpoint.Role
	}
	return w.v.Endpoints[i].Word
}

func (w *twin) cached(i int) float64 {
	if w.r.Blocks == 0 {
		return 0
	}
	return min(float64(w.r.PromptTokens)*float64(w.v.Endpoints[i].Hit)/float64(w.r.Blocks), max(float64(w.r.PromptTokens), 1)-1)
}

func (w *twin) tokens() float64 { return max(float64(w.r.PromptTokens), 1) }

// e returns the model's time for this prompt on endpoint i, at speed 1.
func (w *twin) e(i int) float64 {
	m, h := w.p.Model, w.cached(i)
	u := w.tokens() - h
	return m.PrefillStep*math.Ceil(u/m.StepTokens) + m.PrefillToken*u + m.PrefillContext*u*(h+u/2)
}

// load is the time to load what endpoint i holds outside GPU memory.
func (w *twin) load(i int) (seconds float64) {
	if w.r.Blocks == 0 {
		return 0
	}
	bytes := w.p.Model.TokenBytes
	if w.v.Load.TokenBytes > 0 {
		bytes = w.v.Load.TokenBytes
	}
	for tier, blocks := range w.v.Endpoints[i].Loads {
		rate := w.p.Model.LoadBandwidth[tier]
		if tier == 0 && w.v.Load.LoadBandwidth > 0 {
			rate = w.v.Load.LoadBandwidth
		}
		seconds += float64(blocks) / float64(w.r.Blocks) * w.tokens() * bytes / rate
	}
	return seconds
}

func (w *twin) speed(i int) float64 {
	if s := w.v.Endpoints[i].Speed; s > 0 {
		return s
	}
	return w.fleet()
}

func (w *twin) fleet() float64 {
	if s := w.v.Load.Speed; s > 0 {
		return s
	}
	return 1
}

func (w *twin) phi(rho float64, role kvstate.Role) float64 {
	n := 0.0
	for i := range w.v.Endpoints {
		if w.v.Endpoints[i].Usable && w.used(i)&role != 0 {
			n++
		}
	}
	rho = min(rho, .9)
	return min(2, 6/math.Sqrt(max(n, 1))) * rho / (1 - rho)
}

func (w *twin) costP(i int) float64 {
	c, e := &w.v.Endpoints[i], w.e(i)
	usual := e * w.fleet()
	limit := 2 * w.v.Load.Work.Seconds()
	if w.p.Late {
		limit = math.Inf(1)
	}
	price := w.load(i) + float64(c.Jobs)*min(usual, limit)/w.weight(i) +
		w.phi(w.v.Load.Prefill, kvstate.RolePrefill)*(usual-w.paid(i)*w.fleet())
	price += w.evicts(i, w.tokens()-w.cached(i))
	if c.Endpoint.Role != kvstate.RoleBoth {
		own := (c.Queue.Seconds() + e*w.speed(i)) / w.weight(i)
		return price + own + w.late(i, own) + w.returns(i, e*w.speed(i)/w.weight(i))
	}
	own := w.promptBeside(i)
	alone := own - w.queueBeside(i)
	return price + w.returns(i, alone) + own + w.late(i, own) + w.p.AnswerWeight*w.answersLose(i, max(w.running(i), 0))
}

// late is the price of a first token after the promised time; of one that is too late already it does not matter when.
func (w *twin) late(i int, own float64) float64 {
	left := w.p.Promise.TTFT - w.r.Waited
	if left > 0 && own+w.load(i) > left {
		return w.p.Promise.TTFT
	}
	return 0
}

func (w *twin) running(i int) float64 {
	return float64(w.v.Endpoints[i].Requests - w.v.Endpoints[i].Jobs)
}

// promptBeside is the time of this prompt on an endpoint that may write answers: after the prompts that are there, and
// in the steps of the answers if any run.
func (w *twin) promptBeside(i int) float64 {
	if w.running(i) <= 0 {
		return w.queueBeside(i) + w.e(i)*w.speed(i)/w.weight(i)
	}
	_, _, step, _ := w.step(i) //nolint:dogsled // one of what the batch costs
	return w.queueBeside(i) + w.longer(i) + w.steps(i)*step
}

func (w *twin) queueBeside(i int) float64 {
	c, m := &w.v.Endpoints[i], w.p.Model
	queue := (c.Local + c.Queue).Seconds() / w.weight(i)
	if w.running(i) <= 0 {
		return queue
	}
	_, _, step, _ := w.step(i) //nolint:dogsled // one of what the batch costs
	return queue * (1 + step/(m.StepTokens*m.PrefillToken))
}

// evicts is the time to compute again what endpoint i discards, token by token.
func (w *twin) evicts(i int, need float64) (seconds float64) {
	memory, m := w.v.Endpoints[i].Memory, w.p.Model
	if memory == nil {
		return 0
	}
	need -= memory.Free
	for _, p := range memory.Old {
		lost := math.Max(math.Min(need, p.Tokens), 0)
		before := p.End - lost
		seconds += p.Back * (m.PrefillToken*lost + m.PrefillContext*lost*(before+p.End)/2) * w.fleet()
		need -= lost
	}
	return seconds
}

func (w *twin) returns(i int, work float64) float64 {
	if memory := w.v.Endpoints[i].Memory; memory != nil {
		return work * memory.Returns * work / 2
	}
	return 0
}

// whole is whether engines that serve both legs serve whole requests.
func (w *twin) whole() bool {
	all := 0.0
	for i, c := range w.v.Endpoints {
		switch {
		case !c.Usable, c.Endpoint.Role == kvstate.RoleEncode:
		case c.Endpoint.Role != kvstate.RoleBoth, w.used(i) != kvstate.RoleBoth, c.Memory == nil:
			return false
		default:
			all += c.Memory.Tokens
		}
	}
	return w.v.Load.Live > .35*all
}

func (w *twin) steps(i int) float64 {
	return math.Ceil((w.tokens() - w.cached(i)) / w.p.Model.StepTokens)
}

// longer is the time by which this prompt makes the steps of answers longer.
func (w *twin) longer(i int) float64 {
	return (w.e(i) - w.p.Model.PrefillStep*w.steps(i)) * w.speed(i) / w.weight(i)
}

// answersLose is the time that so many answers lose by this prompt.
func (w *twin) answersLose(i int, n float64) float64 { return n * w.longer(i) / max(1-w.fill(i), .5) }

func (w *twin) fill(i int) float64 {
	n, kv, _, _ := w.step(i)
	return max(n/w.p.Model.MaxAnswers, kv/w.room(i))
}

// token is the time between tokens of an answer: prompts take their share, within the promise.
func (w *twin) token(i int) float64 {
	_, _, step, _ := w.step(i) //nolint:dogsled // one of what the batch costs
	with := step / max(1-w.v.Endpoints[i].Share, .01)
	if tpot := w.tpot(); tpot > 0 && with > .9*tpot {
		return max(step, .9*tpot)
	}
	return with
}

// paid returns the part of a miss on endpoint i that other uses pay, block by block.
func (w *twin) paid(i int) float64 {
	m, sum, from := w.p.Model, 0.0, w.cached(i)
	work := func(x float64) float64 { return m.PrefillToken*x + m.PrefillContext*x*x/2 }
	for block := w.v.Endpoints[i].Hit; block < w.r.Blocks; block++ {
		to := min(float64(w.r.PromptTokens)*float64(block+1)/float64(w.r.Blocks), w.tokens()-1)
		if payers := w.payers(block); payers > 1 && to > from {
			sum += (work(to) - work(from)) * (1 - 1/payers)
		}
		from = max(from, to)
	}
	return sum
}

// payers returns the uses of a copy of a block that would wait for each other without another copy.
func (w *twin) payers(block int) float64 {
	for _, u := range w.v.Uses {
		if block >= int(u.Blocks) {
			continue
		}
		holders := 0.0
		for i, c := range w.v.Endpoints {
			if c.Usable && w.used(i)&kvstate.RolePrefill != 0 && c.Hit >= int(u.Blocks) {
				holders++
			}
		}
		each := float64(u.Uses) / max(holders, 1)
		busy := min(each*w.v.Load.Work.Seconds()/60, 1)
		return each * busy * busy
	}
	return 0
}

func (w *twin) weight(i int) float64 {
	if n := w.v.Endpoints[i].Weight; n > 0 {
		return float64(n) / 100
	}
	return 1
}

func (w *twin) out() float64 {
	out := w.mean()
	if w.r.MaxAnswer > 0 && out > float64(w.r.MaxAnswer) {
		out = float64(w.r.MaxAnswer)
	}
	if out < float64(w.r.MinAnswer) {
		out = float64(w.r.MinAnswer)
	}
	return out
}

func (w *twin) mean() float64 {
	if w.v.Load.Answer > 0 {
		return w.v.Load.Answer
	}
	return 256
}

// tpot returns what is promised between two tokens, or what engines this slow can keep.
func (w *twin) tpot() float64 {
	if w.p.Promise.TPOT <= 0 {
		return 0
	}
	return max(w.p.Promise.TPOT, .030*w.v.Load.Step)
}

func (w *twin) room(i int) float64 {
	if n := w.v.Endpoints[i].KVTokens; n > 0 {
		return float64(n)
	}
	return w.p.Model.KVTokens
}

func (w *twin) step(i int) (n, kv, step, overflow float64) {
	c, m := &w.v.Endpoints[i], w.p.Model
	n = float64(c.Requests - c.Jobs)
	kv = float64(c.PromptTokens) + n*w.mean()/2
	if g := c.Signals; g != nil && c.KVTokens > 0 && g.KVUsage >= 0 {
		lasts := .012 * w.mean()
		trust := c.Trust * lasts / (lasts + 2)
		kv = (1-trust)*kv + trust*g.KVUsage*float64(c.KVTokens)
		if kv < float64(c.PromptTokens) {
			kv = float64(c.PromptTokens)
		}
	}
	kv += w.tokens() + w.out()/2
	step = m.DecodeStep + (m.DecodeAnswer*(n+1)+m.DecodeToken*kv)/w.weight(i)
	if c.Step > 0 {
		step *= c.Step
	}
	x, varies := kv-w.room(i), w.mean()*math.Sqrt(n+1)
	excess := (x + math.Hypot(x, varies)) / 2
	if x < -8*varies {
		excess = varies * varies / -x / 4
	}
	overflow = excess / kv * w.out() * step * 2
	return n, kv, step, overflow
}

func (w *twin) costD(i int) float64 {
	_, _, step, overflow := w.step(i)
	c := &w.v.Endpoints[i]
	overflow += w.evicts(i, w.tokens()-w.cached(i)+w.out())
	if c.Endpoint.Role == kvstate.RoleBoth || c.Share > 0 {
		return step + (c.Queue+c.Local).Seconds()/w.weight(i) + w.p.AnswerWeight*w.out()*w.token(i) + overflow
	}
	return step + w.p.AnswerWeight*w.out()*step + overflow
}

func (w *twin) transfer(p, d int) float64 {
	m, learned := w.p.Model, w.v.Endpoints[d].Transfer
	bytes := m.TokenBytes
	if w.v.Load.TokenBytes > 0 {
		bytes = w.v.Load.TokenBytes
	}
	if learned <= 0 {
		learned = 1
	}
	inGPU := 0.0
	if w.r.Blocks > 0 {
		c := &w.v.Endpoints[d]
		slower := c.Loads[0] + c.Loads[1] + c.Loads[2]
		inGPU = min(float64(w.r.PromptTokens)*float64(c.Hit-int(slower))/float64(w.r.Blocks), w.tokens()-1)
	}
	t := (w.tokens() - inGPU) * bytes / m.Bandwidth
	if w.v.SameNode != nil && sameNode(w.v, p, d) {
		return learned * (m.TransferLag + t/m.NodeGain)
	}
	if a, b := w.v.Endpoints[p].Endpoint.Zone, w.v.Endpoints[d].Endpoint.Zone; a != b && a != "" && b != "" {
		t *= m.ZoneGap
	}
	return learned * (m.TransferLag + t)
}

func (w *twin) compatible(p, d int) bool {
	a, b := &w.v.Endpoints[p], &w.v.Endpoints[d]
	same := func(x, y string) bool { return x == y || x == "" || y == "" }
	size := func(c *kvstate.Candidate) string {
		if c.Report == nil {
			return ""
		}
		return c.Report[kvstate.FactBlockSize]
	}
	return p != d && a.Endpoint.Group == b.Endpoint.Group && same(a.Endpoint.Engine, b.Endpoint.Engine) &&
		same(size(a), size(b)) && !a.Awaits && !b.Awaits && w.loads(p, d)
}

// loads reports whether failed loads allow a pair.
func (w *twin) loads(p, d int) bool {
	at, to := w.v.Endpoints[p].Faults, w.v.Endpoints[d].Faults
	if to != nil && to.Parts&kvstate.RoleDecode != 0 {
		return false
	}
	return at == nil || at.Parts&kvstate.RolePrefill == 0 && !slices.Contains(at.Decodes, w.v.Endpoints[d].Endpoint.Addr)
}

func (w *twin) alone(d int, guarded bool) (price float64, ok bool) {
	c, m := &w.v.Endpoints[d], w.p.Model
	n, _, step, overflow := w.step(d)
	appends := w.tokens()-w.cached(d) <= min(m.StepTokens, w.tokens()/10)
	if guarded = guarded && !appends; guarded && w.fill(d) > .5 {
		return 0, false
	}
	if guarded && w.tpot() > 0 && step/max(1-c.Share, .01)+w.longer(d)/w.mean() > .9*w.tpot() {
		return 0, false
	}
	e := w.e(d)
	own := e * w.speed(d) / w.weight(d)
	if n > 0 {
		own = w.longer(d) + w.steps(d)*step
	}
	queue := (c.Local + c.Queue).Seconds() / w.weight(d) * (1 + step/(m.StepTokens*m.PrefillToken))
	others := w.phi(w.v.Load.Local, kvstate.RoleDecode) * w.fleet()
	if c.Endpoint.Role == kvstate.RoleBoth {
		e -= w.paid(d)
	}
	least := .01
	if w.used(d) == kvstate.RoleBoth {
		least = .5
	}
	return w.load(d) + queue + own + others*e + w.late(d, queue+own) + w.evicts(d, w.tokens()-w.cached(d)+w.out()) +
		w.returns(d, own) + w.p.AnswerWeight*(w.answersLose(d, max(n, 1))/max(1-c.Share, least)+w.out()*w.token(d)) +
		overflow, true
}

func (w *twin) onlyPrefills(i int) bool {
	c := &w.v.Endpoints[i]
	return c.Endpoint.Role != kvstate.RoleBoth || c.Word == kvstate.RolePrefill && c.Room.Need == 0
}

// keeps is whether endpoint i may compute the prompt for another.
func (w *twin) keeps(i int) bool {
	c := &w.v.Endpoints[i]
	after, capacity := float64(c.Room.Held)+w.tokens(), float64(c.KVTokens)
	switch {
	case w.onlyPrefills(i):
		return true
	case capacity == 0:
		return c.Room.Need == 0
	}
	return (after <= capacity/2 || c.Room.Held == 0) && after+float64(c.Room.Need) <= capacity
}

// waits is the price of memory that is full at an endpoint which only prefills.
func (w *twin) waits(i int) float64 {
	c := &w.v.Endpoints[i]
	used := w.tokens() + float64(c.Room.Held)
	if c.Trust > 0 && c.Signals.KVUsage >= 0 {
		used = w.tokens() + min(float64(c.Room.Held), c.Signals.KVUsage*float64(c.KVTokens))
	}
	if !w.onlyPrefills(i) || c.Room.Held == 0 || c.KVTokens == 0 || used <= float64(c.KVTokens) {
		return 0
	}
	return 4
}

// takes is whether endpoint i may answer.
func (w *twin) takes(i int) bool {
	c := &w.v.Endpoints[i]
	return c.Endpoint.Role != kvstate.RoleBoth || c.Room.Held == 0 ||
		c.KVTokens > 0 && float64(c.Room.Held)+w.tokens()+w.out() <= float64(c.KVTokens)
}

// crowd is the endpoint that answers if none has room: one that has too much already, then one that holds least.
func (w *twin) crowd() []Choice {
	var all []int
	for i := range w.v.Endpoints {
		if w.ok(i, kvstate.RoleDecode, asUsed) && !w.takes(i) {
			all = append(all, i)
		}
	}
	if len(all) == 0 {
		return nil
	}
	slices.SortFunc(all, func(a, b int) int {
		x, y := &w.v.Endpoints[a], &w.v.Endpoints[b]
		over := func(c *kvstate.Candidate) int {
			if c.Room.Need > 0 && c.Room.Held+c.Room.Need > c.KVTokens {
				return 0
			}
			return 1
		}
		return cmp.Or(over(x)-over(y), cmp.Compare(x.Room.Held, y.Room.Held), strings.Compare(x.Endpoint.Addr, y.Endpoint.Addr))
	})
	return []Choice{{Prefill: -1, Decode: all[0]}}
}

// pairs returns every pair.
func (w *twin) pairs() (pairs offers) {
	for p := range w.v.Endpoints {
		for d := range w.v.Endpoints {
			if w.r.Split && w.p.Split != SplitNever && (w.p.Split == SplitAlways || !w.whole()) && w.ok(p, kvstate.RolePrefill, asUsed) &&
				w.ok(d, kvstate.RoleDecode, asUsed) && w.compatible(p, d) && w.keeps(p) && w.takes(d) {
				pairs.add(p, d, w.costP(p)+w.waits(p)+w.transfer(p, d)+w.costD(d))
			}
		}
	}
	return pairs
}

// pick returns every choice that Pick may make.
func (w *twin) pick() []Choice {
	var alone offers
	pairs := w.pairs()
	if len(pairs.prices) > 0 && w.p.Split == SplitAlways {
		return w.best(&pairs)
	}
	for how := asUsed; how <= desperate; how++ {
		if len(alone.prices) > 0 {
			break
		}
		if crowd := w.crowd(); how > asUsed && crowd != nil {
			w.other = math.Inf(1)
			return crowd
		}
		for d := range w.v.Endpoints {
			if !w.ok(d, kvstate.RoleDecode, how) || how == asUsed && !w.takes(d) {
				continue
			}
			if price, ok := w.alone(d, len(pairs.prices) > 0); ok {
				alone.add(-1, d, price)
			}
		}
		if len(pairs.prices) > 0 {
			break
		}
	}
	w.other = pairs.least()
	if len(pairs.prices) == 0 {
		return w.best(&alone)
	}
	all := w.best(&alone)
	few := len(all) > 0 && slices.ContainsFunc(all, func(c Choice) bool {
		return math.Ceil(w.tokens()-w.cached(c.Decode)) < float64(w.p.MinPrefillTokens)
	})
	if few || alone.least() < pairs.least() {
		return all
	}
	w.other = alone.least()
	return w.best(&pairs)
}

// best returns the choices that are equal to the cheapest: P first, then the D that go with it.
func (w *twin) best(o *offers) (out []Choice) {
	// price of each P with its cheapest D
	byP := map[int]float64{}
	for i, c := range o.choices {
		if old, ok := byP[c.Prefill]; !ok || o.prices[i] < old {
			byP[c.Prefill] = o.prices[i]
		}
	}
	hit := func(i int) int {
		if i < 0 {
			return 0
		}
		return w.v.Endpoints[i].Hit
	}
	most := -1
	for p, price := range byP {
		if price <= o.least()+sameTime {
			most = max(most, hit(p))
		}
	}
	for p, price := range byP {
		if price > o.least()+sameTime || hit(p) != most {
			continue
		}
		held := -1
		for i, c := range o.choices {
			if c.Prefill == p && o.prices[i] <= price+sameTime {
				held = max(held, hit(c.Decode))
			}
		}
		for i, c := range o.choices {
			if c.Prefill == p && o.prices[i] <= price+sameTime && hit(c.Decode) == held {
				out = append(out, c)
			}
		}
	}
	return out
}
