package telemetry

import (
	"encoding/json"
	"slices"
	"strconv"

	"tandem/picker"
)

// maxExplanation bounds the explanation in a header, in bytes; Envoy accepts some 58 KiB of headers in all.
const maxExplanation = 8 << 10

// Explanation renders a decision for a header: JSON, with as many endpoints as fit, the chosen ones first. It reorders
// and shortens the candidates.
func Explanation(pool string, q Queued, e *picker.Explanation) []byte {
	chosen := func(w picker.Weighed) int {
		if w.Endpoint == e.Prefill || w.Endpoint == e.Decode {
			return 0
		}
		return 1
	}
	slices.SortStableFunc(e.Candidates, func(a, b picker.Weighed) int { return chosen(a) - chosen(b) })
	for {
		text, err := json.Marshal(struct {
			Pool         string  `json:"pool"`
			Waited       float64 `json:"waited"` // s
			WaitedFor    string  `json:"waited_for,omitempty"`
			Behind       int     `json:"behind,omitempty"`
			BehindRemote int     `json:"behind_remote,omitempty"`
			*picker.Explanation
		}{pool, q.Waited.Seconds(), q.WaitedFor, q.Behind, q.BehindRemote, e})
		switch {
		case err != nil: // a price that is not a number: there is no endpoint
			return []byte(`{"pool":` + strconv.Quote(pool) + `,"refused":` + strconv.Quote(e.Refused) + `}`)
		case len(text) <= maxExplanation || len(e.Candidates) == 0:
			return text
		}
		e.Candidates = e.Candidates[:len(e.Candidates)/2]
	}
}
