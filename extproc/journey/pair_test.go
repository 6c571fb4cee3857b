package journey

import (
	"fmt"
	"log/slog"
	"strconv"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"tandem/extproc/concurrent"
	"tandem/extproc/faults"
	"tandem/extproc/kvtransfer"
	"tandem/extproc/pass"
	"tandem/extproc/plan"
	"tandem/extproc/telemetry"
	"tandem/kvstate"
)

// shared returns what journeys share, over a pool "chat" of SGLang engines p1 and d1.
func shared(t *testing.T) *Shared {
	t.Helper()
	state := kvstate.New(kvstate.Options{})
	state.SetPool(kvstate.PoolSpec{Name: "chat", Models: []string{"*"}}, []kvstate.EndpointSpec{
		{Addr: "p1", Role: kvstate.RolePrefill}, {Addr: "d1", Role: kvstate.RoleDecode},
	})
	log := slog.New(slog.DiscardHandler)
	observer := telemetry.NewObserver(telemetry.NewMetrics(prometheus.NewRegistry(), state), log)
	s := pass.New(pass.Options{
		State: state, Limits: plan.Limits{MaxRedirects: 8}, Observer: observer, Log: log,
		Faults: &faults.Faults{State: state, Observer: observer, Log: log, Check: func(*kvstate.Endpoint) {}},
	})
	policy := pass.Policy{Policy: plan.Policy{Split: true, Dialect: kvtransfer.Named("sglang")}}
	s.Apply(pass.Settings{Pools: map[string]pass.Policy{"chat": policy.WithDefaults()}})
	return &Shared{Passes: s}
}

// What follows from each event of a pair. Events: begin; P's verdict: P ok, P STATUS, P gone, P late; D's answer: D STATUS,
// D json (a whole one), D lost; time: the time of the last action is over; drained.
func TestPair(t *testing.T) {
	early := PairRules{Early: true}
	for name, tt := range map[string]struct {
		rules  PairRules
		last   bool   // no further pass is possible
		events string // separated by ;
		follow string // one for each
	}{
		"all goes well":                      {events: "begin; D 200; P ok", follow: "send; hold; let go (holds)"},
		"P is faster":                        {events: "begin; P ok; D 200", follow: "send; let go (holds); let go"},
		"P fails":                            {events: "begin; P 500", follow: "send; again prefill 500, abandoned"},
		"P fails while D waits":              {events: "begin; D 200; P 500; D 200", follow: "send; hold; again prefill 500, abandoned; let go"},
		"P cannot be reached":                {events: "begin; P gone", follow: "send; again prefill unreached, abandoned"},
		"P refuses its body, D must have KV": {events: "begin; P 400", follow: "send; refuse 400, abandoned"},
		"P refuses the request":              {events: "begin; P 401", follow: "send; refuse 401, abandoned"},
		"P refuses it, and D fails first":    {events: "begin; D 500; P 401", follow: "send; await 500ms; refuse 401, abandoned"},
		"P lacks the model":                  {events: "begin; P 404", follow: "send; again prefill 404, abandoned"},
		"P lacks the model, at last":         {last: true, events: "begin; P 404", follow: "send; refuse 404, abandoned"},
		"P is late":                          {events: "begin; D 200; P late", follow: "send; hold; again prefill unreached, abandoned"},
		"P is late after all":                {events: "begin; P ok; P late", follow: "send; let go (holds); await"},
		"D fails":                            {events: "begin; P ok; D 500", follow: "send; let go (holds); again decode 500, abandoned"},
		"D fails, and P does not":            {events: "begin; D 500; P ok", follow: "send; await 500ms; again decode 500, abandoned"},
		"D fails because P does":             {events: "begin; D 500; P gone", follow: "send; await 500ms; again prefill unreached, abandoned"},
		"D fails, and nothing comes of P":    {events: "begin; D 500; time", follow: "send; await 500ms; again decode 500, abandoned"},
		"D fails, and the replica stops":     {events: "begin; D 500; drained", follow: "send; await 500ms; again decode 500, abandoned"},
		"D breaks off while it waits for P":  {events: "begin; D 200; D 503; P ok", follow: "send; hold; again decode 503, abandoned; await"},
		"D is full":                          {events: "begin; D 429", follow: "send; again decode 429, abandoned"},
		"D lacks the model":                  {events: "begin; D 404; P ok", follow: "send; await 500ms; again decode 404, abandoned"},
		"D lacks the model, at last":         {last: true, events: "begin; D 404; P ok", follow: "send; let go, abandoned; await"},
		"D refuses the request":              {events: "begin; D 422; P 500", follow: "send; let go, abandoned; await"},
		"D is lost":                          {events: "begin; D lost; P 500", follow: "send; again decode broken, abandoned; await"},
		"a whole answer has P's KV":          {rules: early, events: "begin; D json; P 500", follow: "send; let go (holds); await"},
		"a stream has not":                   {rules: early, events: "begin; D 200; P 500", follow: "send; hold; again prefill 500, abandoned"},
		"a stream that begins late has it": {
			rules:  PairRules{Early: true, StreamsLate: true},
			events: "begin; D 200; time; P 500", follow: "send; hold 100ms; let go (holds); await",
		},
		"P's leg ends with D's":              {rules: PairRules{StreamsLate: true}, events: "begin; D json", follow: "send; hold"},
		"the replica stops while D waits":    {events: "begin; D 200; drained; P 500", follow: "send; hold; let go; await"},
		"the replica stops before D answers": {events: "begin; drained", follow: "send; let go"},
	} {
		t.Run(name, func(t *testing.T) {
			s := shared(t)
			ticket := &kvtransfer.Ticket{Pool: "chat", Prefill: "p1", Decode: "d1", Stage: kvtransfer.PairLegs}
			if tt.last {
				ticket.Redirects = s.Passes.Limits.MaxRedirects - 1
			}
			p := s.NewPair(ticket, tt.rules)
			var follow []string
			for event := range strings.SplitSeq(tt.events, "; ") {
				a := step(p, event)
				follow = append(follow, said(&a))
			}
			require.Equal(t, tt.follow, strings.Join(follow, "; "))
		})
	}
}

// step is an event of TestPair.
func step(p *Pair, event string) PairAction {
	who, what, _ := strings.Cut(event, " ")
	status, _ := strconv.Atoi(what)
	switch {
	case event == "begin":
		return p.Begin()
	case event == "time":
		return p.Elapsed()
	case event == "drained":
		return p.Drained()
	case event == "P late":
		return p.PrefillOverdue()
	case event == "D lost":
		return p.DecodeLost()
	case who == "P":
		return p.PrefillEnded(&concurrent.Outcome{Status: status, OK: what == "ok", Unreached: what == "gone"})
	case event == "D json":
		status = 200
	}
	return p.DecodeAnswers(&DecodeHead{
		Status: status, Failure: faults.Of(status, "via_upstream", ""), Whole: event == "D json",
	})
}

// said is an action in words.
func said(a *PairAction) string {
	s := [...]string{"await", "send", "hold", "let go", "again", "refuse"}[a.Do]
	if a.Holds {
		s += " (holds)"
	}
	if a.After > 0 {
		s += " " + a.After.String()
	}
	if f := a.Failure; f != nil {
		leg, how := [...]string{"prefill", "decode"}[a.Leg], strconv.Itoa(f.Status)
		switch {
		case f.Unreached:
			how = "unreached"
		case f.Status == 0:
			how = "broken"
		}
		s += fmt.Sprintf(" %s %s", leg, how)
	}
	if a.Refusal != nil {
		s += " " + strconv.Itoa(a.Refusal.Status)
	}
	if a.Abandon {
		s += ", abandoned"
	}
	return s
}
