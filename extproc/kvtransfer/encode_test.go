package kvtransfer

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestReadEncoded(t *testing.T) {
	const two = `{"5af3": {"peer_host":"10.0.0.9","peer_port":5569,"size":[1,2,99999999999999999999]} ,"a\u0062":{}}`
	for answer, want := range map[string]string{
		`{"id":"x","choices":[],"ec_transfer_params":` + two + `}`: two,
		`{"choices":[]}`:              "",
		`{"ec_transfer_params":null}`: "",
		`{"ec_transfer_params":{ }}`:  "",
	} {
		got, err := ReadEncoded([]byte(answer))
		require.NoError(t, err, answer)
		require.Equal(t, want, string(got), "byte for byte")
	}
	for answer, why := range map[string]string{
		`{"ec_transfer_params":[]}`:                                                        "not an object",
		`{"ec_transfer_params":"x"}`:                                                       "not an object",
		`{"ec_transfer_params":{"a":null}}`:                                                "not an object",
		`{"ec_transfer_params":{"a":[{}]}}`:                                                "not an object",
		`{"ec_transfer_params":{"":{}}}`:                                                   "empty",
		`{"ec_transfer_params":{"a":{},"\u0061":{}}}`:                                      "twice",
		`{"ec_transfer_params":{"a":{"x":"` + "\xff" + `"}}}`:                              "not JSON",
		`{"ec_transfer_params":{"a":{"x":"` + strings.Repeat("x", MaxParamsBytes) + `"}}}`: "more than",
	} {
		_, err := ReadEncoded([]byte(answer))
		require.ErrorIs(t, err, ErrParams, "%.60s", answer)
		require.ErrorContains(t, err, why)
	}
	_, err := ReadEncoded([]byte(`<html>`))
	require.Error(t, err)
	require.NotErrorIs(t, err, ErrParams)
}

// FuzzReadEncoded: whatever an engine answers, the result is a part of it, an object, and valid.
func FuzzReadEncoded(f *testing.F) {
	f.Add([]byte(`{"ec_transfer_params":{"5af3":{"peer_host":"10.0.0.9","peer_port":5569}}}`))
	f.Add([]byte(`{"ec_transfer_params":{"a":{},"\u0061":{}}}`))
	f.Add([]byte(`{"ec_transfer_params":null}`))
	f.Fuzz(func(t *testing.T, answer []byte) {
		got, err := ReadEncoded(answer)
		if err != nil || got == nil {
			require.Nil(t, got)
			return
		}
		require.True(t, bytes.Contains(answer, got))
		var twin map[string]map[string]json.RawMessage
		require.NoError(t, json.Unmarshal(got, &twin))
		require.NotEmpty(t, twin)
		for _, v := range twin {
			require.NotNil(t, v)
		}
	})
}
