package picker

import (
	"testing"

	"github.com/stretchr/testify/require"

	"tandem/kvstate"
)

// An engine that stands still may go on: a request whose other endpoint has died goes there, and not to that one again.
// While another one is well, nothing does.
func TestStandingBeforeFailed(t *testing.T) {
	at := func(addr string, usable, stands bool) kvstate.Candidate {
		return kvstate.Candidate{Usable: usable, Stands: stands, Endpoint: &kvstate.Endpoint{
			EndpointSpec: kvstate.EndpointSpec{Addr: addr, Role: kvstate.RoleDecode}}}
	}
	for name, tt := range map[string]struct {
		excluded []string
		well     bool
		want     string
	}{
		"the other one died":             {[]string{"dead"}, false, "stands"},
		"both failed it":                 {[]string{"dead", "stands"}, false, "dead"},
		"a third one is well":            {[]string{"dead"}, true, "well"},
		"nothing has failed the request": {nil, false, "dead"}, // nobody knows yet that it is
	} {
		t.Run(name, func(t *testing.T) {
			v := &kvstate.View{Endpoints: []kvstate.Candidate{at("stands", false, true), at("dead", true, false)}}
			if tt.well {
				v.Endpoints = append(v.Endpoints, at("well", true, false))
			}
			d, err := always().PickDecode(&Request{PromptTokens: 100, Faults: Faults{Excluded: tt.excluded}}, v, -1)
			require.NoError(t, err)
			require.Equal(t, tt.want, v.Endpoints[d].Endpoint.Addr)
		})
	}
}
