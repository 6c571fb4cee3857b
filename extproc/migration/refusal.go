package migration

import (
	"bytes"
	"cmp"
	"math"
	"strconv"
	"time"

	"tandem/extproc/openai"
)

// Policy is what an operator decides about streams that shall outlive their engine.
type Policy struct {
	On bool // streams are continued at all
	// Header: only those of requests that have this header, in lower case; "": all.
	Header string
	// MinAnswer: only answers that may become so long, in tokens: the request's limit allows it, or it has none.
	MinAnswer int64
	// Most is how often one answer may be continued. Default 8.
	Most int
	// DiesWithin is how soon after it took over an engine's death may be the answer's doing: then no other engine is
	// asked. Default 30 s.
	DiesWithin time.Duration
	// Inexact also admits requests whose continued answer is valid but may differ from the uninterrupted one: those
	// with a seed and a temperature, and those with frequency_penalty, presence_penalty or bad_words, which count only
	// what the engine itself has generated.
	Inexact bool
	// Seeds gives a seed to sampled requests that can only be repeated and have none: the next engine draws the same
	// tokens.
	Seeds bool
	// MaxBytes bounds the memory of a stream: token ids, and an event that has not arrived whole. Beyond it the answer
	// passes on, but cannot be continued. Default 4 MiB: 300,000 tokens of a prompt and the event with their ids.
	MaxBytes int
}

const (
	defaultMaxBytes = 4 << 20
	defaultMost     = 8
	defaultDies     = 30 * time.Second
)

// Limit returns how often one answer may be continued.
func (p *Policy) Limit() int { return cmp.Or(p.Most, defaultMost) }

// Soon returns [Policy.DiesWithin], or its default.
func (p *Policy) Soon() time.Duration { return cmp.Or(p.DiesWithin, defaultDies) }

// maxStop bounds the length of stop strings, in characters: one place to continue from is remembered for each.
const maxStop = 256

// Reason says why an answer cannot be continued, as a label value; "": it can.
type Reason string

// Reasons that arise while an answer passes. [Refusal] has others.
const (
	NoIDs      Reason = "no_ids"        // the engine does not answer token ids
	NotContent Reason = "not_text"      // unknown, or reasoning of a sampled answer
	TooLong    Reason = "too_long"      // Policy.MaxBytes
	Format     Reason = "format"        // not a stream of one choice in the form of vLLM: the client has unknown bytes
	Sampled    Reason = "sampled"       // what the client has would have to be generated again, and would differ
	Complete   Reason = "complete"      // the client has the finish reason: Finish ends the stream
	Failed     Reason = "failed"        // the engine reported an error, or ended the answer without a finish reason
	Refused    Reason = "refused"       // the engine says that the request is at fault: another one would say the same
	Different  Reason = "different"     // the next engine generated other tokens in place of those that the client has
	OtherStart Reason = "not_continued" // the next engine had another prompt than the one that it was asked with
	NoTokens   Reason = "limit"         // no token is left of max_tokens
	secondRole Reason = "role_again"    // the role came with other things
)

// Refusal returns the reason why the answer to a request could not be continued, "" if it may be.
func Refusal(r *openai.Request, policy Policy) Reason {
	switch r.API() {
	case openai.Chat, openai.Completions, openai.Messages, openai.Responses:
	default:
		return "api"
	}
	if !r.True(openai.FieldStream) {
		return "not_streamed"
	}
	if reason := cmp.Or(policy.short(r), r.Unsplittable()); reason != "" {
		return Reason(reason)
	}
	if byIDs(r, policy) == "" {
		return ""
	}
	return repeatable(r, policy)
}

// byIDs returns the reason why another engine cannot go on behind the answer's last token, "" if it can.
func byIDs(r *openai.Request, policy Policy) Reason {
	if r.API() != openai.Chat && r.API() != openai.Completions {
		return "api" // /v1/responses and /v1/messages answer no token ids
	}
	for reason := range openai.Obstacles(r) {
		switch reason {
		case "token_ids":
			continue
		case "logprobs": // those of completions have offsets into the text
			if r.API() == openai.Chat {
				continue
			}
		case "stop": // text that an engine holds back is generated again
			if n, ok := longestStop(r.Raw(openai.FieldStop)); ok && n <= maxStop && greedy(r) {
				continue
			}
		case "seed": // the next engine's generator begins anew
			if policy.Inexact || greedy(r) {
				continue
			}
		case "penalty":
			if policy.Inexact {
				continue
			}
		}
		return Reason(reason)
	}
	return ""
}

// repeatable returns the reason why another engine would not write the same answer from its beginning, or why that was
// not tried; "" if it would.
func repeatable(r *openai.Request, policy Policy) Reason {
	messages := r.API() == openai.Messages
	if r.API() == openai.Responses && bytes.Contains(openai.Value(r, "include"), []byte(`.logprobs"`)) {
		return "logprobs"
	}
	for reason := range openai.Obstacles(r) {
		switch reason {
		case "modalities", "limit", "logprobs", "token_ids", "prompt":
			return Reason(reason)
		}
	}
	if !greedy(r) && !seeded(r) && (messages || !policy.Seeds) { // messages have no seed
		return Sampled
	}
	return ""
}

// seeded reports whether the request names the seed of its answer. Messages cannot.
func seeded(r *openai.Request) bool {
	_, err := strconv.ParseInt(string(r.Raw(openai.FieldSeed)), 10, 64)
	return err == nil && r.API() != openai.Messages
}

// short returns why an answer is too short to be worth it; "": it is.
func (p *Policy) short(r *openai.Request) string {
	if n, ok := r.TokenLimit(); ok && n > 0 && n < p.MinAnswer {
		return "short"
	}
	return ""
}

// greedy reports whether the engine takes the likeliest token each time (vLLM: a temperature below 1e-5).
func greedy(r *openai.Request) bool {
	t, err := strconv.ParseFloat(string(openai.Value(r, "temperature")), 64)
	return err == nil && math.Abs(t) < 1e-5
}

// longestStop returns the length of the longest stop string, in characters. stop is a valid JSON value.
func longestStop(stop []byte) (n int, ok bool) {
	if len(stop) == 0 || string(stop) == "null" {
		return 0, true
	}
	if stop[0] == '"' {
		return characters(stop), true
	}
	p := parser{b: stop}
	for more := p.open('['); more; more = p.more(']') {
		one := p.value()
		if !p.isString(one) {
			return 0, false
		}
		n = max(n, characters(p.text(one)))
	}
	return n, !p.bad
}
