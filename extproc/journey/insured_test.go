package journey

import (
	"fmt"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"tandem/extproc/faults"
	"tandem/extproc/kvtransfer"
	"tandem/extproc/migration"
	"tandem/extproc/openai"
)

// What follows from each event of an insured stream. Events: asked; a head: STATUS (of a stream), json, envoy STATUS; event;
// error (an event); done; reset; long (the engine writes for a minute); move; none (no endpoint takes it).
func TestInsured(t *testing.T) {
	for name, tt := range map[string]struct {
		most   int    // how often it may be continued
		tools  bool   // it has tools: another engine would repeat it
		last   bool   // no further pass is possible
		events string // separated by ;
		follow string // one for each
	}{
		"all goes well":          {events: "200; event; done", follow: "begin; read on; read on"},
		"D dies while it writes": {events: "200; event; reset", follow: "begin; read on; go on"},
		"D dies before it writes": {
			events: "200; reset; asked; 200; event", follow: "begin; again; read on; begin; read on",
		},
		"D cannot be reached":      {events: "reset", follow: "again"},
		"D fails":                  {events: "500", follow: "again"},
		"D fails at last":          {last: true, events: "500", follow: "begin"},
		"D redirects at last":      {last: true, events: "307", follow: "refuse 502"},
		"Envoy answers for D":      {events: "envoy 503; reset", follow: "read on; again"},
		"D does not stream":        {events: "json; reset", follow: "begin; break off: reset"},
		"D refuses":                {events: "400; reset", follow: "begin; break off: reset"},
		"D reports an error":       {events: "200; event; error", follow: "begin; read on; go on"},
		"D dies, but all was sent": {events: "200; event; done; reset", follow: "begin; read on; read on; finish"},
		"the next one dies at once": {
			events: "200; event; reset; asked; 200; reset",
			follow: "begin; read on; go on; read on; begin; break off: reset: died_again",
		},
		"the next one reports an error at once": {
			events: "200; event; error; asked; 200; error",
			follow: "begin; read on; go on; read on; begin; end so",
		},
		"the next one dies after a while": {
			events: "200; event; reset; asked; 200; event; long; reset",
			follow: "begin; read on; go on; read on; begin; read on; read on; go on",
		},
		"three die, however late": {
			events: "200; event; reset; asked; 200; event; long; reset; asked; 200; event; long; reset",
			follow: "begin; read on; go on; read on; begin; read on; read on; go on; read on; begin; read on; read on; " +
				"break off: reset: died_again",
		},
		"it was continued too often": {
			most: 1, events: "200; event; reset; asked; 200; event; long; reset",
			follow: "begin; read on; go on; read on; begin; read on; read on; break off: reset: times",
		},
		"the next one does not stream": {
			events: "200; event; reset; asked; json", follow: "begin; read on; go on; read on; again",
		},
		"none takes it": {
			events: "200; event; reset; none", follow: "begin; read on; go on; break off: reset: full: all are full",
		},
		"none takes it after an error": {events: "200; event; error; none", follow: "begin; read on; go on; finish"},
		"none takes it, and the client has nothing": {
			events: "500; none", follow: "again; refuse 503",
		},
		"it is moved": {
			events: "200; event; move; asked; 200; event; move", follow: "begin; read on; move; read on; begin; read on; move",
		},
		"nobody takes what is to be moved": {
			events: "200; event; move; none; event; move; reset",
			follow: "begin; read on; move; back; read on; read on; go on",
		},
		"it is moved, and the next one dies at once": {
			events: "200; event; move; asked; reset; none", follow: "begin; read on; move; read on; again; back",
		},
		"it is moved, and the next one fails at last": {
			last: true, events: "200; event; move; asked; 500", follow: "begin; read on; move; read on; back",
		},
		"it is repeated": {
			tools: true, events: "200; event; reset; asked; 200; event; done",
			follow: "begin; read on; go on; read on; begin; read on; read on",
		},
		"what would be repeated is not moved": {tools: true, events: "200; event; move", follow: "begin; read on; read on"},
		"what does not write is not moved":    {events: "200; move", follow: "begin; read on"},
		"what passes unread is not moved":     {events: "json; move", follow: "begin; read on"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := shared(t)
				ticket := kvtransfer.Ticket{Pool: "chat", Stage: kvtransfer.DecodeLeg, Prefill: "p1", Decode: "d1",
					Started: time.Now()}
				if tt.last {
					ticket.Redirects = 8
				}
				body := `{"model":"m","messages":[],"temperature":0,"stream":true}`
				if tt.tools {
					body = strings.Replace(body, "{", `{"tools":[{}],`, 1)
				}
				var r openai.Request
				require.NoError(t, r.Scan(openai.Chat, []byte(body), openai.Limits{}))
				in := s.NewInsured(&r, migration.Policy{On: true, Most: tt.most}, &ticket, "r-1")
				in.Asked()
				var follow []string
				for event := range strings.SplitSeq(tt.events, "; ") {
					follow = append(follow, words(in.happens(t, event)))
				}
				require.Equal(t, tt.follow, strings.Join(follow, "; "))
			})
		})
	}
}

// happens has an event happen to a stream.
func (in *Insured) happens(t *testing.T, event string) StreamAction {
	t.Helper()
	feed := func(event string) StreamAction {
		in.Stream.Feed(nil, []byte("data: "+event+"\n\n"))
		if why := in.Stream.Broken(); why != "" {
			return in.Breaks(why, time.Now())
		}
		if in.state != StreamWrites {
			in.Writes()
		}
		return StreamAction{}
	}
	status, _ := strconv.Atoi(strings.Fields(strings.TrimPrefix(event, "envoy "))[0])
	switch event {
	case "asked":
		in.Asked()
	case "json":
		return in.answers(&StreamAnswer{Status: 200, Engine: true})
	case "event":
		if in.state != StreamWrites {
			prompt := []byte("[1,2,3]")
			if in.Stream.Continues() {
				prompt = in.Stream.AppendPrompt(nil)
			}
			feed(chunk(`{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}`,
				`,"prompt_token_ids":`+string(prompt)))
		}
		return feed(chunk(`{"index":0,"delta":{"content":" a"},"finish_reason":null,"token_ids":[7]}`, ""))
	case "error":
		return feed(`{"error":{"message":"died","code":500}}`)
	case "done":
		feed(chunk(`{"index":0,"delta":{"content":""},"finish_reason":"stop","token_ids":[2]}`, ""))
		return feed("[DONE]")
	case "reset":
		return in.Resets(time.Now())
	case "long":
		time.Sleep(time.Minute)
	case "move":
		return in.Move(CauseMoved, time.Now())
	case "none":
		return in.NoneTakes(openai.Unavailable("full", "all are full", time.Second))
	default:
		return in.answers(&StreamAnswer{Status: status, Engine: !strings.HasPrefix(event, "envoy"), Events: status == 200,
			Failure: faults.Failure{Status: status}})
	}
	return StreamAction{}
}

// chunk is an event of a chat's answer.
func chunk(choice, more string) string {
	return fmt.Sprintf(`{"id":"c","object":"o","created":1,"model":"m","choices":[%s]%s}`, choice, more)
}

// answers is [Insured.Answers], and the client gets the head.
func (in *Insured) answers(a *StreamAnswer) StreamAction {
	next := in.Answers(a)
	if next.Do == BeginAnswer {
		in.Begins()
	}
	return next
}

// words are an action in words.
func words(a StreamAction) string {
	word := map[StreamStep]string{
		ReadOn: "read on", BeginAnswer: "begin", Finish: "finish", AskAgain: "again", GoOn: "go on", MoveOn: "move",
		GoBack: "back", PassEnd: "end so", AnswerError: "refuse", BreakOff: "break off",
	}[a.Do]
	if a.Err != nil {
		word += " " + strconv.Itoa(a.Err.Status)
	}
	return word + strings.TrimSuffix(": "+a.Why, ": ")
}
