package kvtransfer

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// clocks is one engine's clock.
type clocks map[string]float64

func (c clocks) Now(_ context.Context, engine, host string, port int) (float64, bool) {
	if host != "10.0.0.1" || port != 5600 {
		return 0, false
	}
	now, ok := c[engine]
	return now, ok
}

// A hand-over says by P's clock when its lease ends, counted from when P was asked, or D gets none.
func TestExpiry(t *testing.T) {
	const rest = `"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[1]],"remote_engine_id":"e",` +
		`"remote_request_id":"r","remote_host":"10.0.0.1","remote_port":5600`
	const member = `"remote_blocks_expiry_time":`
	x := Expiry{Clocks: clocks{"e": 4000.25}, Lease: 30 * time.Second}
	for name, tt := range map[string]struct {
		params, want string
		age          time.Duration
		err          error
	}{
		"null": {
			`{` + rest + `,` + member + `null,"x":1}`, `{` + rest + `,` + member + `4027.250,"x":1}`, 2 * time.Second, nil,
		},
		"its own":   {`{` + member + `9e9,` + rest + `}`, `{` + member + `4029.250,` + rest + `}`, 0, nil},
		"absent":    {`{` + rest + `}`, `{` + rest + `,` + member + `4029.250}`, -time.Second, nil},
		"too late":  {`{` + rest + `}`, "", 29 * time.Second, errNoLease},
		"restarted": {`{` + rest[:len(rest)-4] + `5601}`, "", 0, errNoClock},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := x.Write(t.Context(), []byte(tt.params), tt.age)
			require.ErrorIs(t, err, tt.err)
			require.Equal(t, tt.want, string(got))
			if err == nil {
				_, err = readPull(got)
				require.NoError(t, err)
			}
		})
	}
}

// TestLateReads: what may a D read that comes after P has freed the blocks? If P's parameters name blocks by number, what
// they hold then, which is another client's text: Lease is how long P keeps them, and D's answer is checked against it.
// Only a D that finds nothing, or the same KV, needs none. Each dialect says here which it is, and where that was read
// in docs/security.md.
func TestLateReads(t *testing.T) {
	harmless := map[string]string{
		"nixl-push":               "P writes, and nothing after its lease",
		"mooncake":                "P sends only what it still keeps",
		"sglang":                  "P writes into the room that D allocated",
		"lmcache":                 "chunks are found by hash, and counted",
		"shared":                  "chunks are found by hash, and counted",
		"offload":                 "blocks are found by a name, which goes with them",
		"moriio":                  "P writes into D's memory",
		"trtllm":                  "the request id goes with the blocks",
		"trtllm-generation-first": "P writes, and says when it has",
	}
	for _, name := range Names() {
		d := every(t, name)
		why, ok := harmless[name]
		require.NotEqual(t, d.Lease > 0, ok && why != "",
			"%s: Hold.Lease (%s) says how long P keeps blocks that D reads by number; 0 needs a reason here", name, d.Lease)
	}
	for name := range harmless {
		require.Contains(t, Names(), name)
	}
}

// P's parameters are for D within a third of the lease. Dialects whose D may come late keep the server's limit.
func TestHandOverTTL(t *testing.T) {
	const limit = 20 * time.Second
	for _, tt := range []struct {
		dialect     string
		lease, want time.Duration
	}{
		{"nixl", 0, 10 * time.Second},
		{"nixl", 6 * time.Second, 2 * time.Second},
		{"nixl", 120 * time.Second, limit},
		{"moriio-read", 0, limit},
		{"moriio-read", 12 * time.Second, 4 * time.Second},
		{"orchestrated", 0, 10 * time.Second},
		{"lmcache", 0, limit},
		{"trtllm", 0, limit},
	} {
		d, err := New(Options{Name: tt.dialect, Lease: tt.lease})
		require.NoError(t, err)
		require.Equal(t, tt.want, d.HandOverTTL(limit), "%s, lease %s", tt.dialect, tt.lease)
	}
	d, err := New(Options{Name: "multi", Members: []string{"nixl", "shared"}})
	require.NoError(t, err)
	require.Equal(t, 10*time.Second, d.HandOverTTL(limit))
}
