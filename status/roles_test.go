package status

import (
	"bytes"
	"encoding/json"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tandem/extproc/pass"
	"tandem/extproc/telemetry"
	"tandem/kvstate"
	"tandem/picker"
	"tandem/picker/roles"
)

// Status, the decision about a request, and the one for a prompt of now say each endpoint's role, since when and why;
// status says how many engines would serve the load.
func TestRoles(t *testing.T) {
	now := time.Now()
	state := kvstate.New(kvstate.Options{})
	state.SetPool(kvstate.PoolSpec{Name: "chat", Models: []string{"*"}}, []kvstate.EndpointSpec{
		{Name: "a", Addr: "10.0.0.1:80", Role: kvstate.RoleBoth}, {Name: "b", Addr: "10.0.0.2:80", Role: kvstate.RoleBoth},
	})
	state.SetWord(state.Pool("chat").Endpoint("10.0.0.1:80"), kvstate.RolePrefill)
	state.SetWord(state.Pool("chat").Endpoint("10.0.0.2:80"), kvstate.RoleDecode)
	advice := roles.Advice{
		Engines: roles.Engines{All: 2, Prefills: 1, Decodes: 1, Either: true}, WantedPrefill: 1, WantedDecode: 3,
		Words: map[string]roles.Word{
			"10.0.0.1:80": {Word: "prefill", Since: now.Add(-3 * time.Minute), Why: "it was new"},
			"10.0.0.2:80": {Word: "decode", Since: now.Add(-10 * time.Second), Why: "answers need the others: \x1b[31m"},
		},
	}
	request := telemetry.Trace{RequestID: "r", Pool: "chat", Route: "split", Prefill: "10.0.0.1:80", Decode: "10.0.0.2:80",
		Started: now.Add(-time.Minute), Weighed: []telemetry.Weighed{{Endpoint: "10.0.0.1:80", Role: "both", Word: "prefill"}}}
	f := NewFeed(Source{
		State: state, Totals: func() telemetry.Totals { return telemetry.Totals{} }, Ready: func() bool { return true },
		Sharing: func() Sharing { return Sharing{} }, Recent: func(int) []telemetry.Trace { return []telemetry.Trace{request} },
		Roles: func() map[string]roles.Advice { return map[string]roles.Advice{"chat": advice} },
		Explain: func(pool string, tokens int64) (pass.Explanation, error) {
			require.Equal(t, "chat", pool)
			require.EqualValues(t, 700, tokens)
			return pass.Explanation{Explanation: picker.Explanation{
				Prefill: "10.0.0.1:80", Decode: "10.0.0.2:80",
				Candidates: []picker.Weighed{{Endpoint: "10.0.0.1:80", Name: "a", Role: "both", Word: "prefill"}},
			}}, nil
		},
	})
	s := status(f, 0)
	var text bytes.Buffer
	Print(&text, &s)
	require.Contains(t, text.String(), "warning  chat: the pool is short by 2: 1 for prefill and 3 for decode would serve this. (docs/howto/autoscale.md)\n")
	require.Contains(t, text.String(), "pool chat (*), prefix index 0 blocks, the pool is short by 2: 1 for prefill and 3 for decode would serve this\n")
	require.Regexp(t, `  a +both, now prefill .*  prefill for 3m\d+s: it was new\n`, text.String())
	require.Regexp(t, `  b +both, now decode .*  decode for 1\ds: answers need the others: `, text.String())
	require.NotContains(t, text.String(), "\x1b")

	get := func(path string, v any) {
		rec := httptest.NewRecorder()
		Handler(f).ServeHTTP(rec, httptest.NewRequestWithContext(t.Context(), "GET", path, nil))
		require.Equal(t, 200, rec.Code, rec.Body.String())
		require.NoError(t, json.Unmarshal(rec.Body.Bytes(), v))
		text.Reset()
	}
	var explained Explained
	get("/debug/explain?tokens=700", &explained)
	PrintExplanation(&text, &explained)
	require.Regexp(t, `\n  a +both, now prefill `, text.String())
	require.Regexp(t, `\n  endpoint +role now +for +why\n  a +prefill +3m\d+s +it was new\n  10.0.0.2:80 +decode +1\ds`, text.String())
	var requested []telemetry.Trace
	get("/debug/requests?id=r", &requested)
	PrintDecided(&text, requested, map[string]roles.Advice{"chat": advice})
	require.Regexp(t, `\n  a +both, now prefill `, text.String())
	require.Regexp(t, `\n  10.0.0.1:80 +prefill +3m\d+s +it was new\n  10.0.0.2:80 .*\(it changed after this request was planned\)\n`, text.String())

	// Of two replicas the one that knows more is shown, with the words of the newest change.
	late := roles.Word{Word: "prefill", Since: now, Why: "prompts need it"}
	parts := []report{f.report(question{Status: true}), f.report(question{Status: true})}
	parts[0].Pools[0].Advice.WantedDecode, parts[0].Pools[0].Advice.WantedPrefill = 0, 0
	parts[1].Pools[0].Endpoints[1].Now = &late
	merged := merge(answers{reports: parts}, now, &Wanted{N: shownRecent})
	require.Equal(t, "the pool is short by 2: 1 for prefill and 3 for decode would serve this", merged.Pools[0].Wanted)
	require.Equal(t, &late, merged.Pools[0].Endpoints[1].Now)
}
