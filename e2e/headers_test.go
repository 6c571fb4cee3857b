package e2e

import (
	"maps"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// What engines see beyond the client's own headers, which they all get. Envoy adds the two x-forwarded-*.
var (
	clientsOwn = []string{"Accept", "Accept-Encoding", "Content-Length", "Content-Type", "User-Agent", "X-Client",
		"X-Forwarded-For", "X-Forwarded-Proto", "X-Request-Id"}
	// beside Envoy the way of an answer needs the ticket, the name of the request's reservations and the destination
	besideOwn = []string{"X-Tandem-Ticket", "X-Tandem-Reservation", "X-Gateway-Destination-Endpoint"}
	// and for pairs where the other leg goes
	pairsOwn  = append(slices.Clone(besideOwn), "X-Tandem-Request-Id", "X-Tandem-Mirror", "X-Tandem-Prefill-Endpoint")
	asksLoad  = "Endpoint-Load-Metrics-Format"                                         // of P, which reports its load with its answer
	pickerOwn = []string{"X-Gateway-Destination-Endpoint", "X-Envoy-External-Address"} // the gateway's, at D
)

// Engines see of Tandem's and Envoy's headers only those that the way of their answer needs: inside Envoy none. A body
// that Envoy buffers has a length.
func TestHeadersAtEngines(t *testing.T) {
	t.Parallel()
	for name, kind := range map[string]struct {
		options
		beside []string
	}{
		"nixl":      {options{dialect: "nixl", envoyFields: ", bodyMode: auto"}, besideOwn},
		"none":      {options{dialect: "none", envoyFields: ", bodyMode: auto"}, besideOwn},
		"trtllm":    {options{dialect: "trtllm", envoyFields: ", bodyMode: auto"}, besideOwn},
		"sglang":    {options{dialect: "sglang", envoyFields: ", bodyMode: auto"}, pairsOwn},
		"mooncake":  {options{dialect: "mooncake", envoyFields: ", bodyMode: duplex"}, pairsOwn},
		"nixl-push": {options{dialect: "nixl-push", envoyFields: ", bodyMode: buffered"}, pairsOwn},
		"encode":    {options{prefills: 1, decodes: 1, encodes: 1, pool: "  encode: {timeout: 5s}\n"}, besideOwn},
		"continued": {options{prefills: 1, decodes: 1, pool: insurance}, nil},
		"picker": {options{prefills: 1, decodes: 1, extProcFields: ", protocol: endpointPicker", pool: "  handoff: direct\n",
			bootstrap: gatewayTo()}, pickerOwn},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel() // mostly waits
			if runsInside() && kind.bootstrap != nil || !runsInside() && kind.pool == insurance {
				t.Skip("only the other way")
			}
			f := start(t, kind.options)
			f.lenient = true // embeddings are no leg of the account
			const long = 200_000
			short := strings.Replace(pairBody, `"max_tokens"`, `"stream":true,"max_tokens"`, 1)
			for _, r := range []asked{
				{path: "/v1/chat/completions", body: short},
				{path: "/v1/chat/completions", body: strings.Replace(pairBody, " long", " long"+strings.Repeat(" long", long/5), 1)},
				show(1, 1, 1, ""),
				{path: "/v1/embeddings", body: `{"model":"tiny","input":"x"}`},
			} {
				for range 3 {
					got := f.post(r.path, r.body, "x-client", "1", "x-forwarded-for", "192.0.2.1", "x-envoy-upstream-rq-timeout-ms", "9")
					require.Equal(t, 200, got.status, got.body)
				}
			}
			allowed := map[string]bool{}
			for _, h := range slices.Concat(clientsOwn, kind.beside) {
				allowed[h] = true
			}
			if runsInside() {
				for _, h := range kind.beside {
					delete(allowed, h)
				}
			}
			legs := map[string]int{}
			for _, s := range f.requests("", f.engines()...) {
				if s.Path != "/v1/chat/completions" && s.Path != "/v1/embeddings" {
					continue
				}
				legs[s.Leg]++
				names := slices.Sorted(maps.Keys(s.Headers))
				for _, header := range names {
					require.True(t, allowed[header] || header == asksLoad && s.Leg == "prefill", "%s has %s of %v", s.Leg, header, names)
				}
				if from := s.Headers["X-Forwarded-For"]; len(from) > 0 && (runsInside() || !slices.Equal(kind.beside, pairsOwn)) {
					require.Len(t, strings.Split(strings.Join(from, ","), ","), 2, "%s: %v: the client's, and Envoy's once", s.Leg, from)
				}
				if mode := kind.envoyFields; strings.Contains(mode, "buffered") || strings.Contains(mode, "auto") && s.BodyBytes > long {
					require.Equal(t, []string{strconv.Itoa(s.BodyBytes)}, s.Headers["Content-Length"], s.Leg)
				}
			}
			require.GreaterOrEqual(t, legs["decode"]+legs["plain"], 12, "%v", legs)
			if name != "none" {
				require.GreaterOrEqual(t, legs["prefill"], 6, "%v", legs)
			}
		})
	}
}
