package filter

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tandem/extproc/kvtransfer"
	"tandem/extproc/pass"
)

// engineClock is a clock of P's that is known.
type engineClock struct{}

func (engineClock) Now(context.Context, string, string, int) (float64, bool) { return 1000, true }

// Answers that the client gets otherwise than D wrote them, whole and as streams, in pieces that end anywhere.
func TestRewrittenAnswers(t *testing.T) {
	nixl := func(o kvtransfer.Options) func(*pass.Policy) {
		return func(p *pass.Policy) {
			always(p)
			o.Name = "nixl"
			var err error
			p.Dialect, err = kvtransfer.New(o)
			require.NoError(t, err)
		}
	}
	cached := func(p *pass.Policy) {
		always(p)
		p.PrefillCached = true
	}
	prefilled := strings.Replace(answered, `"completion_tokens":1`,
		`"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":5}`, 1)
	const usage = `"usage":{"prompt_tokens":12,"prompt_tokens_details":{"cached_tokens":11}}`
	const secret = `"kv_transfer_params":{"remote_host":"10.0.2.1","remote_block_ids":[[7]]}`
	stream := strings.Replace(chat, `"max_tokens"`, `"stream":true,"stream_options":{"include_usage":true},"max_tokens"`, 1)
	for name, tt := range map[string]struct {
		policy func(*pass.Policy)
		body   string // the client's
		answer string // D's
		reply  string // the client's
	}{
		"cached tokens": {cached, chat, `{"choices":[],` + usage + `}`,
			`{"choices":[],"usage":{"prompt_tokens":12,"prompt_tokens_details":{"cached_tokens":5}}}`},
		"cached tokens of a stream": {cached, stream, "data: {\"choices\":[]}\n\ndata: {" + usage + "}\n\ndata: [DONE]\n\n",
			"data: {\"choices\":[]}\n\n" +
				"data: {\"usage\":{\"prompt_tokens\":12,\"prompt_tokens_details\":{\"cached_tokens\":5}}}\n\ndata: [DONE]\n\n"},
		"both ways": {nixl(kvtransfer.Options{Bidirectional: true}), chat, `{"choices":[],` + secret + `}`,
			`{"choices":[],"kv_transfer_params":null}`},
		"expiry": {nixl(kvtransfer.Options{Clocks: engineClock{}}), chat, `{"choices":[],` + secret + `}`,
			`{"choices":[],"kv_transfer_params":null}`},
		"expiry, a stream": {nixl(kvtransfer.Options{Clocks: engineClock{}}), stream,
			"data: {\"choices\": []}\n\ndata: {\"choices\":[]," + secret + "}\n\ndata: [DONE]\n\n",
			"data: {\"choices\": []}\n\ndata: {\"choices\":[]}\n\ndata: [DONE]\n\n"},
		"an answer that is no JSON": {cached, chat, `hello`, `hello`},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFleet(t, tt.policy)
			c := newClient(t, f, func(at string, _ []byte) engineAnswer {
				if prefills(at) {
					return engineAnswer{status: 200, body: prefilled}
				}
				return engineAnswer{status: 200, body: tt.answer}
			}, tt.body)
			c.run()
			require.Equal(t, 200, c.status, c.reply)
			require.Equal(t, tt.reply, c.reply)
			require.Eventually(t, func() bool { return f.Memory.Load() == 0 }, time.Minute, time.Millisecond)
		})
	}
}

// An event without an end does not fill the memory: the answer is cut.
func TestEndlessEvents(t *testing.T) {
	f := newFleet(t, func(p *pass.Policy) {
		always(p)
		p.PrefillCached = true
	})
	prefilled := strings.Replace(answered, `"completion_tokens":1`,
		`"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":5}`, 1)
	c := newClient(t, f, func(at string, _ []byte) engineAnswer {
		if prefills(at) {
			return engineAnswer{status: 200, body: prefilled}
		}
		return engineAnswer{status: 200, body: "data: " + strings.Repeat("x", 9<<20)}
	}, strings.Replace(chat, `"max_tokens"`, `"stream":true,"stream_options":{"include_usage":true},"max_tokens"`, 1))
	c.pieces = 1 << 16
	c.run()
	require.True(t, c.reset)
	require.Eventually(t, func() bool { return f.Memory.Load() == 0 }, time.Minute, time.Millisecond)
}

// A chat with media goes to an endpoint that encodes, first; that it fails costs nothing but its time.
func TestEncode(t *testing.T) {
	const media = `{"model":"m","messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:x"}}]}]}`
	for name, tt := range map[string]struct {
		encoded engineAnswer
		prefill string // a part of P's body
	}{
		"encoded": {engineAnswer{status: 200, body: `{"choices":[],"ec_transfer_params":{"h":{"peer_host":"10.0.3.1"}}}`},
			"ec_transfer_params"},
		"the encoder fails": {engineAnswer{status: 500, body: "no"}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFleet(t, func(p *pass.Policy) {
				always(p)
				p.EncodeTimeout = 30 * time.Second
			})
			f.encoder()
			var asked []string
			c := newClient(t, f, func(at string, body []byte) engineAnswer {
				asked = append(asked, at)
				if strings.HasPrefix(at, "10.0.3.") {
					require.Contains(t, string(body), `"image_url"`)
					return tt.encoded
				}
				if prefills(at) {
					require.Contains(t, string(body), tt.prefill)
				}
				return well(at, body)
			}, media)
			c.run()
			require.Equal(t, 200, c.status, c.reply)
			require.Len(t, asked, 3)
			require.Contains(t, string(c.got), media[1:], "the client's body, and P's parameters")
			require.Eventually(t, func() bool { return f.reserved() == 0 }, time.Minute, time.Millisecond)
			require.Eventually(t, func() bool { return f.Memory.Load() == 0 }, time.Minute, time.Millisecond)
		})
	}
}
