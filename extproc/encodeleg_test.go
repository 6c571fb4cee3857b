package extproc

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tandem/extproc/core"
	"tandem/extproc/names"
	"tandem/extproc/plan"
)

// These tests play the listener encode-leg: what an encode endpoint is sent and answers, and what becomes of a chat with media.

const (
	picture = `{"type":"image_url","image_url":{"url":"data:image/png;base64,AA=="}}`
	// encodedAs has a number that no float holds.
	encodedAs = `{"5af3":{"peer_host":"10.0.0.9","peer_port":5569, "address":140234567890123456789}}`
)

// showing is a chat with a picture and so much text.
func showing(text, more string) string {
	return `{"model":"m","max_tokens":9,` + more + `"messages":[{"role":"user","content":[{"type":"text","text":"` + text + `"},` + picture + `]}],"stream":true}`
}

func encodeStand(t *testing.T, endpoints ...string) *stand {
	s := newStand(t, core.Options{})
	policy := splitting()
	policy.EncodeTimeout = 7 * time.Second
	s.pool("chat", policy, endpoints...)
	return s
}

// encode takes the request through pass 1 and the encode leg, whose engine answers so.
func (q *request) encode(status int, answer string) {
	t := q.s.t
	v := q.pass()
	require.Equal(t, plan.LegEncode, v.set[names.HeaderLeg])
	require.Equal(t, addressOf("e1"), v.set[names.HeaderEndpoint])
	require.Equal(t, "7000", v.set[names.HeaderPerTry])
	require.Equal(t, string(q.first), string(v.body), "what Envoy keeps for pass 2 is the client's")
	l, body := q.through(q.s, names.RoleEncodeLeg)
	require.Equal(t, `{"model":"m","stream":false,"messages":[{"role":"user","content":[`+picture+`]}]}`, body)
	l.answer(status, answer)
	l.redirected(q)
}

// settled ends a request: nothing is booked any more.
func (q *request) settled() {
	q.s.log(q.entry(200, "via_upstream"))
	require.Eventually(q.s.t, func() bool { return q.s.state.Bookings.Reservations() == 0 }, 30*time.Second, time.Millisecond)
}

// Encode, prefill, decode: prefill is sent the encode endpoint's answer, byte for byte; decode is sent the client's
// body. The text is longer than any undo.
func TestEncodeThenPrefillThenDecode(t *testing.T) {
	s := encodeStand(t, "e1", "p1", "d1")
	q := s.newRequest("/v1/chat/completions", "r-1", showing(filler(40_000), `"ec_transfer_params":{"theirs":{}},`))
	q.first = []byte(strings.Replace(string(q.body), `"ec_transfer_params":{"theirs":{}},`, "", 1)) // not the client's to say
	q.encode(200, `{"choices":[],"ec_transfer_params":`+encodedAs+`}`)
	v := q.pass()
	require.Equal(t, plan.LegPrefill, v.set[names.HeaderLeg])
	require.Equal(t, 1, strings.Count(string(v.body), `"ec_transfer_params":`+encodedAs))
	require.NotContains(t, string(v.body), "theirs")
	require.Contains(t, string(v.body), `"do_remote_decode":true`)
	q.prefillLeg(engineAnswer{status: 200, body: prefilled(params(4))})
	q.follow()
	v = q.pass()
	require.Equal(t, plan.LegDecode, v.set[names.HeaderLeg])
	_, rest, ok := strings.Cut(string(v.body), `},"model"`)
	require.True(t, ok)
	require.Equal(t, string(q.first), `{"model"`+rest)
	require.NotContains(t, string(v.body), "ec_transfer_params")
	q.settled()
}

// The endpoint that computes the prompt gets the answer, even decode; if encode fails, the client's body is restored.
func TestEncodeThenDecodeAlone(t *testing.T) {
	s := encodeStand(t, "e1", "p1", "d1", "d2")
	q := s.newRequest("/v1/chat/completions", "r-1", showing("What?", `"n":2,`))
	q.encode(200, `{"choices":[],"ec_transfer_params":`+encodedAs+`}`)
	v := q.pass()
	require.Equal(t, plan.LegDecode, v.set[names.HeaderLeg])
	require.Equal(t, `{"ec_transfer_params":`+encodedAs+`,`+string(q.first[1:]), string(v.body))
	require.Equal(t, 307, q.replan().Code)
	q.follow()
	v = q.pass()
	require.Equal(t, string(q.first), string(v.body), "what was fetched may be gone: encoded anew, by decode")
	q.settled()
}

// An encode leg that fails costs nothing but its time: prefill encodes, and no encode endpoint is asked again.
func TestEncodeFails(t *testing.T) {
	for name, fail := range map[string]func(q *request){
		"500":           func(q *request) { q.encode(500, "no") },
		"429":           func(q *request) { q.encode(429, "") },
		"refused":       func(q *request) { q.encode(400, `{"error":{"message":"no such image"}}`) },
		"nonsense":      func(q *request) { q.encode(200, "<html>") },
		"names nothing": func(q *request) { q.encode(200, `{"choices":[]}`) },
		"no object":     func(q *request) { q.encode(200, `{"ec_transfer_params":{"a":[]}}`) },
		"outright": func(q *request) {
			require.Equal(t, plan.LegEncode, q.pass().set[names.HeaderLeg])
			require.Equal(t, 307, q.replan().Code)
			q.follow()
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := encodeStand(t, "e1", "p1", "d1")
			q := s.newRequest("/v1/chat/completions", "r-1", showing("What?", ""))
			fail(q)
			v := q.pass()
			require.Equal(t, plan.LegPrefill, v.set[names.HeaderLeg])
			require.NotContains(t, string(v.body), "ec_transfer_params")
			q.prefillLeg(engineAnswer{status: 500})
			q.follow()
			require.NotEqual(t, plan.LegEncode, q.pass().set[names.HeaderLeg])
			q.settled()
			require.Equal(t, name == "outright", s.state.Pool("chat").Endpoint(addressOf("e1")).Failed())
		})
	}
}

// What is said of media is good once: a redirect that is sent twice has prefill encode.
func TestEncodedOnce(t *testing.T) {
	s := encodeStand(t, "e1", "p1", "d1")
	q := s.newRequest("/v1/chat/completions", "r-1", showing("What?", ""))
	q.encode(200, `{"ec_transfer_params":`+encodedAs+`}`)
	ticket, body := q.headers[names.HeaderTicket], q.body
	require.Contains(t, string(q.pass().body), encodedAs)
	q.headers[names.HeaderTicket], q.body = ticket, body
	require.NotContains(t, string(q.pass().body), encodedAs)
	q.settled()
}

// Who is not encoded for: text, other APIs, pools without the stage, and where no encode endpoint works.
func TestNotEncoded(t *testing.T) {
	leg := func(s *stand, path, body string) string {
		return s.newRequest(path, "r-1", body).pass().set[names.HeaderLeg]
	}
	s := encodeStand(t, "e1", "p1", "d1")
	require.Equal(t, plan.LegPrefill, leg(s, "/v1/chat/completions", hello))
	require.Equal(t, plan.LegPrefill, leg(s, "/v1/completions", `{"model":"m","prompt":"image_url","max_tokens":3}`))
	s.state.Health.MarkFailed(s.state.Pool("chat").Endpoint(addressOf("e1")))
	require.Equal(t, plan.LegPrefill, leg(s, "/v1/chat/completions", showing("What?", "")))
	require.Equal(t, plan.LegPrefill, leg(encodeStand(t, "p1", "d1"), "/v1/chat/completions", showing("What?", "")))
	without := newStand(t, core.Options{})
	without.pool("chat", splitting(), "e1", "p1", "d1")
	require.Equal(t, plan.LegPrefill, leg(without, "/v1/chat/completions", showing("What?", "")))
}

// A ticket of another leg does not open this one, and a body that is not the one that was sent ends it.
func TestEncodeLegIsPicky(t *testing.T) {
	s := encodeStand(t, "e1", "p1", "d1")
	q := s.newRequest("/v1/chat/completions", "r-1", hello)
	require.Equal(t, plan.LegPrefill, q.pass().set[names.HeaderLeg])
	ended := func(q *request) int {
		l := s.leg(names.RoleEncodeLeg)
		headers, parts := q.messages()
		require.NoError(t, l.stream.Send(headers))
		for _, m := range parts {
			_ = l.stream.Send(m)
		}
		return int(l.receive().GetImmediateResponse().GetStatus().GetCode())
	}
	require.Equal(t, 500, ended(q))
	q = s.newRequest("/v1/chat/completions", "r-2", showing("What?", ""))
	require.Equal(t, plan.LegEncode, q.pass().set[names.HeaderLeg])
	q.body = append(q.body, ' ')
	require.Equal(t, 500, ended(q))
}
