package main

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"tandem/e2e/enginesim/api"
)

// pictures returns a chat with images, and text if there is any.
func pictures(text string, urls []string, members ...string) string {
	var parts []string
	if text != "" {
		parts = append(parts, `{"type":"text","text":"`+text+`"}`)
	}
	for _, url := range urls {
		parts = append(parts, `{"type":"image_url","image_url":{"url":"`+url+`"}}`)
	}
	return strings.Replace(chat("", members...), `"content":""`, `"content":[`+strings.Join(parts, ",")+`]`, 1)
}

func TestEncode(t *testing.T) {
	e, p := startEngine(t, "-role", "encode"), startEngine(t, "-role", "both")
	encoded := func(urls ...string) string {
		t.Helper()
		got := e.post(t, chatPath, "e", pictures("", urls))
		require.Equal(t, 200, got.status, got)
		var answer struct {
			Params json.RawMessage `json:"ec_transfer_params"`
		}
		require.NoError(t, json.Unmarshal([]byte(got.String()), &answer))
		return `"ec_transfer_params":` + string(answer.Params)
	}
	last := func() api.Record { return p.Records.Last(1, "")[0] }
	plain := p.post(t, chatPath, "r0", pictures("What?", []string{"a", "b"}))
	require.Equal(t, 200, plain.status, plain)
	require.Equal(t, 2, last().EncodedHere)

	params := encoded("a", "b")
	require.EqualValues(t, 2, e.State().BlocksHeld)
	got := p.post(t, chatPath, "r1", pictures("What?", []string{"a", "b"}, params))
	require.Equal(t, plain.content(), got.content())
	require.Equal(t, []int{2, 0}, []int{last().Encoded, last().EncodedHere})
	got = p.post(t, chatPath, "r2", pictures("What?", []string{"a", "b"}, encoded("b")))
	require.Equal(t, plain.content(), got.content())
	require.Equal(t, []int{1, 1}, []int{last().Encoded, last().EncodedHere}, "what is not told of is encoded here")
	e.quiet(t)
	short := startEngine(t, "-role", "encode", "-lease", "50ms")
	require.Equal(t, 200, short.post(t, chatPath, "e", pictures("", []string{"never fetched"})).status)
	short.quiet(t)
	p.quiet(t)

	for kind, body := range map[string]string{
		"unknown_encoding":  pictures("What?", []string{"a", "b"}, params),
		"foreign_encoding":  pictures("What?", []string{"other"}, encoded("b")),
		"altered_params":    pictures("What?", []string{"b"}, strings.Replace(encoded("b"), "140234567890123456789", "1.4023456789012346e+20", 1)),
		"incomplete_params": pictures("What?", []string{"b"}, strings.Replace(encoded("b"), "peer_host", "peer", 1)),
	} {
		require.Equal(t, 500, p.post(t, chatPath, "bad", body).status, kind)
		require.EqualValues(t, 1, p.violations(kind), kind)
	}
	for kind, body := range map[string]string{
		"nothing_to_encode": chat("text alone"), "not_for_encode": pictures("What?", []string{"a"}),
	} {
		require.Equal(t, 500, e.post(t, chatPath, "bad", body).status, kind)
		require.EqualValues(t, 1, e.violations(kind), kind)
	}
	require.Equal(t, 400, p.post(t, chatPath, "bad", pictures("What?", []string{"a"}, `"ec_transfer_params":[]`)).status)
}
