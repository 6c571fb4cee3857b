package status

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"math"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"tandem/extproc/pass"
	"tandem/kvstate"
	"tandem/picker"
	"tandem/picker/roles"
	"tandem/status/words"
)

// Explained is a decision with the words that endpoints of the pool have.
type Explained struct {
	pass.Explanation
	Roles map[string]roles.Word `json:"roles,omitempty"` // by address
}

// explain answers with where a prompt of so many tokens would go now.
func (f *Feed) explain(w http.ResponseWriter, r *http.Request) {
	tokens, err := strconv.ParseInt(cmp.Or(r.URL.Query().Get("tokens"), "1000"), 10, 64)
	if err != nil || tokens < 1 {
		http.Error(w, "tokens is the length of the prompt: 1 or more", http.StatusBadRequest)
		return
	}
	pool := r.URL.Query().Get("pool")
	if p := f.source.State.PoolFor(""); p != nil && pool == "" {
		pool = p.Spec.Name
	}
	e, err := f.source.Explain(pool, tokens)
	if err != nil {
		http.Error(w, err.Error(), http.StatusNotFound)
		return
	}
	words.WriteJSON(w, Explained{e, f.source.roles(pool).Words})
}

// printRoles writes since when endpoints have their words, and why. Words are those of now: those that changed after a
// request was decided about are marked.
func printRoles(
	w io.Writer, all map[string]roles.Word, name func(address string) string, now, decided time.Time,
) {
	if len(all) == 0 {
		return
	}
	fmt.Fprintln(w)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "  endpoint\trole now\tfor\twhy")
	for _, addr := range slices.Sorted(maps.Keys(all)) {
		word, later := all[addr], ""
		if word.Since.After(decided) {
			later = " (it changed after this request was planned)"
		}
		fmt.Fprintf(t, "  %s\t%s\t%s\t%s%s\n", words.Plain(name(addr)), words.Plain(word.Word),
			words.Since(now, word.Since), words.Plain(word.Why), later)
	}
	_ = t.Flush()
}

// PrintExplanation writes a decision for a terminal: one sentence, then the price of each endpoint.
func PrintExplanation(w io.Writer, of *Explained) {
	e := &of.Explanation
	name := func(addr string) string {
		for i := range e.Candidates {
			if c := &e.Candidates[i]; c.Endpoint == addr {
				return cmp.Or(c.Name, addr)
			}
		}
		return addr
	}
	if e.Paused {
		fmt.Fprintln(w, "The pool is paused: its requests get an error (503 pool_paused). Otherwise:")
	}
	fmt.Fprintf(w, "%s\n", Sentence(e))
	if e.Waiting > 0 || e.Remote > 0 {
		fmt.Fprintln(w, waiting(e))
	}
	if e.Refused == "" {
		first := "The first"
		if failed(e, e.Prefill) || failed(e, e.Decode) {
			first = "If the chosen one is back, the first"
		}
		fmt.Fprintf(w, "%s token is expected after %s, then one each %s; %.0f in the answer.\n", first,
			words.Millis(e.FirstToken*1000), words.Millis(e.TokenTime*1000), e.Answer)
		fmt.Fprintln(w, "A price is what the request costs all requests, not the time that its client waits or saves.")
	}
	if e.Prompt > 0 {
		fmt.Fprintf(w, "The prompt has %d tokens, and no endpoint holds any of them.\n", e.Prompt)
	}
	if most := mostKV(e); most > 0 && e.Prompt > most {
		fmt.Fprintf(w, "No decode endpoint can hold the prompt: its KV cache has room for %d tokens at most.\n", most)
	}
	fmt.Fprintf(w, "Prefill endpoints are %.0f %% busy.\n", 100*e.Load)
	if len(e.Defaults) > 0 {
		names := strings.Join(e.Defaults, ", ")
		names = strings.Replace(names, "length of answers", "length of answers (from 20 answers on)", 1)
		fmt.Fprintf(w, "Not learned yet, so the model's defaults count: %s.\n", names)
	}
	fmt.Fprintln(w)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, priceColumns)
	for i := range e.Candidates {
		c := &e.Candidates[i]
		prefill, decode, alone := c.Totals()
		note := remark(c, c.Endpoint == e.Prefill || c.Endpoint == e.Decode, e.Prefill != "")
		if e.NotSplit == "no_prefill" && c.Out == "" && c.Role == kvstate.RolePrefill.String() {
			note = words.Join("no decode endpoint of its group can answer", note)
		}
		fmt.Fprintf(t, "  %s\t%s\t%s\t%s\t%s\t%s\t%s\n",
			words.Plain(cmp.Or(c.Name, c.Endpoint)), words.Role(c.Role, c.Word), held(c.Out != "", c.Hit),
			price(c.Prefill != nil, prefill), price(c.Decode != nil, decode), price(c.Alone != nil, alone), note)
	}
	_ = t.Flush()
	printRoles(w, of.Roles, name, time.Now(), time.Now())
}

// held prints the blocks of the prompt that an endpoint holds.
func held(out bool, blocks int) string {
	if out {
		return "-"
	}
	return strconv.Itoa(blocks)
}

// waiting says how many requests wait for endpoints of the pool, and where if not all wait here.
func waiting(e *pass.Explanation) string {
	s := places(e.Waiting, e.Remote) + " wait"
	if e.Waiting+e.Remote == 1 {
		s += "s"
	}
	switch {
	case e.Longest == 0:
	case e.Waiting+e.Remote == 1:
		s += ", for " + words.Millis(e.Longest*1000)
	default:
		s += ", the longest for " + words.Millis(e.Longest*1000)
	}
	return s + "."
}

// mostKV returns the largest KV cache of a decode endpoint, in tokens; 0 if one of them is not known.
func mostKV(e *pass.Explanation) (most int64) {
	for i := range e.Candidates {
		if c := &e.Candidates[i]; c.Decode != nil {
			if c.KVTokens == 0 {
				return 0
			}
			most = max(most, c.KVTokens)
		}
	}
	return most
}

// priceColumns is the header of a table of prices.
const priceColumns = "  endpoint\trole\tcached blocks\tprefill\t" +
	"transfer and decode\tdecode alone\tnote" //nolint:dupword // two columns

// remark describes whether an endpoint is chosen or excluded, and what differs from the model.
func remark(c *picker.Weighed, chosen, split bool) string {
	note := learned(c)
	if c.State == "stale" {
		note = words.Join("stale", note)
	}
	switch {
	case c.Out != "" && chosen:
		return "out: " + c.Out + "; chosen since all are out"
	case c.Out != "":
		return "left out: " + c.Out
	case c.State == "failed" && chosen:
		return words.Join("out: failed; chosen since all are out", note)
	case c.State == "failed":
		return words.Join("out: failed; weighed since all are out", note)
	case c.Busy && chosen && !split:
		return words.Join("chosen since there is no other way, though its answers suffer", note)
	case c.Busy && !chosen:
		return words.Join(notAlone(c.TooLong), note)
	case c.Busy:
		return words.Join(words.Join("chosen", notAlone(c.TooLong)), note)
	case chosen:
		return words.Join("chosen", note)
	}
	return note
}

// notAlone says why an endpoint does not compute the prompt, too.
func notAlone(tooLong bool) string {
	if tooLong {
		return "no decode alone here: the prompt is too long, answers would suffer"
	}
	return "no decode alone here: its answers would suffer"
}

// learned describes the learned difference of an endpoint's times from the model's.
func learned(c *picker.Weighed) (note string) {
	for _, l := range []struct {
		what   string
		factor float64
	}{{"prefill", c.Speed}, {"transfers", c.Learned}, {"decode", c.Step}} {
		if l.factor > 0 {
			note = words.Join(note, fmt.Sprintf("%s times %.2g", l.what, l.factor))
		}
	}
	return note
}

func price(has bool, seconds float64) string {
	if !has {
		return "-"
	}
	// finer than other times: a decision may lie in a few milliseconds
	if seconds >= 1 && seconds < 10 {
		return fmt.Sprintf("%.2f s", seconds)
	}
	return words.Millis(max(seconds, 0) * 1000)
}

// Sentence describes the decision, and by how much it is cheaper than the other way.
func Sentence(e *pass.Explanation) string {
	if e.Refused != "" {
		s := "No endpoint can take the request: " + strings.TrimPrefix(e.Refused, "picker: ")
		if out := excluded(e, kvstate.RoleDecode.String()); len(out) > 0 {
			s += " (" + words.List(out) + ")"
		}
		return s + "."
	}
	pair, alone := ways(&e.Explanation)
	name := func(address string) string {
		for _, c := range e.Candidates {
			if c.Endpoint == address {
				return words.Plain(cmp.Or(c.Name, c.Endpoint))
			}
		}
		return words.Plain(address)
	}
	if failed(e, e.Decode) {
		return "All decode endpoints have failed: start one again. " +
			"Until then a request gets an error (503), unless one is back."
	}
	if e.Prefill == "" {
		s := "Decode alone on " + name(e.Decode)
		if why := whole(e); why != "" {
			return s + ": " + why + "."
		}
		if math.IsInf(pair, 1) {
			return s + ": " + noPrefill(e) + "."
		}
		return s + compared(pair-e.Price, "splitting it")
	}
	if failed(e, e.Prefill) {
		return tried(e, name(e.Prefill))
	}
	s := fmt.Sprintf("Split: %s computes the prompt, %s answers", name(e.Prefill), name(e.Decode))
	switch {
	case e.Always:
		return s + splitAlways
	case math.IsInf(alone, 1) && slices.ContainsFunc(e.Candidates, func(c picker.Weighed) bool { return c.Busy }):
		return s + suffering(e)
	case math.IsInf(alone, 1):
		return s + ": no decode endpoint can compute it, too."
	}
	return s + compared(alone-e.Price, "decode alone")
}

const splitAlways = ": the pool splits every prompt (split is always)."

// suffering ends a sentence about a request for which no decode endpoint is offered to do both.
func suffering(e *pass.Explanation) string {
	least, tooLong := math.Inf(1), false
	for i := range e.Candidates {
		c := &e.Candidates[i]
		if c.Alone != nil {
			_, _, alone := c.Totals()
			least = min(least, alone)
		}
		tooLong = tooLong || c.TooLong
	}
	return notOffered(tooLong, least-e.Price)
}

// notOffered ends a sentence about a split request that no decode endpoint may compute, too: why, and what that would
// cost more than splitting, in seconds.
func notOffered(tooLong bool, more float64) string {
	s := ": decode endpoints are too busy to compute it, too"
	if tooLong {
		s = ": the prompt is too long for decode alone, where answers would suffer"
	}
	switch {
	case finite(more) && more > 0:
		s += "; splitting it is " + words.Millis(more*1000) + " cheaper, too"
	case finite(more) && more < 0:
		s += "; otherwise decode alone would be " + words.Millis(-more*1000) + " cheaper"
	}
	return s + "."
}

// failed reports whether a chosen endpoint has failed, as all others of its role have.
func failed(e *pass.Explanation, chosen string) bool {
	return slices.ContainsFunc(e.Candidates, func(c picker.Weighed) bool {
		return c.Endpoint == chosen && c.State == "failed"
	})
}

// tried says what happens to a request while all prefill endpoints have failed.
func tried(e *pass.Explanation, prefill string) string {
	s := "All prefill endpoints have failed: start one again. Until then a request may try each of them once, " +
		prefill + " first,\nbecause one may be back. If none is, "
	if e.NoFallback {
		return s + "the request gets an error (503): the pool does not let decode compute the prompt."
	}
	return s + "decode computes the prompt."
}

// whole returns why a request is never split, whatever the prices; "" if prices decide.
func whole(e *pass.Explanation) string {
	if e.NotSplit == "no_prefill" {
		return noPrefill(e)
	}
	return words.Because(e.NotSplit)
}

// excluded lists the endpoints of a role, or of both, that cannot take a request, each with the reason.
func excluded(e *pass.Explanation, role string) (out []string) {
	for i := range e.Candidates {
		if c := &e.Candidates[i]; c.Out != "" && (c.Role == role || c.Role == kvstate.RoleBoth.String()) {
			out = append(out, words.Plain(cmp.Or(c.Name, c.Endpoint))+" "+c.Out)
		}
	}
	return out
}

const otherGroup = "no prefill endpoint shares its group with a decode endpoint that can answer"

// noPrefill says why no prefill endpoint can take a request.
func noPrefill(e *pass.Explanation) string {
	out := excluded(e, kvstate.RolePrefill.String())
	free := slices.ContainsFunc(e.Candidates, func(c picker.Weighed) bool {
		return c.Out == "" && c.Role != kvstate.RoleDecode.String() && c.Role != kvstate.RoleEncode.String()
	})
	switch {
	case free:
		return otherGroup
	case len(out) == 0:
		return "the pool has no prefill endpoint"
	}
	return "no prefill endpoint can take the request (" + words.List(out) + ")"
}

// compared ends a sentence with the additional cost of the other way, in seconds.
func compared(more float64, other string) string {
	const equal = .001 // prices so close are ties to the picker
	switch {
	case math.Abs(more) < equal:
		return ": as cheap as " + other + "."
	case more > 0:
		return fmt.Sprintf(": %s cheaper than %s.", words.Millis(more*1000), other)
	}
	return fmt.Sprintf(", though %s would be %s cheaper: the pool's settings or a target of the request ask for it, "+
		"or endpoints have no capacity left.",
		other, words.Millis(-more*1000))
}

// ways returns the least prices of a pair and of decode alone; infinite if there is none.
func ways(e *picker.Explanation) (pair, alone float64) {
	prefill, decode := math.Inf(1), math.Inf(1)
	alone = math.Inf(1)
	for i := range e.Candidates {
		c := &e.Candidates[i]
		p, d, a := c.Totals()
		if c.Prefill != nil {
			prefill = min(prefill, p)
		}
		if c.Decode != nil {
			decode = min(decode, d)
		}
		if c.Alone != nil && !c.Busy {
			alone = min(alone, a)
		}
	}
	return prefill + decode, alone
}
