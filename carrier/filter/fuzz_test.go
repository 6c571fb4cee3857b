package filter

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tandem/extproc/pass"
	"tandem/extproc/plan"
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

// Whatever D answers, in pieces that end anywhere: the client gets it as it is, if nothing of it is rewritten, and in any
// case an end; nobody panics, and nothing stays held.
func FuzzAnswer(f *testing.F) {
	f.Add([]byte("data: {\"usage\":{\"prompt_tokens\":3}}\n\ndata: [DONE]\n\n"), true, false, 7)
	f.Add([]byte(`{"choices":[],"usage":{"prompt_tokens":12,"prompt_tokens_details":{"cached_tokens":11}}}`), false, true, 1)
	f.Add([]byte(`{"usage":{"prompt_tokens":-1e9,"completion_tokens":{}`), false, false, 3)
	f.Add([]byte("data: {\"usage\":\r\ndata: x"), true, true, 2)
	f.Add([]byte{}, true, true, 1)
	prefilled := strings.Replace(answered, `"completion_tokens":1`,
		`"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":5}`, 1)
	f.Fuzz(func(t *testing.T, decoded []byte, stream, rewritten bool, pieces int) {
		fleet := newFleet(t, func(p *pass.Policy) {
			always(p)
			if rewritten {
				p.Cached = plan.CachedInPassing
			}
		})
		body, kind := chat, "application/json"
		if stream {
			body, kind = strings.Replace(chat, `"max_tokens"`, `"stream":true,"max_tokens"`, 1), "text/event-stream"
		}
		c := newClient(t, fleet, func(at string, _ []byte) engineAnswer {
			if prefills(at) {
				return engineAnswer{status: 200, body: prefilled}
			}
			return engineAnswer{status: 200, body: string(decoded)}
		}, body)
		c.kind, c.pieces = kind, 1+int(uint(pieces)%100)
		c.run()
		require.NotZero(t, c.status)
		if !rewritten {
			require.Equal(t, 200, c.status)
			require.Equal(t, string(decoded), c.reply)
		}
		for key, n := range c.tokens {
			require.True(t, n == -1 || n >= 0 && bytes.Contains(decoded, []byte("tokens")), "%s: %v", key, n)
		}
		require.NotEqual(t, "tandem_internal_error", c.details)
		require.Eventually(t, func() bool { return fleet.reserved() == 0 }, time.Minute, time.Millisecond)
		require.Eventually(t, func() bool { return fleet.Memory.Load() == 0 }, time.Minute, time.Millisecond)
	})
}
