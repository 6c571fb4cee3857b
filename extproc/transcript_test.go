package extproc

import (
	"bufio"
	"bytes"
	"context"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	filterv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	"github.com/stretchr/testify/require"

	"tandem/extproc/core"
	"tandem/extproc/kvtransfer"
	"tandem/extproc/names"
	"tandem/extproc/plan"
	"tandem/kvstate"
)

var update = flag.Bool("update", false, "rewrite the transcripts in testdata")

// TestTranscripts runs testdata/*.txt, which read as what Envoy sends, and what it is answered (lines with >, written
// anew with -update). Time stands still but for `wait`. A blank line ends a request; what it leaves booked then fails
// the test.
//
//	server splitBody=N maxBody=N redirects=N held=N bodyTimeout=DURATION
//	pool NAME ENDPOINT... [models=A,B] [failure=decodeAlone|fail] [attempts=N] [split=no] [long=refuse] [transfer=none|DIALECT]
//	                       [buffer=TOKENS of each decode endpoint] [ranks=N behind each endpoint's port]
//	                       endpoints p1 (10.0.1.1:8000, prefill), d1 (10.0.2.1:8000, decode), b1 (10.0.3.1:8000, both)
//	notices DURATION|never   how long after P's answer LMCache's notice comes; default at once
//	group NAME ENDPOINT... (of the pool last named)
//	load ENDPOINT TOKENS | fail ENDPOINT | drop ENDPOINT
//	request METHOD PATH [HEADER=VALUE...] [mode=duplex|buffered|none] [piece=N] [trailers] [empty]
//	body TEXT | body long N | body undo N     (chat with N bytes of text, completion with so many that a prefill leg must not see)
//	pass                      pass 1, or pass 2 after a redirect
//	answer STATUS [blocks=N | random=N | params=JSON | TEXT] [piece=N] [empty] [trailers]     P's answer, through the leg's filter
//	answer 200 carried ...    the same without the filter: Envoy redirects with it by itself
//	replan                    the hop's second try, at the replan port
//	leave N                   the client is gone after N messages of the body
//	ticket keep|again|flip|borrow|none     of the redirect: remember it, use that one, break it, another request's, a redirect without
//	forget                    the KV parameters that are kept for the redirect's ticket
//	wait DURATION
//	byte                      the first of the endpoint's answer, as Envoy will log it
//	done STATUS [DETAILS] | gone   the end, as Envoy logs it
//	quiet                     from here on the answers to Envoy are not shown
//	counts                    what was counted since the last of these (counts_test.go)
func TestTranscripts(t *testing.T) {
	files, err := filepath.Glob("testdata/*.txt")
	require.NoError(t, err)
	require.NotEmpty(t, files)
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txt"), func(t *testing.T) {
			text, err := os.ReadFile(file)
			require.NoError(t, err)
			var got []byte
			synctest.Test(t, func(t *testing.T) { got = (&player{t: t}).play(text) }) // fails if a goroutine stays
			if *update {
				require.NoError(t, os.WriteFile(file, got, 0o644))
				return
			}
			require.Equal(t, string(text), string(got))
		})
	}
}

// player runs one transcript.
type player struct {
	t          *testing.T
	out        bytes.Buffer
	s          *stand
	o          core.Options
	spec       kvstate.PoolSpec
	eps        []kvstate.EndpointSpec
	loads      []kvstate.ReservationID
	q          *request
	n          int
	kept       string
	keptAnswer string
	notices    string // when LMCache's notice comes
	body0      []byte // of the leg that the kept ticket came from
	ended      bool
	quiet      bool
	names      []string              // of all endpoints there were
	counted    map[string][2]float64 // by the last `counts`
}

func (p *player) play(text []byte) []byte {
	for lines := bufio.NewScanner(bytes.NewReader(text)); lines.Scan(); {
		line := lines.Text()
		if strings.HasPrefix(line, ">") {
			continue
		}
		fmt.Fprintln(&p.out, line)
		words := strings.Fields(line)
		if len(words) == 0 {
			p.settle()
			continue
		}
		if words[0] != "#" {
			p.do(words, line)
		}
	}
	p.settle()
	return p.out.Bytes()
}

// say writes a line of the answer.
func (p *player) say(format string, args ...any) { fmt.Fprintf(&p.out, "> "+format+"\n", args...) }

// settle ends a request: nothing may stay booked.
func (p *player) settle() {
	if p.q == nil {
		return
	}
	require.True(p.t, p.ended, "request %d has no `done`", p.n)
	synctest.Wait()
	if p.s.state.Bookings.Reservations() != len(p.loads) {
		p.t.Log(p.out.String())
	}
	require.Equal(p.t, len(p.loads), p.s.state.Bookings.Reservations(), "request %d leaves something booked", p.n)
	require.Zero(p.t, p.s.server.Memory.Load(), "request %d leaves bytes counted", p.n)
	p.q, p.ended = nil, false
}

func (p *player) do(words []string, line string) {
	switch words[0] {
	case "server":
		p.options(words[1:])
	case "pool":
		p.pool(words[1:])
	case "group":
		for i := range p.eps {
			if slices.Contains(words[2:], p.eps[i].Name) {
				p.eps[i].Group = words[1]
			}
		}
		p.s.state.SetPool(p.spec, p.eps)
	case "drop":
		p.eps = slices.DeleteFunc(p.eps, func(e kvstate.EndpointSpec) bool { return e.Name == words[1] })
		p.s.state.SetPool(p.spec, p.eps)
	case "load":
		e, tokens := p.endpoint(words[1]), p.number(words[2])
		b := kvstate.Booking{For: kvstate.RoleDecode, PromptTokens: int64(tokens)}
		if e.Role == kvstate.RolePrefill {
			b = kvstate.Booking{For: kvstate.RolePrefill, PromptTokens: int64(tokens), Uncached: int64(tokens), Work: time.Duration(tokens) * time.Second / 16000}
		}
		p.loads = append(p.loads, p.s.state.Bookings.Reserve(e, b))
	case "fail":
		p.s.state.Health.MarkFailed(p.endpoint(words[1]))
	case "request":
		p.request(words[1:])
	case "body":
		p.body(strings.TrimPrefix(line, "body "))
	case "pass":
		p.pass()
	case "answer":
		p.answer(words[1:], line)
	case "replan":
		p.replan()
	case "notices":
		p.notices = words[1]
	case "leave":
		if p.q.taken != "" {
			p.q.follow()
		}
		p.q.leave(p.number(words[1]), synctest.Wait)
	case "ticket":
		p.ticket(words[1])
	case "forget":
		_, ok := p.s.state.HandOvers.TakeHandOver(p.s.ticket(p.q.taken, p.q.headers[names.HeaderRequestID]).ParamsRef)
		require.True(p.t, ok)
	case "wait":
		d, err := time.ParseDuration(words[1])
		require.NoError(p.t, err)
		time.Sleep(d)
	case "byte":
		p.q.firstByte = time.Since(p.q.started)
	case "quiet":
		p.quiet = true
	case "counts":
		synctest.Wait()
		p.counts()
	case "done":
		p.s.log(p.q.entry(p.number(words[1]), append(words, "via_upstream")[2]))
		p.ended = true
	case "gone":
		p.s.log(p.q.entry(0, "downstream_remote_disconnect"))
		p.ended = true
	default:
		require.Fail(p.t, "unknown line", "%s", line)
	}
}

func (p *player) number(s string) int {
	n, err := strconv.Atoi(s)
	require.NoError(p.t, err)
	return n
}

func (p *player) endpoint(name string) *kvstate.Endpoint {
	e := p.s.state.Pool(p.spec.Name).Endpoint(addressOf(name))
	require.NotNil(p.t, e, "endpoint %s", name)
	return e
}

func (p *player) options(words []string) {
	for _, w := range words {
		key, value, _ := strings.Cut(w, "=")
		switch key {
		case "splitBody":
			p.o.SplitBodyBytes = p.number(value)
		case "maxBody":
			p.o.MaxBodyBytes = p.number(value)
		case "redirects":
			p.o.MaxRedirects = p.number(value)
		case "held":
			p.o.HeldBytes = p.number(value)
		case "bodyTimeout":
			d, err := time.ParseDuration(value)
			require.NoError(p.t, err)
			p.o.BodyTimeout = d
		default:
			require.Fail(p.t, "unknown option", "%s", w)
		}
	}
}

func (p *player) pool(words []string) {
	if p.s == nil {
		p.s = newStand(p.t, p.o)
	}
	policy := splitting()
	p.eps = nil
	var names, models []string
	transfer, buffer, ranks := true, int64(0), 0
	for _, w := range words[1:] {
		key, value, setting := strings.Cut(w, "=")
		if !setting {
			names = append(names, w)
			continue
		}
		switch w {
		case "failure=decodeAlone":
			policy.OnFailure = plan.DecodeAlone
		case "failure=fail":
			policy.OnFailure = plan.Fail
		case "split=no":
			policy.Split = false
		case "long=refuse":
			policy.RefuseLong = true
		case "transfer=none":
			transfer = false
		default:
			switch key {
			case "transfer":
				dialect, err := kvtransfer.New(kvtransfer.Options{Name: value, Arrivals: p})
				require.NoError(p.t, err)
				policy.Dialect = dialect
			case "ranks":
				ranks = p.number(value)
			case "buffer":
				buffer = int64(p.number(value))
			case "attempts":
				policy.PrefillAttempts = p.number(value)
			case "time":
				d, err := time.ParseDuration(value)
				require.NoError(p.t, err)
				policy.AttemptsTime = d
			case "session":
				kind, name, _ := strings.Cut(value, ":")
				switch kind {
				case "header":
					policy.Session.Header = name
				case "cookie":
					policy.Session.Cookie = name
				case "body":
					policy.Session.Body = name
				}
			case "models":
				models = strings.Split(value, ",")
			default:
				require.Fail(p.t, "unknown setting", "%s", w)
			}
		}
	}
	p.s.pool(words[0], policy, names...)
	p.names = append(p.names, names...)
	if models != nil {
		var eps []kvstate.EndpointSpec
		for _, e := range p.s.state.Pool(words[0]).Endpoints() {
			eps = append(eps, e.EndpointSpec)
		}
		p.s.state.SetPool(kvstate.PoolSpec{Name: words[0], Models: models}, eps)
	}
	if !transfer {
		policy.Dialect = kvtransfer.Dialect{}
		p.s.policy(words[0], policy)
	}
	p.spec = p.s.state.Pool(words[0]).Spec
	for _, e := range p.s.state.Pool(words[0]).Endpoints() {
		e.Transfer.BufferTokens = buffer
		spec := e.EndpointSpec
		spec.Ranks = ranks
		p.eps = append(p.eps, spec.ByRank()...)
	}
	if ranks > 0 {
		p.s.state.SetPool(p.spec, p.eps)
	}
}

var modes = map[string]filterv3.ProcessingMode_BodySendMode{
	"duplex": filterv3.ProcessingMode_FULL_DUPLEX_STREAMED, "buffered": filterv3.ProcessingMode_BUFFERED, "none": filterv3.ProcessingMode_NONE,
}

func (p *player) request(words []string) {
	p.n++
	p.q = p.s.newRequest(words[1], "r"+strconv.Itoa(p.n), "")
	p.q.headers[":method"] = words[0]
	for _, w := range words[2:] {
		key, value, _ := strings.Cut(w, "=")
		switch key {
		case "mode":
			p.q.mode = modes[value]
		case "piece":
			p.q.piece = p.number(value)
		case "trailers":
			p.q.trailers = true
		case "empty":
			p.q.bodyless = true
			delete(p.q.headers, "content-length")
		default:
			p.q.headers[key] = strings.ReplaceAll(value, "~", " ")
		}
	}
}

func (p *player) body(text string) {
	if n, ok := strings.CutPrefix(text, "long "); ok {
		text = `{"model":"m","messages":[{"role":"user","content":"` + filler(p.number(n)) + `"}]}`
	} else if n, ok := strings.CutPrefix(text, "undo "); ok {
		text = `{"model":"m","prompt":"x","stop":["` + filler(p.number(n)) + `"]}`
	}
	p.q.body, p.q.first = []byte(text), []byte(text)
	p.q.headers["content-length"] = strconv.Itoa(len(text))
}

// filler is text of n bytes in which no two blocks are the same.
func filler(n int) string {
	b := make([]byte, 0, n+16)
	for i := 0; len(b) < n; i++ {
		b = append(strconv.AppendInt(b, int64(i), 10), " word "...)
	}
	return string(b[:n])
}

func (p *player) pass() {
	if p.q.taken != "" {
		p.q.follow()
	}
	v := p.q.pass()
	p.sayVerdict(v)
	switch {
	case v.immediate != nil, p.quiet:
	case p.q.mode == filterv3.ProcessingMode_NONE || p.q.bodyless:
	case !v.changed:
		p.say("body as it came")
	case bytes.Equal(v.body, p.q.first):
		p.say("body as the client sent it%s", cutInto(v.pieces))
	default:
		p.say("body%s: %s", cutInto(v.pieces), plainID(short(v.body)))
	}
}

func (p *player) sayVerdict(v *verdict) {
	if p.quiet {
		return
	}
	if v.immediate != nil {
		for _, h := range v.immediate.GetHeaders().GetSetHeaders() {
			value := plainID(string(h.GetHeader().GetRawValue()))
			if h.GetHeader().GetKey() == names.HeaderTicket {
				value = p.describe(string(h.GetHeader().GetRawValue()))
			}
			p.say("%s: %s", h.GetHeader().GetKey(), value)
		}
		p.say("%d %s %s", v.status(), v.immediate.GetDetails(), v.immediate.GetBody())
		return
	}
	for _, name := range v.sortedSets() {
		value := plainID(v.set[name])
		if name == names.HeaderTicket {
			value = p.describe(v.set[name])
		}
		p.say("%s: %s", name, value)
	}
	if len(v.removed) > 0 {
		p.say("without %s", strings.Join(v.removed, ", "))
	}
	if v.trailers {
		p.say("trailers go on")
	}
}

// Wait is kvtransfer.Arrivals: the transcript gives the notice.
func (p *player) Wait(ctx context.Context, id string, n int) bool {
	require.Len(p.t, id, 32)
	require.Equal(p.t, 1, n)
	after, err := time.ParseDuration(p.notices)
	if p.notices == "never" {
		after = time.Hour
	} else if p.notices != "" {
		require.NoError(p.t, err)
	}
	select {
	case <-time.After(after):
		return true
	case <-ctx.Done():
		return false
	}
}

var (
	madeNumber = regexp.MustCompile(`"disagg_request_id":[0-9]{19}`)
	madeID     = regexp.MustCompile(`\b[0-9a-f]{32}\b`)
	madeHalf   = regexp.MustCompile(`"resp_[0-9a-f]{16}`)
)

// plainID hides ids that are drawn at random, and the random half of a response's.
func plainID(s string) string {
	s = madeNumber.ReplaceAllString(s, `"disagg_request_id":(a new id)`)
	return madeHalf.ReplaceAllString(madeID.ReplaceAllString(s, "(a new id)"), `"resp_(random)`)
}

// describe shows what a ticket holds.
func (p *player) describe(sealed string) string {
	t := p.s.ticket(sealed, p.q.headers[names.HeaderRequestID])
	var b strings.Builder
	fmt.Fprintf(&b, "%s, pool %s", t.Stage, t.Pool)
	if t.Split {
		fmt.Fprintf(&b, ", %s -> %s", t.Prefill, t.Decode)
	} else {
		fmt.Fprintf(&b, ", %s", t.Decode)
	}
	fmt.Fprintf(&b, ", %d tokens, redirects %d, prefills %d", t.PromptTokens, t.Redirects, t.Prefills)
	if len(t.Undo) > 0 {
		fmt.Fprintf(&b, ", undo %d edits %d bytes of %d", len(t.Undo), t.Undo.Size(), t.BodyBytes)
	}
	if t.Stage == kvtransfer.HandOver && t.Params == nil && t.ParamsRef == ([16]byte{}) {
		fmt.Fprint(&b, ", no KV parameters")
	}
	if t.Params != nil {
		fmt.Fprintf(&b, ", KV parameters %d bytes", len(t.Params))
	}
	if t.ParamsRef != ([16]byte{}) {
		fmt.Fprint(&b, ", KV parameters by reference")
	}
	if t.Cause != "" {
		fmt.Fprintf(&b, ", cause %s", t.Cause)
	}
	if len(t.Excluded) > 0 {
		fmt.Fprintf(&b, ", not %s", strings.Join(t.Excluded, " "))
	}
	fmt.Fprintf(&b, ", good for %v", time.Until(t.Expires))
	return b.String()
}

func cutInto(pieces []int) string {
	if len(pieces) < 2 {
		return ""
	}
	return fmt.Sprintf(" in pieces of %v", pieces)
}

// short is a text with its middle left out.
func short(b []byte) string {
	if len(b) <= 600 {
		return string(b)
	}
	return fmt.Sprintf("%s ...%d bytes... %s", b[:320], len(b)-400, b[len(b)-80:])
}

func (p *player) answer(words []string, line string) {
	a, carried := engineAnswer{status: p.number(words[0])}, false
	text := strings.TrimPrefix(line, "answer "+words[0])
	for _, w := range words[1:] {
		key, value, _ := strings.Cut(w, "=")
		known := true
		switch key {
		case "blocks":
			a.body = prefilled(params(p.number(value)))
		case "random":
			a.body = prefilled(randomParams(p.number(value)))
		case "params":
			a.body = prefilled(value)
		case "piece":
			a.piece = p.number(value)
		case "empty":
			a.bodyless = true
		case "trailers":
			a.trailers = true
		case "carried":
			carried = true
		default:
			known = false
		}
		if known {
			text = strings.Replace(text, w, "", 1)
		}
	}
	if a.body == nil {
		a.body = []byte(strings.TrimSpace(text))
	}
	if carried {
		p.q.carry(a.body)
		return
	}
	began := time.Now()
	v := p.q.prefillLeg(a)
	if took := time.Since(began); took > 0 {
		p.say("after %v", took)
	}
	p.sayVerdict(v)
	if p.quiet {
		return
	}
	if v.immediate == nil && v.set[":status"] == "" && !bytes.Equal(a.body, v.body) {
		p.say("the client's answer: %q", v.body)
	} else if v.immediate == nil && v.set[":status"] == "" {
		require.Equal(p.t, string(a.body), string(v.body))
		p.say("P's answer is the client's%s", cutInto(v.pieces))
	}
}

func (p *player) replan() {
	w := p.q.replan()
	if p.quiet {
		return
	}
	p.say("%d", w.Code)
	for _, name := range []string{"location", "retry-after", "content-type"} {
		if v := w.Header().Get(name); v != "" {
			p.say("%s: %s", name, v)
		}
	}
	if p.q.taken != "" {
		p.say("%s: %s", names.HeaderTicket, p.describe(p.q.taken))
	}
	if w.Body.Len() > 0 {
		p.say("%s", w.Body)
	}
}

func (p *player) ticket(what string) {
	switch what {
	case "keep":
		p.kept, p.keptAnswer, p.body0 = p.q.taken, p.q.carried, p.q.body
	case "again":
		p.q.taken, p.q.carried, p.q.body = p.kept, p.keptAnswer, p.body0
	case "flip":
		b := []byte(p.q.taken)
		b[len(b)/2] ^= 1
		p.q.taken = string(b)
	case "none":
		p.q.taken = p.q.headers[names.HeaderTicket] // a redirect of the engine's own: the request keeps the leg's ticket
	case "borrow":
		p.q.headers[names.HeaderTicket] = p.kept
	default:
		require.Fail(p.t, "unknown", "ticket %s", what)
	}
}
