package filter

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// Whatever clients send and engines answer, a request ends, nobody panics, and nothing stays reserved.
func FuzzRequest(f *testing.F) {
	f.Add([]byte(chat), []byte(answered), 200, 200)
	f.Add([]byte(chat), []byte(`{"kv_transfer_params":null}`), 200, 503)
	f.Add([]byte(`{"model":"m","prompt":"x","kv_transfer_params":{}}`), []byte(`{"error":1}`), 400, 429)
	f.Add([]byte(`[`), []byte(``), 504, 0)
	f.Fuzz(func(t *testing.T, body, prefill []byte, prefillStatus, decodeStatus int) {
		fleet := newFleet(t, always)
		c := newClient(t, fleet, func(at string, _ []byte) engineAnswer {
			if prefills(at) {
				return engineAnswer{status: prefillStatus, body: string(prefill)}
			}
			return engineAnswer{status: 100 + int(uint(decodeStatus)%500), body: "{}"}
		}, string(body))
		c.run()
		require.NotZero(t, c.status)
		if c.details != "" && c.details != "tandem_models" {
			require.True(t, json.Valid([]byte(c.reply)), c.reply)
		}
		require.NotEqual(t, "tandem_internal_error", c.details)
		require.Eventually(t, func() bool { return fleet.reserved() == 0 }, time.Minute, time.Millisecond)
		require.Eventually(t, func() bool { return fleet.Memory.Load() == 0 }, time.Minute, time.Millisecond)
	})
}
