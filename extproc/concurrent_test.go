package extproc

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"slices"
	"strconv"
	"testing"
	"testing/synctest"
	"time"

	logdatav3 "github.com/envoyproxy/go-control-plane/envoy/data/accesslog/v3"
	filterv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	logv3 "github.com/envoyproxy/go-control-plane/envoy/service/accesslog/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/metadata"

	"tandem/extproc/core"
	"tandem/extproc/envoywire"
	"tandem/extproc/envoywire/wiretest"
	"tandem/extproc/kvtransfer"
	"tandem/extproc/names"
	"tandem/extproc/pass"
	"tandem/extproc/plan"
	"tandem/kvstate"
)

// These tests play the two legs of a request that both run at once, as Envoy's listeners decode-leg and prefill-mirror do.

// pairStand is a server with a pool of SGLang endpoints.
func pairStand(t *testing.T, dialect string, endpoints ...string) *stand {
	s := newStand(t, core.Options{})
	s.policy("chat", pass.Policy{Policy: plan.Policy{Dialect: kvtransfer.Named(dialect), Split: true, PrefillAttempts: 3, PrefillTimeout: 30 * time.Second}})
	var eps []kvstate.EndpointSpec
	for _, e := range endpoints {
		eps = append(eps, kvstate.EndpointSpec{Name: e, Addr: addressOf(e), Role: roleOf(e)})
	}
	s.state.SetPool(kvstate.PoolSpec{Name: "chat", Models: []string{"*"}}, eps)
	return s
}

// leg is a stream of one of the leg listeners' filters.
type leg struct {
	t      *testing.T
	stream extprocv3.ExternalProcessor_ProcessClient
	cancel context.CancelFunc
}

func (s *stand) leg(role string) *leg {
	ctx, cancel := context.WithCancel(metadata.AppendToOutgoingContext(s.t.Context(), "x-tandem-role", role))
	s.t.Cleanup(cancel)
	stream, err := s.ext.Process(ctx)
	require.NoError(s.t, err)
	return &leg{s.t, stream, cancel}
}

// decode begins the decode leg, and gives the body that D gets.
func (q *request) decode(s *stand) (l *leg, body string) {
	return q.through(s, names.RoleDecodeLeg)
}

// through begins a leg whose filter rewrites the body, and gives what the engine gets.
func (q *request) through(s *stand, role string) (l *leg, body string) {
	l = s.leg(role)
	headers, parts := q.messages()
	require.NoError(l.t, l.stream.Send(headers))
	for _, m := range parts {
		require.NoError(l.t, l.stream.Send(m))
	}
	v := &verdict{set: map[string]string{}}
	v.takeStreamed(l.t, l.stream, true, false)
	require.Zero(l.t, v.status(), "%v", v.immediate)
	return l, string(v.body)
}

// mirror begins the mirrored leg.
func (q *request) mirror(s *stand) *leg {
	l := s.leg(names.RoleMirror)
	q.mode = filterv3.ProcessingMode_NONE
	headers, _ := q.messages()
	q.mode = filterv3.ProcessingMode_FULL_DUPLEX_STREAMED
	require.NoError(l.t, l.stream.Send(headers))
	r, err := l.stream.Recv()
	require.NoError(l.t, err)
	require.NotNil(l.t, r.GetRequestHeaders(), "%v", r)
	return l
}

// headers are those of the engine's answer, on their way through the leg.
func (l *leg) headers(end bool, pairs ...string) {
	require.NoError(l.t, l.stream.Send(&extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_ResponseHeaders{
		ResponseHeaders: &extprocv3.HttpHeaders{Headers: wiretest.HeaderMap(pairs...), EndOfStream: end},
	}}))
}

// streams are the headers of a stream.
func (l *leg) streams() {
	l.headers(false, ":status", "200", "content-type", "text/event-stream; charset=utf-8")
}

// answer is the engine's answer, on its way through the leg.
func (l *leg) answer(status int, body string) {
	l.headers(body == "", ":status", strconv.Itoa(status))
	if body != "" {
		require.NoError(l.t, l.stream.Send(&extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_ResponseBody{
			ResponseBody: &extprocv3.HttpBody{Body: []byte(body), EndOfStream: true},
		}}))
	}
}

func (l *leg) receive() *extprocv3.ProcessingResponse {
	l.t.Helper()
	r, err := l.stream.Recv()
	require.NoError(l.t, err)
	return r
}

// ended is a stream that the server has ended in peace, which Envoy takes for leave to carry on.
func (l *leg) ended() {
	l.t.Helper()
	_, err := l.stream.Recv()
	require.ErrorIs(l.t, err, io.EOF)
}

// redirected takes the 307 that cuts a decode leg.
func (l *leg) redirected(q *request) {
	l.t.Helper()
	i := l.receive().GetImmediateResponse()
	require.NotNil(l.t, i)
	require.EqualValues(l.t, 307, i.GetStatus().GetCode())
	for _, h := range i.GetHeaders().GetSetHeaders() {
		if h.GetHeader().GetKey() == names.HeaderTicket {
			q.taken = string(h.GetHeader().GetRawValue())
		}
	}
	q.follow()
}

const goodPrefill = `{"choices":[{"finish_reason":"length"}],"usage":{"prompt_tokens":12}}`

// pass1 sends a chat request through the main filter.
func pass1(s *stand, id string) (q *request, v *verdict) {
	return pass1At(s, id, "/v1/chat/completions")
}

func pass1At(s *stand, id, path string) (q *request, v *verdict) {
	q = s.newRequest(path, id, `{"model":"m","messages":[],"stream":true,"max_tokens":9}`)
	v = q.pass()
	require.Zero(s.t, v.status(), "%v", v.immediate)
	return q, v
}

func room(t *testing.T, body string) string {
	var b struct {
		Room json.Number `json:"bootstrap_room"`
	}
	require.NoError(t, json.Unmarshal([]byte(body), &b), body)
	return b.Room.String()
}

func inBubble(t *testing.T, endpoints []string, test func(t *testing.T, s *stand)) {
	synctest.Test(t, func(t *testing.T) {
		s := pairStand(t, "sglang", endpoints...)
		test(t, s)
		synctest.Wait()
		require.Zero(t, s.state.Bookings.Reservations(), "something stays booked")
		require.Zero(t, s.server.Memory.Load())
	})
}

var twoAndTwo = []string{"p1", "p2", "d1", "d2"}

func TestPairGoesWell(t *testing.T) {
	inBubble(t, twoAndTwo, func(t *testing.T, s *stand) {
		q, v := pass1At(s, "well", "/v1/messages")
		require.Equal(t, plan.LegPair, v.set[names.HeaderLeg])
		require.Equal(t, names.MirrorCancel, v.set[names.HeaderMirror])
		require.Equal(t, "well", v.set[names.HeaderClientID])
		require.NotEmpty(t, v.set[names.HeaderPrefillEndpoint])
		d, body := q.decode(s)
		require.Equal(t, room(t, string(q.body)), room(t, body), "one room")
		require.Contains(t, body, `"model":"m","messages":[],"stream":true,"max_tokens":9}`)
		require.Contains(t, string(q.body), `"stream":false`)
		p := q.mirror(s)

		d.streams() // before there is a token
		require.Equal(t, 31*time.Second, d.receive().GetOverrideMessageTimeout().AsDuration(), "held, and Envoy told to be patient")
		p.answer(200, goodPrefill)
		require.NotNil(t, p.receive().GetResponseHeaders())
		require.True(t, p.receive().GetResponseBody().GetResponse().GetBodyMutation().GetStreamedResponse().GetEndOfStream())
		require.NotNil(t, d.receive().GetResponseHeaders(), "now they may go")
		d.ended()
		s.log(q.entry(200, "via_upstream"))
	})
}

// Headers that show that D has P's blocks go soon, and P goes on.
func TestPairHeadersThatSayEnough(t *testing.T) {
	for name, answers := range map[string]struct {
		give func(*leg)
		wait time.Duration
	}{
		"a stream that begins with its first token": {(*leg).streams, 100 * time.Millisecond},
		"a whole answer": {func(d *leg) { d.headers(false, ":status", "200", "content-type", "application/json") }, 0},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, twoAndTwo, func(t *testing.T, s *stand) {
				q, _ := pass1(s, "enough")
				d, _ := q.decode(s)
				p := q.mirror(s)
				began := time.Now()
				answers.give(d)
				if answers.wait > 0 {
					require.NotNil(t, d.receive().GetOverrideMessageTimeout())
				}
				require.NotNil(t, d.receive().GetResponseHeaders())
				require.Equal(t, answers.wait, time.Since(began))
				d.ended()
				s.log(q.entry(200, "via_upstream"))
				p.answer(200, goodPrefill)
				require.NotNil(t, p.receive().GetResponseHeaders(), "not cut")
			})
			inBubble(t, twoAndTwo, func(t *testing.T, s *stand) { // D shows P's failure first
				if answers.wait == 0 {
					return
				}
				q, _ := pass1(s, "late")
				d, _ := q.decode(s)
				p := q.mirror(s)
				answers.give(d)
				require.NotNil(t, d.receive().GetOverrideMessageTimeout())
				time.Sleep(answers.wait / 2)
				p.answer(500, "oops")
				d.redirected(q)
				s.log(q.entry(0, "downstream_remote_disconnect"))
			})
		})
	}
}

// A stream of several prompts, or of an engine that answers 200 before it has done anything, says nothing.
func TestPairHeadersThatSayNothing(t *testing.T) {
	held := func(t *testing.T, s *stand, q *request) {
		d, _ := q.decode(s)
		p := q.mirror(s)
		d.streams()
		require.NotNil(t, d.receive().GetOverrideMessageTimeout())
		p.answer(200, goodPrefill)
		require.NotNil(t, d.receive().GetResponseHeaders())
		d.ended()
		s.log(q.entry(200, "via_upstream"))
	}
	inBubble(t, twoAndTwo, func(t *testing.T, s *stand) {
		q := s.newRequest("/v1/completions", "batch", `{"model":"m","prompt":["a","b"],"stream":true}`)
		require.Zero(t, q.pass().status())
		held(t, s, q)
	})
	inBubble(t, twoAndTwo, func(t *testing.T, s *stand) {
		var eps []kvstate.EndpointSpec
		for _, e := range twoAndTwo {
			eps = append(eps, kvstate.EndpointSpec{Name: e, Addr: addressOf(e), Role: roleOf(e),
				Transfer: kvstate.Transfer{Release: "0.5.9"}})
		}
		s.state.SetPool(kvstate.PoolSpec{Name: "chat", Models: []string{"*"}}, eps)
		q, _ := pass1(s, "old")
		held(t, s, q)
	})
}

// A P that never answers is cut some time after its limit, although D has answered.
func TestPairPrefillNeverAnswers(t *testing.T) {
	inBubble(t, twoAndTwo, func(t *testing.T, s *stand) {
		q, _ := pass1(s, "never")
		d, _ := q.decode(s)
		p := q.mirror(s)
		began := time.Now()
		d.streams()
		d.receive()
		require.NotNil(t, d.receive().GetResponseHeaders())
		d.ended()
		s.log(q.entry(200, "via_upstream"))
		require.EqualValues(t, 503, p.receive().GetImmediateResponse().GetStatus().GetCode())
		require.Equal(t, 31*time.Second, time.Since(began))
	})
}

// Without headers to hold, the stream simply ends with P's good answer.
func TestPairLetsGo(t *testing.T) {
	inBubble(t, twoAndTwo, func(_ *testing.T, s *stand) {
		q, _ := pass1(s, "lets-go")
		d, _ := q.decode(s)
		q.mirror(s).answer(200, goodPrefill)
		d.ended()
		s.log(q.entry(200, "via_upstream"))
	})
}

func TestPairPrefillFails(t *testing.T) {
	for name, answer := range map[string]struct {
		status int
		body   string
	}{"500": {500, "oops"}, "503 of Envoy": {503, ""}, "nonsense": {200, "<html>"}, "429": {429, "{}"}} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, twoAndTwo, func(t *testing.T, s *stand) {
				q, first := pass1(s, "fails")
				d, body := q.decode(s)
				q.mirror(s).answer(answer.status, answer.body)
				d.redirected(q)
				second := q.pass()
				require.Equal(t, plan.LegPair, second.set[names.HeaderLeg])
				require.NotEqual(t, first.set[names.HeaderPrefillEndpoint], second.set[names.HeaderPrefillEndpoint], "another P")
				require.NotEqual(t, room(t, body), room(t, string(q.body)), "another room")
				d, _ = q.decode(s)
				q.mirror(s).answer(200, goodPrefill)
				d.ended()
				s.log(q.entry(200, "via_upstream"))
			})
		})
	}
}

// P's verdict may be in before D's leg has begun.
func TestPairPrefillIsFaster(t *testing.T) {
	inBubble(t, twoAndTwo, func(_ *testing.T, s *stand) {
		q, _ := pass1(s, "faster")
		p := q.mirror(s)
		p.answer(500, "")
		p.receive()
		synctest.Wait()
		d, _ := q.decode(s)
		d.redirected(q)
		s.log(q.entry(0, "downstream_remote_disconnect"))
	})
}

func TestPairRefused(t *testing.T) {
	inBubble(t, twoAndTwo, func(t *testing.T, s *stand) {
		q, _ := pass1(s, "refused")
		d, _ := q.decode(s)
		q.mirror(s).answer(400, `{"error":"of P"}`)
		i := d.receive().GetImmediateResponse()
		require.EqualValues(t, 400, i.GetStatus().GetCode())
		require.Equal(t, `{"error":"of P"}`, string(i.GetBody()))
		s.log(q.entry(400, "tandem_prefill_refused"))
	})
}

// P reports its load along with its answer, which nobody else reads.
func TestPairPrefillReportsItsLoad(t *testing.T) {
	inBubble(t, twoAndTwo, func(t *testing.T, s *stand) {
		q, _ := pass1(s, "load")
		d, _ := q.decode(s)
		p := q.mirror(s)
		p.headers(true, ":status", "200", names.HeaderLoad, `JSON {"named_metrics":{"kv_cache_usage_perc":0.5}}`)
		synctest.Wait()
		var v kvstate.View
		s.state.View(s.state.Pool("chat"), nil, &v)
		require.True(t, slices.ContainsFunc(v.Endpoints, func(c kvstate.Candidate) bool {
			return c.Signals != nil && c.Signals.KVUsage == .5
		}))
		d.cancel()
		s.log(q.entry(0, "downstream_remote_disconnect"))
	})
}

// D's end is P's too. A 408 or a 425 is no refusal of the request: it says that D did not serve it.
func TestPairDecodeDoesNotServe(t *testing.T) {
	for _, status := range []int{408, 425, 429, 500, 503} {
		inBubble(t, twoAndTwo, func(t *testing.T, s *stand) {
			q, first := pass1(s, "decode")
			d, _ := q.decode(s)
			q.mirror(s)
			d.answer(status, "")
			d.redirected(q)
			second := q.pass()
			require.NotEqual(t, first.set[names.HeaderEndpoint], second.set[names.HeaderEndpoint], "another D")
			s.log(q.entry(0, "downstream_remote_disconnect"))
		})
	}
}

// D's end is P's too.
func TestPairDecodeFails(t *testing.T) {
	inBubble(t, twoAndTwo, func(t *testing.T, s *stand) {
		q, first := pass1(s, "decode")
		d, _ := q.decode(s)
		p := q.mirror(s)
		d.answer(503, "")
		d.redirected(q)
		require.EqualValues(t, 503, p.receive().GetImmediateResponse().GetStatus().GetCode(), "cut")
		second := q.pass()
		require.NotEqual(t, first.set[names.HeaderEndpoint], second.set[names.HeaderEndpoint], "another D")
		s.log(q.entry(0, "downstream_remote_disconnect"))
	})
}

// D's connection breaks, and P's leg ends with it. Which of them was the cause is unknown, so the next pair has another
// D, although there is only one P; and P's answer says how P failed: it is neither unreached nor out of service.
func TestPairWhoseConnectionBreaks(t *testing.T) {
	for _, status := range []int{500, 503} {
		inBubble(t, []string{"p1", "d1", "d2"}, func(t *testing.T, s *stand) {
			q, first := pass1(s, "breaks")
			p := q.mirror(s)
			p.answer(status, "")
			p.receive()
			require.Equal(t, 307, q.replan().Code)
			p1 := s.state.Pool("chat").Endpoint(addressOf("p1"))
			require.False(t, p1.Failed())
			q.follow()
			second := q.pass()
			if status == 503 {
				require.Equal(t, 503, second.status(), "P is full, and there is no other")
				return
			}
			require.Equal(t, plan.LegPair, second.set[names.HeaderLeg])
			require.NotEqual(t, first.set[names.HeaderEndpoint], second.set[names.HeaderEndpoint], "another D")
			s.log(q.entry(0, "downstream_remote_disconnect"))
		})
	}
}

func TestPairClientLeaves(t *testing.T) {
	inBubble(t, twoAndTwo, func(t *testing.T, s *stand) {
		q, _ := pass1(s, "leaves")
		d, _ := q.decode(s)
		p := q.mirror(s)
		d.cancel()
		require.EqualValues(t, 503, p.receive().GetImmediateResponse().GetStatus().GetCode())
		s.log(q.entry(0, "downstream_remote_disconnect"))
	})
}

func TestPairTimeIsUp(t *testing.T) {
	inBubble(t, twoAndTwo, func(t *testing.T, s *stand) {
		began := time.Now()
		q, _ := pass1(s, "time")
		d, _ := q.decode(s)
		p := q.mirror(s)
		d.redirected(q)
		require.Equal(t, 30*time.Second, time.Since(began))
		require.EqualValues(t, 503, p.receive().GetImmediateResponse().GetStatus().GetCode())
		s.log(q.entry(0, "downstream_remote_disconnect"))
	})
}

// Two replicas serve a leg each: what one has to know of the other comes by Envoy's access log.
func TestPairOverTwoReplicas(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		one := pairStand(t, "sglang", twoAndTwo...)
		two := pairStand(t, "sglang", twoAndTwo...)
		two.core.Apply(pass.Settings{Keys: one.server.passes.Keys(), Pools: two.core.Settings().Pools})

		q, _ := pass1(one, "prefill-fails")
		d, _ := q.decode(one)
		p := q.mirror(two)
		p.answer(500, "")
		p.receive()
		one.logMirror(q, 500)
		d.redirected(q)
		one.log(q.entry(0, "downstream_remote_disconnect"))

		q, _ = pass1(one, "client-leaves")
		d, _ = q.decode(one)
		p = q.mirror(two)
		d.cancel()
		two.log(q.entry(0, "downstream_remote_disconnect"))
		require.EqualValues(t, 503, p.receive().GetImmediateResponse().GetStatus().GetCode())
		one.log(q.entry(0, "downstream_remote_disconnect"))

		q, _ = pass1(one, "well")
		d, _ = q.decode(one)
		q.mirror(two).answer(200, goodPrefill)
		one.logMirror(q, 200)
		d.ended()
		one.log(q.entry(200, "via_upstream"))
		synctest.Wait()
		require.Zero(t, one.state.Bookings.Reservations())
	})
}

// logMirror is the mirrored leg's access log entry.
func (s *stand) logMirror(q *request, status int) {
	stream, err := s.logs.StreamAccessLogs(s.t.Context())
	require.NoError(s.t, err)
	e := q.entry(status, "via_upstream")
	e.Request.RequestId = "another"
	e.Request.RequestHeaders[names.HeaderClientID] = q.headers[names.HeaderClientID]
	require.NoError(s.t, stream.Send(&logv3.StreamAccessLogsMessage{
		Identifier: &logv3.StreamAccessLogsMessage_Identifier{LogName: envoywire.LogNameMirror},
		LogEntries: &logv3.StreamAccessLogsMessage_HttpLogs{HttpLogs: &logv3.StreamAccessLogsMessage_HTTPAccessLogEntries{LogEntry: []*logdatav3.HTTPAccessLogEntry{e}}},
	}))
	_, err = stream.CloseAndRecv()
	require.True(s.t, err == nil || errors.Is(err, io.EOF) || err.Error() != "", "%v", err)
}

// Where no pair is left there is an answer, and engines started for neither leg take what pairs cannot.
func TestPairAlternatives(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := pairStand(t, "sglang", "p1", "d1", "b1")
		q := s.newRequest("/v1/responses", "stored", `{"model":"m","input":"x","store":true}`)
		v := q.pass()
		require.Equal(t, addressOf("b1"), v.set[names.HeaderEndpoint])
		require.Equal(t, plan.LegDecode, v.set[names.HeaderLeg])
		s.log(q.entry(200, "via_upstream"))

		s = pairStand(t, "sglang", "p1", "d1")
		for body, code := range map[string]string{`{"model":"m","input":"x","store":true}`: "not_over_two_engines"} {
			q = s.newRequest("/v1/responses", "stored", body)
			v = q.pass()
			require.Equal(t, 400, v.status())
			require.Contains(t, string(v.immediate.GetBody()), code)
		}
		s = pairStand(t, "mooncake", "p1", "d1") // whose P is not known: D does it alone
		q, v = pass1(s, "unknown")
		require.Equal(t, plan.LegDecode, v.set[names.HeaderLeg])
		s.log(q.entry(200, "via_upstream"))
	})
}

// A pool without endpoints, or with those of one role, is the client's 503.
func TestPairWithoutEndpoints(t *testing.T) {
	for _, dialect := range []string{"sglang", "mooncake"} {
		for _, endpoints := range [][]string{nil, {"p1"}} {
			s := pairStand(t, dialect, endpoints...)
			v := s.newRequest("/v1/chat/completions", "r1", chatBody).pass()
			require.Equal(t, 503, v.status(), "%s %v", dialect, endpoints)
			require.Zero(t, s.state.Bookings.Reservations())
		}
	}
}

// A ticket of another kind opens neither leg.
func TestPairForeignTickets(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := pairStand(t, "sglang", twoAndTwo...)
		sealed, err := s.server.passes.Keys().Seal(nil, &kvtransfer.Ticket{Stage: kvtransfer.DecodeLeg, Expires: time.Now().Add(time.Minute)}, "x")
		require.NoError(t, err)
		for _, ticket := range []string{"", "forged", string(sealed)} {
			for _, role := range []string{names.RoleDecodeLeg, names.RoleMirror} {
				l := s.leg(role)
				require.NoError(t, l.stream.Send(&extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_RequestHeaders{
					RequestHeaders: &extprocv3.HttpHeaders{Headers: wiretest.HeaderMap(names.HeaderTicket, ticket, names.HeaderClientID, "x")},
				}}))
				require.EqualValues(t, 500, l.receive().GetImmediateResponse().GetStatus().GetCode(), "%s with %q", role, ticket)
			}
		}
	})
}

// A pair whose KV failed to load is avoided. The only one is tried all the same: it may fail again, but an error is certain.
func TestTheOnlyPairIsTriedAgain(t *testing.T) {
	for dialect, leg := range map[string]string{"sglang": plan.LegPair, "nixl": plan.LegPrefill} {
		for _, body := range []string{chatBody, `{"model":"m","stream":true,"messages":[{"role":"user","content":"Hi"}]}`} {
			s := pairStand(t, dialect, "p1", "d1")
			policy := s.core.Settings().Pools["chat"]
			policy.Alone = plan.AloneNever
			s.policy("chat", policy)
			s.state.KVLoads.LoadFailed(s.state.Pool("chat"), addressOf("p1"), addressOf("d1"))
			q := s.newRequest("/v1/chat/completions", "r1", body)
			v := q.pass()
			require.Zero(t, v.status(), "%v", v.immediate)
			require.Equal(t, leg, q.headers[names.HeaderLeg])
		}
	}
}
