package telemetry

import "time"

// Part is one summand of a price, in PriceUnit.
type Part struct {
	Name  string  `json:"name"`
	Value float64 `json:"value"`
}

// PriceUnit is what prices and their parts are counted in.
const PriceUnit = "s"

// Weighed is one endpoint in a decision, with what its price was made of (PriceUnit).
type Weighed struct {
	Endpoint string `json:"endpoint"`
	Role     string `json:"role"`
	Out      bool   `json:"out,omitempty"` // left out: it failed
	Hit      int    `json:"hit_blocks"`    // leading blocks of the prompt that it holds
	Prefill  []Part `json:"prefill,omitempty"`
	Decode   []Part `json:"decode,omitempty"` // of the hop that answers
	Alone    []Part `json:"alone,omitempty"`  // of decode alone, where the request may be split
}

// Foreseen is how long a request was expected to take when its last pass was planned, from then on; 0: not estimated.
type Foreseen struct {
	ExpectedPrefill time.Duration `json:"expected_prefill_ns,omitempty"`     // until the prefill endpoint has answered
	ExpectedFirst   time.Duration `json:"expected_first_token_ns,omitempty"` // until the first token
}

// Planned is what one pass of a request was planned as.
type Planned struct {
	RequestID, Pool, Route string
	Reason                 string // "" where no other route was possible
	Prefill, Decode        string // addresses; prefill is "" where one endpoint does both

	PromptTokens                        int64
	BodyBytes, PromptBlocks, Candidates int

	Foreseen

	Waited               time.Duration // for its endpoints
	WaitedFor            string        // endpoint that had too much to do when the request came
	Behind, BehindRemote int           // requests that waited before it then

	Weighed []Weighed // nil: nobody looks
}
