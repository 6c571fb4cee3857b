package status

import (
	"cmp"
	"fmt"
	"io"
	"math"

	"tandem/extproc/telemetry"
	"tandem/kvstate"
	"tandem/status/words"
)

// Memory is what a pool's conversations need of its engines' KV memory, and what it costs that they have less. Tokens.
type Memory struct {
	Conversations int     `json:"conversations"`
	Expected      float64 `json:"expected_tokens"`   // of those that are expected back within two minutes: the working set
	Keeps         float64 `json:"memory_tokens"`     // of engines that report it, or of their hosts if that is more
	Lacks         float64 `json:"needs_host_tokens"` // of host memory that each engine needs; 0: none
	Engines       int     `json:"engines"`           // engines that report how much they keep

	// Of the last ten minutes: tokens of prompts that earlier ones of their conversations had; of those, what was
	// computed again since no engine held it any more, or though another one held it.
	Had       float64 `json:"had_tokens"`
	Evicted   float64 `json:"evicted_tokens"`
	Elsewhere float64 `json:"elsewhere_tokens"`

	Waiting int `json:"waiting_for_memory"` // requests that wait until there is room for their KV
}

// memory returns a pool's part at this replica.
func (f *Feed) memory(p *kvstate.Pool) (m Memory) {
	c := p.Conversations()
	m = Memory{
		Conversations: c.Known, Expected: c.Live, Keeps: c.Memory, Lacks: c.Lacks(), Engines: c.Engines,
		Had: c.Lately.Had, Evicted: c.Lately.Evicted, Elsewhere: c.Lately.Elsewhere,
	}
	if f.source.Queued != nil {
		m.Waiting = f.source.Queued(p.Spec.Name).Memory
	}
	return m
}

// add adds another replica's part. All know the conversations, each counts the requests that came to it.
func (m *Memory) add(o *Memory) {
	m.Conversations = max(m.Conversations, o.Conversations)
	m.Expected, m.Lacks = max(m.Expected, o.Expected), max(m.Lacks, o.Lacks)
	m.Keeps, m.Engines = max(m.Keeps, o.Keeps), max(m.Engines, o.Engines)
	m.Had, m.Evicted, m.Elsewhere = m.Had+o.Had, m.Evicted+o.Evicted, m.Elsewhere+o.Elsewhere
	m.Waiting += o.Waiting
}

// printMemory writes a line about conversations, if some came back.
func printMemory(w io.Writer, m *Memory) {
	if m.Had == 0 && m.Waiting == 0 {
		return
	}
	fmt.Fprintf(w, "  conversations: %d, %s tokens expected back", m.Conversations, rounded(m.Expected))
	if m.Keeps > 0 {
		fmt.Fprintf(w, ", memory for %s", rounded(m.Keeps))
	}
	if m.Had > 0 {
		fmt.Fprintf(w, "; computed again %.1f %% (evicted), %.1f %% (elsewhere)", 100*m.Evicted/m.Had,
			100*m.Elsewhere/m.Had)
	}
	if m.Waiting > 0 {
		fmt.Fprintf(w, "; %s", m.waits())
	}
	fmt.Fprintln(w)
}

// waits describes how many requests wait until there is room for their KV.
func (m *Memory) waits() string {
	verb := "wait"
	if m.Waiting == 1 {
		verb = "waits"
	}
	return words.Count(m.Waiting, "cold prompt") + " " + verb + " for room"
}

const (
	// lacking is the share of the tokens that conversations had from which on status reports that they are computed again.
	lacking  = 0.05
	lackedOf = 1e6 // tokens that came back in the last ten minutes: below that a share says little
)

// lacksMemory adds a notice if memory for conversations is what a pool lacks.
func lacksMemory(p *Pool, add func(bad bool, doc, format string, values ...any)) {
	m := &p.Memory
	if m.Had < lackedOf || m.Evicted < lacking*m.Had || m.Lacks <= 0 {
		return
	}
	waits := ""
	if m.Waiting > 0 {
		waits = fmt.Sprintf(" Meanwhile %s.", m.waits())
	}
	add(false, "howto/agents.md", "%s: engines compute %.0f %% of what conversations had again, since KV memory is short: "+
		"host memory for %s tokens each would hold them all.%s", p.Name, 100*m.Evicted/m.Had, rounded(m.Lacks), waits)
}

// printConversation says what of a request's prompt is computed again, and what its KV costs other conversations.
func printConversation(w io.Writer, t *telemetry.Trace) {
	if again := againOf(t); again != "" {
		fmt.Fprintf(w, "Earlier turns had %s of its tokens, of which %s.\n", rounded(float64(t.Had)), again)
	}
	at := weighed(t, cmp.Or(t.Prefill, t.Decode))
	if at == nil {
		return
	}
	parts := at.Prefill
	if t.Prefill == "" {
		if parts = at.Alone; parts == nil {
			parts = at.Decode
		}
	}
	name := words.Plain(at.Endpoint)
	if evicts := part(parts, "evicts"); evicts > 0 {
		fmt.Fprintf(w, "For its KV %s discards %s tokens of conversations, which come back within two minutes with a chance of %.0f %%: "+
			"%s to compute them again.\n", name, rounded(at.Discards), 100*at.Back, words.Millis(evicts*1000))
	}
	if returns := part(parts, "returns"); returns > 0 {
		fmt.Fprintf(w, "Conversations that come back to %s while it computes the prompt wait %s in all.\n", name,
			words.Millis(returns*1000))
	}
}

// againOf says how many tokens of a prompt are computed again, and why; "": none.
func againOf(t *telemetry.Trace) string {
	evicted, elsewhere := "", ""
	if t.Evicted > 0 {
		evicted = rounded(float64(t.Evicted)) + " are computed again, since no endpoint holds them any more (evicted)"
	}
	if t.Elsewhere > 0 {
		elsewhere = rounded(float64(t.Elsewhere)) + " are computed again, though another endpoint holds them (elsewhere)"
	}
	return words.Join(evicted, elsewhere)
}

// rounded prints a number of tokens with two digits.
func rounded(tokens float64) string {
	for _, unit := range []struct {
		of   float64
		name string
	}{{1e9, "G"}, {1e6, "M"}, {1e3, "k"}} {
		if tokens >= .995*unit.of {
			digits := 0
			if tokens < 9.95*unit.of {
				digits = 1
			}
			return fmt.Sprintf("%.*f%s", digits, tokens/unit.of, unit.name)
		}
	}
	return fmt.Sprintf("%.0f", math.Round(tokens))
}
