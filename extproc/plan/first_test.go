package plan

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tandem/extproc/kvtransfer"
	"tandem/extproc/openai"
	"tandem/kvstate"
	"tandem/picker"
)

const hello = `{"model":"m","messages":[{"role":"user","content":"hello"}],"stream":true}`

// fleet is a pool with two prefill endpoints, p1 and p2, two decode endpoints, d1 and d2, and an encode endpoint, e1.
func fleet() (*kvstate.State, *kvstate.Pool) {
	state := kvstate.New(kvstate.Options{})
	state.SetPool(kvstate.PoolSpec{Name: "chat", Models: []string{"*"}}, []kvstate.EndpointSpec{
		{Name: "p1", Addr: "p1:1", Role: kvstate.RolePrefill}, {Name: "p2", Addr: "p2:1", Role: kvstate.RolePrefill},
		{Name: "d1", Addr: "d1:1", Role: kvstate.RoleDecode}, {Name: "d2", Addr: "d2:1", Role: kvstate.RoleDecode},
		{Name: "e1", Addr: "e1:1", Role: kvstate.RoleEncode},
	})
	return state, state.Pool("chat")
}

// asked is a request of the pool with a view of its endpoints.
func asked(t *testing.T, a Attempt, body string) (*Request, *kvstate.View) {
	t.Helper()
	state, pool := fleet()
	r := &Request{ID: "r1", Pool: pool, Attempt: a, Limits: Limits{SplitBodyBytes: 1000, MaxRedirects: 8, TicketTTL: time.Minute}, Tokens: 9}
	if r.Attempt.Started.IsZero() {
		r.Attempt.Started = time.Now()
	}
	require.NoError(t, r.Client.Scan(openai.Chat, []byte(body), openai.Limits{}))
	r.Hash()
	v := &kvstate.View{}
	state.View(pool, r.Hashes, v)
	return r, v
}

// What a request's first pass does with the endpoints that the picker chose.
func TestFirst(t *testing.T) {
	pair, alone := picker.Choice{Prefill: 0, Decode: 2}, picker.Choice{Prefill: -1, Decode: 3}
	for name, tt := range map[string]struct {
		policy   func(*Policy)
		a        Attempt
		choice   picker.Choice
		leg, to  string
		reason   string // why it is not split
		prefills int    // that the ticket counts
		code     string // of the client's error
	}{
		"split":         {choice: pair, leg: LegPrefill, to: "p1:1", prefills: 1},
		"split again":   {choice: pair, a: Attempt{Redirects: 2, Prefills: 1}, leg: LegPrefill, to: "p1:1", prefills: 2},
		"cheaper alone": {choice: alone, leg: LegDecode, to: "d2:1", reason: "cheaper"},
		"too short": {choice: picker.Choice{Prefill: -1, Decode: 3, Uncached: 99}, policy: func(p *Policy) {
			p.Place = picker.DefaultPolicy()
			p.Place.MinPrefillTokens = 100
		}, leg: LegDecode, to: "d2:1", reason: "min_prefill_tokens"},
		"just long enough": {choice: picker.Choice{Prefill: -1, Decode: 3, Uncached: 100}, policy: func(p *Policy) {
			p.Place = picker.DefaultPolicy()
			p.Place.MinPrefillTokens = 100
		}, leg: LegDecode, to: "d2:1", reason: "cheaper"},
		"prefill has failed it": {choice: alone, a: Attempt{Prefills: 1}, leg: LegDecode, to: "d2:1", reason: "prefill_failed"},
		"it is cheaper than another prefill": {choice: alone, a: Attempt{Prefills: 1}, policy: func(p *Policy) {
			p.Alone, p.Place = AloneNever, picker.DefaultPolicy()
			p.Place.Split = picker.SplitAuto
		}, leg: LegDecode, to: "d2:1", reason: "prefill_failed"},
		"cannot be split":        {choice: alone, a: Attempt{Alone: true, Why: "several_choices"}, leg: LegDecode, to: "d2:1", reason: "several_choices"},
		"the last redirect":      {choice: alone, a: Attempt{Redirects: 7}, leg: LegPass, to: "d2:1", reason: "cheaper"},
		"must be split":          {choice: alone, policy: func(p *Policy) { p.OnFailure = Fail }, code: "no_endpoint"},
		"decode failed too long": {choice: pair, a: Attempt{DecodeFailed: true, Started: time.Now().Add(-time.Hour)}, code: "endpoint_failed"},
		"an old answer goes on":  {choice: pair, a: Attempt{Redirects: 1, DecodeFailed: true, Started: time.Now().Add(-time.Hour), From: time.Now()}, leg: LegPrefill, to: "p1:1", prefills: 1},
		"all have failed twice":  {choice: pair, a: Attempt{Excluded: []string{"d1:1", "d1:1"}}, code: "endpoint_failed"},
	} {
		t.Run(name, func(t *testing.T) {
			p := splitting("nixl")
			if tt.policy != nil {
				tt.policy(&p)
			}
			r, v := asked(t, tt.a, hello)
			d, err := First(r, v, tt.choice, &p)
			if tt.code != "" {
				var e *openai.Error
				require.ErrorAs(t, err, &e)
				require.Equal(t, tt.code, e.Code)
				return
			}
			require.NoError(t, err)
			require.Equal(t, tt.leg, d.Leg)
			require.Equal(t, tt.to, d.Endpoint.Addr)
			require.Equal(t, tt.reason, d.Report.Reason)
			require.Equal(t, tt.choice.Prefill >= 0, d.Prefill.Endpoint != nil, "P is reserved")
			require.Equal(t, v.Endpoints[tt.choice.Decode].Endpoint, d.Decode.Endpoint)
			require.Equal(t, d.Endpoint, d.Computes)
			require.Equal(t, max(tt.prefills, tt.a.Prefills), d.Ticket.Prefills)
			require.Equal(t, tt.a.Redirects, d.Ticket.Redirects)
			leg := d.Edits.Apply(nil, r.Client.Body())
			require.Len(t, leg, d.Ticket.BodyBytes)
			require.Equal(t, hello, string(d.Ticket.Undo.Apply(nil, leg)), "the ticket restores the client's body")
		})
	}
}

// A push dialect reserves D for good, and waits for space in its buffer; without space D computes the prompt.
func TestFirstReservesABuffer(t *testing.T) {
	p := splitting("nixl")
	p.Dialect.Push = &kvtransfer.Push{Patience: time.Second}
	r, v := asked(t, Attempt{}, hello)
	c := picker.Choice{Prefill: 0, Decode: 2}
	d, err := First(r, v, c, &p)
	require.NoError(t, err)
	require.False(t, d.Decode.Booking.Tentative)
	require.Zero(t, d.Decode.Buffer, "its buffer has no limit")

	v.Endpoints[2].Endpoint.Transfer.BufferTokens = 100
	d, err = First(r, v, c, &p)
	require.NoError(t, err)
	require.EqualValues(t, 100, d.Decode.Buffer)
	r.Attempt.Why = "buffer_full"
	d, err = Alone(r, v, c, &p)
	require.NoError(t, err)
	require.Equal(t, LegDecode, d.Leg)
	require.Equal(t, "buffer_full", d.Report.Reason)
	require.Nil(t, d.Prefill.Endpoint)
}

// P is not asked for what D would leave in its buffer: all that D holds, if it lacks less than a chunk.
func TestFirstPushesOnlyWhatDTakes(t *testing.T) {
	for name, tt := range map[string]struct {
		tokens, held int64 // of 8 blocks
		chunk        int64
		alone        WhenAlone
		split        bool
	}{
		"nothing is held":         {tokens: 800, held: 0, chunk: 256, split: true},
		"a later turn":            {tokens: 800, held: 400, chunk: 256, split: true},
		"a chunk is missing":      {tokens: 1024, held: 768, chunk: 256, split: true},
		"less than a chunk":       {tokens: 1024, held: 896, chunk: 256},
		"a repeat":                {tokens: 1024, held: 1024, chunk: 256},
		"a short repeat":          {tokens: 80, held: 80, chunk: 256},
		"a short one's beginning": {tokens: 80, held: 40, chunk: 256, split: true},
		"D takes everything":      {tokens: 1024, held: 1024, split: true},
		"never alone":             {tokens: 1024, held: 1024, chunk: 256, alone: AloneNever, split: true},
	} {
		t.Run(name, func(t *testing.T) {
			p := splitting("nixl")
			p.Dialect.Push, p.Alone = &kvtransfer.Push{ChunkTokens: tt.chunk}, tt.alone
			r, v := asked(t, Attempt{}, hello)
			r.Tokens, r.Hashes = tt.tokens, make([]uint64, 8)
			v.Endpoints[2].Hit = int(8 * tt.held / tt.tokens)
			d, err := First(r, v, picker.Choice{Prefill: 0, Decode: 2, Uncached: tt.tokens}, &p)
			require.NoError(t, err)
			if tt.split {
				require.Equal(t, LegPrefill, d.Leg)
				return
			}
			require.Equal(t, LegDecode, d.Leg)
			require.Equal(t, "held_by_decode", d.Report.Reason)
			require.Equal(t, tt.tokens-tt.held, d.Decode.Booking.Uncached)
		})
	}
}

func TestEncode(t *testing.T) {
	const media = `{"model":"m","messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"http://a"}}]}]}`
	p := splitting("nixl")
	p.EncodeTimeout = time.Second
	r, v := asked(t, Attempt{}, media)
	require.True(t, EncodesFirst(r, &p))
	d := Encode(r, v.Endpoints[PickEncoder(v)].Endpoint, &p)
	require.Equal(t, LegEncode, d.Leg)
	require.Equal(t, "e1:1", d.Endpoint.Addr)
	require.Equal(t, kvstate.RoleEncode, d.Decode.Booking.For)
	v.Endpoints = v.Endpoints[:4]
	require.Equal(t, -1, PickEncoder(v), "no endpoint encodes")
	r, _ = asked(t, Attempt{Redirects: 1}, media)
	require.False(t, EncodesFirst(r, &p), "only in pass 1")
	r, _ = asked(t, Attempt{}, hello)
	require.False(t, EncodesFirst(r, &p), "no media")
}

// Encode endpoints with equally many requests get equally many of the next: of 1,000 each gets 500, give or take six
// standard deviations of 16.
func TestEncodeSharesEqually(t *testing.T) {
	_, v := asked(t, Attempt{}, hello)
	other := *v.Endpoints[4].Endpoint
	other.Addr = "e2:1"
	v.Endpoints = append(v.Endpoints, v.Endpoints[4])
	v.Endpoints[5].Endpoint = &other
	got := map[string]int{}
	for range 1000 {
		got[v.Endpoints[PickEncoder(v)].Endpoint.Addr]++
	}
	require.InDelta(t, 500, got["e1:1"], 6*16)
	v.Endpoints[4].Requests = 1
	require.Equal(t, "e2:1", v.Endpoints[PickEncoder(v)].Endpoint.Addr, "the one with fewer requests")
}

func TestOneHop(t *testing.T) {
	p := splitting("nixl")
	p.Handoff = HandoffSidecar
	r, v := asked(t, Attempt{}, hello)
	c := picker.Choice{Prefill: 1, Decode: 2}
	d, err := OneHop(r, v, c, &p)
	require.NoError(t, err)
	require.Equal(t, LegDecode, d.Leg)
	require.Equal(t, "split", d.Report.Route)
	require.Equal(t, &SidecarHeaders{Prefill: "p2:1"}, d.Sidecar)
	require.Nil(t, d.Prefill.Endpoint, "the sidecar asks it")

	p.Handoff = HandoffDirect
	d, err = OneHop(r, v, c, &p)
	require.NoError(t, err)
	require.True(t, d.Direct, "this server asks it, before the hop")
	require.Nil(t, d.Sidecar)
}

// A stored response stays with the endpoint whose name its id has.
func TestStoredResponses(t *testing.T) {
	_, pool := fleet()
	d1 := pool.Endpoint("d1:1")
	r := &Request{Pool: pool, Limits: limits}
	require.NoError(t, r.Client.Scan(openai.Responses, []byte(`{"model":"m","input":"a","store":true}`), openai.Limits{}))
	e, stored := r.Holder(pool)
	require.Nil(t, e)
	require.True(t, stored)
	d := ToHolder(r, d1, &Policy{})
	require.Equal(t, LegPass, d.Leg)
	var again openai.Request
	require.NoError(t, again.Scan(openai.Responses, d.Edits.Apply(nil, r.Client.Body()), openai.Limits{}))
	id, _ := again.String(openai.FieldRequestID)
	require.Equal(t, d1, HolderOf(pool, id))
	require.Nil(t, HolderOf(pool, "resp_1"))
	got, ok := StoredResponse("/v1/responses/" + id + "/cancel?x=1")
	require.True(t, ok)
	require.Equal(t, id, got)
}

// What pass 2 does with P's answer.
func TestResume(t *testing.T) {
	params := []byte(`{"do_remote_prefill":true}`)
	for name, tt := range map[string]struct {
		policy  func(*Policy)
		ticket  func(*kvtransfer.Ticket)
		gone    string // an endpoint that left between the hops
		params  []byte
		to      string
		loads   bool
		leg     string
		refused bool
	}{
		"paired":            {params: params, to: "d1:1", loads: true, leg: LegDecode},
		"no parameters":     {to: "d1:1", leg: LegDecode},
		"P has left":        {params: params, gone: "p1:1", to: "d1:1", leg: LegDecode},
		"D has left":        {params: params, gone: "d1:1", to: "d2:1", loads: true, leg: LegDecode},
		"the last redirect": {params: params, ticket: func(t *kvtransfer.Ticket) { t.Redirects = 7 }, to: "d1:1", loads: true, leg: LegPass},
		"cached tokens": {
			params: params, policy: func(p *Policy) { p.Cached = CachedByLeg }, ticket: func(t *kvtransfer.Ticket) { t.Cached = 5 },
			to: "d1:1", loads: true, leg: LegAnswer,
		},
	} {
		t.Run(name, func(t *testing.T) {
			p := splitting("nixl")
			if tt.policy != nil {
				tt.policy(&p)
			}
			r, v := asked(t, Attempt{}, hello)
			first, why := Split(r, v, picker.Choice{Prefill: 0, Decode: 2}, &p)
			require.Empty(t, why)
			body, ticket := first.Edits.Apply(nil, r.Client.Body()), first.Ticket
			ticket.StreamUsage = true
			if tt.ticket != nil {
				tt.ticket(&ticket)
			}
			var left []kvstate.Candidate
			for _, c := range v.Endpoints {
				if c.Endpoint.Addr != tt.gone && c.Endpoint.Addr != "d2:1" || tt.gone == "d1:1" && c.Endpoint.Addr == "d2:1" {
					left = append(left, c)
				}
			}
			v.Endpoints = left
			h := HandOver{Ticket: &ticket, Params: tt.params, API: openai.Chat, Body: body}
			require.False(t, h.Bound(r.Pool, &p))
			require.NoError(t, h.Choose(r, v, &picker.Picker{}, &p))
			d, err := Resume(r, &h, &p)
			require.NoError(t, err)
			require.Equal(t, tt.to, d.Endpoint.Addr)
			require.Equal(t, tt.leg, d.Leg)
			require.Equal(t, tt.loads, d.Ticket.Loads)
			decode := d.Edits.Apply(nil, body)
			require.Equal(t, tt.loads, string(decode) != hello, "D gets the parameters, or the client's own body")
			require.Equal(t, hello, string(d.Ticket.Undo.Apply(nil, decode)))
			require.Equal(t, d.Decode.Endpoint, d.Endpoint)
		})
	}
}

// Blocks that P has pushed are at the D of pass 1 only.
func TestResumeWherePWrote(t *testing.T) {
	p := splitting("nixl")
	p.Dialect.Push = &kvtransfer.Push{}
	_, pool := fleet()
	h := HandOver{Ticket: &kvtransfer.Ticket{Prefill: "p1:1", Decode: "d2:1"}}
	require.True(t, h.Bound(pool, &p))
	require.Equal(t, "d2:1", h.Decode.Addr)
	h = HandOver{Ticket: &kvtransfer.Ticket{Prefill: "p1:1", Decode: "left:1"}}
	require.False(t, h.Bound(pool, &p))
}

// D continues after P's first token, if its parameters allow it.
func TestResumeContinues(t *testing.T) {
	p := splitting("nixl")
	p.Dialect.DecodeMember = nil
	var cannot error
	p.Dialect.Continue = func(_ *openai.Request, patch *openai.Patch, params []byte) ([]byte, error) {
		patch.Insert("prompt_token_ids", params)
		return []byte("how"), cannot
	}
	r, v := asked(t, Attempt{}, hello)
	h := HandOver{
		Ticket: &kvtransfer.Ticket{Pool: "chat", Prefill: "p1:1"}, Params: []byte("[1]"), API: openai.Chat,
		Decode: v.Endpoints[2].Endpoint, Paired: true, Restored: true, Body: r.Client.Body(),
	}
	require.True(t, h.Restores(&p, r.Limits))
	d, err := Resume(r, &h, &p)
	require.NoError(t, err)
	require.Equal(t, LegAnswer, d.Leg)
	require.Equal(t, "/v1/completions", d.Path)
	require.Equal(t, "how", string(d.Ticket.Params))
	require.Equal(t, hello, string(d.Ticket.Undo.Apply(nil, d.Edits.Apply(nil, h.Body))))

	cannot = errors.New("no token")
	d, err = Resume(r, &h, &p)
	require.NoError(t, err)
	require.Equal(t, LegDecode, d.Leg)
	require.Equal(t, cannot, d.Lost)
	require.Empty(t, d.Edits, "D gets the client's body")
}

// A completion of TensorRT-LLM gets P's token ids. If D fails, it gets the client's prompt back, or keeps the ids where
// the prompt is too long for a ticket.
func TestResumeWithTokenIDs(t *testing.T) {
	const params = `"disaggregated_params":{"request_type":"generation_only"},"prompt_token_ids":[1,2]`
	for name, tt := range map[string]struct {
		bytes   int
		undoes  bool
		invalid error
	}{
		"a short prompt": {bytes: 100, undoes: true},
		"a long prompt":  {bytes: kvtransfer.MaxUndoBytes},
		"no valid body":  {bytes: 100, undoes: true, invalid: errors.New("a broken body")},
	} {
		t.Run(name, func(t *testing.T) {
			p := splitting("trtllm")
			body := `{"model":"m","prompt":"` + strings.Repeat("x", tt.bytes) + `","max_tokens":9}`
			r, v := asked(t, Attempt{}, hello)
			require.NoError(t, r.Client.Scan(openai.Completions, []byte(body), openai.Limits{}))
			h := HandOver{
				Ticket: &kvtransfer.Ticket{Pool: "chat", Prefill: "p1:1"}, Params: []byte(params), API: openai.Completions,
				Decode: v.Endpoints[2].Endpoint, Paired: true, Restored: true, Body: []byte(body), Invalid: tt.invalid,
			}
			require.True(t, h.Restores(&p, r.Limits))
			d, err := Resume(r, &h, &p)
			require.NoError(t, err)
			require.Equal(t, LegDecode, d.Leg)
			decode := string(d.Edits.Apply(nil, h.Body))
			require.Equal(t, tt.invalid, d.Lost)
			const withIDs = `{"disaggregated_params":{"request_type":"generation_only"},"model":"m","prompt":[1,2],"max_tokens":9}`
			if tt.invalid == nil {
				require.Equal(t, withIDs, decode)
			} else {
				require.Equal(t, body, decode, "D gets the client's own body")
			}
			undone := string(d.Ticket.Undo.Apply(nil, []byte(decode)))
			if tt.undoes {
				require.Equal(t, body, undone)
			} else {
				require.Equal(t, `{"model":"m","prompt":[1,2],"max_tokens":9}`, undone)
			}
			require.Equal(t, len(decode), d.Ticket.BodyBytes)

			h.API = openai.Chat
			require.False(t, h.Restores(&p, r.Limits), "a chat's body is only added to")
		})
	}
}

// A decode endpoint that stands still is chosen only where no other one is left. It gets no KV that has a lease, in pass
// 1 and in pass 2, unless the pool never lets decode compute a prompt.
func TestWhoStandsFetchesNothing(t *testing.T) {
	for name, tt := range map[string]struct {
		policy func(*Policy)
		stands bool
		split  bool
	}{
		"it works":                 {split: true},
		"it stands":                {stands: true},
		"never alone":              {stands: true, policy: func(p *Policy) { p.Alone = AloneNever }, split: true},
		"no fallback":              {stands: true, policy: func(p *Policy) { p.OnFailure = Fail }, split: true},
		"KV that has no lease":     {stands: true, policy: func(p *Policy) { p.Dialect.Lease = 0 }, split: true},
		"pushed before it is late": {stands: true, policy: func(p *Policy) { p.Dialect = splitting("nixl-push").Dialect }, split: splitting("nixl-push").Dialect.Lease == 0},
	} {
		t.Run(name, func(t *testing.T) {
			p := splitting("nixl")
			if tt.policy != nil {
				tt.policy(&p)
			}
			r, v := asked(t, Attempt{}, hello)
			for i := range v.Endpoints {
				if c := &v.Endpoints[i]; c.Endpoint.Role == kvstate.RoleDecode {
					c.Usable, c.Stands = !tt.stands, tt.stands
				}
			}
			d, err := First(r, v, picker.Choice{Prefill: 0, Decode: 2}, &p)
			require.NoError(t, err)
			if tt.split {
				require.Equal(t, LegPrefill, d.Leg)
			} else {
				require.Equal(t, [2]string{LegDecode, "standstill"}, [2]string{d.Leg, d.Report.Reason})
			}
			if p.Dialect.Push != nil {
				return
			}
			h := HandOver{Ticket: &kvtransfer.Ticket{Prefill: "p1:1", PromptTokens: 9}, Params: []byte(`{}`)}
			var k picker.Picker
			require.NoError(t, h.Choose(r, v, &k, &p))
			require.Equal(t, [2]bool{tt.split, !tt.split}, [2]bool{h.Paired, h.Late})
		})
	}
}

// What an engine holds of a prompt of megabytes is known to its end: here the first half.
func TestHalfOfALongPromptIsHeld(t *testing.T) {
	prompt := func(end string) string {
		half := func(of string) string { return strings.Repeat(of, 2<<20) }
		return `{"model":"m","messages":[{"role":"user","content":"` + half("a") + half(end) + `"}]}`
	}
	state, pool := fleet()
	r := &Request{Pool: pool, Tokens: 1 << 20}
	require.NoError(t, r.Client.Scan(openai.Chat, []byte(prompt("b")), openai.Limits{}))
	r.Hash()
	state.Routed(pool, pool.Endpoint("p1:1"), r.Hashes)
	require.NoError(t, r.Client.Scan(openai.Chat, []byte(prompt("c")), openai.Limits{}))
	r.Hash()
	v := &kvstate.View{}
	state.View(pool, r.Hashes, v)
	at := slices.IndexFunc(v.Endpoints, func(c kvstate.Candidate) bool { return c.Endpoint.Addr == "p1:1" })
	require.InDelta(t, 1<<19, lacking(r, v, at), 1000)
}
