package faults

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// What a failed leg means, for the request and for the endpoint. To have Tandem react to another kind of failure, begin
// here.
func TestMeans(t *testing.T) {
	const request, endpoint = "the client gets the answer", "excluded, blamed"
	status := func(n int) Failure { return Failure{Status: n} }
	decides := Facts{DecodeDecides: true}
	for _, tt := range []struct {
		leg   Leg
		how   string
		f     Failure
		facts Facts
		want  string
	}{
		{Prefill, "refuses the request", status(401), Facts{}, request},
		{Prefill, "refuses its body, which is not the client's", status(400), decides, "refused"},
		{Prefill, "refuses its body, and D must not be alone", status(400), Facts{}, request},
		{Prefill, "refuses its body in the last pass", status(400), Facts{DecodeDecides: true, Last: true}, request},
		{Prefill, "fails over its one token", status(500), decides, "refused"},
		{Prefill, "fails over its one token in the last pass", status(500), Facts{DecodeDecides: true, Last: true}, "refused"},
		{Prefill, "does not serve the model", status(404), Facts{}, "model: excluded"},
		{Prefill, "does not serve the model, nor does another", status(404), Facts{Last: true}, request},
		{Prefill, "is full", status(429), Facts{}, "prefill: blamed"},
		{Prefill, "is full", status(503), Facts{}, "prefill: blamed"},
		{Prefill, "times out by itself", status(408), Facts{}, "prefill: " + endpoint + ", may be the KV"},
		{Prefill, "fails", status(500), Facts{}, "prefill: " + endpoint + ", may be the KV"},
		{Prefill, "answers nonsense", status(200), Facts{}, "prefill: " + endpoint + ", may be the KV"},
		{Prefill, "cannot be reached", Failure{Unreached: true}, Facts{Code: 503}, "prefill: " + endpoint + ", may be the KV"},
		{Prefill, "breaks the connection", Failure{}, Facts{Code: 502}, "prefill: " + endpoint + ", may be the KV"},
		{Prefill, "is too slow", Failure{Overdue: true}, Facts{Code: 504}, "prefill: " + endpoint + ", may be the KV"},
		{Prefill, "is kept from it by Envoy's own refusal", Failure{}, Facts{Code: 413}, request},
		{Prefill, "fails, and its pool is gone", status(500), Facts{Gone: true}, "pool_gone"},

		{Decode, "does not serve the model", status(404), Facts{}, "model: excluded"},
		{Decode, "is full", status(429), Facts{}, "decode: blamed"},
		{Decode, "fails", status(500), Facts{}, "decode: " + endpoint + ", may be the KV, as it says"},
		{Decode, "times out by itself", status(408), Facts{}, "decode: " + endpoint + ", may be the KV, as it says"},
		{Decode, "cannot be reached", Failure{Unreached: true}, Facts{}, "decode: " + endpoint},
		{Decode, "breaks the connection", Failure{}, Facts{}, "decode: " + endpoint},
		{Decode, "failed in a way that nobody has reported", Failure{Unknown: true}, Facts{}, "decode: " + endpoint + ", may be the KV"},
		{Decode, "is too slow", Failure{Overdue: true}, Facts{}, "decode: " + endpoint},
		{Decode, "stood still, and no other can serve", Failure{}, Facts{Waits: true}, "outdated: blamed"},

		{Encode, "refuses the media", status(400), Facts{}, "encode"},
		{Encode, "answers nonsense", status(200), Facts{}, "encode"},
		{Encode, "fails", status(500), Facts{}, "encode: blamed"},
		{Encode, "is too slow", Failure{Overdue: true}, Facts{}, "encode: blamed"},
	} {
		who := [...]string{"P ", "D ", "the encoder "}[tt.leg]
		m := Means(tt.leg, &tt.f, tt.facts)
		require.Equal(t, tt.want, said(&m), who+tt.how)
	}
}

// said is a meaning in words.
func said(m *Meaning) string {
	if m.Client {
		return "the client gets the answer"
	}
	var words []string
	for _, w := range []struct {
		holds bool
		word  string
	}{{m.Excludes, "excluded"}, {m.Blames, "blamed"}, {m.Loads, "may be the KV"}, {m.Suspects, "as it says"}} {
		if w.holds {
			words = append(words, w.word)
		}
	}
	if words == nil {
		return m.Cause
	}
	return m.Cause + ": " + strings.Join(words, ", ")
}
