package filter

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tandem/extproc/kvtransfer"
	"tandem/extproc/pass"
	"tandem/extproc/plan"
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
		p.Cached = plan.CachedInPassing
	}
	expiring := func(p *pass.Policy) {
		nixl(kvtransfer.Options{Clocks: engineClock{}})(p)
		p.Cached = plan.CachedInPassing
	}
	prefilled := strings.Replace(answered, `"completion_tokens":1`,
		`"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":5,"created_cache_tokens":4}`, 1)
	const messages = `{"model":"m","max_tokens":5,"messages":[{"role":"user","content":"hello"}]}`
	const said = `{"input_tokens":12,"cache_creation_input_tokens":0,"cache_read_input_tokens":0}`
	const one = `{"input_tokens":3,"cache_creation_input_tokens":4,"cache_read_input_tokens":5}`
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
		"messages": {cached, messages, `{"content":[],"usage":` + said + `}`, `{"content":[],"usage":` + one + `}`},
		"a stream of messages": {cached, strings.Replace(messages, "{", `{"stream":true,`, 1), "data: {\"message\":{\"usage\":" + said +
			"}}\n\ndata: {\"delta\":{}}\n\ndata: {\"usage\":" + said + "}\n\n", "data: {\"message\":{\"usage\":" + one +
			"}}\n\ndata: {\"delta\":{}}\n\ndata: {\"usage\":" + one + "}\n\n"},
		"cached tokens and expiry": {expiring, chat, `{"choices":[],` + secret + "," + usage + `}`,
			`{"choices":[],"kv_transfer_params":null,"usage":{"prompt_tokens":12,"prompt_tokens_details":{"cached_tokens":5}}}`},
		"cached tokens and expiry, a stream": {expiring, stream, "data: {\"choices\": []}\n\ndata: {\"choices\":[]," + secret + "}\n\n" +
			"data: {" + usage + "}\n\n", "data: {\"choices\": []}\n\ndata: {\"choices\":[]}\n\n" +
			"data: {\"usage\":{\"prompt_tokens\":12,\"prompt_tokens_details\":{\"cached_tokens\":5}}}\n\n"},
		"expiry": {nixl(kvtransfer.Options{Clocks: engineClock{}}), chat, `{"choices":[],` + secret + `}`,
			`{"choices":[],"kv_transfer_params":null}`},
		"expiry, a stream": {nixl(kvtransfer.Options{Clocks: engineClock{}}), stream,
			"data: {\"choices\": []}\n\ndata: {\"choices\":[]," + secret + "}\n\ndata: [DONE]\n\n",
			"data: {\"choices\": []}\n\ndata: {\"choices\":[]}\n\ndata: [DONE]\n\n"},
		"an answer that is no JSON": {cached, chat, `hello`, `hello`},
		"compressed":                {expiring, chat, `hello`, `hello`},
		"a stream, compressed":      {expiring, stream, "\r\n\r\n\x1f\r\rx\n\n\r\n", "\r\n\r\n\x1f\r\rx\n\n\r\n"},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFleet(t, tt.policy)
			c := newClient(t, f, func(at string, _ []byte) engineAnswer {
				if prefills(at) {
					return engineAnswer{status: 200, body: prefilled}
				}
				return engineAnswer{status: 200, body: tt.answer}
			}, tt.body)
			if strings.HasSuffix(name, "compressed") {
				c.coded = "gzip"
			}
			if strings.HasSuffix(name, "messages") {
				c.SetHeader(":path", "/v1/messages")
			}
			c.run()
			require.Equal(t, 200, c.status, c.reply)
			require.Equal(t, tt.reply, c.reply)
			require.Eventually(t, func() bool { return f.Memory.Load() == 0 }, time.Minute, time.Millisecond)
		})
	}
}

// What is only to have other counts is never the worse for it: a stream passes without a hook, but for the events that
// have counts, and an answer that cannot be read passes as it is.
func TestCountsInPassing(t *testing.T) {
	prefilled := strings.Replace(answered, `"completion_tokens":1`,
		`"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":5}`, 1)
	whole := func(n string) string {
		return `{"text":"` + strings.Repeat("x", 1000) + `","usage":{"prompt_tokens":12,"prompt_tokens_details":{"cached_tokens":` + n + `}}}`
	}
	const event = "data: {\"choices\":[{\"delta\":{\"content\":\"x\"}}]}\n\n"
	events := strings.Repeat(event, 9)
	const last = "data: {\"usage\":{\"prompt_tokens\":12,\"prompt_tokens_details\":{\"cached_tokens\":11}}}\n\n"
	endless := "data: " + strings.Repeat("x", 9<<20)
	for name, tt := range map[string]struct {
		stream        bool
		coded         string // content-encoding
		answer, reply string
		pieces        int // bytes of each
		passed        int // of them, without a hook
		length        bool
	}{
		"whole, at once":     {false, "", whole("11"), whole("5"), 1 << 20, 0, true},
		"whole, in pieces":   {false, "", whole("11"), whole("5"), 100, 0, false},
		"larger than a hold": {false, "", `{"a":"` + endless + endless + `",` + whole("11")[1:], `{"a":"` + endless + endless + `",` + whole("5")[1:], 1 << 16, 0, false},
		"a stream":           {true, "", events + last + event, events + strings.Replace(last, "11", "5", 1) + event, len(event), 8, false}, // the first one is looked at: it may be late,
		"a stream in pieces": {true, "", events + last, events + strings.Replace(last, "11", "5", 1), 7, 0, false},
		"compressed":         {true, "br", events + last, events + last, len(event), 0, true},
		"an endless event":   {true, "", event + endless, event + endless, 1 << 16, 0, false},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFleet(t, func(p *pass.Policy) {
				always(p)
				p.Cached = plan.CachedInPassing
			})
			body := chat
			if tt.stream {
				body = strings.Replace(chat, `"max_tokens"`, `"stream":true,"stream_options":{"include_usage":true},"max_tokens"`, 1)
			}
			c := newClient(t, f, func(at string, _ []byte) engineAnswer {
				if prefills(at) {
					return engineAnswer{status: 200, body: prefilled}
				}
				return engineAnswer{status: 200, body: tt.answer}
			}, body)
			c.pieces, c.coded = tt.pieces, tt.coded
			c.run()
			require.Equal(t, 200, c.status)
			require.Equal(t, tt.reply, c.reply)
			require.Equal(t, tt.passed, c.passed)
			require.Equal(t, tt.length, c.length != "", "a length is said")
			require.Eventually(t, func() bool { return f.Memory.Load() == 0 }, time.Minute, time.Millisecond)
		})
	}
}

// An event without an end does not fill the memory: the answer is cut, if it may have what its client must not get.
func TestEndlessEvents(t *testing.T) {
	f := newFleet(t, func(p *pass.Policy) {
		always(p)
		var err error
		p.Dialect, err = kvtransfer.New(kvtransfer.Options{Name: "nixl", Clocks: engineClock{}})
		require.NoError(t, err)
	})
	c := newClient(t, f, func(at string, _ []byte) engineAnswer {
		if prefills(at) {
			return engineAnswer{status: 200, body: answered}
		}
		return engineAnswer{status: 200, body: "data: " + strings.Repeat("x", 9<<20)}
	}, strings.Replace(chat, `"max_tokens"`, `"stream":true,"max_tokens"`, 1))
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
