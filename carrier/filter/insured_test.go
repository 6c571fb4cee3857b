package filter

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"hash/fnv"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tandem/extproc/journey"
	"tandem/extproc/migration"
	"tandem/extproc/names"
	"tandem/extproc/pass"
	"tandem/extproc/plan"
)

// streams is the part of a [client] that is about answers which the filter makes by itself.
type streams struct {
	play     func(leg *startedLeg)
	legs     []*startedLeg
	headSent bool // an answer has begun
	gets     bytes.Buffer
	slow     int // bytes that the client still takes; 0: all
	done     bool
	broken   bool
}

// startedLeg is a leg that the filter started.
type startedLeg struct {
	id     uint64
	at     string
	body   []byte
	status int
	local  bool // Envoy answers in place of the endpoint
	inline bool // it fails before StartStream returns
	never  bool // Envoy cannot start it
	kind   string
	coded  string   // Content-Encoding
	pieces []string // of the answer
	cut    bool     // its connection breaks behind them
	stays  bool     // nothing comes behind them, for now
	begun  bool
	over   bool
}

func (c *client) StartStream(call *Call) (uint64, bool) {
	u := &startedLeg{id: uint64(len(c.legs) + 1), body: slices.Clone(call.Body), status: 200, kind: "text/event-stream"}
	for _, h := range call.Set {
		if h.Name == "x-gateway-destination-endpoint" {
			u.at = h.Value
		}
	}
	c.legs = append(c.legs, u)
	c.play(u)
	if u.inline {
		u.over = true
		c.filter.insured.Load().StreamReset(u.id)
	}
	if u.never {
		u.over = true
		return 0, false
	}
	return u.id, true
}

func (c *client) ResetStream(id uint64) {
	u := c.legs[id-1]
	if !u.over {
		u.over = true
		c.filter.insured.Load().StreamReset(id) // as Envoy does
	}
}

func (c *client) SendHeaders(headers []Header) {
	require.False(c.tb, c.headSent, "one head")
	c.headSent = true
	for _, h := range headers {
		if h.Name == ":status" {
			c.status, _ = strconv.Atoi(h.Value)
		}
		require.NotEqual(c.tb, "content-length", h.Name)
		c.explained += valueOf(h, names.HeaderExplanation)
		c.named += valueOf(h, names.HeaderRequestID)
	}
}

func (c *client) Send(data []byte, end bool) {
	require.True(c.tb, c.headSent && !c.done && !c.broken)
	c.gets.Write(data)
	if c.slow > 0 && c.gets.Len() >= c.slow {
		c.filter.insured.Load().AboveWatermark()
	}
	if c.done = end; end { // Envoy ends the filter at once
		c.end()
	}
}

// breakOff is [client.Reset] of an answer that the filter makes by itself.
func (c *client) breakOff() {
	require.True(c.tb, !c.done && !c.broken)
	c.broken = true
	c.end()
}

// deliver has the next thing of an open leg happen. false: there is nothing.
func (c *client) deliver() bool {
	for _, u := range c.legs {
		if u.over || u.begun && len(u.pieces) == 0 && u.stays {
			continue
		}
		in := c.filter.insured.Load()
		switch {
		case !u.begun:
			u.begun = true
			in.StreamHeaders(u.id, func(do func(name, value []byte)) {
				do([]byte(":status"), []byte(strconv.Itoa(u.status)))
				do([]byte("content-type"), []byte(u.kind))
				do([]byte("transfer-encoding"), []byte("chunked"))
				if u.coded != "" {
					do([]byte("content-encoding"), []byte(u.coded))
				}
				if !u.local {
					do([]byte("x-envoy-upstream-service-time"), []byte("3"))
				}
			}, false)
		case len(u.pieces) > 0:
			p := []byte(u.pieces[0])
			u.pieces = u.pieces[1:]
			in.StreamData(u.id, [][]byte{p[:len(p)/2], p[len(p)/2:]}, false)
		case u.cut:
			u.over = true
			in.StreamReset(u.id)
		default:
			u.over = true
			in.StreamData(u.id, nil, true)
		}
		return true
	}
	return false
}

// stream runs a request whose answer is streamed to its end, or until nothing happens any more by itself.
func (c *client) stream() {
	c.begin()
	c.goOn()
}

func (c *client) goOn() {
	for !c.done && !c.broken && (c.headSent || c.status == 0) {
		if c.deliver() {
			continue
		}
		open := slices.ContainsFunc(c.legs, func(u *startedLeg) bool { return !u.over && u.stays })
		if c.filter.m == nil && open {
			return
		}
		c.step()
	}
	if !c.done && !c.broken {
		c.end()
	}
}

// next is a token: a function of all before it.
func next(ids []int) int {
	h := fnv.New32a()
	for _, id := range ids {
		fmt.Fprint(h, id, ",")
	}
	return int(h.Sum32() % 50)
}

// writes returns the events of an engine that answers a chat with ids of one token each.
func writes(tb testing.TB, who int, body []byte) (events []string) {
	tb.Helper()
	var r struct {
		Max   int  `json:"max_tokens"`
		IDs   bool `json:"return_token_ids"`
		Usage struct {
			Include bool `json:"include_usage"`
		} `json:"stream_options"`
		KV struct {
			Prompt []int `json:"prompt_token_ids"`
		} `json:"kv_transfer_params"`
	}
	require.NoError(tb, json.Unmarshal(body, &r), string(body))
	again := bytes.Contains(body, []byte(`"tools"`)) || bytes.Contains(body, []byte(`"structured_outputs"`)) || bytes.Contains(body, []byte(`"seed"`))
	require.True(tb, r.IDs || again && r.KV.Prompt == nil, "the filter asks for ids: %s", body)
	ids := r.KV.Prompt
	if ids == nil {
		ids = []int{1, 2, 3}
	}
	prompt := len(ids)
	event := func(choices, more string) {
		events = append(events, fmt.Sprintf(`data: {"id":"from-%d","object":"chunk","created":%d,"model":"m","choices":[%s]%s}`+
			"\n\n", who, who, choices, more))
	}
	text, _ := json.Marshal(ids)
	event(`{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}`, `,"prompt_token_ids":`+string(text))
	r.Max = cmp.Or(r.Max, 9)
	for i := range r.Max {
		id := next(ids)
		ids = append(ids, id)
		finish := "null"
		if i == r.Max-1 {
			finish = `"length"`
		}
		event(fmt.Sprintf(`{"index":0,"delta":{"content":" w%d"},"finish_reason":%s,"token_ids":[%d]}`, id, finish, id), "")
	}
	if r.Usage.Include {
		event("", fmt.Sprintf(`,"usage":{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d}`, prompt, prompt+r.Max, r.Max))
	}
	return append(events, "data: [DONE]\n\n")
}

const insuredChat = `{"model":"m","messages":[{"role":"user","content":"hello"}],"temperature":0,"max_tokens":9,"stream":true,` +
	`"stream_options":{"include_usage":true}}`

// uninterrupted is what a client without Tandem would get.
func uninterrupted(tb testing.TB) string {
	tb.Helper()
	var out strings.Builder
	for _, e := range writes(tb, 1, []byte(strings.Replace(insuredChat, "{", `{"return_token_ids":true,`, 1))) {
		out.WriteString(hideIDs(e))
	}
	return out.String()
}

func hideIDs(event string) string {
	for _, member := range []string{`"token_ids":`, `"prompt_token_ids":`} {
		if at := strings.Index(event, member); at >= 0 {
			from := at + len(member)
			event = event[:from] + "null" + event[from+strings.IndexByte(event[from:], ']')+1:]
		}
	}
	return event
}

// insuredFleet is a fleet whose pool continues streams.
func insuredFleet(tb testing.TB, change func(*pass.Policy)) *fleet {
	tb.Helper()
	return newFleet(tb, func(p *pass.Policy) {
		always(p)
		p.Streams = migration.Policy{On: true}
		if change != nil {
			change(p)
		}
	})
}

// whole requires that everything of a request is gone.
func (c *client) nothingStays() {
	c.tb.Helper()
	f := c.fleet
	require.Eventually(c.tb, func() bool { return f.reserved() == 0 }, time.Minute, time.Millisecond)
	require.Eventually(c.tb, func() bool { return f.Memory.Load() == 0 }, time.Minute, time.Millisecond)
	require.Empty(c.tb, f.insured)
	require.Empty(c.tb, f.waiting)
	require.Equal(c.tb, c.wakers, c.closed)
	for _, u := range c.legs {
		require.True(c.tb, u.over, "a leg to %s stays open", u.at)
	}
}

// A D that dies behind any event, and those after it, cost the client nothing: it gets what one engine would have sent.
func TestAStreamOutlivesItsEngines(t *testing.T) {
	want := uninterrupted(t)
	total := strings.Count(want, "\n\n")
	for deaths := range 3 {
		for cut := range total + 1 {
			t.Run(fmt.Sprint(deaths, " deaths, behind event ", cut), func(t *testing.T) {
				f := insuredFleet(t, longAfter)
				c := newClient(t, f, well, insuredChat)
				c.play = func(u *startedLeg) {
					u.pieces = writes(t, len(c.legs), u.body)
					if len(c.legs) <= deaths {
						u.pieces, u.cut = u.pieces[:min(cut, len(u.pieces))], true
					}
				}
				c.stream()
				if deaths == 2 && cut < 2 { // the second one dies before it has written anything
					require.True(t, strings.HasPrefix(want, c.gets.String()))
					require.Len(t, c.legs, 2)
					require.False(t, c.done)
					c.nothingStays()
					return
				}
				require.Equal(t, want, unified(c.gets.String()))
				require.True(t, c.done)
				if len(c.legs) > 1 {
					require.NotEqual(t, c.legs[0].at, c.legs[1].at, "another endpoint")
				}
				c.nothingStays()
			})
		}
	}
}

// insuredAgent is an agent's request.
var insuredAgent = strings.Replace(insuredChat, "{", `{"tools":[{"type":"function","function":{"name":"read"}}],`, 1)

// calls is an answer with reasoning and a tool call, as an engine writes it.
func calls(who int) (events []string) {
	for _, choice := range []string{
		`"delta":{"role":"assistant","content":""},"finish_reason":null`, `"delta":{"reasoning":"Hm"},"finish_reason":null`,
		`"delta":{"reasoning":"."},"finish_reason":null`, `"delta":{"content":"I read"},"finish_reason":null`,
		fmt.Sprintf(`"delta":{"tool_calls":[{"id":"call-%d","type":"function","index":0,"function":{"name":"read"}}]},"finish_reason":null`, who),
		`"delta":{"tool_calls":[{"index":0,"function":{"arguments":"{\"path\""}}]},"finish_reason":null`,
		`"delta":{"tool_calls":[{"index":0,"function":{"arguments":": 1}"}}]},"finish_reason":null`,
		`"delta":{},"finish_reason":"tool_calls"`,
	} {
		events = append(events, fmt.Sprintf(`data: {"id":"from-%d","object":"chunk","created":%d,"model":"m","choices":[{"index":0,%s}]}`+
			"\n\n", who, who, choice))
	}
	events = append(events, fmt.Sprintf(`data: {"id":"from-%d","object":"chunk","created":%d,"model":"m","choices":[],"usage":`+
		`{"prompt_tokens":3,"total_tokens":9,"completion_tokens":6}}`+"\n\n", who, who))
	return append(events, "data: [DONE]\n\n")
}

// So it is with an answer that another engine repeats. The call keeps the id that the client has.
func TestAnAgentsStreamOutlivesItsEngines(t *testing.T) {
	want := strings.Join(calls(1), "")
	for deaths := range 3 {
		for cut := range len(calls(1)) {
			t.Run(fmt.Sprint(deaths, " deaths, behind event ", cut), func(t *testing.T) {
				f := insuredFleet(t, longAfter)
				c := newClient(t, f, well, insuredAgent)
				c.play = func(u *startedLeg) {
					require.NotContains(t, string(u.body), "token_ids")
					u.pieces = calls(len(c.legs))
					if len(c.legs) <= deaths { // each of them writes an event that the client lacks
						u.pieces, u.cut = u.pieces[:min(cut+len(c.legs)-1, len(u.pieces))], true
					}
				}
				c.stream()
				got := c.gets.String()
				if !strings.Contains(got, `"call-1"`) { // the first one died before it began its call
					got = strings.NewReplacer("call-2", "call-1", "call-3", "call-1").Replace(got)
				}
				require.Equal(t, want, unified(got))
				require.True(t, c.done)
				c.nothingStays()
			})
		}
	}
}

// longAfter makes no death one that comes soon after the engine took over.
func longAfter(p *pass.Policy) { p.Streams.DiesWithin = time.Nanosecond }

// unified gives a stream that began at a later engine, since the first ones died before their first event, the name of
// the first.
func unified(stream string) string {
	for _, n := range []string{"2", "3"} {
		stream = strings.ReplaceAll(stream, `"id":"from-`+n+`"`, `"id":"from-1"`)
		stream = strings.ReplaceAll(stream, `"created":`+n, `"created":1`)
	}
	return stream
}

// The other ways in which an engine ends a stream before its time, and what the client gets.
func TestInsuredStreams(t *testing.T) {
	const failed = `data: {"error": {"message": "died", "code": 500}}` + "\n\n"
	var fl *fleet
	for name, tt := range map[string]struct {
		policy func(*pass.Policy)
		play   func(n int, u *startedLeg)
		legs   int
		whole  bool // the client gets the uninterrupted stream
		broken bool
		status int
		reply  string // a part of what it gets
	}{
		"well": {legs: 1, whole: true},
		"D reports an error": {play: func(n int, u *startedLeg) {
			if n == 1 {
				u.pieces = append(u.pieces[:4], failed, "data: [DONE]\n\n")
			}
		}, legs: 2, whole: true},
		"D's first event is an error": {play: func(n int, u *startedLeg) {
			if n == 1 {
				u.pieces = []string{failed, "data: [DONE]\n\n"}
			}
		}, legs: 2, whole: true},
		"D ends without [DONE]": {play: func(n int, u *startedLeg) {
			if n == 1 {
				u.pieces = u.pieces[:4]
			}
		}, legs: 2, whole: true},
		"D dies before [DONE]": {play: func(_ int, u *startedLeg) { u.pieces, u.cut = u.pieces[:len(u.pieces)-2], true }, legs: 1, whole: true},
		"D refuses the connection": {play: func(n int, u *startedLeg) {
			if n == 1 {
				u.status, u.local, u.kind, u.pieces = 503, true, "text/plain", []string{"reset reason: connection failure"}
			}
		}, legs: 2, whole: true},
		"Envoy has no connection for D": {play: func(n int, u *startedLeg) { u.never = n == 1 }, legs: 2, whole: true},
		"D cannot be sent to":           {play: func(n int, u *startedLeg) { u.inline = n == 1 }, legs: 2, whole: true},
		"D is full": {play: func(n int, u *startedLeg) {
			if n == 1 {
				u.status, u.kind, u.pieces = 503, "application/json", []string{"{}"}
			}
		}, legs: 2, whole: true},
		"D refuses the request": {play: func(_ int, u *startedLeg) {
			u.status, u.kind, u.pieces = 400, "application/json", []string{`{"error":"bad"}`}
		}, legs: 1, status: 400, reply: `{"error":"bad"}`},
		"D gives no ids": {play: func(_ int, u *startedLeg) {
			for i := range u.pieces {
				u.pieces[i] = hideIDs(u.pieces[i])
			}
			u.pieces, u.cut = u.pieces[:4], true
		}, legs: 1, broken: true},
		"every D refuses what goes on": {play: func(n int, u *startedLeg) {
			if n == 1 {
				u.pieces, u.cut = u.pieces[:4], true
			} else {
				u.status, u.kind, u.pieces = 400, "application/json", []string{`{"error":"bad"}`}
			}
		}, legs: 3, broken: true},
		"the next D begins anew": {play: func(n int, u *startedLeg) {
			switch n {
			case 1:
				u.pieces, u.cut = u.pieces[:4], true
			case 2: // it ignores the ids, and the first one has come back
				for _, e := range fl.state.Pool("chat").Endpoints() {
					fl.state.Health.MarkGood(e)
				}
				u.pieces = writes(t, 2, []byte(strings.Replace(insuredChat, "{", `{"return_token_ids":true,`, 1)))
			}
		}, legs: 3, whole: true},
		"the next D writes something else": {play: func(n int, u *startedLeg) {
			switch n {
			case 1:
				u.pieces, u.cut = append(u.pieces[:4], u.pieces[4][:20]), true
			case 2:
				u.pieces = append(u.pieces[:2], "data: {\"nonsense\n\n")
			}
		}, legs: 3, whole: true},
		"too often": {policy: func(p *pass.Policy) { p.Streams.Most = 1; longAfter(p) }, play: func(_ int, u *startedLeg) {
			u.pieces, u.cut = u.pieces[:2], true
		}, legs: 2, broken: true},
		"two die, one soon after the other": {play: func(_ int, u *startedLeg) {
			u.pieces, u.cut = u.pieces[:2], true
		}, legs: 2, broken: true},
		"the next one dies before its first event": {play: func(n int, u *startedLeg) {
			u.cut = true
			if n == 1 {
				u.pieces = u.pieces[:2]
			} else {
				u.pieces = nil
			}
		}, legs: 2, broken: true},
		"two die before their first event": {play: func(_ int, u *startedLeg) { u.pieces, u.cut = nil, true }, legs: 2, status: 503},
		"three die, long after each other": {policy: longAfter, play: func(_ int, u *startedLeg) {
			u.pieces, u.cut = u.pieces[:2], true
		}, legs: 3, broken: true},
		"two report errors": {play: func(_ int, u *startedLeg) {
			u.pieces = append(u.pieces[:2], failed, "data: [DONE]\n\n")
		}, legs: 2, reply: `"died"`},
		"each one's first event is an error": {play: func(_ int, u *startedLeg) {
			u.pieces = []string{failed, "data: [DONE]\n\n"}
		}, legs: 4, reply: `"died"`}, // it may be P's KV, twice
		"D says that the request is at fault": {play: func(_ int, u *startedLeg) {
			u.pieces = append(u.pieces[:2], `data: {"error": {"message": "too long", "code": 400}}`+"\n\n", "data: [DONE]\n\n")
		}, legs: 1, reply: "too long"},
		"an encoded answer": {play: func(_ int, u *startedLeg) {
			u.coded, u.pieces, u.cut = "gzip", []string{"\x1f\x8b"}, true
		}, legs: 1, broken: true, reply: "\x1f\x8b"},
		"a continuation is encoded": {play: func(n int, u *startedLeg) {
			if u.cut = n == 1; n == 1 {
				u.pieces = u.pieces[:4]
			} else if n == 2 {
				u.coded, u.pieces = "gzip", []string{"\x1f\x8b"}
			}
		}, legs: 3, whole: true},
		"text that is no stream of events, and breaks": {play: func(_ int, u *startedLeg) {
			u.pieces, u.cut = []string{"HELLO\n\n"}, true
		}, legs: 1, broken: true, reply: "HELLO"},
		"text that is no stream of events, and ends": {play: func(_ int, u *startedLeg) {
			u.pieces = []string{"HELLO\n\n"}
		}, legs: 1, reply: "HELLO"},
	} {
		t.Run(name, func(t *testing.T) {
			f := insuredFleet(t, tt.policy)
			fl = f
			c := newClient(t, f, well, insuredChat)
			c.play = func(u *startedLeg) {
				u.pieces = writes(t, len(c.legs), u.body)
				if tt.play != nil {
					tt.play(len(c.legs), u)
				}
			}
			c.stream()
			require.Equal(t, tt.broken, c.broken)
			require.Len(t, c.legs, tt.legs, c.gets.String())
			if tt.whole {
				require.Equal(t, uninterrupted(t), unified(c.gets.String()))
			}
			if tt.status > 0 {
				require.Equal(t, tt.status, c.status)
			}
			require.Contains(t, c.gets.String(), tt.reply)
			c.nothingStays()
		})
	}
}

// The usage of an insured stream counts what prefill found in its cache, whether one engine writes it or several do.
func TestInsuredStreamsCountWhatPrefillHadCached(t *testing.T) {
	for _, cut := range []int{0, 4} {
		f := insuredFleet(t, func(p *pass.Policy) { p.Cached = plan.CachedInPassing })
		first := true
		c := newClient(t, f, func(at string, body []byte) engineAnswer {
			a := well(at, body)
			if prefills(at) && first {
				first = false
				a.body = strings.Replace(a.body, `"completion_tokens":1`, `"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":3}`, 1)
			}
			return a
		}, insuredChat)
		c.play = func(u *startedLeg) {
			u.pieces = writes(t, len(c.legs), u.body)
			for i := range u.pieces {
				u.pieces[i] = strings.Replace(u.pieces[i], `"usage":{`, `"usage":{"prompt_tokens_details":{"cached_tokens":12},`, 1)
			}
			if cut > 0 && len(c.legs) == 1 {
				u.pieces, u.cut = u.pieces[:cut], true
			}
		}
		c.stream()
		require.True(t, c.done)
		require.Contains(t, c.gets.String(), `"usage":{"prompt_tokens_details":{"cached_tokens":3},`)
		c.nothingStays()
	}
}

// An engine that is drained, or fails and is silent, keeps its stream until another one writes; without another one it
// goes on.
func TestStreamsAreMoved(t *testing.T) {
	const failed = `data: {"error": {"message": "died", "code": 500}}` + "\n\n"
	for name, tt := range map[string]struct {
		others bool   // decode endpoints that take the stream
		next   string // what they say in place of the answer
		most   int    // how often it may be continued
		says   string // the engine's last words, while another one is asked
		cut    bool   // the engine dies then
		whole  bool
	}{
		"another engine":           {others: true, whole: true},
		"no other":                 {whole: true},
		"others report errors":     {next: failed + "data: [DONE]\n\n", whole: true},
		"one reports an error":     {next: failed + "data: [DONE]\n\n", most: 1, whole: true},
		"a comment is no event":    {next: ": ping\n\n", most: 1, whole: true},
		"no other, and it dies":    {cut: true},
		"it reports an error":      {says: failed, cut: true},
		"it reports an error once": {says: failed + "data: [DONE]\n\n"},
	} {
		t.Run(name, func(t *testing.T) {
			f := insuredFleet(t, func(p *pass.Policy) { p.Streams.Most = tt.most })
			c := newClient(t, f, well, insuredChat)
			c.play = func(u *startedLeg) {
				u.pieces = writes(t, len(c.legs), u.body)
				switch {
				case len(c.legs) == 1:
					u.pieces, u.stays = u.pieces[:4], true
				case tt.next != "":
					u.pieces, u.cut = []string{tt.next}, tt.next[0] == ':'
				case !tt.others:
					u.status, u.kind, u.pieces = 400, "application/json", []string{"no"}
				}
			}
			c.stream()
			one := c.legs[0]
			require.False(t, one.over)
			in := c.filter.insured.Load()
			in.move(journey.CauseMoved)
			require.NotNil(t, in.spare)
			all := writes(t, 1, one.body)
			in.StreamData(one.id, [][]byte{[]byte(all[4])}, false) // it goes on meanwhile
			if one.pieces, one.stays, one.cut = all[5:], tt.others, tt.cut; !tt.whole {
				one.pieces = slices.DeleteFunc([]string{tt.says}, func(s string) bool { return s == "" })
			}
			c.goOn()
			require.Equal(t, tt.whole, c.done && !c.broken && !strings.Contains(c.gets.String(), `"error"`))
			if tt.whole {
				require.Equal(t, uninterrupted(t), unified(strings.Replace(c.gets.String(), ": ping\n\n", "", 1)))
				require.Equal(t, tt.others, in.journey.Joined(), "what nobody took was not continued")
			}
			c.nothingStays()
		})
	}
}

// What a client does not take waits in the filter, up to a bound.
func TestSlowClients(t *testing.T) {
	want := uninterrupted(t)
	t.Run("it takes the rest later", func(t *testing.T) {
		f := insuredFleet(t, nil)
		c := newClient(t, f, well, insuredChat)
		c.slow = 300
		c.play = func(u *startedLeg) { u.pieces = writes(t, len(c.legs), u.body) }
		c.begin()
		for len(c.legs) == 0 {
			c.step()
		}
		for c.deliver() {
		}
		require.Less(t, c.gets.Len(), len(want))
		require.Positive(t, f.Memory.Load(), "what waits is counted")
		c.slow = 0
		c.filter.insured.Load().BelowWatermark()
		require.Equal(t, want, c.gets.String())
		require.True(t, c.done)
		c.nothingStays()
	})
	t.Run("it takes nothing", func(t *testing.T) {
		f := insuredFleet(t, nil)
		c := newClient(t, f, well, insuredChat)
		c.slow = 1
		c.play = func(u *startedLeg) {
			u.pieces = writes(t, 1, u.body)[:3]
			for range 6 {
				u.pieces = append(u.pieces, ": "+strings.Repeat("x", 1<<20)+"\n\n")
			}
		}
		c.stream()
		require.True(t, c.broken)
		require.Less(t, c.gets.Len(), 1<<20)
		c.nothingStays()
	})
}

// A client that leaves ends everything at once, whatever the filter is at: also while its stream is moved.
func TestInsuredClientsLeave(t *testing.T) {
	for steps := range 60 {
		moved := steps >= 30
		steps %= 30
		f := insuredFleet(t, nil)
		c := newClient(t, f, well, insuredChat)
		c.play = func(u *startedLeg) {
			u.pieces = writes(t, len(c.legs), u.body)
			u.pieces, u.cut = u.pieces[:min(5, len(u.pieces))], true
		}
		c.begin()
		for i := range steps {
			if in := c.filter.insured.Load(); moved && in != nil && i%3 == 0 && !c.done && !c.broken {
				in.move(journey.CauseMoved)
			}
			if !c.done && !c.broken && !c.deliver() {
				c.step()
			}
		}
		if !c.done && !c.broken {
			c.answer = engineAnswer{local: "downstream_remote_disconnect"}
			c.end()
		}
		c.nothingStays()
	}
}

// Requests that are not insured go the way that they went.
func TestWhichStreamsAreInsured(t *testing.T) {
	for name, tt := range map[string]struct {
		policy  migration.Policy
		body    string
		headers []Header
		insured bool
	}{
		"off":                  {migration.Policy{}, insuredChat, nil, false},
		"on":                   {migration.Policy{On: true}, insuredChat, nil, true},
		"not streamed":         {migration.Policy{On: true}, chat, nil, false},
		"without the header":   {migration.Policy{On: true, Header: "x-keep"}, insuredChat, nil, false},
		"with it":              {migration.Policy{On: true, Header: "x-keep"}, insuredChat, []Header{{"x-keep", "1"}}, true},
		"short":                {migration.Policy{On: true, MinAnswer: 10}, insuredChat, nil, false},
		"long":                 {migration.Policy{On: true, MinAnswer: 9}, insuredChat, nil, true},
		"without a limit":      {migration.Policy{On: true, MinAnswer: 99}, strings.Replace(insuredChat, `"max_tokens":9,`, "", 1), nil, true},
		"with a grammar":       {migration.Policy{On: true}, strings.Replace(insuredChat, "{", `{"structured_outputs":{"regex":"a"},`, 1), nil, true},
		"with tools":           {migration.Policy{On: true}, insuredAgent, nil, true},
		"with tools, sampled":  {migration.Policy{On: true}, strings.Replace(insuredAgent, `"temperature":0,`, "", 1), nil, false},
		"it gets a seed":       {migration.Policy{On: true, Seeds: true}, strings.Replace(insuredAgent, `"temperature":0,`, "", 1), nil, true},
		"seed":                 {migration.Policy{On: true}, strings.Replace(insuredChat, `"temperature":0`, `"temperature":1,"seed":1`, 1), nil, true},
		"seed, and it is said": {migration.Policy{On: true, Inexact: true}, strings.Replace(insuredChat, `"temperature":0`, `"temperature":1,"seed":1`, 1), nil, true},
	} {
		t.Run(name, func(t *testing.T) {
			f := insuredFleet(t, func(p *pass.Policy) { p.Streams = tt.policy })
			c := newClient(t, f, well, tt.body)
			c.headers = append(c.headers, tt.headers...)
			c.play = func(u *startedLeg) {
				require.Equal(t, tt.policy.Seeds || strings.Contains(tt.body, "seed"), strings.Contains(string(u.body), `"seed":`))
				u.pieces = writes(t, 1, u.body)
			}
			c.stream()
			require.Equal(t, tt.insured, len(c.legs) == 1)
			require.Equal(t, tt.insured, len(c.sent) == 0)
			c.nothingStays()
		})
	}
}

// FuzzInsured: whatever engines send, and wherever they die, the request ends, nobody panics, and nothing stays.
func FuzzInsured(f *testing.F) {
	f.Add([]byte("data: {\"error\":1}\n\n"), uint64(1), 200)
	f.Add([]byte("data: [DONE]\n\n"), uint64(2), 503)
	f.Fuzz(func(t *testing.T, noise []byte, seed uint64, status int) {
		fleet := insuredFleet(t, nil)
		r := rand.New(rand.NewPCG(seed, 1))
		c := newClient(t, fleet, well, []string{insuredChat, insuredAgent}[r.IntN(2)])
		c.play = func(u *startedLeg) {
			u.pieces = writes(t, len(c.legs), u.body)
			switch r.IntN(5) {
			case 0:
				u.pieces = append(u.pieces[:r.IntN(len(u.pieces))], string(noise))
			case 1:
				u.pieces = []string{string(noise)}
				u.status = 100 + int(uint(status)%500)
			case 2:
				u.inline = true
			case 3:
				u.local, u.status = r.IntN(2) == 0, 500+r.IntN(10)
			}
			u.cut = r.IntN(2) == 0
			u.pieces = u.pieces[:r.IntN(len(u.pieces)+1)]
		}
		c.stream()
		require.True(t, c.done || c.broken || c.status >= 400, "%d", c.status)
		c.nothingStays()
	})
}

// An engine that does not continue, as another release, is not asked again, to decode or to prefill; it serves all else.
func TestEnginesThatDoNotContinue(t *testing.T) {
	anew := []byte(strings.Replace(insuredChat, "{", `{"return_token_ids":true,`, 1))
	f := insuredFleet(t, nil)
	asked := map[string]int{} // continuations, by endpoint
	dies := ""                // the decode endpoint that got the first stream, and with it the prompt
	for range 6 {
		c := newClient(t, f, func(at string, body []byte) engineAnswer {
			a := well(at, body)
			if bytes.Contains(body, []byte("prompt_token_ids")) && prefills(at) { // it computes the client's prompt alone
				asked[at]++
				a.body = answered
			}
			return a
		}, insuredChat)
		c.play = func(u *startedLeg) {
			u.pieces = writes(t, len(c.legs), u.body)
			dies = cmp.Or(dies, u.at)
			f.state.Health.MarkHealthy(f.state.Pool("chat").Endpoint(dies)) // nothing checks it
			switch {
			case len(c.legs) == 1 && u.at == dies:
				u.pieces, u.cut = u.pieces[:4], true
			case len(c.legs) == 1:
			case u.at != dies && !prefills(u.at):
				asked[u.at]++
				u.pieces = writes(t, len(c.legs), anew)
			default:
				require.NotContains(t, string(u.body), "remote_block_ids", "no KV of a prompt that is not the one asked for")
			}
		}
		c.stream()
		require.NotContains(t, c.gets.String(), `"error"`)
		c.nothingStays()
	}
	for at, n := range asked {
		require.Equal(t, 1, n, "%s is asked once", at)
	}
	for _, e := range f.Passes.State.Pools()[0].Endpoints() {
		require.Equal(t, asked[e.Addr] == 0, e.Continues(time.Now()), e.Addr)
	}
	require.Equal(t, 1, asked["10.0.2.1:8000"]+asked["10.0.2.2:8000"])
}
