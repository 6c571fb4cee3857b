package telemetry

import (
	"math"
	"time"

	"tandem/picker"
)

// Part is one summand of a price, in PriceUnit.
type Part = picker.Part

// PriceUnit is the unit of prices and their parts.
const PriceUnit = "s"

// Weighed is one endpoint in a decision, with the parts of its price (PriceUnit).
type Weighed struct {
	Endpoint string `json:"endpoint"`
	Role     string `json:"role"`
	Word     string `json:"word,omitempty"` // with roles auto: the leg that an endpoint of role both had
	Out      bool   `json:"out,omitempty"`  // excluded
	Why      string `json:"why,omitempty"`  // it is excluded
	Hit      int    `json:"hit_blocks"`     // leading blocks of the prompt that it holds
	Prefill  []Part `json:"prefill,omitempty"`
	Decode   []Part `json:"decode,omitempty"` // of the hop that answers
	Alone    []Part `json:"alone,omitempty"`  // of decode alone, if the request may be split
	// tokens of conversations that it would discard for the request, and the chance that they come back within two
	// minutes
	Discards float64 `json:"discards_tokens,omitempty"`
	Back     float64 `json:"discards_back,omitempty"`
	// why decode alone was not offered here, whatever it costs: NotAloneBusy or NotAloneTooLong
	NotAlone string `json:"not_alone,omitempty"`
}

// Values of Weighed.NotAlone: other answers would suffer, because of what runs there, or because of this prompt alone.
const (
	NotAloneBusy    = "busy"
	NotAloneTooLong = "too_long"
)

// Foreseen is what was expected of a request when its last pass was planned. Durations count from then on; 0: not
// estimated.
type Foreseen struct {
	ExpectedPrefill time.Duration `json:"expected_prefill_ns,omitempty"`     // until the prefill endpoint has answered
	ExpectedFirst   time.Duration `json:"expected_first_token_ns,omitempty"` // until the first token
	ExpectedToken   time.Duration `json:"expected_per_token_ns,omitempty"`   // from one token to the next
	// share of the last minute or so that prefill endpoints were busy, 0 to 1; only with Weighed
	PrefillBusy float64 `json:"prefill_busy,omitempty"`
	// blocks of the prompt, of which endpoints hold Weighed.Hit
	PromptBlocks int `json:"prompt_blocks,omitempty"`
	// Of the prompt's tokens: those that earlier turns of its conversation had; and of these, what is computed again
	// since no endpoint holds it any more, or though another one does
	Had       int64 `json:"had_tokens,omitempty"`
	Evicted   int64 `json:"evicted_tokens,omitempty"`
	Elsewhere int64 `json:"elsewhere_tokens,omitempty"`
	// How the chosen way compares with the other one, which is decode alone for a split request, two hops
	// otherwise: the price of the other way less that of the chosen, s; 0: not compared
	Cheaper float64 `json:"cheaper_by_s,omitempty"`
	// split, since no decode endpoint could do both: answers would suffer
	NotAlone bool `json:"not_alone,omitempty"`
}

// MarginOf returns Cheaper and NotAlone for a price and that of the other way, which is infinite if none was offered,
// and 0 if they cannot be compared.
func MarginOf(price, other float64, split bool) (cheaper float64, notAlone bool) {
	switch {
	case other == 0:
		return 0, false
	case math.IsInf(other, 1):
		return 0, split
	}
	return other - price, false
}

// Planned is the plan of one pass of a request.
type Planned struct {
	RequestID, Pool, Route string
	Started                time.Time // when the request came in
	Pass                   int       // redirects that Envoy has followed before
	Reason                 string    // "" where no other route was possible
	Prefill, Decode        string    // addresses; prefill is "" if one endpoint does both

	PromptTokens          int64
	BodyBytes, Candidates int

	Foreseen

	Queued   // for its endpoints
	Streamed bool
	Always   bool // the pool splits every prompt

	Weighed []Weighed // nil: not wanted
}
