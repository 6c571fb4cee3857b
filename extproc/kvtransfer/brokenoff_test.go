package kvtransfer

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// An answer with status 200 may say that the engine has given the request up: then D waits in vain.
func TestBrokenOff(t *testing.T) {
	for body, want := range map[string]string{
		`{"choices":[{"finish_reason":"abort"}]}`:                                                              "abort",
		`{"choices":[{"finish_reason":"length"},{"finish_reason":"error"}]}`:                                   "error",
		`{"text":"","meta_info":{"finish_reason":{"type":"abort","message":"x"}}}`:                             "abort",
		`[{"meta_info":{"finish_reason":{"type":"length"}}},{"meta_info":{"finish_reason":{"type":"abort"}}}]`: "abort",
		`{"type":"message","stop_reason":"abort"}`:                                                             "abort",
		`{"object":"response","status":"failed"}`:                                                              "failed",
		`{"choices":[{"finish_reason":"length"}]}`:                                                             "",
		`{"choices":[{"finish_reason":"stop"}]}`:                                                               "",
		`{"choices":[{"finish_reason":null}]}`:                                                                 "",
		`{"meta_info":{"finish_reason":{"type":"length","length":1}}}`:                                         "",
		`{"object":"response","status":"incomplete"}`:                                                          "",
		`{"status":"completed"}`:                                                                               "",
		`not json`:                                                                                             "",
	} {
		require.Equal(t, want, brokenOff([]byte(body)), body)
	}
	for name, read := range map[string]func(body, sent []byte) (Answer, Peer, error){
		"sglang": sglang{}.ReadAnswer, "mooncake": mooncake{}.ReadAnswer, "moriio": moriio{}.ReadAnswer,
		"nixl-push": nixlPush{}.ReadAnswer,
	} {
		_, _, err := read([]byte(`{"choices":[{"finish_reason":"abort"}],"usage":{"prompt_tokens":3}}`), nil)
		require.ErrorIs(t, err, ErrParams, name)
	}
}
