// Package sessions reads and generates sessions: the requests that one client makes, each after the answer before it.
// Unlike a trace, a session has no times of arrival: they depend on how fast the fleet answers.
//
// Package replay plays sessions in a closed loop.
package sessions

// Session is what one client asks, turn after turn.
type Session struct {
	// Sessions with the same Prefix begin with the same PrefixTokens tokens: tools and a system prompt.
	Prefix       uint64
	PrefixTokens int
	Turns        []Turn
}

// Turn is a request and its answer.
type Turn struct {
	Think  float64 // s from the end of the answer before it, or from the session's start
	Input  int     // tokens of the prompt, at least 1
	Output int     // tokens of the answer, at least 1
	// Its prompt begins with the first Had tokens of an earlier turn's prompt and answer, Back turns before it. 0: it
	// has nothing from any.
	Back, Had int
	Stop      Stop
	Service   float64 // s that the recorded service took; 0: unknown
}

// Stop is why an answer ended.
type Stop byte

// Why answers end.
const (
	Other Stop = iota
	Tool       // the client runs a tool, and asks again by itself
	End        // the client's user speaks next
)

// Limits cut what is recorded.
type Limits struct {
	Think   float64 // s: a longer gap lasts that long
	Context int     // tokens: a session ends before the turn that needs more
}

// DefaultLimits cut 4 % of the gaps of recorded coding agents, and a tenth of their turns.
func DefaultLimits() Limits { return Limits{Think: 600, Context: 256_000} }

// limited returns the session within limits.
func (s *Session) limited(l Limits) Session {
	out := *s
	out.Turns = nil
	for _, t := range s.Turns {
		if t.Input+t.Output > l.Context {
			break
		}
		t.Think = min(t.Think, l.Think)
		out.Turns = append(out.Turns, t)
	}
	return out
}

// Within returns sessions within limits: those that still have two turns.
func Within(all []Session, l Limits) (out []Session) {
	for i := range all {
		if s := all[i].limited(l); len(s.Turns) >= 2 {
			out = append(out, s)
		}
	}
	return out
}

// Duration returns the seconds that the session took when it was recorded.
func (s *Session) Duration() (sum float64) {
	for i := range s.Turns {
		sum += s.Turns[i].Think + s.Turns[i].Service
	}
	return sum
}
