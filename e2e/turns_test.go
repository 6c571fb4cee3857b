package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// turnsKind is NIXL in both directions: decode keeps answers for keep, prefill fetches them in the next turn, within
// good.
func turnsKind(keep, good string) kind {
	return kind{
		engine: "nixl", kv: "nixl", more: []string{"--bidirectional", "--decoder-ttl", keep},
		pool: fmt.Sprintf("  session: {header: x-session}\n  nixl: {bidirectional: true, reuseTokenIds: true, turnTtl: %s}\n", good),
	}
}

// talk is one conversation, over chat or over completions of token ids.
type talk struct {
	f       *fleet
	session string
	stream  bool
	turn    int

	messages []map[string]string // of a chat
	ids      []uint32            // of completions; nil: it is a chat
}

func (c *talk) id() string { return fmt.Sprintf("%s-%d", c.session, c.turn) }

// next returns the next turn's request, with more text of the user.
func (c *talk) next(t *testing.T) asked {
	t.Helper()
	c.turn++
	a := asked{id: c.id()}
	more := strings.Repeat(fmt.Sprintf("In %s, turn %d, there is more to say. ", c.session, c.turn), 12)
	member := ""
	if c.ids != nil {
		for i := range 120 {
			c.ids = append(c.ids, uint32(i+c.turn*1000)+seedOf(c.session))
		}
		text, err := json.Marshal(c.ids)
		require.NoError(t, err)
		a.path, member = "/v1/completions", `"prompt":`+string(text)+`,"return_token_ids":true`
	} else {
		c.messages = append(c.messages, map[string]string{"role": "user", "content": more})
		text, err := json.Marshal(c.messages)
		require.NoError(t, err)
		a.path, member = "/v1/chat/completions", `"messages":`+string(text)
	}
	a.body = fmt.Sprintf(`{"model":"tiny",%s,"max_tokens":%d`, member, 100+c.turn) // fewer tokens than kv_recompute_threshold are not fetched
	if c.stream {
		a.body += `,"stream":true,"stream_options":{"include_usage":true}`
	}
	a.body += "}"
	return a
}

func seedOf(text string) (n uint32) {
	for _, c := range text {
		n = n*31 + uint32(c)
	}
	return n % 1000
}

// say makes the next turn, and compares the answer with a single engine's.
func (c *talk) say(t *testing.T) (prefill, decode seen) {
	t.Helper()
	a := c.next(t)
	got := c.f.post(a.path, a.body, "x-request-id", a.id, "x-session", c.session)
	c.hear(t, a, got)
	return c.f.hops(a.id)
}

// hear checks an answer and adds it to the conversation.
func (c *talk) hear(t *testing.T, a asked, got answer) {
	t.Helper()
	require.Equal(t, 200, got.status, got.body)
	text := got.text(t)
	require.Equal(t, c.f.want(a, c.f.decodes[len(c.f.decodes)-1]), text, a.id)
	require.NotContains(t, got.body, "remote_")
	require.NotContains(t, got.body, "do_remote")
	if c.ids != nil {
		c.ids = append(c.ids, c.said(t, got)...)
		return
	}
	require.NotContains(t, got.body, `token_ids":[`, "the client did not ask for them")
	c.messages = append(c.messages, map[string]string{"role": "assistant", "content": text})
}

// said returns the token ids of an answer whose client asked for them.
func (c *talk) said(t *testing.T, got answer) (ids []uint32) {
	t.Helper()
	texts := []string{got.body}
	if c.stream {
		texts = slices.DeleteFunc(got.events(), func(e string) bool { return e == "[DONE]" })
	}
	for _, text := range texts {
		var v struct {
			Choices []struct {
				IDs []uint32 `json:"token_ids"`
			}
		}
		require.NoError(t, json.Unmarshal([]byte(text), &v), text)
		for _, choice := range v.Choices {
			ids = append(ids, choice.IDs...)
		}
	}
	require.NotEmpty(t, ids)
	return ids
}

// turns returns the number of turns with a result, over all replicas.
func (f *fleet) turns(what string) (n float64) {
	for _, admin := range f.admins {
		n += metric(f.t, admin, "tandem_turns_total", `what="`+what+`"`)
	}
	return n
}

// From the second turn of a conversation on, prefill fetches prompt and answer of the previous turn from the decode
// endpoint that gave it, and computes the new part; the text is a single engine's, the client sees nothing of it, and
// gets token ids only if it asked for them.
func TestTurns(t *testing.T) {
	t.Parallel() // at its end it waits until decode keeps nothing any more
	f := startKind(t, turnsKind("30s", "20s"), 2, 2)
	talks := []*talk{
		{session: "chat"}, {session: "chat-streamed", stream: true},
		{session: "ids", ids: []uint32{1}}, {session: "ids-streamed", ids: []uint32{2}, stream: true},
	}
	for i, c := range talks {
		c.f = f
		for turn := range 4 {
			p, d := c.say(t)
			require.Positive(t, d.ExternalTokens, "%s: decode fetches from prefill in every turn", p.RequestID)
			if turn == 0 {
				require.Contains(t, p.Body, `"remote_block_ids":null`)
				require.Zero(t, p.ExternalTokens)
				continue
			}
			require.Contains(t, p.Body, `"remote_block_ids":[[`, "prefill is told of the last turn")
			fetched := p.ExternalTokens + p.CachedTokens
			require.Greater(t, fetched, p.PromptTokens/2, "%s: %d of %d tokens were there", p.RequestID, fetched, p.PromptTokens)
		}
		require.InDelta(t, 3*(i+1), f.turns("used"), 0)
	}
	require.InDelta(t, 16, f.turns("kept"), 0)

	// Without a session, or with an API without token ids, the answer is only cleaned.
	for i, path := range []string{"/v1/chat/completions", "/v1/responses", "/v1/messages"} {
		input := `"messages":[{"role":"user","content":"` + strings.Repeat("Nobody asks for more. ", 30) + `"}]`
		if path == "/v1/responses" {
			input = `"input":"` + strings.Repeat("Nobody asks for more. ", 30) + `"`
		}
		for _, stream := range []bool{false, true} {
			id := fmt.Sprintf("plain-%d-%v", i, stream)
			got := f.post(path, fmt.Sprintf(`{"model":"tiny",%s,"max_tokens":20,"stream":%v}`, input, stream), "x-request-id", id, "x-session", map[bool]string{true: "s", false: ""}[i > 0])
			require.Equal(t, 200, got.status, got.body)
			require.NotContains(t, got.body, "remote_", path)
			f.hops(id)
		}
	}
	// Nor is a chat with a picture, which token ids do not describe.
	got := f.post("/v1/chat/completions", `{"model":"tiny","messages":[{"role":"user","content":[{"type":"text","text":"`+strings.Repeat("Look. ", 200)+
		`"},{"type":"image_url","image_url":{"url":"data:image/png;base64,AAAA"}}]}],"max_tokens":20}`, "x-request-id", "picture", "x-session", "picture")
	require.Equal(t, 200, got.status, got.body)
	require.NotContains(t, got.body, "remote_")
	f.hops("picture")
	require.InDelta(t, 16, f.turns("kept"), 0)
	require.Zero(t, f.turns("unusable"))
}

// A prompt that does not begin with the tokens of the last turn never causes a fetch: another answer in its place, as
// of a client that leaves thoughts out; other words before it; a salt of another tenant; another model's adapter. The
// conversation that does continue is served all the same.
func TestTurnsOfOtherPrompts(t *testing.T) {
	t.Parallel() // at its end it waits until decode keeps nothing any more
	f := startKind(t, turnsKind("30s", "20s"), 2, 2)
	c := &talk{f: f, session: "right"}
	c.say(t)
	right := slices.Clone(c.messages)
	for name, change := range map[string]func(m []map[string]string){
		"thoughts left out": func(m []map[string]string) {
			m[1] = map[string]string{"role": "assistant", "content": m[1]["content"][8:]}
		},
		"another beginning": func(m []map[string]string) {
			m[0] = map[string]string{"role": "user", "content": "x" + m[0]["content"]}
		},
	} {
		c.messages = slices.Clone(right)
		change(c.messages)
		p, _ := c.say(t)
		require.Contains(t, p.Body, `"remote_block_ids":null`, name)
		require.Zero(t, p.ExternalTokens, name)
	}
	require.InDelta(t, 2, f.turns("other_prompt"), 0)

	// Each of these replaced the first turn's state; the last one is continued.
	p, _ := c.say(t)
	require.Contains(t, p.Body, `"remote_block_ids":[[`)

	// Another tenant of the same session: nothing is known there.
	a := c.next(t)
	a.body = strings.Replace(a.body, "{", `{"cache_salt":"another tenant",`, 1)
	got := f.post(a.path, a.body, "x-request-id", a.id, "x-session", c.session)
	require.Equal(t, 200, got.status, got.body)
	p, _ = f.hops(a.id)
	require.Contains(t, p.Body, `"remote_block_ids":null`)
	require.Zero(t, p.ExternalTokens)
	require.InDelta(t, 1, f.turns("used"), 0)
}

// A turn older than the pool allows is not used, though decode still keeps it.
func TestTurnsExpire(t *testing.T) {
	t.Parallel() // at its end it waits until decode keeps nothing any more
	f := startKind(t, turnsKind("26s", "12s"), 1, 1)
	c := &talk{f: f, session: "slow"}
	c.say(t)
	time.Sleep(12200 * time.Millisecond)
	p, _ := c.say(t)
	require.Contains(t, p.Body, `"remote_block_ids":null`)
	p, _ = c.say(t)
	require.Contains(t, p.Body, `"remote_block_ids":[[`, "at once, it is")
	require.InDelta(t, 1, f.turns("used"), 0)
}

// A decode endpoint that restarted, or has died, has lost its kept blocks: prefill cannot fetch them, and is asked
// again without.
func TestTurnsOfDeadDecodes(t *testing.T) {
	t.Parallel()
	for name, revive := range map[string]bool{"started anew": true, "dead": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := startKind(t, turnsKind("40s", "30s"), 2, 2)
			f.lenient = true // the restarted engine is stopped before the account
			c := &talk{f: f, session: "unlucky"}
			_, d := c.say(t)
			for i, e := range f.decodes {
				if e.addr != d.Engine {
					continue
				}
				e.stop(syscall.SIGKILL)
				if revive {
					f.restart(e)
				} else if i == len(f.decodes)-1 { // the reference for the text
					slices.Reverse(f.decodes)
				}
			}
			a := c.next(t)
			got := f.post(a.path, a.body, "x-request-id", a.id, "x-session", c.session)
			c.hear(t, a, got)
			require.InDelta(t, 1, f.turns("used")+f.turns("endpoint")+f.turns("no_ids"), 0, "no_ids: the dead engine was asked to render")
			require.InDelta(t, f.turns("used"), f.turns("failed"), 0)
			for _, p := range f.requests(a.id, f.prefills...) {
				if p.Status == 200 {
					require.Contains(t, p.Body, `"remote_block_ids":null`)
				}
			}
			// Later turns work again, from the one on for which Tandem does not ask the dead one to render.
			for told := false; !told; {
				require.Less(t, c.turn, 20)
				a := c.next(t)
				c.hear(t, a, f.post(a.path, a.body, "x-request-id", a.id, "x-session", c.session))
				told = slices.ContainsFunc(f.requests(a.id, f.prefills...), func(p seen) bool {
					return p.Status == 200 && strings.Contains(p.Body, `"remote_block_ids":[[`)
				})
			}
			for _, e := range f.engines() {
				if e.running() {
					require.Zero(t, metric(t, "http://"+e.addr, "enginesim_violations_total"))
				}
			}
		})
	}
}

// Many conversations at once, with clients that leave in the middle: every answer is right, no engine is asked for
// blocks that it does not keep, and at the end nothing is held.
func TestTurnsWhileClientsLeave(t *testing.T) {
	t.Parallel() // at its end it waits until decode keeps nothing any more
	f := startKind(t, turnsKind("30s", "20s"), 2, 2)
	var talks sync.WaitGroup
	for i := range 12 {
		talks.Go(func() {
			c := &talk{f: f, session: fmt.Sprint("crowd-", i), stream: i%2 == 0}
			for turn := range 5 {
				a := c.next(t)
				if (i+turn)%3 == 0 { // the client gives up, and asks again
					ctx, cancel := context.WithTimeout(context.Background(), time.Duration(1+(7*i+turn)%25)*time.Millisecond)
					_, _ = f.try(ctx, http.MethodPost, a.path, a.body, "x-request-id", a.id+"-left", "x-session", c.session)
					cancel()
				}
				got, err := f.try(context.Background(), http.MethodPost, a.path, a.body, "x-request-id", a.id, "x-session", c.session)
				if err != nil || got.status != 200 {
					t.Errorf("%s: %v %d %s", a.id, err, got.status, got.body)
					return
				}
				c.messages = append(c.messages, map[string]string{"role": "assistant", "content": got.text(t)})
			}
		})
	}
	talks.Wait()
	require.Greater(t, f.turns("used"), 20.0)
	require.Zero(t, f.turns("failed"))
	for _, e := range f.engines() {
		require.Zero(t, metric(t, "http://"+e.addr, "enginesim_violations_total"))
	}
}

// With Redis a conversation's next turn may come to any replica, and one of them gets the stored turn. Replicas with a
// key file keep their own: who can write to Redis could put a used one back (docs/adr/0100).
func TestTurnsOverReplicas(t *testing.T) {
	t.Parallel() // at its end it waits until decode keeps nothing any more
	for name, o := range map[string]options{"made keys": {madeKeys: true}, "key file": {}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			o.prefills, o.decodes, o.replicas, o.top = 2, 2, 2, startRedis(t).yaml()
			f := start(t, turnsKind("30s", "20s").setUp(o, "", "tiny"))
			var talks sync.WaitGroup
			for i := range 6 {
				talks.Go(func() { talkAnywhere(t, f, i) })
			}
			talks.Wait()
			require.InDelta(t, 18, f.turns("kept"), 0)
			missed := sum(t, f, "tandem_redis_errors_total") + sum(t, f, "tandem_tickets_consumed_locally_total")
			if o.madeKeys && missed == 0 {
				require.InDelta(t, 12, f.turns("used"), 0)
			} else { // turns are dropped if Redis takes more than 50 ms, and while it is not asked after that
				require.Positive(t, f.turns("used"), "Redis was late %v times", missed)
				require.LessOrEqual(t, f.turns("used"), 12.)
			}
			for i, admin := range f.admins {
				require.Positive(t, metric(t, admin, "tandem_turns_total"), "replica %d", i)
			}
		})
	}
}

// talkAnywhere has three turns of a conversation, each with the replica that Envoy takes.
func talkAnywhere(t *testing.T, f *fleet, i int) {
	c := &talk{f: f, session: fmt.Sprint("anywhere-", i), stream: i%2 == 0}
	for range 3 {
		a := c.next(t)
		got, err := f.try(context.Background(), http.MethodPost, a.path, a.body, "x-request-id", a.id, "x-session", c.session)
		if err != nil || got.status != 200 {
			t.Errorf("%s: %v %d %s", a.id, err, got.status, got.body)
			return
		}
		c.messages = append(c.messages, map[string]string{"role": "assistant", "content": got.text(t)})
	}
}

// An answer too long for Tandem to clean is refused, with that reason, to the client alone: the endpoint is not at
// fault, so no other is asked for the same, and it stays in use.
func TestTurnsOfAnswersTooLong(t *testing.T) {
	t.Parallel() // at its end it waits until decode keeps nothing any more
	f := startKind(t, turnsKind("30s", "20s"), 1, 2)
	const id = "too-long"
	got := f.post("/v1/chat/completions", `{"model":"tiny","messages":[{"role":"user","content":"`+strings.Repeat("Say all there is to say. ", 30)+
		`"}],"max_tokens":40000,"logprobs":true,"top_logprobs":20}`, "x-request-id", id, "x-session", "long")
	require.Equal(t, 503, got.status)
	require.Contains(t, got.body, `"code":"answer_too_large"`)
	require.Empty(t, got.header.Get("x-envoy-ratelimited"))
	require.Len(t, f.requests(id, f.decodes...), 1)
	for _, admin := range f.admins {
		require.Zero(t, metric(t, admin, "tandem_replans_total"))
	}
	seen := map[string]bool{}
	for i := 0; len(seen) < 2; i++ {
		require.Less(t, i, 100, "one is left out")
		a := ask("tiny", 4*i)
		require.Equal(t, 200, f.post(a.path, a.body, "x-request-id", a.id).status)
		_, d := f.hops(a.id)
		seen[d.Engine] = true
	}
}
