package kvtransfer

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"tandem/extproc/openai"
)

// moriioAnswer is what P answers in the mode READ (vLLM 0.33.0, moriio_connector.py: request_finished).
const moriioAnswer = `{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[7,8,9],"remote_engine_id":"10.0.0.5:6301","remote_host":"10.0.0.5",` +
	`"remote_handshake_port":6301,"remote_notify_port":61005,"remote_dp_rank":0,"remote_dp_size":1,"remote_dp_size_local":1,"tp_size":8,"transfer_id":"tx-1"}`

func TestMoRIIORead(t *testing.T) {
	d, err := New(Options{Name: "moriio-read", DecodeTP: 8, DecodeDP: 2})
	require.NoError(t, err)
	prefill, undo := prefillBody(t, d, openai.Chat, []byte(`{"model":"m","messages":[],"max_tokens":50}`), &Pair{Attempt: testAttempt})
	require.Contains(t, string(prefill), `"remote_dp_size":2,"remote_tp_size":8`)
	require.Contains(t, string(prefill), `"transfer_id":"tx-`)
	other, _ := prefillBody(t, d, openai.Chat, []byte(`{"model":"m","messages":[],"max_tokens":50}`), &Pair{Attempt: [16]byte{1}})
	require.NotEqual(t, prefill, other, "every attempt has its own id")
	a, err := d.ReadAnswer([]byte(`{"kv_transfer_params":`+moriioAnswer+`}`), &Pair{Prefill: Side{Addr: "10.0.0.5:8000"}})
	require.NoError(t, err)
	require.Equal(t, moriioAnswer, string(a.Params), "verbatim")
	require.Equal(t, `{"kv_transfer_params":`+moriioAnswer+`,"model":"m","messages":[],"max_tokens":50}`, string(decodeBody(d, prefill, undo, a.Params)))
}

// If P's object lacks a required member, has it twice, or has another type there, it is refused.
func TestMoRIIOReadRefuses(t *testing.T) {
	d, err := New(Options{Name: "moriio-read"})
	require.NoError(t, err)
	for _, change := range [][2]string{
		{`"do_remote_prefill":true`, `"do_remote_prefill":false`}, {`"do_remote_prefill":true,`, ``}, {`"do_remote_prefill":true`, `"do_remote_prefill":true,"do_remote_prefill":true`},
		{`"remote_host":"`, `"remote_host":1,"x":"`}, {`"remote_host"`, `"host"`}, {`[7,8,9]`, `[]`}, {`[7,8,9]`, `["a"]`}, {`"remote_handshake_port":6301`, `"remote_handshake_port":0`},
		{`"remote_notify_port":61005`, `"remote_notify_port":"61005"`}, {`"transfer_id":"tx-1"`, `"transfer_id":null`},
	} {
		bad := strings.Replace(moriioAnswer, change[0], change[1], 1)
		require.NotEqual(t, moriioAnswer, bad)
		_, err := d.ReadAnswer([]byte(`{"kv_transfer_params":`+bad+`}`), &Pair{Prefill: Side{Addr: "10.0.0.5:8000"}})
		require.ErrorIs(t, err, ErrParams, bad)
	}
	a, err := d.ReadAnswer([]byte(`{"kv_transfer_params":null,"usage":{"prompt_tokens":3}}`), &Pair{})
	require.NoError(t, err)
	require.Nil(t, a.Params)
	require.EqualValues(t, 3, a.PromptTokens)
	_, err = d.ReadAnswer([]byte(`{`), &Pair{})
	require.Error(t, err)
}
