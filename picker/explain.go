package picker

import (
	"fmt"
	"io"
	"math"
	"slices"
	"strings"

	"tandem/kvstate"
)

// Explanation is a decision with all prices behind it, in seconds.
type Explanation struct {
	Prefill     string    `json:"prefill,omitempty"` // address; "": decode alone
	Decode      string    `json:"decode,omitempty"`
	Price       float64   `json:"price"`
	Prompt      int64     `json:"prompt_tokens,omitempty"`
	Refused     string    `json:"refused,omitempty"`      // why no endpoint was chosen
	Full        bool      `json:"full,omitempty"`         // engines of both roles had no room for its KV
	Load        float64   `json:"load"`                   // utilisation of the prefill endpoints, 0 to 1
	SecondCosts float64   `json:"second_costs"`           // cost to other requests of a second of prefill at that load
	TokenBytes  float64   `json:"token_bytes"`            // KV bytes of one token, for transfers
	Answer      float64   `json:"answer_tokens"`          // expected length of the answer
	PrefillTime float64   `json:"prefill_time,omitempty"` // estimated, s: until the prefill endpoint has answered
	FirstToken  float64   `json:"first_token"`            // estimated, s
	TokenTime   float64   `json:"token_time"`             // between two tokens, s
	Candidates  []Weighed `json:"candidates"`             // in the view's order

	// quantities that were not measured yet, for which the model's defaults are used
	Defaults []string `json:"defaults,omitempty"`
}

// Weighed is one endpoint in a decision.
type Weighed struct {
	Endpoint string `json:"endpoint"` // address
	Name     string `json:"name,omitempty"`
	Role     string `json:"role"`
	Word     string `json:"word,omitempty"` // what an endpoint of role both is used for now, if it is not for both
	Out      string `json:"out,omitempty"`  // why it was excluded: failed, paused, failed_request, model
	// failed, though it counts as usable because all of its role have failed; or stale: no recent engine report
	State string `json:"state,omitempty"`
	Hit   int    `json:"hit_blocks"`            // leading blocks of the prompt that it holds; 0 if it is out
	Loads int    `json:"load_blocks,omitempty"` // of those, outside GPU memory
	// learned factor on the modelled prefill times; absent: as modelled
	Speed    float64       `json:"prefill_learned,omitempty"`
	Step     float64       `json:"decode_learned,omitempty"` // the same for its decode steps
	Prefill  *PrefillPrice `json:"prefill,omitempty"`
	Transfer float64       `json:"transfer,omitempty"` // to it, from within its zone
	// learned factor on the modelled transfer times to it; absent: as modelled
	Learned float64      `json:"transfer_learned,omitempty"`
	Decode  *DecodePrice `json:"decode_leg,omitempty"`
	Alone   *AlonePrice  `json:"alone,omitempty"`
	Busy    bool         `json:"busy,omitempty"` // decode alone would delay its answers more than allowed
	// with Busy: this prompt would be enough for that, without other prompts
	TooLong bool `json:"too_long,omitempty"`
	// capacity of its KV cache in tokens, as its engine says; 0: not known
	KVTokens int64 `json:"kv_tokens,omitempty"`
	Held     int64 `json:"held_tokens,omitempty"` // of that, by prompts that other engines have yet to fetch
	// tokens of conversations that it would discard for the request, and the chance that they come back within two
	// minutes
	Discards float64 `json:"discards_tokens,omitempty"`
	Back     float64 `json:"discards_back,omitempty"`
}

// Explain decides like Pick, and returns all prices. It allocates: it is for operators.
func (k *Picker) Explain(r *Request, v *kvstate.View) Explanation {
	c, err := k.Pick(r, v)
	prefills, decodes := k.survey(r, v)
	t := k.terms(r, v, prefills, decodes)
	e := Explanation{Load: v.Load.Prefill, SecondCosts: t.others, TokenBytes: t.moveToken * k.Model.Bandwidth,
		Answer: t.out, Prompt: r.PromptTokens}
	if err != nil {
		e.Refused = err.Error()
	} else {
		e.PrefillTime, e.FirstToken, e.TokenTime = c.PrefillTime, c.FirstToken, c.TokenTime
		e.Price, e.Decode = c.Price, v.Endpoints[c.Decode].Endpoint.Addr
		e.Full = c.Full && isBoth(&v.Endpoints[c.Decode])
		if c.Prefill >= 0 {
			e.Prefill = v.Endpoints[c.Prefill].Endpoint.Addr
		}
	}
	for i := range v.Endpoints {
		e.Candidates = append(e.Candidates, k.weigh(r, &t, &v.Endpoints[i]))
	}
	e.Defaults = defaults(v)
	return e
}

// defaults names the quantities that were not measured at any endpoint.
func defaults(v *kvstate.View) (out []string) {
	var prefill, decode, transfer bool // measured
	for i := range v.Endpoints {
		c := &v.Endpoints[i]
		prefill = prefill || c.Endpoint.Role&kvstate.RolePrefill != 0 && measured(c.Speed)
		if c.Endpoint.Role&kvstate.RoleDecode != 0 {
			decode, transfer = decode || measured(c.Step), transfer || measured(c.Transfer)
		}
	}
	for _, q := range []struct {
		known bool
		name  string
	}{
		{prefill, "speed of prefill"}, {decode, "speed of decode"}, {transfer, "speed of transfers"},
		{v.Load.TokenBytes > 0, "KV bytes of a token"}, {v.Load.Answer > 0, "length of answers"},
	} {
		if !q.known {
			out = append(out, q.name)
		}
	}
	return out
}

// measured reports whether a factor was learned. One that was not is 1, or 0.
func measured(factor float64) bool { return factor != 0 && factor != 1 }

func (k *Picker) weigh(r *Request, t *terms, c *kvstate.Candidate) Weighed {
	w := Weighed{
		Endpoint: c.Endpoint.Addr, Name: c.Endpoint.DisplayName(), Role: c.Endpoint.Role.String(), Out: k.why(r, c),
	}
	if c.Word != 0 && c.Word != c.Endpoint.Role {
		w.Word = c.Word.String()
	}
	if w.Out != "" {
		return w // its blocks do not count, and if it has failed they are not known
	}
	w.Hit, w.Loads, w.Held = c.Hit, c.Loads.Blocks(), c.Room.Held
	switch {
	case c.Endpoint.Failed():
		w.State = "failed"
	case c.Signals != nil && c.Trust < 1:
		w.State = "stale"
	}
	uncached, _ := t.split(c)
	w.Discards, w.Back = discards(c, uncached)
	var runs batch
	t.batch(c, &runs)
	if c.Used()&kvstate.RolePrefill != 0 {
		w.Prefill, w.Speed = &PrefillPrice{}, learned(c.Speed)
		t.prefill(c, &runs, w.Prefill)
	}
	if c.Used()&kvstate.RoleDecode != 0 {
		w.Learned, w.Step = learned(c.Transfer), learned(c.Step)
		w.Decode, w.Transfer, w.Alone = &DecodePrice{}, t.transfer(c, true), &AlonePrice{}
		t.decode(c, &runs, w.Decode)
		w.Busy = !t.alone(c, &runs, w.Alone)
		w.TooLong, w.KVTokens = w.Busy && t.idle(c, &runs), c.KVTokens
	}
	return w
}

// idle reports whether an endpoint would have room for the request if its prompt were short.
func (t *terms) idle(c *kvstate.Candidate, b *batch) bool {
	kv := max(b.kv-t.tokens, 0)
	return t.room(c, t.step(c, b.answers, kv), max(b.answers/t.m.MaxAnswers, kv/b.freeKV), 0)
}

// learned returns a learned factor, 0 if it is as modelled.
func learned(factor float64) float64 {
	if factor == 1 {
		return 0
	}
	return factor
}

// Print writes an explanation as text, prices in milliseconds.
func (e *Explanation) Print(w io.Writer) {
	for _, c := range e.Candidates {
		name := c.Name
		if name == "" {
			name = c.Endpoint
		}
		if c.Out != "" {
			fmt.Fprintf(w, "%s: out, %s\n", name, c.Out)
			continue
		}
		prefill, decode, alone := c.Parts()
		totalPrefill, totalDecode, totalAlone := c.Totals()
		if c.Prefill != nil {
			fmt.Fprintf(w, "%s: prefill %s = %s\n", name, ms(totalPrefill), summands(prefill))
		}
		if c.Decode != nil {
			fmt.Fprintf(w, "%s: decode %s = %s\n", name, ms(totalDecode), summands(decode))
		}
		if c.Alone != nil {
			busy := ""
			if c.Busy {
				busy = ", but its answers would suffer"
			}
			fmt.Fprintf(w, "%s: alone %s = %s%s\n", name, ms(totalAlone), summands(alone), busy)
		}
	}
}

// summands formats the parts of a price.
func summands(parts []Part) string {
	var b strings.Builder
	for i, p := range parts {
		if i > 0 {
			b.WriteString(" + ")
		}
		b.WriteString(p.Name + " " + ms(p.Value))
	}
	return b.String()
}

// ms formats a time in milliseconds, without decimals below the precision of the estimate.
func ms(seconds float64) string {
	if seconds < 0.1 {
		return fmt.Sprintf("%.1f", seconds*1000)
	}
	return fmt.Sprintf("%.0f", math.Round(seconds*1000))
}

// Totals returns the sums of the endpoint's prices that exist: to prefill the prompt, to take its KV and decode,
// and to do both alone.
func (w *Weighed) Totals() (prefill, decode, alone float64) {
	if w.Prefill != nil {
		prefill = w.Prefill.sum()
	}
	if w.Decode != nil {
		decode = w.Transfer + w.Decode.sum()
	}
	if w.Alone != nil {
		alone = w.Alone.sum()
	}
	return prefill, decode, alone
}

// Part is one summand of a price, in seconds.
type Part struct {
	Name  string  `json:"name"`
	Value float64 `json:"value"`
}

// Parts returns the summands of the endpoint's prices that exist, in seconds; they add up to Totals. Parts that most
// prices lack are left out where they are 0.
func (w *Weighed) Parts() (prefill, decode, alone []Part) {
	if p := w.Prefill; p != nil {
		prefill = listed([]Part{
			{"queue", p.Queue}, {"work", p.Work}, {"load", p.Load}, {"others", p.Others}, {"jobs", p.Jobs},
			{"answers", p.Answers}, {"late", p.Late}, {"room", p.Room}, {"evicts", p.Evicts},
			{"returns", p.Returns}, {"session", p.Session},
		}, "load", "answers", "late", "room", "evicts", "returns", "session")
	}
	if p := w.Decode; p != nil {
		decode = listed([]Part{
			{"transfer", w.Transfer}, {"step", p.Step}, {"answer", p.Answer}, {"overflow", p.Overflow},
			{"evicts", p.Evicts}, {"session", p.Session},
		}, "evicts", "session")
	}
	if p := w.Alone; p != nil {
		alone = listed([]Part{
			{"queue", p.Queue}, {"work", p.Work}, {"load", p.Load}, {"others", p.Others}, {"answers", p.Answers},
			{"decode", p.Decode}, {"overflow", p.Overflow}, {"late", p.Late}, {"evicts", p.Evicts},
			{"returns", p.Returns}, {"session", p.Session},
		}, "load", "late", "evicts", "returns", "session")
	}
	return prefill, decode, alone
}

// listed removes those of the rare parts that are 0.
func listed(parts []Part, rare ...string) []Part {
	return slices.DeleteFunc(parts, func(p Part) bool { return p.Value == 0 && slices.Contains(rare, p.Name) })
}
