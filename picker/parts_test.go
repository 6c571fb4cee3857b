package picker

import (
	"testing"

	"github.com/stretchr/testify/require"

	"tandem/kvstate"
)

func TestPartsSumUpToThePrice(t *testing.T) {
	sum := func(parts []Part) (out float64) {
		for _, p := range parts {
			out += p.Value
		}
		return out
	}
	for _, r := range []Request{{PromptTokens: 1000}, {PromptTokens: 1000, Blocks: 10}} {
		for hit := range 11 {
			c := kvstate.Candidate{Requests: 3, PromptTokens: 700, Hit: hit}
			require.InDelta(t, float64(prefillPrice(&r, &c)), sum(PrefillParts(&r, &c)), 1e-9)
			require.InDelta(t, float64(decodePrice(&r, &c)), sum(DecodeParts(&r, &c)), 1e-9)
			require.InDelta(t, float64(alonePrice(&r, &c)), sum(AloneParts(&r, &c)), 1e-9)
		}
	}
}
