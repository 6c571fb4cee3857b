package status

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"

	"tandem/extproc/telemetry"
	"tandem/kvstate"
	"tandem/status/words"
)

// decided describes a recorded decision in a sentence.
func decided(t *telemetry.Trace) string {
	switch {
	case t.Prefill == "" && t.Route != "decode_alone":
		route := routeOf(&telemetry.Trace{Route: t.Route, Reason: t.Reason})
		return "It went to " + words.Plain(t.Decode) + " as it came (" + route + ")."
	case t.Prefill == "" && t.Reason == "no_prefill" && otherGroups(t):
		return "Decode alone on " + words.Plain(t.Decode) + ": " + otherGroup + " (no_prefill)."
	case t.Prefill == "" && t.Reason != "" && t.Reason != "cheaper":
		return "Decode alone on " + words.Plain(t.Decode) + ": " + cmp.Or(words.Because(t.Reason), words.Plain(t.Reason)) +
			" (" + words.Plain(t.Reason) + ")."
	}
	switch {
	case t.Prefill == "":
		return holding(t, decidedAlone(t), t.Decode)
	case t.Decode == "":
		return decidedSplit(t)
	}
	return holding(t, decidedSplit(t), t.Prefill, t.Decode)
}

// holding adds to a sentence how much of the prompt the chosen endpoints held, if that is worth a mention.
func holding(t *telemetry.Trace, sentence string, chosen ...string) string {
	held := ""
	for _, address := range chosen {
		w := weighed(t, address)
		if w == nil || t.PromptBlocks == 0 || 10*w.Hit < t.PromptBlocks {
			continue
		}
		percent := min(100*w.Hit/t.PromptBlocks, 100)
		if held == "" {
			held = fmt.Sprintf("; by the prefix index %s holds %d %% of the prompt", words.Plain(address), percent)
		} else {
			held += fmt.Sprintf(", %s %d %%", words.Plain(address), percent)
		}
	}
	return strings.TrimSuffix(sentence, ".") + held + "."
}

// decidedSplit describes a decision for two endpoints.
func decidedSplit(t *telemetry.Trace) string {
	if t.Decode == "" && t.Final {
		return "Split: " + words.Plain(t.Prefill) + " computed the prompt, and its answer was the client's."
	}
	if t.Decode == "" {
		return "Split: " + words.Plain(t.Prefill) +
			" was to compute the prompt, and failed. No decode endpoint was asked."
	}
	answers := "answers"
	if t.Refused != "" {
		answers = "was to answer"
	}
	s := fmt.Sprintf("Split: %s computes the prompt, %s %s", words.Plain(t.Prefill), words.Plain(t.Decode), answers)
	if t.Always {
		return s + splitAlways
	}
	paid := at(t, t.Prefill, prefillOf) + at(t, t.Decode, decodeOf)
	why, all := kept(t)
	more := least(t, func(w *telemetry.Weighed) []telemetry.Part {
		if w.NotAlone != "" {
			return nil
		}
		return w.Alone
	}) - paid
	switch {
	case len(t.Weighed) == 0 && t.NotAlone:
		return s + ": decode endpoints were too busy to compute it, too, or it is too long for that."
	case len(t.Weighed) == 0 && t.Cheaper != 0:
		return s + compared(t.Cheaper, "decode alone")
	case all:
		return s + notOffered(why == telemetry.NotAloneTooLong, least(t, aloneOf)-paid)
	case finite(more):
		return s + compared(more, "decode alone")
	}
	return s + "."
}

// decidedAlone describes a decision for decode alone that prices made.
func decidedAlone(t *telemetry.Trace) string {
	s := "Decode alone on " + words.Plain(t.Decode)
	more := least(t, prefillOf) + least(t, decodeOf) - at(t, t.Decode, aloneOf)
	switch {
	case len(t.Weighed) == 0 && t.Cheaper != 0:
		return s + compared(t.Cheaper, "splitting it")
	case finite(more) && more < 0 && len(t.Failed) > 0:
		return s + ": pairs that failed it, or failed lately, were left out."
	case finite(more):
		return s + compared(more, "splitting it")
	case t.Reason == "cheaper":
		return s + ": " + words.Because(t.Reason) + "."
	}
	return s + "."
}

func prefillOf(w *telemetry.Weighed) []telemetry.Part { return w.Prefill }
func decodeOf(w *telemetry.Weighed) []telemetry.Part  { return w.Decode }
func aloneOf(w *telemetry.Weighed) []telemetry.Part   { return w.Alone }

// otherGroups reports whether a prefill endpoint could take the request, but no decode endpoint of its group.
func otherGroups(t *telemetry.Trace) bool {
	return slices.ContainsFunc(t.Weighed, func(w telemetry.Weighed) bool {
		return !w.Out && w.Role == kvstate.RolePrefill.String()
	})
}

// kept reports whether no decode endpoint may do both because its answers would suffer, and why: because of this prompt
// alone, if that is so at one of them.
func kept(t *telemetry.Trace) (why string, all bool) {
	for i := range t.Weighed {
		w := &t.Weighed[i]
		switch {
		case w.Out || w.Alone == nil:
		case w.NotAlone == "":
			return "", false
		case why != telemetry.NotAloneTooLong:
			why = w.NotAlone
		}
	}
	return why, why != ""
}

// least returns the lowest price of one kind; infinite if no endpoint has one.
func least(t *telemetry.Trace, of func(*telemetry.Weighed) []telemetry.Part) float64 {
	out := math.Inf(1)
	for i := range t.Weighed {
		if !t.Weighed[i].Out {
			out = min(out, sum(of(&t.Weighed[i])))
		}
	}
	return out
}

// at returns an endpoint's price of one kind; infinite if it has none.
func at(t *telemetry.Trace, address string, of func(*telemetry.Weighed) []telemetry.Part) float64 {
	if w := weighed(t, address); w != nil {
		return sum(of(w))
	}
	return math.Inf(1)
}

// weighed returns an endpoint as it was weighed; nil if it was not.
func weighed(t *telemetry.Trace, address string) *telemetry.Weighed {
	i := slices.IndexFunc(t.Weighed, func(w telemetry.Weighed) bool { return w.Endpoint == address })
	if i < 0 {
		return nil
	}
	return &t.Weighed[i]
}

func finite(v float64) bool { return !math.IsInf(v, 0) && !math.IsNaN(v) }
